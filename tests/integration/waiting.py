"""Waiting for what can be seen, never for time to pass."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE_S = 30.0
"""How long a small machine that is busy with other things may take for anything; a test that fails waits so long, none
that passes does."""

_PAUSE_S = 0.005


async def eventually(
    probe: Callable[[], Awaitable[T]], wanted: Callable[[T], object], *, within: float = PATIENCE_S
) -> T:
    """Asks ``probe`` until its answer is ``wanted``, and returns that answer."""
    loop = asyncio.get_running_loop()
    end = loop.time() + within
    while not wanted(answer := await probe()):
        assert loop.time() < end, f"still not so after {within:g} s: {answer!r}"
        await asyncio.sleep(_PAUSE_S)
    return answer
