"""The thread of the log: what it writes together, and what becomes of a disk that is slow or fails."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvtierd.event_log import EventLog, EventRun
from kvtierd.event_log import log as module
from kvtierd.event_log.segments import LogSegments
from kvtierd.tiers.base import TierIOError
from tests.unit.event_log.runs import MB, held, run

PATIENCE_S = 10.0


class Faulty(LogSegments):
    """``fails``: no write works. ``may_go_on``: a write waits for it."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        super().__init__(path, max_bytes)
        self.fails = False
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.under_way = threading.Event()
        self.groups: list[int] = []

    def append(self, runs: Sequence[EventRun], epoch_first: int) -> None:
        self.under_way.set()
        assert self.may_go_on.wait(PATIENCE_S)
        if self.fails:
            raise OSError(28, "No space left on device")
        super().append(runs, epoch_first)
        self.groups.append(len(runs))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Faulty]:
    disk = Faulty(tmp_path / "log", 64 * MB)
    yield disk
    disk.may_go_on.set()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.01)


def started(disk: LogSegments, waiting_bytes: int = 64 * MB) -> EventLog:
    log = EventLog(disk, waiting_bytes)
    log.start(1)
    return log


def eventually(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


async def test_runs_are_written_in_bounded_groups(disk: Faulty) -> None:
    log = started(disk)
    for number in range(1, 31):
        log.offer(run(number, number, size=100_000))
    await log.finish(PATIENCE_S)
    assert held(disk) == list(range(1, 31))
    assert 3 <= len(disk.groups) < 30 and max(disk.groups) <= 10
    log.close()


async def test_each_epoch_is_written_with_its_first_id(disk: Faulty) -> None:
    log = started(disk)
    log.offer(run(1, 2))
    await log.finish(PATIENCE_S)
    log.close()
    log = EventLog(disk, 64 * MB)
    log.start(3)
    log.offer(run(3, 4, epoch=2))
    await log.finish(PATIENCE_S)
    assert log.epochs == [(1, 1), (3, 2)]
    assert log.known == (2, 4)


async def test_a_failing_disk_costs_only_the_runs_that_there_is_no_memory_for(disk: Faulty) -> None:
    disk.fails = True
    log = started(disk, waiting_bytes=10 * run(1, 1, size=1000).size)
    settled = [log.offer(run(number, number, size=1000)) for number in range(1, 31)]
    assert settled[9] == 0 and settled[-1] >= 19
    eventually(lambda: log.status().failing)
    assert "No space left" in str(log.status().failing)
    disk.fails = False
    eventually(lambda: not log.status().failing)
    await log.finish(PATIENCE_S)
    told, status = held(disk), log.status()
    assert told[-10:] == list(range(21, 31))
    assert status.lost == 30 - len(told)
    assert status.failures > 0


async def test_a_run_that_is_being_written_is_not_lost(disk: Faulty) -> None:
    disk.may_go_on.clear()
    log = started(disk, waiting_bytes=2 * run(1, 1, size=1000).size)
    log.offer(run(1, 1, size=1000))
    assert disk.under_way.wait(PATIENCE_S)
    for number in range(2, 6):
        assert log.offer(run(number, number, size=1000)) == 0
    disk.may_go_on.set()
    await log.finish(PATIENCE_S)
    assert held(disk) == [1, 5]
    assert log.status().lost == 3


@pytest.mark.parametrize("fails", [True, False])
async def test_an_end_does_not_wait_for_a_disk_that_fails_or_hangs(disk: Faulty, fails: bool) -> None:
    disk.fails = fails
    if not fails:
        disk.may_go_on.clear()
    log = started(disk)
    log.offer(run(1, 1))
    assert disk.under_way.wait(PATIENCE_S)
    began = time.monotonic()
    await log.finish(PATIENCE_S if fails else 0.1)
    log.close()
    assert time.monotonic() - began < PATIENCE_S / 2
    assert held(disk) == []


def test_a_directory_that_cannot_be_made_is_an_io_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TierIOError):
        EventLog.open(tmp_path / "file" / "log", MB, MB)
