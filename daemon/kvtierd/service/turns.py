"""Turns on the loop for those who read the past, events or a snapshot: however many there are, moves come first."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
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
        self._order: Final = asyncio.Lock()
        self._cpu_s: Final = cpu_s
        self._began = self._ended = float("-inf")
        self._counted_s = 0.0
        self._cpu_then = 0.0

    @asynccontextmanager
    async def turn(self, least_s: float) -> AsyncGenerator[None]:
        """What is done in it must not wait for anything. ``least_s``: what it counts as, at least, since a message
        costs the loop time afterwards, too. Who leaves while it waits keeps nobody waiting."""
        loop = asyncio.get_running_loop()
        async with self._order:
            await self._others(QUIET_SHARE)
            if self._cpu_s() - self._cpu_then > (loop.time() - self._ended) / 2:
                await self._others(SHARE)
            self._began = loop.time()
            try:
                yield
            finally:
                self._ended, self._cpu_then = loop.time(), self._cpu_s()
                self._counted_s = max(least_s, self._ended - self._began)

    async def _others(self, share: int) -> None:
        """Leaves the loop to them until the last turn was no more than that of the time since it began."""
        await asyncio.sleep(max(0.0, self._began + share * self._counted_s - asyncio.get_running_loop().time()))
