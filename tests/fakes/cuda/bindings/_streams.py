"""Streams as threads: each does what it was given in order, but late, and at its own pace."""

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from ._races import Given

Work = Callable[[], object]

_IDLE_S = 0.5
"""How long a stream's thread waits for more: a process that has used many fakes would keep a thread of each stream."""


class Mark:
    """A point in a stream. ``reached`` is set when all before it is done."""

    __slots__ = ("reached",)

    def __init__(self, *, reached: bool = False) -> None:
        self.reached = threading.Event()
        if reached:
            self.reached.set()


class FakeStream:
    """``failed`` is called with what a piece of work raises; nothing more is done then, by this stream. While a file
    ``hold`` is there, no work is begun."""

    def __init__(
        self,
        number: int,
        context: int,
        seed: int,
        max_delay_s: float,
        hold: Path | None,
        failed: Callable[[Exception], None],
    ) -> None:
        self.number = number
        self.capturing = False
        self.blocking = False
        """It and the legacy default stream wait for each other."""
        self.context = context
        self._hold = hold
        self._random = random.Random(seed)
        self._max_delay_s = max_delay_s
        self._failed = failed
        self._work: deque[Work | Mark] = deque()
        self._given = threading.Condition()
        self._name = f"fake-cuda-{seed}"
        self._alive = False  # whether it has a thread
        self._busy = False
        self._broken = False

    def give(self, work: Work) -> None:
        self._append(work)

    def mark(self) -> Mark:
        mark = Mark()
        self._append(mark)
        return mark

    @property
    def idle(self) -> bool:
        """Whether all has been done."""
        with self._given:
            return not self._busy and not self._work

    def _append(self, work: Work | Mark) -> None:
        with self._given:
            self._work.append(work)
            self._given.notify()
            if not self._alive:
                self._alive = True
                threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _next(self) -> Work | Mark | None:
        with self._given:
            self._busy = False
            if not self._given.wait_for(lambda: self._work, _IDLE_S):
                self._alive = False
                return None
            self._busy = True
            return self._work.popleft()

    def _run(self) -> None:
        while (work := self._next()) is not None:
            if isinstance(work, Mark):
                work.reached.set()
            elif not self._broken:
                self._do(work)

    def _do(self, work: Work) -> None:
        if self._max_delay_s and self._random.random() < 0.7:
            time.sleep(self._random.uniform(0, self._max_delay_s))
        while self._hold is not None and self._hold.exists():
            time.sleep(0.001)
        try:
            work()
        except Exception as error:  # noqa: BLE001 - whatever it is, the device is lost by it
            self._broken = True
            self._failed(error)


class FakeEvent:
    """Stands for a mark of some stream; for none before it was recorded."""

    def __init__(self, context: int) -> None:
        self.context = context
        self.mark = Mark(reached=True)
        self.given: Given = 0, 0
        self.captured = False
