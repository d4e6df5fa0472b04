"""Work of the loop that gives way to all other: a slice a turn, and only where nothing else is ready to run.

A call takes some ten turns of the loop, most of them gRPC's, before its verb runs. With a slice of half a millisecond
in every one of these a lookup would wait for ten of them; so it waits for the one that runs when it comes in.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any, Final

PATIENCE: Final = 12
"""While something else is ready in every turn, a slice runs in one of so many."""
EXPECTED_S: Final = 0.001
"""The least that a selector can wait; what is expected comes in a twentieth of it."""
HURRY_S: Final = 0.001
"""How long a slice gives way to a thread that hurries: the least that a selector can wait."""
POLLS_APART_S: Final = 0.00005
"""While something is ready in every turn, the kernel is asked for more only so often: most turns of a call are one
short callback, and to ask takes as long as that."""

Defer = Callable[..., object]
"""Has a function called with arguments, in some later turn of the loop that is running: like ``loop.call_soon``."""


class Leisure(selectors.DefaultSelector):
    """The selector of a loop, since that is who knows that nothing is ready. Loop thread only."""

    def __init__(self) -> None:
        super().__init__()
        self._deferred: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self.between: Callable[[], None] | None = None
        """Called whenever the kernel is asked, and for less than a microsecond. It may defer."""
        self.hurries: Callable[[], bool] | None = None
        """Whether a thread is about to do with the interpreter what a medium waits for. It gets the interpreter from a
        loop that sleeps at once; from one that only ever looks whether anything is ready, after many slices."""
        self._asked_s = 0.0
        """By the monotonic clock, when the kernel was."""
        self._waited = 0
        """Turns in which the first of them has given way."""
        self._expecting = False

    def defer(self, function: Callable[..., object], *arguments: Any) -> None:
        """Has it called when its turn has come: first come, first served."""
        self._deferred.append((function, arguments))

    def expect(self) -> None:
        """Something will be ready in a moment, and is to be waited for before anything is done at leisure."""
        self._expecting = True

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """As the loop asks for it: without a ``timeout`` above 0 where it has something to run at once."""
        more = timeout is not None and timeout <= 0
        asks = not more or monotonic() - self._asked_s >= POLLS_APART_S
        if asks and self.between is not None:
            self.between()
        if not self._deferred:
            return self._ask(timeout) if asks else []
        ready = self._ask(0) if asks else []
        idle = not ready and not more
        if idle and self._expecting:
            ready = self._ask(EXPECTED_S if timeout is None else min(timeout, EXPECTED_S))
            idle = not ready
        if idle and self.hurries is not None and self.hurries():
            ready = self._ask(HURRY_S)
            idle = not ready
        self._expecting = self._expecting and not ready and not idle
        self._waited += 1
        if idle or self._waited >= PATIENCE:
            self._waited = 0
            function, arguments = self._deferred.popleft()
            asyncio.get_running_loop().call_soon(function, *arguments)
        return ready

    def _ask(self, timeout: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(timeout)
        self._asked_s = monotonic()
        return ready
