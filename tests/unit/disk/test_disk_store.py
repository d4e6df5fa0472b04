"""What a store does when nothing fails: blocks in, the same blocks out, across reopening."""

from __future__ import annotations

import fcntl
import gc
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvtierd.core.errors import InvariantViolation
from kvtierd.core.ids import GroupId, SlotId, Traits
from kvtierd.tiers.base import TierConfigError, TierError
from kvtierd.tiers.disk.batch import DiskWrite
from kvtierd.tiers.disk.index import Index, index_bytes
from kvtierd.tiers.disk.slab import Slab, SlabShape
from kvtierd.tiers.disk.store import DiskStore, create_files
from tests.unit.disk.disk_blocks import (
    FINGERPRINT,
    GROUP,
    block,
    buffers,
    fails,
    fetch,
    holds_its_bytes,
    key,
    names,
    new_store,
    open_store,
    parts_of,
    places,
    reopened,
    retire,
    shapes,
    verdicts,
    watch,
)


def touch(*used: int | str) -> list[tuple[GroupId, bytes]]:
    return [(GROUP, b"".join(key(name) for name in used))]


def test_one_read_may_ask_for_a_block_twice(store: DiskStore) -> None:
    store.write([block(1, 3)])
    reads = [fetch(1, 3), fetch(1, 3)]
    report = store.read(reads)
    assert not report.failed | report.corrupt
    assert all(holds_its_bytes(read) for read in reads)


def test_everything_is_there_after_reopening(store: DiskStore, tmp_path: Path) -> None:
    store.write([block(1, 3, priority=90), block(2, 4, 1), block(3, 7, 2, priority=0)])
    with reopened(store, tmp_path / "store") as (again, recovery):
        assert [tuple(record[:4]) for record in recovery.records[GROUP]] == [
            (3, key(1), None, Traits(90)),
            (4, key(2), key(1), Traits(35)),
            (7, key(3), key(2), Traits(0)),
        ]
        assert recovery.dropped == 0
        assert recovery.quarantined == {GROUP: frozenset()}
        assert verdicts(again, {1: 3, 2: 4, 3: 7}) == {1: "ok", 2: "ok", 3: "ok"}


def test_a_retirement_of_an_earlier_slot_leaves_the_block_where_it_is_now(store: DiskStore, tmp_path: Path) -> None:
    store.write([block(1, 3)])
    store.write([block(1, 6)])
    store.write([], [retire(1, 3), retire("never stored", 2)])
    assert verdicts(store, {1: 6}) == {1: "ok"}
    assert verdicts(store, {1: 3}) == {1: "corrupt"}
    store.write([block(2, 3)])
    with reopened(store, tmp_path / "store") as (_, recovery):
        assert places(recovery) == {key(1): 6, key(2): 3}


def test_a_slot_that_holds_a_block_is_never_overwritten(store: DiskStore) -> None:
    store.write([block(1, 3)])
    for writes, leaving in (
        ([block(2, 3)], []),
        ([block(1, 3)], []),
        ([block(9, 8), block(2, 3)], []),
        ([block(2, 3)], [retire(1, 3)]),
    ):
        with pytest.raises(InvariantViolation, match="slot 3"):
            store.write(writes, leaving)
    assert verdicts(store, {1: 3, 9: 8}) == {1: "ok", 9: "corrupt"}


@pytest.mark.parametrize("writes", [[block(1, 3), block(2, 3)], [block(1, 3), block(1, 4)]])
def test_a_batch_cannot_contradict_itself(store: DiskStore, writes: list[DiskWrite]) -> None:
    with pytest.raises(InvariantViolation, match="same"):
        store.write(writes)


def test_a_block_without_its_parent_on_disk_is_not_stored(store: DiskStore, tmp_path: Path) -> None:
    writes = [block("grandchild", 1, "child"), block("child", 2, "missing"), block("root", 3), block("leaf", 4, "root")]
    assert store.write(writes) == {0, 1}
    assert store.write([block("late", 5, "root")], [retire("leaf", 4)]) == frozenset()
    assert store.write([block("later", 6, "leaf")]) == {0}
    with reopened(store, tmp_path / "store") as (_, recovery):
        assert places(recovery) == {key("root"): 3, key("late"): 5}
        assert recovery.dropped == 0


