"""A log that could not be opened at the start, or dies later: what is gone on with, and what is not."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import lmdb
import pytest

from kvtierd.event_log import EventLog, LoggedRun
from kvtierd.event_log import writer as writer_module
from kvtierd.event_log.store import EventStore
from tests.unit.event_log.log_parts import DAY_NS, MB, held, run

PATIENCE_S = 10.0


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(writer_module, "LAST_RETRY_S", 0.02)


async def newest(log: EventLog, last: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while log.status().newest < last:  # noqa: ASYNC110  another thread's, without an event
            await asyncio.sleep(0.002)


async def lived(path: Path, *runs: LoggedRun, epoch: int = 1, last: int = 0) -> None:
    log = EventLog.open(path, 4 * MB, DAY_NS)
    log.begin(epoch, last + 1, last, MB)
    for each in runs:
        log.offer(each)
    assert await log.flush(PATIENCE_S)
    log.close()


def hidden(path: Path) -> Path:
    """Where there is a file in place of the directory above, so that nothing can be opened or made."""
    away = path.parent.with_name("away")
    path.parent.rename(away)
    path.parent.write_text("in the way")
    return away


def back(path: Path, away: Path) -> None:
    path.parent.unlink()
    away.rename(path.parent)


async def test_one_that_was_away_at_the_start_is_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "state" / "events"
    await lived(path, run(1, 10))
    away = hidden(path)
    log = EventLog.open(path, 4 * MB, DAY_NS)
    assert log.known == (0, 0, 0)
    log.begin(1, 1, 10, MB)
    assert log.status().failing and log.extent is None
    log.offer(run(11, 12))
    assert await log.after(0, MB) is None
    back(path, away)
    await newest(log, 12)
    assert log.status().failing is None
    found = await log.after(0, MB)
    assert found is not None and (found.first, found.last) == (1, 12)
    assert await log.flush(PATIENCE_S)
    log.close()
    assert not path.with_name("events.aside-1").exists()


@pytest.mark.parametrize(("epoch", "last"), [(1, 5), (1, 0)])
async def test_one_that_is_found_ahead_too_late_is_set_aside(tmp_path: Path, epoch: int, last: int) -> None:
    """Its ids could not be heeded when the life began, which gives them out again."""
    path = tmp_path / "state" / "events"
    await lived(path, run(1, 10))
    away = hidden(path)
    log = EventLog.open(path, 4 * MB, DAY_NS)
    log.begin(epoch, 1, last, MB)
    log.offer(run(last + 1, last + 2))
    back(path, away)
    await newest(log, last + 2)
    found = await log.after(0, MB)
    assert found is not None and (found.first, found.last) == (last + 1, last + 2)
    assert await log.flush(PATIENCE_S)
    log.close()
    assert path.with_name("events.aside-1").exists()


async def test_one_that_dies_is_opened_again_and_keeps_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "events"
    log = EventLog.open(path, 4 * MB, DAY_NS)
    log.begin(1, 1, 0, MB)
    log.offer(run(1, 3))
    await newest(log, 3)
    first = log._living.store
    assert first is not None
    first.close()
    assert await log.after(0, MB) is None
    log.offer(run(4, 5))
    await newest(log, 5)
    second = log._living.store
    assert second is not None and second is not first
    assert held(second) == [1, 2, 3, 4, 5]
    assert await log.flush(PATIENCE_S)
    log.close()
    assert os.listdir(tmp_path) == ["events"]


async def test_a_log_of_another_history_is_set_aside_though_it_is_behind(tmp_path: Path) -> None:
    path = tmp_path / "events"
    log = EventLog.open(path, 4 * MB, DAY_NS)
    log.begin(1, 1, 0, MB, history=7)
    log.offer(run(1, 10))
    assert await log.flush(PATIENCE_S)
    log.close()
    for history in (7, 0):
        same = EventLog.open(path, 4 * MB, DAY_NS, history=history)
        assert same.known == (1, 10, 7)
        same.close()
    other = EventLog.open(path, 4 * MB, DAY_NS, history=8)
    assert other.known == (0, 0, 8)
    other.begin(1, 1, 20, MB, history=8)
    assert await other.after(0, MB) is None
    assert await other.flush(PATIENCE_S)
    other.close()
    assert sorted(os.listdir(tmp_path)) == ["events", "events.aside-1"]
    aside = EventLog.open(path.with_name("events.aside-1"), 4 * MB, DAY_NS, history=7)
    assert aside.known == (1, 10, 7)
    aside.close()


async def test_a_log_of_another_history_that_is_found_too_late_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "state" / "events"
    log = EventLog.open(path, 4 * MB, DAY_NS)
    log.begin(1, 1, 0, MB, history=7)
    log.offer(run(1, 10))
    assert await log.flush(PATIENCE_S)
    log.close()
    away = hidden(path)
    log = EventLog.open(path, 4 * MB, DAY_NS, history=8)
    log.begin(1, 1, 20, MB, history=8)
    log.offer(run(21, 22))
    back(path, away)
    await newest(log, 22)
    found = await log.after(0, MB)
    assert found is not None and found.first == 21
    assert await log.flush(PATIENCE_S)
    log.close()
    assert path.with_name("events.aside-1").exists()


async def test_a_log_of_before_there_were_histories_is_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "events"
    await lived(path, run(1, 10))
    log = EventLog.open(path, 4 * MB, DAY_NS, history=8)
    log.begin(1, 1, 10, MB, history=8)
    assert await log.flush(PATIENCE_S)
    log.close()
    again = EventLog.open(path, 4 * MB, DAY_NS)
    assert again.known == (1, 10, 8)
    again.close()


async def test_one_that_turns_out_damaged_while_it_is_written_is_set_aside_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events"
    log = EventLog.open(path, 4 * MB, DAY_NS)
    log.begin(1, 1, 0, MB)
    log.offer(run(1, 3))
    await newest(log, 3)

    transact, times = EventStore._transact, iter(range(10))

    def damaged_once(store: EventStore, runs: Sequence[LoggedRun], epoch_first: int) -> None:
        if next(times) == 0:
            raise lmdb.CorruptedError("located page was wrong type")
        transact(store, runs, epoch_first)

    monkeypatch.setattr(EventStore, "_transact", damaged_once)
    log.offer(run(4, 5))
    await newest(log, 5)
    assert log.status().failing is None
    found = await log.after(0, MB)
    assert found is not None and (found.first, found.last) == (4, 5)
    log.offer(run(6, 6))
    assert await log.flush(PATIENCE_S)
    log.close()
    assert sorted(os.listdir(tmp_path)) == ["events", "events.aside-1"]
