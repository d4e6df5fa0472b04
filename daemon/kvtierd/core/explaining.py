"""What there is to say of one block of a window group: where it is, what holds it, why it stays or goes next. Nothing
changes, recency included.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from typing import Final

from kvtierd.core.block import LEAVING, Block, Copy, Phase
from kvtierd.core.candidates import CLEAN, REDUNDANT
from kvtierd.core.events import Cause
from kvtierd.core.group import GroupState
from kvtierd.core.ids import DISK, Key, SlotId, Tier
from kvtierd.core.slots import SLOT_FILLING, SLOT_READY
from kvtierd.core.standing import LOOKED_AT, Standing, standing
from kvtierd.core.tickets import Lease, LeaseRecord
from kvtierd.core.window import WindowManager

CHILDREN_COUNTED: Final = 1_024
"""A block's children are counted as far as this."""


class Obstacle(IntEnum):
    """Why a copy does not leave its tier to make room. Values are the wire's (``kvtier.v1.Obstacle``)."""

    FILLING = 1
    """It is not there yet."""
    LEASED = 2
    PINNED = 3
    AWAITED = 4
    """A request that waits for room has matched the block."""
    MOVING = 5
    """A copy of it is under way that needs it."""
    CHILDREN = 6
    """It is in no other tier, and children of the block are stored: those go first."""
    DISK_CHILDREN = 7
    """On disk: children of the block are there, and need their prefix there."""
    TIER_LOST = 8
    """The tier is out of service, and the copy about to be given up."""


_GO_FIRST: Final = frozenset({Obstacle.CHILDREN, Obstacle.DISK_CHILDREN})


class Departure(IntEnum):
    """How a copy leaves its tier when its turn comes. Values are the wire's (``kvtier.v1.Departure``)."""

    FREED = 1
    """Its slot is freed at once: the block stays in another tier."""
    DEMOTED = 2
    """Copied to a tier below first; dropped only where nothing below can take it."""
    DROPPED = 3
    """The block is forgotten: it is in no other tier, and goes down no edge from here."""


@dataclass(slots=True, frozen=True)
class CopyNow:
    """A block's bytes in one tier.

    ``leases``: holds but pins, of waiting acquires as well. ``readers``: copies under way that read it. ``waiters``:
    requests that wait for it to become READY. ``threshold``: effective priority from which on a block goes down from
    this tier; 101 = none does. ``departure`` and ``standing`` are None where making room does not take it; with the
    obstacles CHILDREN and DISK_CHILDREN they say when its turn comes once those have gone. ``free``, ``unheld``: slots
    of the tier that are free, and that have copies which nobody holds.
    """

    tier: Tier
    slot: SlotId
    phase: Phase
    leases: int
    pins: int
    readers: int
    waiters: int
    threshold: int
    obstacles: tuple[Obstacle, ...]
    departure: Departure | None
    standing: Standing | None
    free: int
    unheld: int


@dataclass(slots=True, frozen=True)
class MoveNow:
    """A copy of the block under way."""

    src: Tier
    dst: Tier
    cause: Cause


@dataclass(slots=True, frozen=True)
class BlockNow:
    """All that is known of a block that is indexed.

    ``children``: stored directly under it, counted up to :data:`CHILDREN_COUNTED`. ``priority`` is effective: the
    highest of ``own_priority`` and of its children's. ``duration_ms``: for how long it keeps its own, 0 = for ever;
    ``deadline_ns``: when that ends, 0 = its clock stands. ``hot``: the policy of eviction protects it. ``waiting``:
    requests that have matched it and wait for room.
    """

    key: Key
    parent: Key | None
    depth: int
    children: int
    residency: int
    priority: int
    own_priority: int
    duration_ms: int
    deadline_ns: int
    hot: bool
    waiting: int
    copies: tuple[CopyNow, ...]
    moves: tuple[MoveNow, ...]
    leases: tuple[LeaseRecord, ...]


