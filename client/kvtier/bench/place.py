"""Where benchmarks run: a cache of their own, in a private daemon or in one that runs."""

from __future__ import annotations

import hashlib
import mmap
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final

import numpy as np

from kvtier import aio
from kvtier.abi.spec import CacheSpec
from kvtier.cache import Cache
from kvtier.errors import InvalidArgument
from kvtier.private import PrivateDaemon, TierSlots
from kvtier.types import Tier

CACHE: Final = "kvtier-bench"
BLOCK_STEP: Final = 16
_MAX_HEAD: Final = 65536


def spec_of(block_bytes: int) -> CacheSpec:
    """A specification whose blocks have exactly so many bytes. Raises :class:`InvalidArgument`."""
    head, rest = divmod(block_bytes, BLOCK_STEP)
    layers = -(-head // _MAX_HEAD)
    if block_bytes < BLOCK_STEP or rest or head % layers:
        raise InvalidArgument("block_bytes", block_bytes, f"a multiple of {BLOCK_STEP}, of 1 MiB where it is more")
    return CacheSpec.single(
        CACHE, "uint8", tokens_per_block=BLOCK_STEP, layers=layers, kv_heads=1, head_size=head // layers, kv_factor=1
    )


@dataclass(slots=True, frozen=True)
class Place:
    """``daemon``: None where it is somebody else's."""

    client: aio.AsyncClient
    cache: Cache
    daemon: PrivateDaemon | None


@asynccontextmanager
async def place(
    spec: CacheSpec,
    slots: TierSlots,
    *,
    address: str | None = None,
    keep: Path | None = None,
    module: Sequence[str] = ("kvtierd.main",),
) -> AsyncIterator[Place]:
    """A cache of this specification, which has one window group, with so many slots. ``address``: of a daemon that
    runs; its cache is left empty. ``keep`` and ``module``: see :class:`PrivateDaemon`."""
    sizes = slots.as_bytes(spec)
    async with AsyncExitStack() as stack:
        daemon = None
        if address is None:
            daemon = await stack.enter_async_context(PrivateDaemon(sizes, keep=keep, module=module))
            address = daemon.address
        client = await stack.enter_async_context(await aio.connect(address, timeout=600))
        wanted = {tier: size for tier, size in sizes.items() if size}
        cache = await client.open_cache(CACHE, spec, budgets=None if daemon else wanted)
        _map_all(cache)
        yield Place(client, cache, daemon)
        if daemon is None:
            await emptied(cache)


def _map_all(cache: Cache) -> None:
    """Reads a byte of every page, so that no round pays for mapping it."""
    for tier in cache.arena.tiers:
        for pool in cache.arena.pools(tier, 0):
            if isinstance(pool, np.ndarray):  # memory of a GPU has no such pages
                pool[:, :: mmap.PAGESIZE].max()


async def emptied(cache: Cache) -> None:
    """Every block dropped, roots first: their descendants go with them."""
    async for page in cache.pages():
        roots = [block.key for block in page.blocks if block.parent is None]
        for start in range(0, len(roots), 1024):
            await cache.drop(roots[start : start + 1024])


def chains(blocks: int) -> Iterator[list[bytes]]:
    """Chains of so many keys each, none of which comes twice."""
    for number in count():
        yield [hashlib.sha256(f"bench/{number}/{index}".encode()).digest() for index in range(blocks)]


async def scatter(cache: Cache, tier: Tier, seed: int = 1) -> None:
    """Shuffles the order in which the tier's free slots are given out, as in a cache that has been used for a while."""
    leases = [await cache.reserve(1, tier) for _ in range(cache.slots(tier))]
    random.Random(seed).shuffle(leases)
    await cache.release(*leases)
