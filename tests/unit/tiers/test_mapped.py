from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from kvtierd.core.ids import SlotId, Tier
from kvtierd.tiers.arena import Arena
from kvtierd.tiers.base import Bytes, MemoryStore
from kvtierd.tiers.mapped import Chaos, HostStore, StandInDevice
from tests.unit.tiers.arena_helpers import GROUP, POOL_BYTES, make_arena, mapped_segments

SLOTS = {Tier.DEVICE: 4, Tier.HOST: 6}


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = make_arena("stores")
    yield arena
    arena.close()


@pytest.fixture(params=[Tier.DEVICE, Tier.HOST], ids=str)
def store(request: pytest.FixtureRequest, arena: Arena) -> MemoryStore:
    return StandInDevice(arena) if request.param is Tier.DEVICE else HostStore(arena)


def block(seed: int) -> list[Bytes]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 256, size, dtype=np.uint8) for size in POOL_BYTES]


def write(store: MemoryStore, slot: int, parts: Sequence[Bytes]) -> None:
    for target, part in zip(store.parts(GROUP, SlotId(slot)), parts, strict=True):
        np.copyto(target, part)


def reads_as(store: MemoryStore, slot: int, parts: Sequence[Bytes]) -> bool:
    return all(map(np.array_equal, store.parts(GROUP, SlotId(slot)), parts))


def test_every_slot_keeps_its_own_bytes(store: MemoryStore) -> None:
    for slot in range(SLOTS[store.tier]):
        write(store, slot, block(slot))
    assert all(reads_as(store, slot, block(slot)) for slot in range(SLOTS[store.tier]))
    assert [len(part) for part in store.parts(GROUP, SlotId(0))] == list(POOL_BYTES)


def test_padded_parts_are_fit_for_direct_io(store: MemoryStore) -> None:
    for slot in map(SlotId, range(SLOTS[store.tier])):
        exact, padded = store.parts(GROUP, slot), store.padded_parts(GROUP, slot)
        views = [np.asarray(part) for part in padded]
        assert [part.nbytes for part in padded] == ([16384] if store.tier is Tier.HOST else [12288, 4096])
        addresses = [part.ctypes.data for part in exact]
        assert [view.ctypes.data for view in views] == addresses[: len(padded)]
        assert addresses[1] == views[-1].ctypes.data + views[-1].nbytes - 4096
        assert all(view.ctypes.data % 4096 == 0 for view in views)


def test_rows_of_a_pool_array_are_the_slots_parts(store: MemoryStore) -> None:
    for pool, size in enumerate(POOL_BYTES):
        whole = store.pool_array(GROUP, pool)
        assert whole.shape == (SLOTS[store.tier], size)
        for slot, row in enumerate(whole):
            assert row.ctypes.data == store.parts(GROUP, SlotId(slot))[pool].ctypes.data


def test_a_host_record_is_what_the_disk_stores(arena: Arena) -> None:
    host = HostStore(arena)
    write(host, 3, block(3))
    (record,) = host.padded_parts(GROUP, SlotId(3))
    large, small = block(3)
    expected = np.zeros(16384, dtype=np.uint8)
    expected[: len(large)], expected[12288 : 12288 + len(small)] = large, small
    np.testing.assert_array_equal(np.asarray(record), expected)


def test_a_freed_and_poisoned_slot_reads_wrong_in_every_part(store: MemoryStore) -> None:
    """The stand-in's purpose: a reader that kept a view past its lease must not find the old block in any part."""
    for slot in range(SLOTS[store.tier]):
        write(store, slot, block(slot))
    kept = store.parts(GROUP, SlotId(1))
    store.poison(GROUP, SlotId(1))
    large, small = block(1)
    assert (kept[0][:4096] == 0xA5).all() and (kept[0][-4096:] == 0xA5).all()
    assert (kept[1] == 0xA5).all()
    assert not np.array_equal(kept[0], large) and not np.array_equal(kept[1], small)
    others = [slot for slot in range(SLOTS[store.tier]) if slot != 1]
    assert all(reads_as(store, slot, block(slot)) for slot in others)


@pytest.mark.parametrize("slot", [-1, 6, 2**31])
def test_slots_that_do_not_exist(store: MemoryStore, slot: int) -> None:
    with pytest.raises(IndexError):
        store.parts(GROUP, SlotId(slot))
    with pytest.raises(IndexError):
        store.padded_parts(GROUP, SlotId(slot))
    with pytest.raises(IndexError):
        store.poison(GROUP, SlotId(slot))


def test_a_view_outlives_store_and_arena() -> None:
    arena = make_arena("outlived")
    host, device = HostStore(arena), StandInDevice(arena)
    write(host, 0, block(7))
    view = host.parts(GROUP, SlotId(0))
    for part in (host, device, arena):
        part.close()
    assert all(map(np.array_equal, view, block(7)))
    del view, part
    assert mapped_segments("outlived") == 0


def test_chaos_repeats_for_a_seed_and_differs_between_streams() -> None:
    def first(chaos: Chaos, stream: str) -> list[float]:
        return list(itertools.islice(chaos.delays(stream), 50))

    chaos = Chaos(seed=4, max_delay_s=0.01)
    down = first(chaos, "device>host")
    assert down == first(Chaos(seed=4, max_delay_s=0.01), "device>host")
    assert down != first(chaos, "host>device")
    assert down != first(Chaos(seed=5, max_delay_s=0.01), "device>host")
    assert all(0 <= delay <= 0.01 for delay in down)
    assert max(down) > 0.005
