"""``kvtier bench tiers``: every edge of a real daemon, by the move verb, beside the bare copy."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvtier.bench.place import Place, chains, emptied, place, scatter, spec_of
from kvtier.bench.raw_disk import RawSlab
from kvtier.bench.result import Paired, Result
from kvtier.bench.rounds import interleaved, timed
from kvtier.errors import InvalidArgument, KvtierError
from kvtier.lease import Lease
from kvtier.private import TierSlots
from kvtier.tensors import Bytes
from kvtier.types import BlockResult, Tier

ALIGNMENT: Final = 4096
_BATCH_BYTES: Final = 16 << 20
_LEAST_BATCH: Final = 64
_IN_MEMORY: Final = (Tier.DEVICE, Tier.HOST)


@dataclass(slots=True, frozen=True)
class Options:
    """``disk_bytes``: recycled by the disk edges; less than 2 GiB measures the caches of the disk rather than the disk.
    ``directory``: where the disk tier and the bare file go; None = the system's place for temporary files."""

    block_bytes: Sequence[int] = (64 << 10, 1 << 20)
    rounds: int = 20
    disk_bytes: int = 2 << 30
    directory: Path | None = None


async def run(options: Options) -> AsyncIterator[Result]:
    """A round moves a chain with one call and waits until it is there. Floors: in memory ``np.copyto`` slot by slot
    between scattered slots of the same mappings; on disk O_DIRECT with the daemon's threads and batches, from and to
    the same memory, into a file of the same size."""
    for block_bytes in options.block_bytes:
        if block_bytes % ALIGNMENT:
            raise InvalidArgument("block_bytes", block_bytes, f"a multiple of {ALIGNMENT}, as O_DIRECT wants it")
        batch = max(_LEAST_BATCH, _BATCH_BYTES // block_bytes)
        slots = TierSlots(4 * batch, 4 * batch, max(options.disk_bytes // block_bytes, 4 * batch))
        with ExitStack() as stack:
            kept = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=options.directory)))
            async with place(spec_of(block_bytes), slots, keep=kept) as here:
                bench = _Bench(here, batch, options.rounds)
                async for result in bench.memory():
                    yield result
                slab = stack.enter_context(RawSlab(kept / "bare.slab", block_bytes, slots.disk))
                await bench.recycle_disk()
                async for result in bench.disk(slab):
                    yield result


