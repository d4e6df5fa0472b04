"""A cache's copies on the fake: records pass through staging without a stranger's bytes, failures stay where they are,
and nothing is taken apart under a copy."""

import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from kvtierd.core.ids import SlotId, Tier
from kvtierd.mover.cuda.plan import Direction, StagedRecords
from kvtierd.mover.cuda.staging import BUFFERS, Buffer
from kvtierd.mover.runtime import Stretch, Unaccounted
from kvtierd.tiers.base import Bytes, TierIOError
from tests.fakes.cuda.bindings._settings import Failure
from tests.unit.mover.cuda.rigs import Rig
from tests.unit.mover.rig import GROUP, SPEC, content, key


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


def block(number: int) -> Bytes:
    return np.concatenate(content(key(number)))


def whole(slot: int) -> Stretch:
    return Stretch(SlotId(slot), 0, SPEC.block_bytes(0))


def test_bytes_put_from_afar_are_fetched_again_in_any_pieces(rig: Rig) -> None:
    for slot in (0, 5):
        rig.copies.put(GROUP, [whole(slot)], block(slot))
    pool = SPEC.pool_bytes(0, 0)
    across = Stretch(SlotId(5), pool - 100, pool + 100)  # the end of one pool and the beginning of the next
    both = rig.copies.fetch(GROUP, [whole(0), across])
    assert np.array_equal(both, np.concatenate([block(0), block(5)[pool - 100 : pool + 100]]))

    rig.copies.put(GROUP, [across], np.full(200, 7, np.uint8))
    expected = block(5)
    expected[pool - 100 : pool + 100] = 7
    assert np.array_equal(rig.copies.fetch(GROUP, [whole(5)])[: len(expected)], expected)


def test_a_record_for_the_disk_has_zeros_between_its_parts(rig: Rig) -> None:
    """Whatever was in the staging memory before, and whatever is beside the slot on the device."""
    layout, buffer = rig.arena.layout, Buffer(rig.gpu.driver, 1 << 20)
    buffer.memory.fill(0xEE)
    load = StagedRecords(layout, buffer, {4: (GROUP, SlotId(2)), 9: (GROUP, SlotId(1))})
    load.blank_padding()
    for record in load.records().values():
        for pool in layout.groups[0].pools:
            (whole_record,) = record
            assert np.asarray(whole_record).ctypes.data % 4096 == 0
            padding = slice(pool.record_offset + pool.block_bytes, pool.record_offset + pool.padded_bytes)
            assert not any(whole_record[padding])
    first, record_bytes = buffer.address, layout.groups[0].record_bytes
    assert load.at([4, 9]) == {GROUP: ([2, 1], [first, first + record_bytes])}
    assert load.at([9]) == {GROUP: ([1], [first + record_bytes])}
    buffer.close()


def test_staging_memory_that_cannot_be_had_fails_one_copy_after_another() -> None:
    rig = Rig(fail=[{"call": "cuMemHostAlloc", "code": "CUDA_ERROR_OUT_OF_MEMORY", "times": BUFFERS + 1}])
    for _ in range(BUFFERS + 1):
        with pytest.raises(TierIOError, match="OUT_OF_MEMORY"):
            rig.copies.fetch(GROUP, [whole(0)])
    rig.copies.put(GROUP, [whole(0)], block(1))
    assert np.array_equal(rig.copies.fetch(GROUP, [whole(0)]), block(1))
    rig.close()


def test_what_may_still_be_written_to_is_said_and_its_memory_kept() -> None:
    rig = Rig()
    for call in ("cuEventQuery", "cuStreamQuery"):
        rig.fake.STATE.settings.fail.append(Failure(call, "CUDA_ERROR_INVALID_VALUE", times=0))
    with pytest.raises(Unaccounted):
        rig.copies.put(GROUP, [whole(0)], block(0))
    with pytest.raises(TierIOError, match="nobody can say"):
        rig.copies.fetch(GROUP, [whole(0)])
    assert rig.device.lost is not None
    assert not rig.copies._traffic.close()


def test_a_close_waits_for_a_copy_and_refuses_the_next(rig: Rig) -> None:
    gate = threading.Event()
    stream = rig.copies._traffic._ways[Direction.TO_HOST].stream
    rig.fake.fake_work(stream, gate.wait)
    found: list[Bytes] = []
    reading = threading.Thread(target=lambda: found.append(rig.copies.fetch(GROUP, [whole(3)])))
    reading.start()
    while not rig.copies._traffic.under_way:
        pass
    closing = threading.Thread(target=rig.copies.close)
    closing.start()
    gate.set()
    closing.join(30)
    reading.join(30)
    assert len(found) == 1
    with pytest.raises(TierIOError, match="closed"):
        rig.copies.fetch(GROUP, [whole(3)])


def test_a_closed_cache_keeps_no_host_memory_through_those_who_still_know_its_copies() -> None:
    rig = Rig()
    segment = weakref.ref(rig.arena.data(Tier.HOST))
    rig.host.close()
    rig.close()
    assert segment() is None
