"""Chains of blocks in and out of a cache as arrays, piece by piece, through its mapped memory or through streams."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from kvtier import transfer
from kvtier.errors import LeaseLost, StaleRead, TooShort
from kvtier.fences import PASSED
from kvtier.lease import ReadLease, WriteLease
from kvtier.retention import BlockRetention
from kvtier.tensors import Row
from kvtier.types import BlockResult, Tier

if TYPE_CHECKING:
    from kvtier.cache import Cache
    from kvtier.holdings import Holdings
    from kvtier.prompt import Prompt

MAX_PIECE: Final = 16_384
"""Keys that the daemon takes in one call."""


@dataclass(slots=True, frozen=True)
class Piece:
    """A chain, or consecutive keys of one, to be stored. ``blocks``: flat, one a key. ``parent``: the first one's."""

    chain: Sequence[bytes]
    blocks: Sequence[Row]
    parent: bytes | None
    kept: BlockRetention
    prompt: Prompt | None

    def part(self, start: int, end: int) -> Piece:
        parent = self.chain[start - 1] if start else self.parent
        return Piece(self.chain[start:end], self.blocks[start:end], parent, self.kept[start:end], self.prompt)


class Filled(Protocol):
    """A piece that is ready to be stored."""

    async def commit(self) -> list[BlockResult]:
        """Raises :class:`LeaseLost` where the daemon restarted since it was filled."""
        ...

    async def give_up(self) -> None: ...


class Way(Protocol):
    """How the bytes of one piece of a chain travel. ``max_blocks``: of a piece. ``fills_ahead``: a piece can be filled
    while the one before it is stored."""

    @property
    def max_blocks(self) -> int: ...
    @property
    def fills_ahead(self) -> bool: ...

    async def store(self, tier: Tier, piece: Piece, timeout: float | None) -> list[BlockResult]:
        """All of it. Raises :class:`LeaseLost` where the daemon restarts meanwhile."""
        ...

    async def fill(self, tier: Tier, piece: Piece, timeout: float | None) -> Filled:
        """All that can be done before the pieces that come before it are stored. Commit it, or give it up."""
        ...

    async def get(
        self, tier: Tier, chain: Sequence[bytes], targets: Sequence[Row] | None, timeout: float | None
    ) -> list[Row]:
        """Raises :class:`TooShort` where none of it is stored."""
        ...


class Mapped:
    """Through the cache's memory: reserve, copy, commit and release; acquire, copy, check, release."""

    max_blocks: Final = MAX_PIECE
    fills_ahead: Final = True

    def __init__(self, cache: Cache, holdings: Holdings) -> None:
        self._cache: Final = cache
        self._holdings: Final = holdings

    async def fill(self, tier: Tier, piece: Piece, timeout: float | None) -> Filled:
        lease = await self._holdings.reserve(self._cache, tier, len(piece.chain), timeout)
        try:
            memory = lease.arena.memory(tier)
            slots, nbytes = lease.slots[: len(piece.chain)], len(piece.chain) * self._cache.block_bytes
            copy = partial(memory.write, self._cache.group, slots, piece.blocks)
            await transfer.run(copy, nbytes, waits=memory.waits)
        except BaseException:
            await self._cache.release(lease, stream=PASSED)
            raise
        return _FilledSlots(lease, piece, timeout, self._holdings)

    async def store(self, tier: Tier, piece: Piece, timeout: float | None) -> list[BlockResult]:
        return await (await self.fill(tier, piece, timeout)).commit()

    async def get(
        self, tier: Tier, chain: Sequence[bytes], targets: Sequence[Row] | None, timeout: float | None
    ) -> list[Row]:
        cache = self._cache
        lease = await cache.acquire(chain, tier, min_blocks=1, timeout=timeout)
        try:
            rows = list(targets or np.empty((lease.blocks, cache.block_bytes), dtype=np.uint8))[: lease.blocks]
            await copied_out(lease, rows)
            return rows
        finally:
            await cache.release(lease, stream=PASSED)


