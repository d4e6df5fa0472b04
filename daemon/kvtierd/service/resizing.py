"""A resize: a cache gets other slots without a restart, and keeps the blocks that fit.

1. The daemon reserves the surplus slots of each tier for itself: ordinary evictions, with their events. The cache is
   served meanwhile.
2. The sessions that have the cache open end. Their clients attach again, and wait for the cache.
3. When the last move has ended, the blocks move to the first slots of each tier: on disk inside the slab, whose
   superblock then changes; in memory into fresh segments. A process that still uses a slot of the former segments under
   a lease finds its bytes there.
4. The blocks enter a fresh core, as after a restart.

A daemon killed before the superblock changes starts again with the former slots.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Final

import grpc

from kvtier.abi import memory
from kvtier.abi.control import ArenaIdentity
from kvtier.abi.layout import ArenaLayout
from kvtier.abi.spec import CacheSpec
from kvtierd.core.block import Block
from kvtierd.core.ids import DAEMON, CacheId, GroupId, Key, LeaseId, SlotId, Tier
from kvtierd.core.manager import BlockManager
from kvtierd.core.outcome import Content, SlotRef
from kvtierd.core.policy import GroupShape
from kvtierd.core.recovery import RecoveredBlock, reachable
from kvtierd.mover.engine import Engine
from kvtierd.mover.executor import TicketRefused
from kvtierd.service.budgets import Slots, TierBudget, tier_bytes
from kvtierd.service.cache import ServedCache
from kvtierd.service.errors import refused
from kvtierd.tiers.arena import Arena, HeldSlots, SlotMoves
from kvtierd.tiers.disk.batch import DiskWrite
from kvtierd.tiers.disk.store import DiskRead, DiskStore
from kvtierd.tiers.memfd import ALLOCATION_STEP, require_memory

EVICTING_S: Final = 10.0
"""Seconds that leases have to end before a resize that needs their slots is refused."""
_AGAIN_S: Final = 0.05
_RESERVED_AT_ONCE: Final = 1_024
_MOVED_AT_ONCE: Final = 16 << 20


@dataclass(slots=True, frozen=True)
class Resizing:
    """A finished resize. ``stalled_ns``: the longest time that the cache answered no call. ``evicted``: blocks that
    left."""

    took_ns: int = 0
    stalled_ns: int = 0
    evicted: int = 0


def new_slots(cache: ServedCache, asked: Mapping[Tier, TierBudget]) -> Slots:
    """The slots of a cache with other budgets. Raises INVALID_ARGUMENT, FAILED_PRECONDITION, RESOURCE_EXHAUSTED."""
    for tier in asked:
        if tier not in cache.slots:
            raise _refused("NO_TIER", f"cache {cache.name} has no {tier} tier: a cache gets its tiers when it is made")
    if cache.runtime.arena.gpu_memory is not None:
        raise _refused("GPU_MEMORY", f"cache {cache.name} has memory on a GPU, which cannot be resized")
    slots = {**cache.slots, **cache.device.budgets.slots_for(cache.spec, asked, cache.name)} if asked else cache.slots
    stats = cache.runtime.manager.stats()
    if stats.lost:
        raise _refused("TIER_OFFLINE", f"cache {cache.name}: the {min(stats.lost)} tier is out of service")
    for group, counts in stats.groups.items():
        for tier, pinned in counts.pinned.items():
            if pinned > slots[tier][group]:
                raise _refused("STILL_HELD", f"cache {cache.name}: {pinned} blocks are pinned in the {tier} tier")
    return slots


def _refused(reason: str, message: str) -> Exception:
    return refused(grpc.StatusCode.FAILED_PRECONDITION, reason, message)


def require_growth(cache: ServedCache, slots: Slots) -> None:
    """Raises :class:`TierConfigError` if the machine has too little memory for the larger tiers."""
    sizes = [(tier_bytes(cache.spec, slots[t]), tier_bytes(cache.spec, cache.slots[t])) for t in slots if t < Tier.DISK]
    require_memory(f"cache {cache.name}", sum(max(0, new - old) + min(new, ALLOCATION_STEP) for new, old in sizes))


async def take_surplus(engine: Engine, cache: ServedCache, slots: Slots) -> list[LeaseId]:
    """Takes the surplus slots of each tier out of use, the lowest tier first. Raises TicketRefused, and gives them
    back."""
    loop, leases = asyncio.get_running_loop(), list[LeaseId]()
    until = loop.time() + EVICTING_S
    try:
        for tier in sorted(slots, reverse=True):
            for group, (had, gets) in enumerate(zip(cache.slots[tier], slots[tier], strict=True)):
                left = had - gets
                while left > 0:
                    place, count = (GroupId(group), tier), min(left, _RESERVED_AT_ONCE)
                    try:
                        grant = await engine.reserve(cache.id, DAEMON, *place, count, max(0.0, until - loop.time()))
                    except TicketRefused as error:
                        if loop.time() >= until:
                            others = tuple(each for each in error.refusal.holders if each.session != DAEMON)
                            raise TicketRefused(replace(error.refusal, wanted=left, holders=others)) from None
                        await asyncio.sleep(_AGAIN_S)
                        continue
                    leases += [grant.lease] if grant.lease is not None else []
                    left -= count
    except BaseException:
        for lease in leases:
            engine.release(cache.id, DAEMON, [lease])
        raise
    return leases


def held_slots(manager: BlockManager) -> HeldSlots:
    """The slots under leases, by tier and group."""
    held: dict[tuple[Tier, GroupId], set[SlotId]] = {}
    for lease in manager.leases.values():
        held.setdefault((lease.tier, lease.group), set()).update(lease.all_slots())
    return held


@dataclass(slots=True, frozen=True)
class FormerLife:
    """A cache after its last move, to be made anew with other slots.

    ``blocks``: by group, least recently used first. ``pins``: tier, group, key and count. ``held``: memory slots that
    processes may still use. ``bad``: disk slots out of use.
    """

    arena: Arena
    blocks: Mapping[GroupId, Sequence[RecoveredBlock]]
    pins: Sequence[tuple[Tier, GroupId, Key, int]]
    held: HeldSlots
    bad: Mapping[GroupId, Set[SlotId]]

    @classmethod
    def of(cls, manager: BlockManager, arena: Arena, held: HeldSlots) -> FormerLife:
        """Reads a core that no other thread uses any more. Blocks."""
        states = {group: window.state for group, window in manager.windows.items()}
        by_use = {group: sorted(state.index, key=lambda block: block.rank) for group, state in states.items()}
        pins = [
            (tier, group, block.key, state.pins.count(tier, copy))
            for group, state in states.items()
            for tier in state.tiers
            for block, copy in state.pins.copies(tier)
        ]
        bad = {
            group: state.corrupt.get(Tier.DISK, set()) | {slot for _, slot in state.undeleted}
            for group, state in states.items()
        }
        return cls(arena, {group: list(map(_recovered, blocks)) for group, blocks in by_use.items()}, pins, held, bad)

    def pin(self, engine: Engine, cache: CacheId) -> None:
        """Pins the blocks in the new cache."""
        for tier, group, key, times in self.pins:
            for _ in range(times):
                engine.pin(cache, group, tier, [key], unpin=False)

    def compact(self, store: DiskStore, slots: Slots, spec: CacheSpec) -> None:
        """Moves the blocks on disk into the first slots. Blocks. A block that cannot be read or written stays."""
        for group, blocks in self.blocks.items():
            on_disk = {block.slot: block for block in blocks if block.slot is not None}
            moves = _first_slots(on_disk, slots[Tier.DISK][group], self.bad[group])
            nbytes = spec.record_bytes(group)
            tail = [(DiskRead(group, old, on_disk[old].key, ()), new) for old, new in moves.items() if old != new]
            step = max(1, _MOVED_AT_ONCE // nbytes)
            for some in (tail[start : start + step] for start in range(0, len(tail), step)):
                reads = [
                    read._replace(parts=[row.data])
                    for (read, _), row in zip(some, memory.empty((len(some), nbytes)), strict=True)
                ]
                report = store.read(reads)
                store.write(
                    [
                        DiskWrite(
                            group, new, read.key, on_disk[read.slot].parent, on_disk[read.slot].traits, read.parts
                        )
                        for place, (read, (_, new)) in enumerate(zip(reads, some, strict=True))
                        if place not in report.failed | report.corrupt
                    ]
                )

    def move(
        self, name: str, layout: ArenaLayout, identity: ArenaIdentity, slots: Slots, *, records: bool
    ) -> tuple[Arena, SlotMoves]:
        """Moves the blocks in memory into the first slots of fresh segments, where they are READY. Returns also the
        moves. Blocks. ``records``: for a successor. Raises :class:`TierConfigError`."""
        moves: dict[tuple[Tier, GroupId], dict[SlotId, SlotId]] = {
            (tier, group): _first_slots(
                [block.places[tier] for block in blocks if tier in block.places], slots[tier][group]
            )
            for tier in slots
            if tier is not Tier.DISK
            for group, blocks in self.blocks.items()
        }
        arena = self.arena.resized(name, layout, identity, moves, self.held)
        arena.keeps_records = records
        for group, blocks in self.blocks.items() if records else ():
            for block in blocks:
                for tier in block.places.keys() - {Tier.DISK}:
                    ref = SlotRef(group, tier, moves[tier, group][block.places[tier]])
                    arena.note(Content(ref, block.key, block.parent, block.traits))
        for (tier, group), moved in moves.items():
            arena.end_writes(tier, group, moved.values())
        return arena, moves

    def carried(
        self,
        arena: Arena,
        moves: SlotMoves,
        disk: DiskStore | None,
        shapes: Sequence[GroupShape],
        found: Mapping[GroupId, Sequence[RecoveredBlock]],
    ) -> dict[GroupId, list[RecoveredBlock]]:
        """The blocks in their new slots, parents before children, otherwise least recently used first.

        ``found``: on disk. Records there that the core had given up are deleted, and slots in memory that lack an
        ancestor become void.
        """
        carried: dict[GroupId, list[RecoveredBlock]] = {}
        for shape in shapes:
            group, on_disk = shape.group, {block.key: block.slot for block in found.get(shape.group, ())}
            device, host = (moves.get((tier, group), {}) for tier in (Tier.DEVICE, Tier.HOST))
            moved = [
                block._replace(
                    slot=None if block.slot is None else on_disk.pop(block.key, None),
                    device=None if block.device is None else device[block.device],
                    host=None if block.host is None else host[block.host],
                )
                for block in self.blocks[group]
            ]
            carried[group] = kept = [block for block in moved if block.places]
            if shape.attention.chained:
                order = reachable([block.key for block in kept], [block.parent for block in kept])
                carried[group] = kept = [kept[place] for place in order]
            gone = [(group, key, slot) for key, slot in on_disk.items() if slot is not None]
            if disk is not None and gone:
                disk.write([], retire=gone)
            for tier in arena.tiers:
                there = {block.places.get(tier) for block in kept}
                arena.begin_writes(tier, group, set(arena.ready_slots(tier, group)).difference(there))
        return carried


def _recovered(block: Block) -> RecoveredBlock:
    device, host, disk = (copy.slot if copy is not None and copy.valid else None for copy in block.copies)
    return RecoveredBlock(disk, block.key, block.parent_key, block.traits, device, host)


def _first_slots(taken: Collection[SlotId], count: int, bad: Collection[SlotId] = ()) -> dict[SlotId, SlotId]:
    """Maps each taken slot to itself, if it is one of the first ``count``, or to a free slot among them."""
    stay = {slot for slot in taken if slot < count}
    free = (SlotId(slot) for slot in range(count) if slot not in stay and slot not in bad)
    return {slot: slot if slot in stay else next(free) for slot in taken}
