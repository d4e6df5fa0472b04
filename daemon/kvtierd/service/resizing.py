"""A resize: a cache gets other slots without a restart, and keeps the blocks that fit.

1. Blocks in surplus memory slots are copied to the tier below, while the cache is served.
2. The sessions that have the cache open end. Their clients attach again, and wait for the cache.
3. On disk, the latest used blocks move into the first slots, and the others are deleted. The superblock changes.
4. In memory, the latest used blocks are copied into fresh segments, where the code of a restart recovers them. A
   process with a lease goes on with the former segments, which nothing changes any more.

A daemon killed before the superblock changes starts again with the former slots on disk.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import grpc

from kvtier.abi import memory
from kvtierd.core.block import Block
from kvtierd.core.group import GroupState
from kvtierd.core.ids import DAEMON, SlotId, Tier
from kvtierd.mover.engine import Engine
from kvtierd.mover.executor import TicketRefused
from kvtierd.mover.runtime import CacheRuntime
from kvtierd.service.budgets import Slots, TierBudget, tier_bytes
from kvtierd.service.cache import ServedCache
from kvtierd.service.errors import refused
from kvtierd.tiers.arena import Arena
from kvtierd.tiers.base import TierError
from kvtierd.tiers.disk.batch import DiskWrite
from kvtierd.tiers.disk.store import DiskRead, DiskStore
from kvtierd.tiers.memfd import require_memory

SAVING_S: Final = 10.0
"""Seconds that the blocks of a group in surplus slots have to reach the tier below."""
_MOVED_AT_ONCE: Final = 16 << 20

_log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Resizing:
    """A finished resize. ``stalled_ns``: the time without service. ``evicted``: blocks that left."""

    took_ns: int = 0
    stalled_ns: int = 0
    evicted: int = 0


def new_slots(cache: ServedCache, asked: Mapping[Tier, TierBudget], promised: Collection[Tier]) -> Slots:
    """The slots of a cache with other budgets. Raises INVALID_ARGUMENT, FAILED_PRECONDITION, RESOURCE_EXHAUSTED."""
    stats, slots = cache.runtime.manager.stats(), dict(cache.slots)
    pinned = sum(sum(counts.pinned.values()) for counts in stats.groups.values())
    refusals = {
        "NO_TIER": next((f"it has no {t} tier" for t in asked if t not in cache.slots and t not in promised), None),
        "GPU_MEMORY": "memory on a GPU cannot be resized" if cache.runtime.arena.gpu_memory is not None else None,
        "TIER_OFFLINE": "a tier is out of service" if stats.lost else None,
    }
    for reason, why in refusals.items():
        if why is not None:
            raise _refused(cache, reason, why)
    if asked:
        slots |= cache.device.budgets.slots_for(cache.spec, asked, cache.name)
    if pinned:
        raise _refused(cache, "STILL_HELD", f"{pinned} blocks are pinned")
    return slots


def _refused(cache: ServedCache, reason: str, why: str) -> Exception:
    return refused(grpc.StatusCode.FAILED_PRECONDITION, reason, f"cache {cache.name}: {why}")


async def save_surplus(engine: Engine, cache: ServedCache, slots: Slots) -> None:
    """Copies blocks that fit into their tier no more to the tier below. Raises :class:`TierError` if this host lacks
    the memory for fresh segments."""
    fresh = sum(tier_bytes(cache.spec, counts) for tier, counts in slots.items() if tier is not Tier.DISK)
    await asyncio.to_thread(require_memory, f"cache {cache.name}", fresh)
    for group, window in cache.runtime.manager.windows.items():
        for tier, below in reversed(list(pairwise(sorted(cache.slots)))):
            surplus = _by_use(window.state, tier)[: -slots[tier][group]]
            keys = [block.key for block in surplus if block.copies[below] is None][-slots[below][group] :]
            with suppress(TicketRefused):  # the blocks then leave
                await engine.move(cache.id, DAEMON, group, below, keys, SAVING_S)


def compact(former: CacheRuntime, store: DiskStore, slots: Slots) -> None:
    """Moves the latest used blocks on disk into the first slots, and deletes the others. Blocks. Without success, the
    blocks beyond the new slots are lost."""
    try:
        for group, window in former.manager.windows.items():
            count, nbytes, state = slots[Tier.DISK][group], former.spec.record_bytes(group), window.state
            blocks = _by_use(state, Tier.DISK)
            store.write([], retire=[(group, block.key, _slot(block, Tier.DISK)) for block in blocks[:-count]])
            taken = {_slot(block, Tier.DISK) for block in blocks[-count:]}
            taken |= state.corrupt[Tier.DISK] | {slot for _, slot in state.undeleted}
            free = [SlotId(slot) for slot in range(count) if slot not in taken]
            moving = [block for block in blocks[-count:] if _slot(block, Tier.DISK) >= count]
            step = max(1, _MOVED_AT_ONCE // nbytes)
            pairs = list(zip(moving, free, strict=False))  # slots out of use may leave too few
            for some in (pairs[start : start + step] for start in range(0, len(pairs), step)):
                rows = [row.data for row in memory.empty((len(some), nbytes))]
                old = [(block, new, row) for (block, new), row in zip(some, rows, strict=True)]
                report = store.read(
                    [DiskRead(group, _slot(block, Tier.DISK), block.key, [row]) for block, _, row in old]
                )
                writes = [DiskWrite(group, new, b.key, b.parent_key, b.traits, [row]) for b, new, row in old]
                unread = report.failed | report.corrupt
                store.write([write for place, write in enumerate(writes) if place not in unread])
    except TierError as error:
        _log.warning("blocks on disk are lost in a resize cache=%s why=%r", former.name, str(error))


def carry(former: CacheRuntime, arena: Arena, slots: Slots) -> None:
    """Copies the latest used blocks that fit into fresh segments, with their records. Blocks."""
    arena.outlive(former.arena)
    for group, window in former.manager.windows.items():
        fitting = {tier: _by_use(window.state, tier)[-slots[tier][group] :] for tier in arena.tiers if tier in slots}
        moves = {tier: {b: SlotId(new) for new, b in enumerate(blocks)} for tier, blocks in fitting.items()}
        for block in sorted(set().union(*fitting.values()), key=_rank):
            for tier in (tier for tier in moves if block in moves[tier]):
                new = moves[tier][block]
                arena.note(tier, group, {new: block})
                arena.copy_slot(tier, group, new, former.arena, _slot(block, tier))
                arena.end_writes(tier, group, [new])


def _by_use(state: GroupState, tier: Tier) -> list[Block]:
    """The blocks that are READY in a tier, least recently used first."""
    ready = (block for block in state.index if (copy := block.copies[tier]) is not None and copy.valid)
    return sorted(ready, key=_rank) if tier in state.tiers else []


def _rank(block: Block) -> int:
    return block.rank


def _slot(block: Block, tier: Tier) -> SlotId:
    copy = block.copies[tier]
    if copy is None:
        raise AssertionError(f"block {block.key.hex()} is not in {tier}")
    return copy.slot
