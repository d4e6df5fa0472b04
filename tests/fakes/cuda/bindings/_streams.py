"""Streams as threads: each does what it was given in order, but late, and at its own pace."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from ._races import Clock

Work = Callable[[], object]


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
        self.context = context
        self._hold = hold
        self._random = random.Random(seed)
        self._max_delay_s = max_delay_s
        self._failed = failed
        self._work: deque[Work | Mark | None] = deque()
        self._given = threading.Condition()
        self._busy = False
        threading.Thread(target=self._run, name=f"fake-cuda-{seed}", daemon=True).start()

    def give(self, work: Work) -> None:
        with self._given:
            self._work.append(work)
            self._given.notify()

    def mark(self) -> Mark:
        mark = Mark()
        with self._given:
            self._work.append(mark)
            self._given.notify()
        return mark

    @property
    def idle(self) -> bool:
        """Whether all has been done."""
        with self._given:
            return not self._busy and not self._work

    def end(self) -> None:
        """When all has been done."""
        with self._given:
            self._work.append(None)
            self._given.notify()

    def _run(self) -> None:
        broken = False
        while True:
            with self._given:
                self._busy = False
                while not self._work:
                    self._given.wait()
                work = self._work.popleft()
                self._busy = True
            if work is None:
                return
            if isinstance(work, Mark):
                work.reached.set()
                continue
            if broken:
                continue
            if self._max_delay_s and self._random.random() < 0.7:
                time.sleep(self._random.uniform(0, self._max_delay_s))
            while self._hold is not None and self._hold.exists():
                time.sleep(0.001)
            try:
                work()
            except Exception as error:  # noqa: BLE001 - whatever it is, the device is lost by it
                broken = True
                self._failed(error)


class FakeEvent:
    """Stands for a mark of some stream; for none before it was recorded."""

    def __init__(self, context: int) -> None:
        self.context = context
        self.mark = Mark(reached=True)
        self.clock: Clock = {}
        self.captured = False
