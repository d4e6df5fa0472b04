"""A client that keeps every edge of a daemon busy: ``python -m kvtier.bench.load ADDRESS BLOCK_BYTES``.

It stores new chains and asks for old ones, some in the device tier, some in the host tier, until it is ended. In a
process of its own, so that its copies are not felt by whoever measures.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import deque
from typing import Final

import numpy as np

from kvtier import aio
from kvtier.bench.place import CACHE, chains, spec_of
from kvtier.cache import Cache
from kvtier.errors import RetryableError
from kvtier.types import Tier

CHAIN: Final = 32
_PAUSE_S: Final = 0.001
"""After a refusal: the tier was full of what others hold."""


async def run(address: str, block_bytes: int) -> None:
    async with await aio.connect(address, timeout=60) as client:
        cache = await client.open_cache(CACHE, spec_of(block_bytes))
        stored: deque[list[bytes]] = deque(maxlen=sum(cache.slots(tier) for tier in cache.tiers) // CHAIN)
        async with asyncio.TaskGroup() as group:
            group.create_task(_store(cache, stored))
            for tier in (Tier.DEVICE, Tier.HOST):
                group.create_task(_read(cache, stored, tier))


async def _store(cache: Cache, stored: deque[list[bytes]]) -> None:
    rows = list(np.ones((CHAIN, cache.block_bytes), dtype=np.uint8))
    for chain in chains(CHAIN):
        try:
            await cache.put(chain, rows, tier=Tier.DEVICE)
            stored.append(chain)
        except RetryableError:
            await asyncio.sleep(_PAUSE_S)


async def _read(cache: Cache, stored: deque[list[bytes]], tier: Tier) -> None:
    choice = random.Random(tier)
    while True:
        if not stored:
            await asyncio.sleep(_PAUSE_S)
            continue
        try:
            async with cache.acquire(choice.choice(stored), tier):
                pass
        except RetryableError:
            await asyncio.sleep(_PAUSE_S)


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], int(sys.argv[2])))
