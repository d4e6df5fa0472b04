"""The log's clock over lives, boots and jumps."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtierd.event_log import clock
from kvtierd.event_log.clock import Clocks, LogClock
from tests.unit.event_log.log_parts import DAY_NS, FakeTime


def test_it_begins_at_nothing_and_counts_the_systems_time() -> None:
    time = FakeTime()
    log = LogClock(time.clocks)
    assert log.now() == 0
    time.boot_ns += 5
    time.wall_ns -= DAY_NS
    assert log.now() == 5


def test_it_goes_on_over_lives_and_boots_and_never_back() -> None:
    time = FakeTime()
    stored, before = LogClock(time.clocks).to_stored(), 0
    for later in (
        FakeTime(time.boot_ns + 7, time.wall_ns - DAY_NS),  # the same boot: its clock counts
        FakeTime(3, time.wall_ns + DAY_NS, b"x" * 16),  # another one: the wall clock does
        FakeTime(3, 5, b"y" * 16),  # if it went forward
    ):
        log = LogClock(later.clocks, stored)
        assert log.now() >= before
        before, stored = log.now(), log.to_stored()
    assert before == 7 + 2 * DAY_NS


def test_a_boot_that_is_hidden_is_no_reason_not_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = Clocks.of_system()
    assert len(known.boot_id) == 16 and any(known.boot_id)
    monkeypatch.setattr(clock, "_BOOT_ID", tmp_path / "hidden")
    assert Clocks.of_system().boot_id == bytes(16)
