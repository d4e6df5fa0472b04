"""What a store does when nothing fails: blocks in, the same blocks out, across reopening."""

import fcntl
import gc
import os
from pathlib import Path

import numpy as np
import pytest

from kvtierd.core.errors import InvariantViolation
from kvtierd.core.ids import GroupId
from kvtierd.tiers.disk.batch import DiskWrite
from kvtierd.tiers.disk.index import Index, index_bytes
from kvtierd.tiers.disk.store import DiskStore
from tests.unit.disk.disk_blocks import (
    GROUP,
    block,
    fetch,
    holds_its_bytes,
    key,
    names,
    new_store,
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


def test_a_block_put_while_the_log_is_folded_is_the_latest(store: DiskStore, tmp_path: Path) -> None:
    store.write([block(n, n) for n in range(4)])
    store.write([], [], touch(*[0, 1, 2, 3] * 4200))
    store.write([], [retire(2, 2)])
    store.write([block("new", 2)], [], touch(1, 3))
    for _ in range(2):  # the second fold goes by the order in memory
        size = store._index.touch_bytes(GROUP)
        store.write([], [], touch(*[3] * 16_800))
        assert store._index.touch_bytes(GROUP) != size
    with reopened(store, tmp_path / "store") as (_, recovery):
        assert names(recovery, [0, 1, 3, "new"]) == [0, "new", 1, 3]


def test_another_models_bytes_do_not_pass(store: DiskStore, tmp_path: Path) -> None:
    store.write([block(1, 3)])
    store.close()
    other = DiskStore.open(tmp_path / "store", shapes(), bytes(32), index_bytes(16))
    other.recover()
    assert verdicts(other, {1: 3}) == {1: "corrupt"}
    other.close()


def test_a_batch_may_have_more_parts_than_one_call_can_take(tmp_path: Path) -> None:
    """Linux takes 1,024."""
    store = new_store(tmp_path, slots=1200)
    spread = {n: n for n in range(1200)}
    assert store.write([block(n, n) for n in spread]) == frozenset()
    assert set(verdicts(store, spread).values()) == {"ok"}
    store.close()


def test_a_child_may_come_before_its_parent_in_a_batch(store: DiskStore) -> None:
    store.write([block(1, 1)])
    writes = [block(2, 2), block("orphan", 5, parent="nobody"), block(4, 4, parent=3), block(3, 3, parent=2)]
    assert store.write(writes, [retire(1, 1)]) == {1}
    assert verdicts(store, {1: 1, 2: 2, 3: 3, 4: 4}) == {1: "corrupt", 2: "ok", 3: "ok", 4: "ok"}
    assert verdicts(store, {"orphan": 5}) == {"orphan": "corrupt"}


def test_batches_that_are_over_leave_nothing_to_a_garbage_collection(store: DiskStore) -> None:
    """A daemon's looks at an object once, and later never again."""
    gc.collect()
    gc.disable()
    try:
        for begun in [store.begin([block(1, 1)]), store.begin([block(2, 2)])]:
            assert store.finish(begun) == frozenset()
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
