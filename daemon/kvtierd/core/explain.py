"""Where the copies of one block are, and what holds them. Looking changes nothing, recency included."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Final

from kvtierd.core.block import Block, Phase
from kvtierd.core.group import GroupState
from kvtierd.core.ids import Key, SlotId, Tier
from kvtierd.core.tickets import Lease, LeaseRecord

CHILDREN_COUNTED: Final = 1_024
"""A block's children are counted up to this number."""


@dataclass(slots=True, frozen=True)
class CopyNow:
    """A block's bytes in one tier. ``readers``: copies under way that read it."""

    tier: Tier
    slot: SlotId
    phase: Phase
    pins: int
    readers: int


@dataclass(slots=True, frozen=True)
class BlockNow:
    """An indexed block.

    ``priority`` is effective: the highest of ``own_priority`` and of the children's. ``duration_ms``: how long the
    block keeps its own, 0 = for ever. ``deadline_ns``: when that ends, 0 = its clock stands.
    """

    parent: Key | None
    depth: int
    children: int
    priority: int
    own_priority: int
    duration_ms: int
    deadline_ns: int
    copies: tuple[CopyNow, ...]
    leases: tuple[LeaseRecord, ...]


def explain(state: GroupState, leases: Iterable[Lease], key: Key) -> BlockNow | None:
    """None where the key is not indexed. ``leases``: all of the cache."""
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
            if (copy := block.copy(tier)) is not None
        ),
        leases=tuple(LeaseRecord.of(lease) for lease in leases if _holds(lease, block)),
    )


def _holds(lease: Lease, block: Block) -> bool:
    copy = lease.held.get(block)
    return copy is not None and copy is block.copy(lease.tier)
