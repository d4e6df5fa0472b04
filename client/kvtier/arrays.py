"""Chains of blocks in and out of a cache as arrays: reserve, copy, commit, release; acquire, copy, check, release."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from kvtier import transfer
from kvtier.arena import Bytes
from kvtier.errors import LeaseLost, StaleRead, TooShort
from kvtier.retention import BlockRetention
from kvtier.types import BlockResult, Tier

if TYPE_CHECKING:
    from kvtier.cache import Cache
    from kvtier.prompt import Prompt

MAX_PIECE: Final = 16_384
"""Keys that the daemon takes in one call."""


def pieces(cache: Cache, tier: Tier) -> int:
    """Blocks handled at a time: half a tier, so that two clients fit side by side."""
    return max(1, min(cache.slots(tier) // 2, MAX_PIECE))


async def put(
    cache: Cache,
    tier: Tier,
    chain: Sequence[bytes],
    blocks: Sequence[Bytes],
    parent: bytes | None,
    kept: BlockRetention,
    prompt: Prompt | None,
    timeout: float | None,
) -> list[BlockResult]:
    """See :meth:`kvtier.cache.Cache.put`; ``blocks`` are flat."""
    step = pieces(cache, tier)
    results: list[BlockResult] = []
    for start in range(0, len(chain), step):
        end = min(start + step, len(chain))
        if results and results[-1] is BlockResult.PARENT_MISSING:
            results += [BlockResult.PARENT_MISSING] * (end - start)
            continue
        up = chain[start - 1] if start else parent
        piece = (chain[start:end], blocks[start:end], up, kept[start:end], prompt, timeout)
        try:
            results += await _put_piece(cache, tier, *piece)
        except LeaseLost:
            # The daemon restarted under us; the caller's arrays are still good.
            results += await _put_piece(cache, tier, *piece)
    return results


async def get(
    cache: Cache, tier: Tier, chain: Sequence[bytes], targets: Sequence[Bytes] | None, timeout: float | None
) -> list[Bytes]:
    """See :meth:`kvtier.cache.Cache.get`; ``targets`` are flat."""
    step = pieces(cache, tier)
    found: list[Bytes] = []
    while len(found) < len(chain):
        start = len(found)
        end = min(start + step, len(chain))
        try:
            found += await _get_piece(cache, tier, chain[start:end], targets and targets[start:end], timeout)
        except TooShort:
            break
    return found


async def _put_piece(
    cache: Cache,
    tier: Tier,
    chain: Sequence[bytes],
    blocks: Sequence[Bytes],
    parent: bytes | None,
    kept: BlockRetention,
    prompt: Prompt | None,
    timeout: float | None,
) -> list[BlockResult]:
    async with cache.reserve(len(chain), tier, timeout=timeout) as lease:
        pools = lease.arena.pools(tier, cache.group)
        await transfer.run(lambda: transfer.into_slots(pools, lease.slots, blocks), len(chain) * cache.block_bytes)
        return await lease.commit(chain, parent=parent, retention=kept, prompt=prompt, timeout=timeout)


async def _get_piece(
    cache: Cache, tier: Tier, chain: Sequence[bytes], targets: Sequence[Bytes] | None, timeout: float | None
) -> list[Bytes]:
    """Raises :class:`TooShort` where none of it is stored."""
    async with cache.acquire(chain, tier, min_blocks=1, timeout=timeout) as lease:
        pools = lease.arena.pools(tier, cache.group)
        rows = list(targets or np.empty((lease.blocks, cache.block_bytes), dtype=np.uint8))[: lease.blocks]
        before = lease.unchanged()
        await transfer.run(lambda: transfer.out_of_slots(pools, lease.slots, rows), lease.blocks * cache.block_bytes)
        if not (before and lease.unchanged()):
            raise StaleRead("a slot changed under its lease", reason="STALE_READ")
        return rows
