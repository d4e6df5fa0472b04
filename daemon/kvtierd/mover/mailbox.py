"""From threads to the loop, one wake-up for a burst."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Values posted by any thread, taken by the loop thread.

    The flag is cleared before the values are taken, and set after they are appended: a value is either seen by the
    drain that is due, or schedules the next one. Two drains for one burst are possible and harmless.
    """

    __slots__ = ("_closed", "_drain", "_due", "_loop", "_values")

    def __init__(self, loop: asyncio.AbstractEventLoop, drain: Callable[[], None]) -> None:
        self._loop = loop
        self._drain = drain
        self._values: deque[T] = deque()
        self._due = False
        self._closed = False

    def post(self, values: Iterable[T]) -> None:
        """Any thread."""
        self._values.extend(values)
        if not self._due and not self._closed:
            self._due = True
            self._loop.call_soon_threadsafe(self._drain)

    def take(self, budget: int, size: Callable[[T], int]) -> list[T]:
        """Loop thread: values until their sizes reach ``budget``, none after :meth:`close`.

        If more are left, the drain is called again.
        """
        self._due = False
        taken: list[T] = []
        while self._values and not self._closed and budget > 0:
            taken.append(self._values.popleft())
            budget -= size(taken[-1])
        if self._values and not self._due and not self._closed:
            self._due = True
            self._loop.call_soon(self._drain)
        return taken

    def close(self) -> None:
        """Loop thread: nobody listens any more, and the loop itself may go. What was not taken is forgotten."""
        self._closed = True
