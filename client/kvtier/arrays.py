"""Chains of blocks in and out of a cache as arrays, piece by piece, through its mapped memory or through streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from kvtier import transfer
from kvtier.buffers import Row, Rows
from kvtier.errors import LeaseLost, StaleRead, TooShort
from kvtier.fences import PASSED
from kvtier.lease import ReadLease
from kvtier.retention import BlockRetention
from kvtier.types import BlockResult, Tier

if TYPE_CHECKING:
    from kvtier.cache import Cache
    from kvtier.holdings import Holdings
    from kvtier.prompt import Prompt

MAX_PIECE: Final = 1_024
"""Blocks that one call brings into the daemon's core."""


@dataclass(slots=True, frozen=True)
class Piece:
    """A chain, or consecutive keys of one, to be stored. ``blocks``: flat, one a key. ``parent``: the first one's."""

    chain: Sequence[bytes]
    blocks: Rows
    parent: bytes | None
    kept: BlockRetention
    prompt: Prompt | None

    def part(self, start: int, end: int) -> Piece:
        parent = self.chain[start - 1] if start else self.parent
        return Piece(self.chain[start:end], self.blocks[start:end], parent, self.kept[start:end], self.prompt)


class Way(Protocol):
    """How the bytes of one piece of a chain travel. ``max_blocks``: of a piece."""

    @property
    def max_blocks(self) -> int: ...

    async def store(self, tier: Tier, piece: Piece, timeout: float | None) -> list[BlockResult]:
        """Raises :class:`LeaseLost` where the daemon restarts meanwhile."""
        ...

    async def get(self, tier: Tier, chain: Sequence[bytes], targets: Rows | None, timeout: float | None) -> list[Row]:
        """Raises :class:`TooShort` where none of it is stored."""
        ...


class Mapped:
    """Through the cache's memory: reserve, copy, commit and release; acquire, copy, check, release."""

    max_blocks: Final = MAX_PIECE

    def __init__(self, cache: Cache, holdings: Holdings) -> None:
        self._cache: Final = cache
        self._holdings: Final = holdings

    async def store(self, tier: Tier, piece: Piece, timeout: float | None) -> list[BlockResult]:
        lease = await self._holdings.reserve(self._cache, tier, len(piece.chain), timeout)
        try:
            memory = lease.arena.memory(tier)
            copy = partial(memory.write, self._cache.group, lease.slots, piece.blocks)
            await transfer.run(copy, len(lease) * self._cache.block_bytes, waits=memory.waits)
            return await self._holdings.store(lease, piece, timeout)
        finally:
            await self._cache.release(lease, stream=PASSED)

    async def get(self, tier: Tier, chain: Sequence[bytes], targets: Rows | None, timeout: float | None) -> list[Row]:
        cache = self._cache
        lease = await cache.acquire(chain, tier, min_blocks=1, timeout=timeout)
        try:
            fresh = np.empty((lease.blocks, cache.block_bytes), np.uint8) if targets is None else targets
            rows = fresh[: lease.blocks]
            await copied_out(lease, rows)
            return list(rows)
        finally:
            await cache.release(lease, stream=PASSED)


async def copied_out(lease: ReadLease, rows: Rows) -> None:
    """Copies the blocks of a lease into arrays. Raises :class:`StaleRead` where one was not the block to the end."""
    cache, memory = lease.cache, lease.arena.memory(lease.tier)
    before = lease.unchanged()
    nbytes = lease.blocks * cache.block_bytes
    await transfer.run(lambda: memory.read(cache.group, lease.slots, rows), nbytes, waits=memory.waits)
    if not (before and lease.unchanged()):
        raise StaleRead("a slot changed under its lease", reason="STALE_READ")


def pieces(cache: Cache, tier: Tier, way: Way) -> int:
    """Blocks handled at a time: half a tier at most, so that two clients fit side by side."""
    return max(1, min(cache.slots(tier) // 2, way.max_blocks))


async def put(cache: Cache, way: Way, tier: Tier, whole: Piece, timeout: float | None) -> list[BlockResult]:
    """See :meth:`kvtier.cache.Cache.put`."""
    step, count = pieces(cache, tier, way), len(whole.chain)
    results: list[BlockResult] = []
    for start in range(0, count, step):
        piece = whole.part(start, min(start + step, count))
        try:
            results += await way.store(tier, piece, timeout)
        except LeaseLost:
            results += await way.store(tier, piece, timeout)  # the caller's arrays are still good
        if results[-1] is BlockResult.PARENT_MISSING:
            break
    return results + [BlockResult.PARENT_MISSING] * (count - len(results))


async def get(
    cache: Cache, way: Way, tier: Tier, chain: Sequence[bytes], targets: Rows | None, timeout: float | None
) -> list[Row]:
    """See :meth:`kvtier.cache.Cache.get`; ``targets`` are flat."""
    step = pieces(cache, tier, way)
    found: list[Row] = []
    while len(found) < len(chain):
        start = len(found)
        end = min(start + step, len(chain))
        into = None if targets is None else targets[start:end]
        try:
            found += await way.get(tier, chain[start:end], into, timeout)
        except TooShort:
            break
    return found