@dataclass(slots=True, frozen=True)
class _FilledSlots:
    lease: WriteLease
    piece: Piece
    timeout: float | None
    holdings: Holdings

    async def commit(self) -> list[BlockResult]:
        try:
            return await self.holdings.store(self.lease, self.piece, self.timeout)
        finally:
            await self.lease.cache.release(self.lease, stream=PASSED)

    async def give_up(self) -> None:
        await self.lease.release(stream=PASSED)


async def copied_out(lease: ReadLease, rows: Sequence[Row]) -> None:
    """Copies the blocks of a lease into arrays. Raises :class:`StaleRead` where one was not the block to the end."""
    cache, memory = lease.cache, lease.arena.memory(lease.tier)
    before = lease.unchanged()
    nbytes = lease.blocks * cache.block_bytes
    await transfer.run(lambda: memory.read(cache.group, lease.slots, rows), nbytes, waits=memory.waits)
    if not (before and lease.unchanged()):
        raise StaleRead("a slot changed under its lease", reason="STALE_READ")


def pieces(cache: Cache, tier: Tier, way: Way) -> int:
    """Blocks handled at a time: half a tier at most, so that two clients fit side by side."""
    return max(1, min(cache.slots(tier) // 2, MAX_PIECE, way.max_blocks))


async def put(
    cache: Cache, way: Way, tier: Tier, whole: Piece, timeout: float | None, results: list[BlockResult] | None = None
) -> list[BlockResult]:
    """See :meth:`kvtier.cache.Cache.put`. ``results``: an empty list that is returned, and filled as pieces are stored,
    so that it says of a put that fails how much of it is."""
    most, count = pieces(cache, tier, way), len(whole.chain)
    results = [] if results is None else results

    async def store(filled: Filled, piece: Piece) -> list[BlockResult]:
        try:
            return await filled.commit()
        except LeaseLost:
            return await (await way.fill(tier, piece, timeout)).commit()

    if count <= most:
        try:
            results += await way.store(tier, whole, timeout)
        except LeaseLost:
            results += await way.store(tier, whole, timeout)  # the caller's arrays are still good
        return results
    ahead = way.fills_ahead and most > 1
    step = most // 2 if ahead else most  # two at a time: one is filled while the one before it is stored
    storing: asyncio.Task[list[BlockResult]] | None = None
    try:
        for start in range(0, count, step):
            piece = whole.part(start, min(start + step, count))
            try:
                filled = await way.fill(tier, piece, timeout)
            except Exception as error:
                try:
                    results += await storing if storing is not None else []
                except Exception as other:  # noqa: BLE001 - the first of two errors is raised, and tells of this one
                    error.add_note(f"storing the piece before failed, too: {other!r}")
                raise
            try:
                results += await storing if storing is not None else []
            except BaseException:
                await filled.give_up()
                raise
            if results and results[-1] is BlockResult.PARENT_MISSING:
                await filled.give_up()
                results += [BlockResult.PARENT_MISSING] * (count - start)
                return results
            storing = asyncio.create_task(store(filled, piece))
            if not ahead:
                await asyncio.wait([storing])
        results += await storing if storing is not None else []
        return results
    finally:
        if storing is not None and not storing.done():
            storing.cancel()
            await asyncio.wait([storing])


async def get(
    cache: Cache, way: Way, tier: Tier, chain: Sequence[bytes], targets: Sequence[Row] | None, timeout: float | None
) -> list[Row]:
    """See :meth:`kvtier.cache.Cache.get`; ``targets`` are flat."""
    step = pieces(cache, tier, way)
    found: list[Row] = []
    while len(found) < len(chain):
        start = len(found)
        end = min(start + step, len(chain))
        try:
            found += await way.get(tier, chain[start:end], targets and targets[start:end], timeout)
        except TooShort:
            break
    return found
