"""Reports the copies and holders of one block, and the counts of a cache. A report changes nothing, recency
included."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final

from kvtierd.core.acquires import Acquires
from kvtierd.core.block import Block, Phase
from kvtierd.core.group import GroupState
from kvtierd.core.ids import GroupId, Key, SlotId, Tier
from kvtierd.core.leases import SlotLease, holders_of
from kvtierd.core.policy import Edge
from kvtierd.core.slots import SlotState
from kvtierd.core.transfers import EdgeRecord, GroupCounts, ManagerStats, TierCount
from kvtierd.core.window import WindowManager

CHILDREN_COUNTED: Final = 1_024
"""Limit up to which a block's children are counted."""


@dataclass(slots=True, frozen=True)
class CopyNow:
    """A block's copy in one tier. ``readers``: number of copies in flight that read it."""

    tier: Tier
    slot: SlotId
    phase: Phase
    pins: int
    readers: int


@dataclass(slots=True, frozen=True)
class BlockNow:
    """An indexed block.

    ``priority`` is effective: the highest of ``own_priority`` and the children's. ``duration_ms``: time for which the
    block keeps its own priority, 0 = for ever. ``deadline_ns``: end of that time, 0 = the clock is stopped.
    """

    parent: Key | None
    depth: int
    children: int
    priority: int
    own_priority: int
    duration_ms: int
    deadline_ns: int
    copies: tuple[CopyNow, ...]
    leases: tuple[SlotLease, ...]


def explain(state: GroupState, leases: Iterable[SlotLease], key: Key) -> BlockNow | None:
    """Describes a block; None if the key is not indexed. ``leases``: all leases of the cache."""
    block = state.index.get(key)
    if block is None:
        return None
    return BlockNow(
        parent=block.parent_key,
        depth=block.depth,
        children=sum(1 for _ in islice(block.children, CHILDREN_COUNTED)),
        priority=block.priority,
        own_priority=block.own_priority,
        duration_ms=block.traits.duration_ms,
        deadline_ns=block.traits.deadline_ns,
        copies=tuple(
            CopyNow(tier, copy.slot, copy.phase, state.pins.count(tier, copy), copy.readers)
            for tier in state.tiers
            if (copy := block.copies[tier]) is not None
        ),
        leases=tuple(lease for lease in leases if _holds(lease, block)),
    )


def _holds(lease: SlotLease, block: Block) -> bool:
    copy = lease.held.get(block)
    return copy is not None and copy is block.copies[lease.tier]


def stats(windows: Mapping[GroupId, WindowManager], leases: Collection[SlotLease], acquires: Acquires) -> ManagerStats:
    groups = {group: _group(window) for group, window in windows.items()}
    counts = list(groups.values())
    tiers = sorted({tier for one in counts for tier in one.tiers})
    return ManagerStats(
        blocks=sum(one.blocks for one in counts),
        tiers={tier: _sum([one.tiers[tier] for one in counts if tier in one.tiers]) for tier in tiers},
        edges=edges(windows.values()),
        hits={tier: sum(one.hits.get(tier, 0) for one in counts) for tier in tiers},
        queried=sum(one.queried for one in counts),
        found=sum(one.found for one in counts),
        stored=sum(one.stored for one in counts),
        removed=sum(one.removed for one in counts),
        waiting=sum(window.waiting for window in windows.values()) + acquires.waiting,
        held_by={holder.session: holder.slots for holder in holders_of(leases)},
        groups=groups,
        leases=len(leases),
        orphaned_leases=sum(lease.orphaned for lease in leases),
        lost=frozenset(tier for window in windows.values() for tier in window.state.lost),
    )


def _group(window: WindowManager) -> GroupCounts:
    state = window.state
    return GroupCounts(
        blocks=len(state.index),
        tiers={tier: _tier(state, tier) for tier in state.tiers},
        pinned={tier: state.pins.slots(tier) for tier in state.tiers},
        hits=dict(window.use_counts.hits),
        queried=window.use_counts.queried,
        found=window.use_counts.found,
        stored=state.stored,
        removed=state.removed,
        shadow_misses=state.evictor.shadows.misses,
    )


def _tier(state: GroupState, tier: Tier) -> TierCount:
    table = state.slots[tier]
    states = {one: table.count(one) for one in SlotState}
    held = state.held.get(tier, 0) + states[SlotState.BLANK] + states[SlotState.ORPHANED]
    return TierCount(table.capacity, states, held, table.free + state.residencies.doubled(tier))


def _sum(counts: Collection[TierCount]) -> TierCount:
    return TierCount(
        sum(one.capacity for one in counts),
        {state: sum(one.states[state] for one in counts) for state in SlotState},
        sum(one.held for one in counts),
        sum(one.clean for one in counts),
    )


def carried(windows: Collection[WindowManager], tier: Tier) -> tuple[int, int]:
    """Returns the number of blocks copied to or from a tier so far, and the number of failed copies."""
    records = [record for edge, record in edges(windows).items() if tier in edge]
    return sum(record.blocks for record in records), sum(record.failures for record in records)


def edges(windows: Collection[WindowManager]) -> dict[Edge, EdgeRecord]:
    """Edge records, summed over the groups."""
    total: dict[Edge, EdgeRecord] = {}
    for window in windows:
        for edge, record in window.transfers.edges.items():
            into = total.setdefault(edge, EdgeRecord())
            into.blocks += record.blocks
            into.bytes += record.bytes
            into.failures += record.failures
            into.queue_ns += record.queue_ns
            into.copy_ns += record.copy_ns
            into.degraded_until = max(into.degraded_until, record.degraded_until)
    return total
