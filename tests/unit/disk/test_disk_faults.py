"""What a store does when the disk lies, fails or fills: never wrong bytes, and it goes on."""

import errno
import os
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import lmdb
import numpy as np
import pytest

from kvtierd.tiers.base import TierIOError
from kvtierd.tiers.disk.index import Index
from kvtierd.tiers.disk.store import DiskStore, create_files
from tests.unit.disk.disk_blocks import (
    FINGERPRINT,
    GROUP,
    PARTS,
    SHAPE_BYTES,
    block,
    fails,
    key,
    names,
    new_store,
    reopened,
    retire,
    shapes,
    verdicts,
)


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        byte = os.pread(file.fileno(), 1, offset)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 0x10]), offset)
        os.fsync(file.fileno())


@contextmanager
def file_size_limit(limit: int) -> Iterator[None]:
    """The system itself refuses to write past ``limit``: EFBIG, or a short write across it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# The disk lies.


def test_swapped_records_are_both_corrupt(store: DiskStore, slab: Path) -> None:
    store.write([block(1, 3), block(2, 9), block(3, 4)])
    with open(slab, "r+b") as file:
        first = os.pread(file.fileno(), SHAPE_BYTES, 3 * SHAPE_BYTES)
        second = os.pread(file.fileno(), SHAPE_BYTES, 9 * SHAPE_BYTES)
        os.pwrite(file.fileno(), second, 3 * SHAPE_BYTES)
        os.pwrite(file.fileno(), first, 9 * SHAPE_BYTES)
    assert verdicts(store, {1: 3, 2: 9, 3: 4}) == {1: "corrupt", 2: "corrupt", 3: "ok"}


def test_an_older_state_of_a_slot_is_corrupt(store: DiskStore, slab: Path) -> None:
    """What a lost write looks like: the index has moved on, the bytes have not."""
    store.write([block(1, 3)])
    with open(slab, "r+b") as file:
        before = os.pread(file.fileno(), SHAPE_BYTES, 3 * SHAPE_BYTES)
        store.write([], [retire(1, 3)])
        store.write([block(2, 3)])
        os.pwrite(file.fileno(), before, 3 * SHAPE_BYTES)
    assert verdicts(store, {2: 3}) == {2: "corrupt"}


def test_a_sparse_slab_is_corrupt_and_allocated_again(store: DiskStore, slab: Path, tmp_path: Path) -> None:
    store.write([block(1, 3), block(2, 4)])
    whole = slab.stat().st_size
    os.truncate(slab, 4 * SHAPE_BYTES)
    os.truncate(slab, whole)
    with reopened(store, tmp_path / "store") as (again, _):
        assert slab.stat().st_blocks * 512 >= whole
        assert verdicts(again, {1: 3, 2: 4}) == {1: "ok", 2: "corrupt"}


def test_corrupt_slots_survive_a_death_once_anything_else_was_written(store: DiskStore, slab: Path) -> None:
    store.write([block(1, 3)])
    flip(slab, 3 * SHAPE_BYTES)
    verdicts(store, {1: 3})
    store.write([block(2, 5)], [retire(1, 3)])
    assert store._index.load(GROUP).quarantined == {3}


# The disk fails.


class Faulty:
    """A system call over a disk with bad places."""

    def __init__(self, call: Callable[..., int], bad: set[int], short: bool) -> None:
        self._call = call
        self._bad = bad
        self._short = short

    def __call__(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        first = offset // SHAPE_BYTES
        places = range(first, first + len(buffers) // len(PARTS))
        good = next((len(PARTS) * (place - first) for place in places if place in self._bad), len(buffers))
        moved = self._call(fd, buffers[: good + 1], offset)
        if not self._short and good < len(buffers):
            raise OSError(errno.EIO, "Input/output error")
        return moved


@pytest.mark.parametrize("short", [False, True])
def test_a_bad_place_costs_only_the_block_that_was_to_go_there(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, short: bool
) -> None:
    monkeypatch.setattr(os, "pwritev", Faulty(os.pwritev, {4}, short))
    writes = [block(1, 3), block(2, 4), block(3, 5), block(4, 9), block(5, 10, 2)]
    assert store.write(writes) == {1, 4}
    assert verdicts(store, {1: 3, 2: 4, 3: 5, 4: 9, 5: 10}) == {1: "ok", 2: "corrupt", 3: "ok", 4: "ok", 5: "corrupt"}
    monkeypatch.undo()
    assert store.write([block(2, 4), block(5, 10, 2)]) == frozenset()
    with reopened(store, tmp_path / "store") as (_, recovery):
        assert set(names(recovery, range(9))) == {1, 2, 3, 4, 5}


@pytest.mark.parametrize("short", [False, True])
def test_a_place_that_cannot_be_read_costs_only_its_block(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, short: bool
) -> None:
    spread = {1: 3, 2: 4, 3: 5, 4: 9}
    store.write([block(name, slot) for name, slot in spread.items()])
    monkeypatch.setattr(os, "preadv", Faulty(os.preadv, {4}, short))
    assert verdicts(store, spread) == {1: "ok", 2: "failed", 3: "ok", 4: "ok"}
    monkeypatch.undo()
    assert verdicts(store, spread) == dict.fromkeys(spread, "ok")


def test_a_failed_sync_fails_every_write_and_no_retirement(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store.write([block(1, 1), block(2, 2)])

    monkeypatch.setattr(os, "fdatasync", fails)
    assert store.write([block(3, 3), block(4, 4)], [retire(1, 1)]) == {0, 1}
    monkeypatch.undo()
    assert verdicts(store, {1: 1, 2: 2, 3: 3, 4: 4}) == {1: "corrupt", 2: "ok", 3: "corrupt", 4: "corrupt"}
    assert store.write([block(3, 1)]) == frozenset()
    with reopened(store, tmp_path / "store") as (_, recovery):
        assert set(names(recovery, range(9))) == {2, 3}


def test_a_failed_sync_fails_what_had_begun_by_then(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, second = store.begin([block(1, 1)]), store.begin([block(2, 2)])

    monkeypatch.setattr(os, "fdatasync", fails)
    assert store.finish(first) == {0}
    monkeypatch.undo()
    assert store.finish(second) == {0}, "its bytes may be among those that the sync lost"
    assert store.write([block(3, 3)]) == frozenset()
    with reopened(store, tmp_path / "store") as (_, recovery):
        assert set(names(recovery, range(9))) == {3}


def test_a_commit_that_the_system_refuses_raises_and_the_store_goes_on(store: DiskStore, tmp_path: Path) -> None:
    store.write([block(1, 1), block(2, 2)])
    with file_size_limit(8192), pytest.raises(TierIOError, match="commit") as refused:
        store.write([], [retire(1, 1)])
    assert refused.value.errno in (errno.EFBIG, errno.EIO)
    with file_size_limit(8192), pytest.raises(TierIOError, match="commit"):
        store.write([], [], [(GROUP, key(1))])
    assert verdicts(store, {1: 1, 2: 2}) == {1: "ok", 2: "ok"}
    assert store.write([block(3, 3)], [retire(1, 1)]) == frozenset()
    with reopened(store, tmp_path / "store") as (_, recovery):
        assert set(names(recovery, range(9))) == {2, 3}


def test_a_full_index_fails_the_batch_and_goes_on_once_there_is_room(tmp_path: Path) -> None:
    """With room for its slots it never fills; here it gets a fraction."""
    slots, map_bytes = 4096, 256 << 10
    tiny = shapes(slots)
    create_files(tmp_path, tiny, map_bytes)
    store = DiskStore.open(tmp_path, tiny, FINGERPRINT, map_bytes)
    store.recover()
    stored = 0
    while not (failed := store.write([block(n, n) for n in range(stored, stored + 64)])):
        stored += 64
    assert failed == frozenset(range(64))
    assert 0 < stored < slots
    with pytest.raises(TierIOError) as refused:
        store.write([block(n, n) for n in range(stored, stored + 64)], [retire("x", 0)])
    assert refused.value.errno == errno.ENOSPC
    spread = {n: n for n in range(stored + 64)}
    expected = {n: "ok" if n < stored else "corrupt" for n in spread}
    assert verdicts(store, spread) == expected
    for n in range(0, stored, 8):
        store.write([], [retire(n, n)])
    assert store.write([block("new", 0)]) == frozenset()
    assert verdicts(store, {"new": 0}) == {"new": "ok"}
    store.close()
    again = DiskStore.open(tmp_path, tiny, FINGERPRINT, map_bytes)
    assert len(again.recover().records[GROUP]) == stored - stored // 8 + 1
    again.close()


def test_a_commit_of_which_nobody_knows_is_undone(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The transaction reached the disk, word of it did not reach us: what was reported as failed must not come back."""
    store.write([block(1, 1)])
    commit = Index._commit

    def commits_and_fails(index: Index, changes: object) -> None:
        commit(index, changes)  # type: ignore[arg-type]
        raise lmdb.Error("mdb_txn_commit: Input/output error")

    monkeypatch.setattr(Index, "_commit", commits_and_fails)
    assert store.write([block(2, 2), block(3, 3)]) == {0, 1}
    monkeypatch.undo()
    assert verdicts(store, {1: 1, 2: 2}) == {1: "ok", 2: "corrupt"}
    assert store.write([block(4, 2)]) == frozenset()
    with reopened(store, tmp_path / "store") as (again, recovery):
        assert set(names(recovery, range(9))) == {1, 4}
        assert verdicts(again, {4: 2}) == {4: "ok"}