class _Bench:
    def __init__(self, here: Place, batch: int, rounds: int) -> None:
        self._cache = here.cache
        self._batch = batch
        self._rounds = rounds
        self._chains = chains(batch)
        self._nbytes = batch * here.cache.block_bytes
        self._on_disk: deque[list[bytes]] = deque()
        self._random = random.Random(1)
        whole = np.empty((batch, here.cache.block_bytes), dtype=np.uint8)
        whole[:] = np.random.default_rng(1).integers(0, 256, here.cache.block_bytes, dtype=np.uint8)
        self._rows: list[Bytes] = list(whole)

    # -- memory ----------------------------------------------------------------------------------------------------

    async def memory(self) -> AsyncIterator[Result]:
        for tier in _IN_MEMORY:
            await scatter(self._cache, tier)
        chain = next(self._chains)
        await self._cache.put(chain, self._rows, tier=Tier.DEVICE)
        for source, target in (_IN_MEMORY, _IN_MEMORY[::-1]):
            await self._move(chain, source)
            paired = await self._memory_edge(chain, source, target)
            yield paired.rate(f"tiers.{source}>{target}", self._params(), self._nbytes)
        await self._cache.drop(chain[:1])

    async def _memory_edge(self, chain: list[bytes], source: Tier, target: Tier) -> Paired:
        async def ours() -> float:
            seconds = await timed(self._move(chain, target))
            await self._move(chain, source)
            return seconds

        async def floor() -> float:
            async with (
                self._cache.reserve(self._batch, source) as read,
                self._cache.reserve(self._batch, target) as write,
            ):
                return await timed(asyncio.to_thread(_copy, self._views(read), self._views(write)))

        return await interleaved(ours, floor, self._rounds)

    # -- disk ------------------------------------------------------------------------------------------------------

    async def recycle_disk(self) -> None:
        """Fills the disk, frees its slots in random order and fills it again: from then on every write is into a slot
        that another block has left, as far from the next one as it gets."""
        count = self._cache.slots(Tier.DISK) // self._batch - 1
        stored = [key for _ in range(count) for key in await self._to_disk(Tier.HOST, rooted=True)]
        self._random.shuffle(stored)
        for start in range(0, len(stored), 1024):
            await self._cache.drop(stored[start : start + 1024])
        self._on_disk.clear()
        for _ in range(count):
            await self._to_disk(Tier.HOST)

    async def disk(self, slab: RawSlab) -> AsyncIterator[Result]:
        for tier in (Tier.HOST, Tier.DEVICE):
            for result in await self._disk_edges(slab, tier):
                yield result
        await emptied(self._cache)

    async def _disk_edges(self, slab: RawSlab, tier: Tier) -> list[Result]:
        params = {**self._params(), "recycled_bytes": self._cache.slots(Tier.DISK) * self._cache.block_bytes}
        async with self._cache.reserve(self._batch, tier) as lease:
            views = self._views(lease)

            async def bare_write() -> float:
                return await timed(asyncio.to_thread(slab.write, slab.scattered(len(views)), views))

            async def bare_read() -> float:
                return await timed(asyncio.to_thread(slab.read, slab.scattered(len(views)), views))

            write = await interleaved(lambda: self._write(tier), bare_write, self._rounds)
            read = await interleaved(lambda: self._read(tier), bare_read, self._rounds)
        return [
            write.rate(f"tiers.{tier}>disk", params, self._nbytes),
            read.rate(f"tiers.disk>{tier}", params, self._nbytes),
        ]

    async def _write(self, tier: Tier) -> float:
        chain = next(self._chains)
        await self._cache.put(chain, self._rows, tier=tier)
        seconds = await timed(self._move(chain, Tier.DISK))
        self._remember(chain)
        return seconds

    async def _read(self, tier: Tier) -> float:
        """Any chain but the oldest, which may have left the disk for newer ones."""
        chain = self._random.choice(list(self._on_disk)[len(self._on_disk) // 2 :])
        seconds = await timed(self._move(chain, tier))
        await self._move(chain, Tier.DISK)
        return seconds

    async def _to_disk(self, tier: Tier, *, rooted: bool = False) -> list[bytes]:
        """``rooted``: every block a root, so that each can be dropped by itself."""
        chain = next(self._chains)
        async with self._cache.reserve(self._batch, tier) as lease:
            for position, row in enumerate(self._rows):
                lease.view(position)[0][:] = row
            await lease.commit(chain, parents=[None] * len(chain) if rooted else None)
        await self._move(chain, Tier.DISK)
        self._remember(chain)
        return chain

    def _remember(self, chain: list[bytes]) -> None:
        self._on_disk.append(chain)
        if len(self._on_disk) * self._batch > self._cache.slots(Tier.DISK):
            self._on_disk.popleft()

    # -- both ------------------------------------------------------------------------------------------------------

    def _params(self) -> dict[str, Any]:
        return {"block_bytes": self._cache.block_bytes, "blocks": self._batch}

    def _views(self, lease: Lease) -> list[Bytes]:
        (pool,) = self._cache.arena.pools(lease.tier, 0)
        return [pool[slot] for slot in lease.slots]

    async def _move(self, chain: list[bytes], to: Tier) -> None:
        results = await self._cache.move(chain, to)
        if set(results) != {BlockResult.OK}:
            said = sorted({str(result) for result in results})
            raise KvtierError(f"blocks could not be moved to {to}: {', '.join(said)}", reason="BENCH")


def _copy(source: Sequence[Bytes], target: Sequence[Bytes]) -> None:
    for read, write in zip(source, target, strict=True):
        np.copyto(write, read)
