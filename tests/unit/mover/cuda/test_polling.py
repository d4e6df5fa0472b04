"""How often a device is asked whether it is done."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvtierd.mover.cuda import traffic
from kvtierd.mover.cuda.traffic import LONGEST_S, SHORTEST_S, SPIN_S, soon, wait_until

ASKING_S = 1e-6


class Clock:
    """Only asking and sleeping take time."""

    def __init__(self, done_at: float) -> None:
        self.now = 0.0
        self.slept: list[tuple[float, float]] = []
        self._done_at = done_at

    def done(self) -> bool:
        self.now += ASKING_S
        return self.now >= self._done_at

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append((self.now, seconds))
        self.now += seconds


def clock(monkeypatch: pytest.MonkeyPatch, done_at: float) -> Clock:
    made = Clock(done_at)
    monkeypatch.setattr(traffic, "time", SimpleNamespace(perf_counter=made.perf_counter, sleep=made.sleep))
    return made


def test_what_is_done_soon_is_not_slept_for(monkeypatch: pytest.MonkeyPatch) -> None:
    short = clock(monkeypatch, SPIN_S / 2)
    wait_until(short.done)
    assert short.slept == []


def test_asking_all_the_time_ends_after_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    long = clock(monkeypatch, 1.0)
    assert not soon(long.done)
    assert SPIN_S <= long.now < SPIN_S + 3 * ASKING_S


@pytest.mark.parametrize("seconds", [0.001, 0.02, 0.5])
def test_sleeps_grow_with_what_was_waited_within_bounds(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    long = clock(monkeypatch, seconds)
    wait_until(long.done)
    assert long.slept
    for waited, slept in long.slept:
        assert slept == pytest.approx(min(LONGEST_S, max(SHORTEST_S, waited / 8)))
    assert long.now - seconds <= LONGEST_S + ASKING_S