def test_a_dead_environment_is_opened_anew(store: DiskStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store.write([block(1, 1), block(2, 2), block(5, 5)], [], [(GROUP, key(1))])
    commit = Index._commit
    deaths = iter([lmdb.PanicError("mdb_txn_begin: Update of meta page failed or environment had fatal error")])

    def dies_once(index: Index, changes: object) -> None:
        for death in deaths:
            raise death
        commit(index, changes)  # type: ignore[arg-type]

    monkeypatch.setattr(Index, "_commit", dies_once)
    assert store.write([block(3, 3)], [], [(GROUP, key(2))]) == frozenset()
    assert store.write([block(4, 4)], [retire(3, 3)]) == frozenset()
    monkeypatch.undo()
    with reopened(store, tmp_path / "store") as (_, recovery):
        assert names(recovery, range(9)) == [5, 1, 2, 4]


# The disk is full, and busy.


def test_a_full_store_turns_over_for_ever(tmp_path: Path) -> None:
    """Every slot taken, a batch retired and a batch written at a time: no page is ever missing."""
    slots, rounds = 512, 150
    store = new_store(tmp_path, slots)
    places = {n: n for n in range(slots)}
    small = list(places)
    for start in range(0, slots, 64):
        assert store.write([block(n, n) for n in small[start : start + 64]]) == frozenset()
    rng = np.random.default_rng(11)
    next_name = slots
    for turn in range(rounds):
        count = (1, 32, 256)[turn % 3] if turn % 10 == 0 else 8
        victims = rng.choice(list(places), size=count, replace=False).tolist()
        freed = [places.pop(name) for name in victims]
        packed = b"".join(key(name) for name in rng.choice(list(places), size=100).tolist())
        store.write([], [retire(name, slot) for name, slot in zip(victims, freed, strict=True)], [(GROUP, packed)])
        fresh = dict(zip(range(next_name, next_name + count), freed, strict=True))
        next_name += count
        assert store.write([block(name, slot) for name, slot in fresh.items()]) == frozenset()
        places |= fresh
    assert set(verdicts(store, places).values()) == {"ok"}
    with reopened(store, tmp_path, slots) as (_, recovery):
        assert {record.key for record in recovery.records[GROUP]} == {key(name) for name in places}
