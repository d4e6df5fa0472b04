"""How full a cache is and how it does: sums over what its window groups count as they go."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kvtierd.core.across import AcrossGroups
from kvtierd.core.flights import EdgeRecord
from kvtierd.core.group import GroupState
from kvtierd.core.ids import GroupId, SessionId, Tier
from kvtierd.core.policy import Edge
from kvtierd.core.slots import SlotState
from kvtierd.core.tickets import Lease
from kvtierd.core.verbs import GroupCounts, ManagerStats, TierCount
from kvtierd.core.window import WindowManager


def stats(windows: Mapping[GroupId, WindowManager], leases: Collection[Lease], across: AcrossGroups) -> ManagerStats:
    """``across``: the requests over all groups."""
    groups = {group: _group(window) for group, window in windows.items()}
    counts = list(groups.values())
    tiers = sorted({tier for one in counts for tier in one.tiers})
    held_by: dict[SessionId, int] = {}
    for lease in leases:
        held_by[lease.session] = held_by.get(lease.session, 0) + lease.slots
    return ManagerStats(
        blocks=sum(one.blocks for one in counts),
        tiers={tier: _sum([one.tiers[tier] for one in counts if tier in one.tiers]) for tier in tiers},
        edges=edges(windows.values()),
        hits={tier: sum(one.hits.get(tier, 0) for one in counts) for tier in tiers},
        misses=sum(one.misses for one in counts) - across.recounted,
        stored=sum(one.stored for one in counts),
        removed=sum(one.removed for one in counts),
        waiting=sum(window.waiting for window in windows.values()) + across.waiting,
        held_by=held_by,
        groups=groups,
        leases=len(leases),
        orphaned_leases=sum(lease.orphaned for lease in leases),
        disk_lost=any(window.state.disk_lost for window in windows.values()),
    )


def _group(window: WindowManager) -> GroupCounts:
    state = window.state
    return GroupCounts(
        blocks=len(state.index),
        tiers={tier: _tier(state, tier) for tier in state.tiers},
        pinned={tier: state.pins.slots(tier) for tier in state.tiers},
        hits=dict(window.uses.hits),
        misses=window.uses.misses,
        stored=state.stored,
        removed=state.removed,
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


def edges(windows: Collection[WindowManager]) -> dict[Edge, EdgeRecord]:
    """Sums over the groups."""
    total: dict[Edge, EdgeRecord] = {}
    for window in windows:
        for edge, record in window.flights.edges.items():
            into = total.setdefault(edge, EdgeRecord())
            into.blocks += record.blocks
            into.bytes += record.bytes
            into.failures += record.failures
            into.queue_ns += record.queue_ns
            into.copy_ns += record.copy_ns
            into.degraded_until = max(into.degraded_until, record.degraded_until)
    return total
