"""Work of the loop that gives way to all other: a slice a turn, and only where nothing else is ready to run.

A call takes some ten turns of the loop, most of them gRPC's, before its verb runs. With a slice of half a millisecond
in every one of these a lookup would wait for ten of them; so it waits for the one that runs when it comes in.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import deque
from collections.abc import Callable
from typing import Any, Final

PATIENCE: Final = 12
"""While something else is ready in every turn, a slice runs in one of so many."""

Defer = Callable[..., object]
"""Has a function called with arguments, in some later turn of the loop that is running: like ``loop.call_soon``."""


class Leisure(selectors.DefaultSelector):
    """The selector of a loop, since that is who knows that nothing is ready. Loop thread only."""

    def __init__(self) -> None:
        super().__init__()
        self._deferred: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self.between: Callable[[], None] | None = None
        """Called in every turn, and for less than a microsecond. It may defer."""
        self._waited = 0
        """Turns in which the first of them has given way."""

    def defer(self, function: Callable[..., object], *arguments: Any) -> None:
        """Has it called when its turn has come: first come, first served."""
        self._deferred.append((function, arguments))

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """As the loop asks for it: without a ``timeout`` above 0 where it has something to run at once."""
        if self.between is not None:
            self.between()
        if not self._deferred:
            return super().select(timeout)
        ready = super().select(0)
        idle = not ready and (timeout is None or timeout > 0)
        self._waited += 1
        if idle or self._waited >= PATIENCE:
            self._waited = 0
            function, arguments = self._deferred.popleft()
            asyncio.get_running_loop().call_soon(function, *arguments)
        return ready
