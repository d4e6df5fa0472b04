"""What waits for the log: it is written in groups, found meanwhile, and lost only where the disk cannot follow."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtierd.event_log import writer as writer_module
from kvtierd.event_log.backlog import Backlog
from kvtierd.event_log.runs import LoggedRun
from kvtierd.event_log.store import EventStore
from kvtierd.event_log.writer import LogWriter
from kvtierd.tiers.base import TierIOError
from tests.unit.event_log.log_parts import MB, held, opened, run

PATIENCE_S = 10.0


class Faulty:
    """Stands before a store's ``append``: counts transactions, and fails, or waits, while it is told to."""

    def __init__(self, store: EventStore, patch: pytest.MonkeyPatch) -> None:
        self.groups: list[list[int]] = []
        self.fails = False
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.under_way = threading.Event()
        self._append = store.append
        patch.setattr(store, "append", self.append)

    def append(self, runs: list[LoggedRun], epoch_first: int) -> int:
        self.under_way.set()
        assert self.may_go_on.wait(PATIENCE_S)
        if self.fails:
            raise TierIOError(28, "No space left on device")
        self.groups.append([each.first for each in runs])
        return self._append(runs, epoch_first)


def eventually(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[EventStore]:
    store = opened(tmp_path / "log")
    yield store
    store.close()


@pytest.fixture
def faulty(store: EventStore, monkeypatch: pytest.MonkeyPatch) -> Faulty:
    monkeypatch.setattr(writer_module, "FIRST_RETRY_S", 0.01)
    return Faulty(store, monkeypatch)


def never() -> EventStore:
    raise AssertionError("there is a store")


def started(
    store: EventStore | None, waiting_bytes: int = MB, open_store: Callable[[], EventStore] = never
) -> LogWriter:
    writer = LogWriter(open_store, store, 1, waiting_bytes)
    writer.start()
    return writer


def test_what_is_offered_is_logged_in_groups(store: EventStore, faulty: Faulty) -> None:
    writer = started(store)
    for number in range(1, 101):
        writer.offer(run(number, number))
    assert writer.finish(PATIENCE_S)
    assert held(store) == list(range(1, 101))
    assert len(faulty.groups) < 10


def test_a_group_is_bounded(store: EventStore, faulty: Faulty) -> None:
    writer = LogWriter(never, store, 1, 64 * MB)
    for number in range(1, 31):
        writer.offer(run(number, number, size=100_000))
    writer.start()
    assert writer.finish(PATIENCE_S)
    assert {len(group) for group in faulty.groups} == {5}, "an eighth of the log"


def test_what_waits_is_found_until_it_is_in_the_log(store: EventStore, faulty: Faulty) -> None:
    faulty.may_go_on.clear()
    writer = started(store)
    writer.offer(run(1, 5))
    assert faulty.under_way.wait(PATIENCE_S)
    writer.offer(run(6, 9))
    for cursor in range(9):
        found = writer.waiting_above(cursor)
        assert found is not None and found.first <= cursor + 1 <= found.last
    assert writer.waiting_above(9) is None
    faulty.may_go_on.set()
    assert writer.finish(PATIENCE_S)
    assert writer.waiting_above(0) is None
    assert held(store) == list(range(1, 10))


def test_a_failing_disk_costs_only_what_does_not_fit_meanwhile(store: EventStore, faulty: Faulty) -> None:
    faulty.fails = True
    writer = started(store, waiting_bytes=10 * run(1, 1, size=1000).size)
    for number in range(1, 31):
        writer.offer(run(number, number, size=1000))
    eventually(lambda: writer.failures > 2)
    assert writer.failing and "No space left" in writer.failing
    assert writer.lost == 20
    faulty.fails = False
    eventually(lambda: writer.failing is None)
    writer.offer(run(31, 31))
    assert writer.finish(PATIENCE_S)
    assert held(store) == list(range(21, 32))
    assert writer.lost == 20


def test_what_goes_while_it_is_being_written_is_lost_only_if_that_fails(store: EventStore, faulty: Faulty) -> None:
    faulty.may_go_on.clear()
    writer = started(store, waiting_bytes=2 * run(1, 1, size=1000).size)
    writer.offer(run(1, 1, size=1000))
    assert faulty.under_way.wait(PATIENCE_S)
    for number in range(2, 6):
        writer.offer(run(number, number, size=1000))
    assert writer.lost == 2, "the second and the third"
    faulty.fails = True
    faulty.may_go_on.set()
    eventually(lambda: writer.lost == 3)
    faulty.fails = False
    assert writer.finish(PATIENCE_S)
    assert held(store) == [4, 5]


def test_an_end_with_a_disk_that_fails_does_not_wait(store: EventStore, faulty: Faulty) -> None:
    faulty.fails = True
    writer = started(store)
    writer.offer(run(1, 1))
    assert not writer.finish(PATIENCE_S)
    assert not writer._thread.is_alive()


def test_an_end_with_a_disk_that_hangs_does_not_wait_for_ever(
    store: EventStore, faulty: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty.may_go_on.clear()
    writer = started(store)
    writer.offer(run(1, 1))
    assert faulty.under_way.wait(PATIENCE_S)
    assert writer.trouble is None
    monkeypatch.setattr(writer_module, "STUCK_S", 0.0)
    assert writer.trouble is not None and "not answered" in writer.trouble
    assert not writer.finish(0.05)
    writer.close()
    assert not store.dead, "a thread is in it"
    faulty.may_go_on.set()
    assert writer.finish(PATIENCE_S)
    assert writer.trouble is None


def test_a_log_that_cannot_be_opened_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "FIRST_RETRY_S", 0.01)
    tries: list[int] = []

    def open_store() -> EventStore:
        tries.append(1)
        if len(tries) < 4:
            raise TierIOError(5, "Input/output error")
        return opened(tmp_path / "log")

    writer = started(None, open_store=open_store)
    writer.offer(run(1, 3))
    eventually(lambda: len(tries) == 4)
    assert writer.finish(PATIENCE_S)
    assert (writer.failures, writer.failing, writer.lost) == (3, None, 0)
    assert writer.store is not None
    assert held(writer.store) == [1, 2, 3]
    writer.close()


def test_a_dead_store_is_opened_anew(tmp_path: Path, store: EventStore) -> None:
    store.close()
    writer = started(store, open_store=lambda: opened(tmp_path / "log"))
    writer.offer(run(1, 3))
    assert writer.finish(PATIENCE_S)
    assert writer.store is not None and writer.store is not store
    assert held(writer.store) == [1, 2, 3]
    writer.close()


def test_a_commit_that_failed_at_its_end_may_have_worked(
    tmp_path: Path, store: EventStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "FIRST_RETRY_S", 0.01)
    real = store.append

    def dies(runs: list[LoggedRun], epoch_first: int) -> int:
        real(runs, epoch_first)
        store.close()
        raise TierIOError(5, "Input/output error")

    monkeypatch.setattr(store, "append", dies)
    writer = started(store, open_store=lambda: opened(tmp_path / "log"))
    writer.offer(run(1, 3))
    eventually(lambda: writer.failures and not writer.failing)
    writer.offer(run(4, 5))
    assert writer.finish(PATIENCE_S)
    assert writer.store is not None
    assert (held(writer.store), writer.lost) == ([1, 2, 3, 4, 5], 0)
    writer.close()


def test_a_backlog_finds_what_it_holds() -> None:
    backlog = Backlog(10 * run(1, 1).size)
    for first in range(1, 1000, 3):
        backlog.append(run(first, first + 1))
        kept = list(backlog)
        for cursor in range(max(0, kept[0].first - 4), first + 3):
            assert backlog.above(cursor) is next((each for each in kept if each.last > cursor), None)
    assert backlog.bytes == sum(each.size for each in backlog) <= 10 * run(1, 1).size
    backlog.drop_up_to(999)
    assert len(backlog) == 0 == backlog.bytes