def test_blocks_that_are_each_others_parents_are_not_stored(store: DiskStore) -> None:
    assert store.write([block(1, 1, 2), block(2, 2, 1), block(3, 3, 3), block(4, 4)]) == {0, 1, 2}


def test_a_parent_leaving_in_the_same_batch_is_no_parent(store: DiskStore) -> None:
    store.write([block("root", 3)])
    assert store.write([block("child", 4, "root")], [retire("root", 3)]) == {0}


def test_the_log_of_touches_does_not_grow_without_bound(store: DiskStore, tmp_path: Path) -> None:
    store.write([block(n, n) for n in range(16)])
    rng = np.random.default_rng(7)
    index = store._index
    sizes = [0]
    folded = 0
    order: list[int] = list(range(16))
    while folded < 3:  # and no further: the last fold alone knows the order of all but four
        used = rng.choice(16, size=4, replace=False).tolist()
        store.write([], [], touch(*used * 250))
        sizes.append(index.touch_bytes(GROUP))
        for name in used:
            order.remove(name)
            order.append(name)
        folded += sizes[-1] < sizes[-2]
        assert sizes[-1] < 70_000
    with reopened(store, tmp_path / "store") as (again, recovery):
        assert names(recovery, range(16)) == order
        assert again._index.touch_bytes(GROUP) == sizes[-1]


def test_groups_have_slabs_sizes_and_keys_of_their_own(tmp_path: Path) -> None:
    other = GroupId(1)
    both = shapes(4) | {other: SlabShape(4096, 8)}
    create_files(tmp_path, both, index_bytes(12))
    store = DiskStore.open(tmp_path, both, FINGERPRINT, index_bytes(12))
    store.recover()
    here, there = block(1, 3), block(1, 3, group=other, sizes=(4096,))
    assert store.write([here, there, block(2, 7, 1, group=other, sizes=(4096,))]) == frozenset()
    store.write([], [retire(1, 3)], [(other, key(1))])
    store.close()
    store = DiskStore.open(tmp_path, both, FINGERPRINT, index_bytes(12))
    recovery = store.recover()
    assert recovery.records[GROUP] == []
    assert [record.slot for record in recovery.records[other]] == [3, 7]
    read = fetch(1, 3)._replace(group=other, parts=parts_of(buffers((4096,))))
    assert not store.read([read]).corrupt
    assert holds_its_bytes(read)
    store.close()


def test_another_models_bytes_do_not_pass(store: DiskStore, tmp_path: Path) -> None:
    store.write([block(1, 3)])
    store.close()
    other = DiskStore.open(tmp_path / "store", shapes(), bytes(32), index_bytes(16))
    other.recover()
    assert verdicts(other, {1: 3}) == {1: "corrupt"}
    other.close()


def test_recovery_comes_before_use(tmp_path: Path) -> None:
    new_store(tmp_path).close()
    store = open_store(tmp_path)
    with pytest.raises(TierError, match="recover"):
        store.write([block(1, 3)])
    with pytest.raises(TierError, match="recover"):
        store.read([fetch(1, 3)])
    store.recover()
    assert store.write([block(1, 3)]) == frozenset()
    store.close()


