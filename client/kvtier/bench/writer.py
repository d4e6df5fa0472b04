"""``python -m kvtier.bench.writer ADDRESS BLOCK_BYTES CHAIN``: stores new chains of so many blocks, two at a time.

Asked ``{"traffic": name, "seconds": s}`` it does so for that long, and tells how many blocks it stored and how long
each put took. See :data:`TRAFFIC` for what else becomes of a chain.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtier import aio
from kvtier.bench.helper import serve
from kvtier.bench.place import CACHE, spec_of
from kvtier.cache import Cache
from kvtier.types import BlockResult, Tier
from kvtier.wire import split_keys

_AT_ONCE: Final = 2
"""While the answer of one is on its way the daemon has another to do."""
_KEY_BYTES: Final = 32

_MOVED: Final = 4
"""One chain in so many, of mixed traffic."""

_After = Callable[[Cache, list[bytes], int], Awaitable[None]]
"""What becomes of a chain: its keys, and how many were stored before it."""


@dataclass(slots=True)
class Stored:
    """``puts``: milliseconds of each."""

    blocks: int = 0
    puts: list[float] = field(default_factory=list)


async def run(address: str, block_bytes: int, chain: int) -> None:
    rows = np.ones((chain, block_bytes), dtype=np.uint8)
    async with await aio.connect(address, timeout=60) as client:
        cache = await client.open_cache(CACHE, spec_of(block_bytes))

        async def answer(question: dict[str, Any]) -> dict[str, Any]:
            stored, until = Stored(), time.perf_counter() + question["seconds"]
            after = TRAFFIC[question["traffic"]]
            await asyncio.gather(*(_store(cache, rows, after, stored, until) for _ in range(_AT_ONCE)))
            return asdict(stored)

        await serve(answer)


async def _store(cache: Cache, rows: NDArray[np.uint8], after: _After, stored: Stored, until: float) -> None:
    while (began := time.perf_counter()) < until:
        keys = split_keys(os.urandom(_KEY_BYTES * len(rows)))
        results = await cache.put(keys, rows, tier=Tier.DEVICE)
        stored.puts.append(1e3 * (time.perf_counter() - began))
        stored.blocks += results.count(BlockResult.OK)
        await after(cache, keys, len(stored.puts))


async def _sometimes_moved(cache: Cache, keys: list[bytes], number: int) -> None:
    if number % _MOVED == 0:
        await cache.move(keys, Tier.HOST)
    await cache.drop(keys[:1])


async def _moved(cache: Cache, keys: list[bytes], number: int) -> None:
    await cache.move(keys, Tier.HOST)
    await cache.drop(keys[:1])


async def _left(cache: Cache, keys: list[bytes], number: int) -> None:
    """The next ones push it out."""


TRAFFIC: Final[dict[str, _After]] = {"mixed": _sometimes_moved, "moves": _moved, "pressure": _left}
"""A block is stored in the device tier, moves to the host tier and leaves: three changes. By calls about a whole chain,
where of mixed traffic only every fourth moves; or, under pressure, because the tiers are full."""


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
