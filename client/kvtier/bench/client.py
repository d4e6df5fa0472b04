"""``kvtier bench client``: match, store and load, 64 blocks at a time."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvtier import transfer
from kvtier.bench.bare import Call, bare_server
from kvtier.bench.place import Place, chains, place, scatter, spec_of
from kvtier.bench.result import Paired, Result
from kvtier.bench.rounds import interleaved, timed
from kvtier.private import TierSlots
from kvtier.tensors import Bytes
from kvtier.types import Tier

BATCH: Final = 64
SLOTS: Final = 16 * BATCH
PUTS: Final = 4
"""At once, where they are pipelined."""
TIER: Final = Tier.DEVICE


@dataclass(slots=True, frozen=True)
class Options:
    block_bytes: Sequence[int] = (64 << 10, 1 << 20)
    rounds: int = 40
    address: str | None = None


async def run(options: Options) -> AsyncIterator[Result]:
    """Floors: of store and load the copy alone, with the same primitive between the same slots and arrays; of the calls
    an empty call to a bare server."""
    for block_bytes in options.block_bytes:
        slots = TierSlots(device=SLOTS, host=0, disk=0)
        params = {"block_bytes": block_bytes, "blocks": BATCH, "tier": str(TIER)}
        nbytes = BATCH * block_bytes
        async with place(spec_of(block_bytes), slots, address=options.address) as here:
            await scatter(here.cache, TIER)
            bench = _Bench(here, options.rounds)
            with tempfile.TemporaryDirectory(prefix="kvtier-") as directory:
                async with bare_server(Path(directory)) as bare:
                    yield (await bench.match(bare.call)).time("client.match", params)
                    yield (await bench.hold(bare.call)).time("client.acquire_release", params)
            yield (await bench.store(1)).rate("client.store", params, nbytes)
            pipelined = await bench.store(PUTS)
            yield pipelined.rate("client.store_pipelined", {**params, "puts": PUTS}, PUTS * nbytes)
            yield (await bench.load()).rate("client.load", params, nbytes)


class _Bench:
    def __init__(self, here: Place, rounds: int) -> None:
        self._client = here.client
        self._cache = here.cache
        self._rounds = rounds
        self._chains = chains(BATCH)
        self._pools = here.cache.arena.pools(TIER, 0)
        self._rows = _touched(here.cache.block_bytes)

    async def match(self, nothing: Call) -> Paired:
        """A chain that is stored whole."""
        chain = await self._stored()
        return await self._against(nothing, lambda: self._cache.match(chain))

    async def hold(self, nothing: Call) -> Paired:
        chain = await self._stored()

        async def hold() -> None:
            async with self._cache.acquire(chain, TIER, min_blocks=BATCH):
                pass

        return await self._against(nothing, hold)

    async def store(self, puts: int) -> Paired:
        """So many puts at once, into free slots. Last freed is first given, so the floor gets such slots, too; it fills
        them in one thread."""

        async def ours() -> float:
            stored = [next(self._chains) for _ in range(puts)]
            putting = [self._cache.put(chain, self._rows, tier=TIER) for chain in stored]
            seconds = await timed(asyncio.gather(*putting) if puts > 1 else putting[0])
            await self._cache.drop([chain[0] for chain in stored])
            return seconds

        other = await self._client.open_cache(self._cache.name, self._cache.spec)  # which keeps no slots for puts

        async def floor() -> float:
            async with other.reserve(puts * BATCH, TIER) as lease:
                return _copying(lambda: transfer.into_slots(self._pools, lease.slots, self._rows * puts))

        paired = await interleaved(ours, floor, self._rounds)
        await other.close()
        return paired

    async def load(self) -> Paired:
        """Acquire, copy, check, release."""
        chain = await self._stored()
        out = _touched(self._cache.block_bytes)

        async def ours() -> float:
            return await timed(self._cache.get(chain, out, tier=TIER))

        async def floor() -> float:
            async with self._cache.acquire(chain, TIER, min_blocks=BATCH) as lease:
                return _copying(lambda: transfer.out_of_slots(self._pools, lease.slots, out))

        paired = await interleaved(ours, floor, self._rounds)
        await self._cache.drop(chain[:1])
        return paired

    async def _stored(self) -> list[bytes]:
        chain = next(self._chains)
        await self._cache.put(chain, self._rows, tier=TIER)
        return chain

    async def _against(self, nothing: Call, verb: Callable[[], Awaitable[Any]]) -> Paired:
        return await interleaved(lambda: timed(verb()), lambda: timed(nothing()), self._rounds * 10)


def _copying(copy: Callable[[], None]) -> float:
    started = time.perf_counter()
    copy()
    return time.perf_counter() - started


def _touched(block_bytes: int) -> list[Bytes]:
    """One array a block, every page of which is mapped."""
    whole = np.empty((BATCH, block_bytes), dtype=np.uint8)
    whole[:] = np.random.default_rng(1).integers(0, 256, block_bytes, dtype=np.uint8)
    return list(whole)
