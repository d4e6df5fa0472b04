"""Where the benchmark of a GPU runs: a private daemon whose device tier is on it, and two chains that change places."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvtier.abi.spec import CacheSpec, PoolSpec, WindowGroupSpec
from kvtier.bench.gpu_bare import DOWN
from kvtier.bench.place import BLOCK_STEP, CACHE, Place, chains, place, scatter, spec_of
from kvtier.bench.rounds import timed
from kvtier.cache import Cache
from kvtier.errors import DaemonError, KvtierError
from kvtier.private import TierSlots
from kvtier.types import BlockResult, Tier

SETTLED_S: Final = 2.0
"""How long a new cache is used before it is measured: its host memory is page-locked beside the first moves."""
_SHARES: Final = 3
"""Chains that each tier has room for: one that comes and one that goes at once, and one besides."""
_POOL_GRAIN: Final = 4 << 20
"""Where a pool may begin on a GPU, twice over."""


@dataclass(slots=True, frozen=True)
class Shape:
    """Of a block: so many pools, and bytes in each."""

    pools: int
    fragment_bytes: int

    @property
    def block_bytes(self) -> int:
        return self.pools * self.fragment_bytes

    def spec(self) -> CacheSpec:
        """Raises :class:`kvtier.errors.InvalidArgument` and :class:`kvtier.abi.spec.SpecError`."""
        if self.pools == 1:
            return spec_of(self.fragment_bytes)
        pool = PoolSpec(layers=1, kv_heads=1, head_size=self.fragment_bytes // BLOCK_STEP, kv_factor=1)
        spec = CacheSpec(CACHE, "uint8", BLOCK_STEP, groups=(WindowGroupSpec(pools=(pool,) * self.pools),))
        spec.validate()
        return spec

    def params(self, blocks: int) -> dict[str, Any]:
        """For :attr:`kvtier.bench.result.Result.params`."""
        return {
            "block_bytes": self.block_bytes,
            "pools": self.pools,
            "fragment_bytes": self.fragment_bytes,
            "blocks": blocks,
        }


class GpuPlace:
    """Whenever nothing is measured, ``below`` is a chain in the host tier and ``above`` one in the device tier."""

    def __init__(self, here: Place, shape: Shape, blocks: int) -> None:
        self.cache: Final[Cache] = here.cache
        self.shape: Final = shape
        self.blocks: Final = blocks
        self.nbytes: Final = blocks * shape.block_bytes
        """Of a chain."""
        self._client: Final = here.client
        every = chains(blocks)
        self.below: list[bytes] = next(every)
        self.above: list[bytes] = next(every)

    async def move(self, chain: Sequence[bytes], to: Tier) -> None:
        results = await self.cache.move(chain, to)
        if set(results) != {BlockResult.OK}:
            said = sorted({str(result) for result in results})
            raise KvtierError(f"blocks could not be moved to {to}: {', '.join(said)}", reason="BENCH")

    async def cross(self) -> None:
        """Both chains change places, at once."""
        await asyncio.gather(self.move(self.below, Tier.DEVICE), self.move(self.above, Tier.HOST))
        self.below, self.above = self.above, self.below

    async def one_way(self, edge: str) -> tuple[float, float]:
        """Seconds until a chain is on the other side, and seconds that the daemon was copying it; then it goes back."""
        chain, to, back = (self.above, Tier.HOST, Tier.DEVICE) if edge == DOWN else (self.below, Tier.DEVICE, Tier.HOST)
        bytes_before, ns_before = await self.copied(edge)
        seconds = await timed(self.move(chain, to))
        bytes_after, ns_after = await self.copied(edge)
        await self.move(chain, back)
        if bytes_after - bytes_before != self.nbytes or ns_after == ns_before:
            raise DaemonError(f"{edge}: {bytes_after - bytes_before} bytes copied of {self.nbytes}", reason="BENCH")
        return seconds, (ns_after - ns_before) / 1e9

    async def copied(self, edge: str) -> tuple[int, int]:
        """Bytes, and nanoseconds in which they were copied, since the cache was opened."""
        (cache,) = (await self._client.stats()).caches
        return next(((each.bytes, each.copy_ns) for each in cache.edges if each.edge == edge), (0, 0))


@asynccontextmanager
async def gpu_place(device: str, shape: Shape, blocks: int, settled_s: float) -> AsyncIterator[GpuPlace]:
    """Raises :class:`kvtier.errors.DaemonUnavailable`, with the end of its log, where no daemon can have the GPU."""
    spare = -(-shape.pools * _POOL_GRAIN // shape.block_bytes)
    slots = TierSlots(device=_SHARES * blocks + spare, host=_SHARES * blocks, disk=0)
    async with place(shape.spec(), slots, module=("kvtierd.main", "--device", device)) as here:
        await scatter(here.cache, Tier.HOST)
        if Tier.DEVICE in here.cache.arena.tiers:
            await scatter(here.cache, Tier.DEVICE)
        made = GpuPlace(here, shape, blocks)
        rows = np.random.default_rng(1).integers(0, 256, (blocks, shape.block_bytes), dtype=np.uint8)
        for chain in (made.below, made.above):
            await made.cache.put(chain, rows, tier=Tier.HOST)
        await made.move(made.above, Tier.DEVICE)
        until = time.monotonic() + settled_s
        while time.monotonic() < until:
            await made.cross()
        yield made
