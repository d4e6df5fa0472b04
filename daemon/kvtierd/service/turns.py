"""Turns on the loop for those who read the past, events or a snapshot: however many there are, moves come first."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Final

SHARE: Final = 5
"""Whoever held the loop for a time leaves it to others until so many times that have passed."""

QUIET_SHARE: Final = 2
"""The same while the others hardly want it: they use less than half of what they are left."""


class Turns:
    """One after the other, first come first served. All of them together have a fifth of the loop's time, by the
    clock, and half of it while it is quiet: on a slow or busy machine each is longer, and they are further apart.

    ``cpu_s``: seconds that the loop's thread has computed.
    """

    def __init__(self, cpu_s: Callable[[], float] = time.thread_time) -> None:
        self._places: Final = count()
        self._waiting: Final[dict[int, asyncio.Future[None]]] = {}
        """By place."""
        self._busy = False
        self._cpu_s: Final = cpu_s
        self._began = self._ended = float("-inf")
        self._counted_s = 0.0
        self._cpu_then = 0.0

    def place(self) -> int:
        """In the order of turns; to come with it again is to have waited all the time."""
        return next(self._places)

    @asynccontextmanager
    async def turn(self, least_s: float, place: int | None = None, until: float | None = None) -> AsyncGenerator[bool]:
        """What is done in it must not wait for anything. ``least_s``: what it counts as, at least, since a message
        costs the loop time afterwards, too. Who leaves while it waits keeps nobody waiting.

        ``until``: by the loop's clock; where it has not been called by then it gives False, and nothing is to be done.
        """
        loop = asyncio.get_running_loop()
        if not await self._called(self.place() if place is None else place, until):
            yield False
            return
        try:
            await self._others(QUIET_SHARE)
            if self._cpu_s() - self._cpu_then > (loop.time() - self._ended) / 2:
                await self._others(SHARE)
            self._began = loop.time()
            try:
                yield True
            finally:
                self._ended, self._cpu_then = loop.time(), self._cpu_s()
                self._counted_s = max(least_s, self._ended - self._began)
        finally:
            self._call_next()

    async def _called(self, place: int, until: float | None) -> bool:
        """Whether it is its turn by then; if so, :meth:`_call_next` is to follow."""
        if not self._busy:
            self._busy = True
            return True
        call = asyncio.get_running_loop().create_future()
        self._waiting[place] = call
        try:
            async with asyncio.timeout_at(until):
                await call
        except TimeoutError:
            return call.done() and not call.cancelled()  # it may have been called in the same turn of the loop
        except asyncio.CancelledError:
            if call.done() and not call.cancelled():
                self._call_next()
            raise
        finally:
            self._waiting.pop(place, None)
        return True

    def _call_next(self) -> None:
        while self._waiting:
            call = self._waiting.pop(min(self._waiting))
            if not call.done():
                call.set_result(None)
                return
        self._busy = False

    async def _others(self, share: int) -> None:
        """Leaves the loop to them until the last turn was no more than that of the time since it began."""
        await asyncio.sleep(max(0.0, self._began + share * self._counted_s - asyncio.get_running_loop().time()))
