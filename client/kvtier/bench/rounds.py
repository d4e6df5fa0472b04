"""Rounds in turn: ours, the floor's, the floor's, ours."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from itertools import count

from kvtier.bench.result import Paired

Round = Callable[[], Awaitable[float]]
"""Does one round and returns the seconds that count; what it sets up and clears away does not."""

WARM_UP = 2
"""Rounds of each that do not count: they map pages and fill caches."""


async def interleaved(ours: Round, floor: Round, rounds: int) -> Paired:
    """So many rounds of each that count. Neither always has what the other has left in the caches: they swap places."""
    paired = Paired()
    for turn in count():
        if turn == rounds + WARM_UP:
            return paired
        first_is_ours = turn % 2 == 0
        seconds = [await each() for each in ((ours, floor) if first_is_ours else (floor, ours))]
        if turn >= WARM_UP:
            paired.ours.append(seconds[0 if first_is_ours else 1])
            paired.floor.append(seconds[1 if first_is_ours else 0])
    raise AssertionError("count() does not end")


async def timed(work: Awaitable[object]) -> float:
    """Seconds that it takes."""
    started = time.perf_counter()
    await work
    return time.perf_counter() - started
