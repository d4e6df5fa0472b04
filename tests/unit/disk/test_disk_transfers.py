"""Many places of a file by one call: through the kernel's queue, and without it."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvtierd.tiers.disk import transfers
from kvtierd.tiers.disk.runs import Run
from kvtierd.tiers.disk.transfers import DEPTH, KernelQueue, Queues, Way, begin
from tests.unit.disk.disk_blocks import buffers, parts_of

PAGE = 4096
RUNS = 2 * DEPTH + 3
"""More than the queue takes at a time."""
CALLS = transfers.QUEUES.calls


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    os.posix_fallocate(fd, 0, 4 * RUNS * PAGE)
    yield fd
    os.close(fd)


@pytest.fixture(params=["queued", "one by one"], autouse=True)
def way_of_moving(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    queued = request.param == "queued"
    monkeypatch.setattr(transfers, "QUEUES", Queues(transfers.QUEUES.calls if queued else None))


def transfer(fd: int, way: Way, runs: list[Run]) -> list[int]:
    return begin(fd, way, runs)()


def scattered(seed: int, pages: int = 1) -> list[Run]:
    """Runs at every fourth page of the file, in any order, each of so many parts that nobody else has."""
    rng = np.random.default_rng(seed)
    runs = [Run(4 * PAGE * int(place), parts_of(buffers([PAGE] * pages))) for place in rng.permutation(RUNS)]
    for run in runs:
        for part in run.parts:
            np.asarray(part.memory)[:] = rng.integers(0, 256, PAGE, dtype=np.uint8)
    return runs


def blank(runs: list[Run]) -> list[Run]:
    return [Run(run.offset, parts_of(buffers([part.nbytes for part in run.parts]))) for run in runs]


def same(one: list[Run], other: list[Run]) -> bool:
    return all(
        a.memory == b.memory for x, y in zip(one, other, strict=True) for a, b in zip(x.parts, y.parts, strict=True)
    )


def test_what_is_written_is_read(fd: int) -> None:
    written = scattered(seed=1, pages=2)
    assert transfer(fd, Way.WRITE, written) == [2 * PAGE] * RUNS
    read = blank(written)
    assert transfer(fd, Way.READ, read) == [2 * PAGE] * RUNS
    assert same(read, written)


def test_one_run_and_none(fd: int) -> None:
    written = scattered(seed=1)[:1]
    assert transfer(fd, Way.WRITE, written) == [PAGE]
    assert transfer(fd, Way.READ, read := blank(written)) == [PAGE]
    assert same(read, written)
    assert transfer(fd, Way.READ, []) == []


def test_each_run_has_its_own_fault(fd: int) -> None:
    runs = scattered(seed=1)
    transfer(fd, Way.WRITE, runs)
    at_the_end = os.fstat(fd).st_size
    wanted = [
        runs[0],
        Run(at_the_end - PAGE, parts_of(buffers([PAGE, PAGE]))),
        Run(-PAGE, parts_of(buffers([PAGE]))),
        runs[1],
    ]
    assert transfer(fd, Way.READ, wanted) == [PAGE, PAGE, -errno.EINVAL, PAGE]


def test_a_file_that_is_not_open_is_a_fault_of_every_run() -> None:
    assert transfer(1 << 20, Way.READ, scattered(seed=1)) == [-errno.EBADF] * RUNS


def test_what_has_begun_is_on_disk_at_its_end_whoever_waits(fd: int) -> None:
    written = [scattered(seed) for seed in range(3)]
    for place, runs in enumerate(written):
        written[place] = [Run(run.offset + place * PAGE, run.parts) for run in runs]
    ends = [begin(fd, Way.WRITE, runs) for runs in written]
    moved: list[list[int]] = []
    waiting = threading.Thread(target=lambda: moved.extend(end() for end in reversed(ends)))
    waiting.start()
    waiting.join()
    assert moved == [[PAGE] * RUNS] * 3
    for runs in written:
        assert transfer(fd, Way.READ, read := blank(runs)) == [PAGE] * RUNS
        assert same(read, runs)


def test_a_queue_that_fails_has_nothing_under_way_and_is_not_used_again(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(queue: KernelQueue, count: int, moved: NDArray[np.int64]) -> int:
        raise OSError(errno.EIO, "no events to be had")

    monkeypatch.setattr(transfers, "QUEUES", Queues(CALLS))
    with monkeypatch.context() as broken:
        broken.setattr(KernelQueue, "_wait", fails)
        end = begin(fd, Way.WRITE, scattered(seed=1))
        with pytest.raises(OSError, match="no events"):
            end()
    written = scattered(seed=2)
    assert transfer(fd, Way.WRITE, written) == [PAGE] * RUNS, "with another queue"
    assert transfer(fd, Way.READ, read := blank(written)) == [PAGE] * RUNS
    assert same(read, written), "no late write of the first ones"


def test_threads_do_not_get_in_each_others_way(fd: int) -> None:
    def work(seed: int) -> None:
        written = [Run(run.offset + seed * PAGE, run.parts) for run in scattered(seed)]
        read = blank(written)
        moved = [transfer(fd, way, runs) for way, runs in ((Way.WRITE, written), (Way.READ, read))]
        right[seed] = moved == [[PAGE] * RUNS] * 2 and same(read, written)

    right: dict[int, bool] = {}
    threads = [threading.Thread(target=work, args=[seed]) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == {0: True, 1: True, 2: True}


def test_a_kernel_that_gives_no_queue_is_said_once(
    fd: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    no_such_call = transfers.Calls(1 << 20, 1 << 20, 1 << 20, 1 << 20)
    monkeypatch.setattr(transfers, "QUEUES", Queues(no_such_call))
    written = scattered(seed=1)
    with caplog.at_level(logging.WARNING):
        assert transfer(fd, Way.WRITE, written) == [PAGE] * RUNS
        assert transfer(fd, Way.READ, read := blank(written)) == [PAGE] * RUNS
    assert same(read, written)
    assert [record.getMessage() for record in caplog.records] == [
        "disk I/O goes on without the kernel's queue, one call after another: [Errno 38] Function not implemented"
    ]


@pytest.mark.parametrize("refused", [range(1), range(0, RUNS, 2), range(RUNS)], ids=["first", "many", "all"])
def test_what_the_queue_does_not_take_is_moved_all_the_same(
    fd: int, refused: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = KernelQueue._submit
    calls = count()

    def refuse(queue: KernelQueue, addresses: NDArray[np.uint64]) -> int:
        if next(calls) in refused:
            raise BlockingIOError(errno.EAGAIN, "no request to be had")
        return submit(queue, addresses[:3])

    monkeypatch.setattr(KernelQueue, "_submit", refuse)
    written = scattered(seed=1)
    assert transfer(fd, Way.WRITE, written) == [PAGE] * RUNS
    assert transfer(fd, Way.READ, read := blank(written)) == [PAGE] * RUNS
    assert same(read, written)