def explain(window: WindowManager, leases: Iterable[Lease], key: Key, now: int) -> BlockNow | None:
    """None where the key is not indexed. ``leases``: all of the cache."""
    state = window.state
    block = state.index.get(key)
    if block is None:
        return None
    present = [(tier, copy) for tier in state.tiers if (copy := block.copy(tier)) is not None]
    moving = any(not copy.valid or copy.reads for _, copy in present)
    held = any(copy.holds for _, copy in present)
    return BlockNow(
        key=block.key,
        parent=block.parent_key,
        depth=block.depth,
        children=sum(1 for _ in islice(block.children, CHILDREN_COUNTED)),
        residency=block.residency,
        priority=block.priority,
        own_priority=block.own_priority,
        duration_ms=block.traits.duration_ms,
        deadline_ns=block.traits.deadline_ns,
        hot=block.hot,
        waiting=block.claims,
        copies=tuple(_copy(window, block, tier, copy, now, LOOKED_AT // len(present)) for tier, copy in present),
        moves=_moves(window, block) if moving else (),
        leases=_leases(leases, block) if held else (),
    )


def keys_with(state: GroupState, prefix: bytes, page: int, limit: int) -> tuple[list[Key], int]:
    """Of a page of the group's blocks, the keys that begin with ``prefix``; and where to go on, 0 = nowhere."""
    blocks, following = state.index.page(page, limit)
    return [block.key for block in blocks if block.key.startswith(prefix)], following


def _copy(window: WindowManager, block: Block, tier: Tier, copy: Copy, now: int, limit: int) -> CopyNow:
    state, slots = window.state, window.state.slots[tier]
    pins = state.pins.count(tier, copy)
    obstacles = _obstacles(state, block, tier, copy, pins)
    departure, turn = None, None
    if copy.phase is LEAVING:
        departure = Departure.DEMOTED
    elif _GO_FIRST.issuperset(obstacles):
        sinks = all(window.flights.usable(tier, low, now) for low in state.below[tier])
        turn = standing(state, tier, block, sinks=sinks, limit=limit)
        departure = None if obstacles and turn is None else _departure(state, block, tier, copy)
    return CopyNow(
        tier=tier,
        slot=copy.slot,
        phase=copy.phase,
        leases=copy.holds - (pins > 0),
        pins=pins,
        readers=copy.readers,
        waiters=window.flights.waiting_for(copy),
        threshold=state.floor[tier],
        obstacles=obstacles,
        departure=departure,
        standing=turn,
        free=slots.free,
        unheld=slots.count(SLOT_READY) + slots.count(SLOT_FILLING) - state.held[tier],
    )


def _obstacles(state: GroupState, block: Block, tier: Tier, copy: Copy, pins: int) -> tuple[Obstacle, ...]:
    state.candidates(tier)  # so that ``listed`` is true
    alone = block.residency == tier.bit
    found = {
        Obstacle.FILLING: not copy.valid,
        Obstacle.LEASED: copy.holds > (pins > 0),
        Obstacle.PINNED: pins > 0,
        Obstacle.AWAITED: block.claims > 0,
        Obstacle.MOVING: copy.valid and not copy.listed and (copy.reads > 0 or (alone and _is_coming(block))),
        Obstacle.CHILDREN: copy.valid and alone and not copy.listed and block.first_child is not None,
        Obstacle.DISK_CHILDREN: tier is DISK and not alone and block.disk_children > 0,
        Obstacle.TIER_LOST: tier in state.offline,
    }
    return () if copy.phase is LEAVING else tuple(obstacle for obstacle, stands in found.items() if stands)


def _is_coming(block: Block) -> bool:
    return any(copy is not None and not copy.valid for copy in block.copies)


def _departure(state: GroupState, block: Block, tier: Tier, copy: Copy) -> Departure:
    if copy.listed & (REDUNDANT | CLEAN) or block.residency & (tier.bit - 1):
        return Departure.FREED
    return Departure.DROPPED if state.expendable(block, tier) else Departure.DEMOTED


def _moves(window: WindowManager, block: Block) -> tuple[MoveNow, ...]:
    flights = (flight for flight in window.flights.all() if flight.block is block)
    return tuple(MoveNow(*flight.edge, flight.cause) for flight in flights)


def _leases(leases: Iterable[Lease], block: Block) -> tuple[LeaseRecord, ...]:
    """Those that hold one of its copies, the oldest first."""
    return tuple(
        LeaseRecord.of(lease)
        for lease in leases
        if (copy := lease.held.get(block)) is not None and copy is block.copy(lease.tier)
    )
