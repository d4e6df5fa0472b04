"""The thread that asks an idle device for a sign of life."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from kvtierd.service import lost_device
from kvtierd.service.lost_device import Prober
from kvtierd.tiers.base import TierIOError

PATIENCE_S = 10.0


class SomeDevice:
    """Answers what ``answer`` does; ``asked`` is set by each call."""

    def __init__(self, answer: Callable[[], object]) -> None:
        self.lost: str | None = None
        self.asked = threading.Semaphore(0)
        self._answer = answer

    def on_loss(self, tell: Callable[[], None]) -> None:
        raise AssertionError("the probe is told nothing")

    def memory(self) -> tuple[int, int]:
        self.asked.release()
        self._answer()
        return 1, 1


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(lost_device, "PROBE_S", 0.001)
    yield


def test_a_device_that_does_not_answer_is_silent_until_it_does() -> None:
    answers = threading.Event()
    device = SomeDevice(lambda: answers.wait(PATIENCE_S))
    prober = Prober(device)
    assert prober.silent_s == 0.0
    prober.start()
    assert device.asked.acquire(timeout=PATIENCE_S)
    before = prober.silent_s
    assert 0.0 < before <= prober.silent_s
    prober.stop()
    answers.set()
    prober._thread.join(PATIENCE_S)
    assert prober.silent_s == 0.0


def test_an_error_that_is_no_loss_is_passed_over_and_a_loss_ends_it() -> None:
    calls = 0

    def fail() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            device.lost = "it is"
        raise TierIOError(0, "not now")

    device = SomeDevice(fail)
    prober = Prober(device)
    prober.start()
    prober._thread.join(PATIENCE_S)
    assert not prober._thread.is_alive()
    assert calls == 3
