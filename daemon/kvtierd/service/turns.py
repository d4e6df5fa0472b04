"""Turns on the loop for those who read the past, events or a snapshot: however many there are, moves come first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

SHARE: Final = 5
"""Whoever held the loop for a time leaves it to others until so many times that have passed."""


class Turns:
    """One after the other, first come first served. All of them together have a fifth of the loop's time, by the
    clock: on a slow or busy machine each is longer, and they are further apart."""

    def __init__(self) -> None:
        self._order: Final = asyncio.Lock()
        self._next = 0.0

    @asynccontextmanager
    async def turn(self, least_s: float) -> AsyncGenerator[None]:
        """What is done in it must not wait for anything. ``least_s``: what it counts as, at least, since a message
        costs the loop time afterwards, too. Who leaves while it waits keeps nobody waiting."""
        loop = asyncio.get_running_loop()
        async with self._order:
            await asyncio.sleep(max(0.0, self._next - loop.time()))
            began = loop.time()
            try:
                yield
            finally:
                self._next = began + SHARE * max(least_s, loop.time() - began)