def test_adjacent_slots_are_moved_together_as_far_as_one_call_can_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces: list[int] = []

    preadv = os.preadv

    def watched(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        pieces.append(len(buffers))
        return preadv(fd, buffers, offset)

    store = new_store(tmp_path, slots=1200)
    spread = {n: n for n in range(1200)}
    assert store.write([block(n, n) for n in spread]) == frozenset()
    monkeypatch.setattr(os, "preadv", watched)
    assert set(verdicts(store, spread).values()) == {"ok"}
    assert sorted(pieces, reverse=True) == [1024, 1024, 352]
    store.close()


def test_batches_that_have_begun_are_finished_as_one(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child may be in a later one than its parent, and what the later one deletes is deleted."""
    store.write([block(1, 1)])
    steps: list[str] = []

    watch(monkeypatch, os, "fdatasync", steps)
    watch(monkeypatch, Index, "commit", steps)
    first = store.begin([block(2, 2), block("orphan", 5, parent="nobody")])
    second = store.begin([block(4, 4, parent=3), block(3, 3, parent=2)])
    assert store.finish([first, second], [retire(1, 1)]) == {1}
    assert steps == ["fdatasync", "commit"]
    assert verdicts(store, {1: 1, 2: 2, 3: 3, 4: 4}) == {1: "corrupt", 2: "ok", 3: "ok", 4: "ok"}
    assert verdicts(store, {"orphan": 5}) == {"orphan": "corrupt"}


def test_batches_that_are_over_leave_nothing_to_a_garbage_collection(store: DiskStore) -> None:
    """A daemon's looks at an object once, and later never again."""
    gc.collect()
    gc.disable()
    try:
        assert store.finish([store.begin([block(1, 1)]), store.begin([block(2, 2)])]) == frozenset()
        assert verdicts(store, {1: 1, 2: 2}) == {1: "ok", 2: "ok"}
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_payload_is_durable_before_the_index_says_so(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """No kill shows this, only a power cut: the page cache outlives the process."""
    steps: list[str] = []

    watch(monkeypatch, os, "pwritev", steps)
    watch(monkeypatch, os, "fdatasync", steps)
    watch(monkeypatch, Index, "commit", steps)
    store.write([block(1, 3), block(2, 4), block(3, 9)], [retire("x", 1)])
    assert steps == ["pwritev", "pwritev", "fdatasync", "commit"]


@pytest.mark.parametrize("sizes", [(), (4096, 4096), (8192, 8192)])
def test_memory_that_is_not_one_record_is_refused(store: DiskStore, sizes: Sequence[int]) -> None:
    """More would be written over the next slot, less would be read from the one before."""
    store.write([block(9, 9)])
    with pytest.raises(TierConfigError, match="one record of 12288 bytes"):
        store.write([block(1, 3), block(2, 4)._replace(parts=parts_of(buffers(sizes)))])
    with pytest.raises(TierConfigError, match="one record of 12288 bytes"):
        store.read([fetch(9, 9)._replace(parts=parts_of(buffers(sizes)))])
    assert verdicts(store, {1: 3}) == {1: "corrupt"}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (block(1, 3)._replace(slot=SlotId(16)), "slot = 16: 0 to 15"),
        (block(1, 3)._replace(slot=SlotId(-1)), "slot = -1: 0 to 15"),
    ],
)
def test_malformed_writes_are_refused_whole(store: DiskStore, wrong: DiskWrite, said: str) -> None:
    with pytest.raises(TierConfigError, match=said):
        store.write([block(2, 4), wrong])
    assert verdicts(store, {2: 4}) == {2: "corrupt"}


def test_without_direct_io_it_works_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    really_open = os.open

    def no_direct(path: str | Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return really_open(path, flags, mode)

    monkeypatch.setattr(os, "open", no_direct)
    store = new_store(tmp_path)
    assert "no direct I/O" in caplog.text
    store.write([block(1, 3), block(2, 4)])
    assert verdicts(store, {1: 3, 2: 4}) == {1: "ok", 2: "ok"}
    store.close()


def test_direct_io_is_used_where_the_file_system_has_it(store: DiskStore, tmp_path: Path) -> None:
    probe = tmp_path / "probe"
    probe.touch()
    try:
        os.close(os.open(probe, os.O_RDWR | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system has no direct I/O")
    assert fcntl.fcntl(store._slabs[GROUP]._fd, fcntl.F_GETFL) & os.O_DIRECT


def test_a_slab_is_allocated_in_full(tmp_path: Path) -> None:
    new_store(tmp_path, slots=64).close()
    for name in ("group-0.slab", "index/data.mdb"):
        status = (tmp_path / name).stat()
        assert status.st_blocks * 512 >= status.st_size > 0


def test_an_unopened_slab_holds_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new_store(tmp_path).close()

    before = set(os.listdir("/proc/self/fd"))
    (tmp_path / "index" / "data.mdb").unlink()
    with pytest.raises(TierError):
        open_store(tmp_path)
    os.truncate(tmp_path / "group-0.slab", 4096)
    monkeypatch.setattr(os, "posix_fallocate", fails)
    with pytest.raises(TierError):
        Slab.open(tmp_path / "group-0.slab", shapes()[GROUP])
    assert set(os.listdir("/proc/self/fd")) == before
