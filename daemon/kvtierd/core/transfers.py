"""Copies in flight: planned, not yet reported complete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvtier.abi.attention import Needed
from kvtier.abi.words import BlockResult as BlockResult  # noqa: PLC0414  others take it from here
from kvtierd.core import removal
from kvtierd.core.block import DOWNWARDS, FILLING, LEAVING, UPWARDS, Block, Copy
from kvtierd.core.errors import InvariantViolation
from kvtierd.core.events import CAPACITY, UPDATED, WATERMARK, WRITE_THROUGH, Cause
from kvtierd.core.group import GroupState
from kvtierd.core.ids import BITS, DEVICE, DISK, HOST, GroupId, Key, Label, MoveId, SessionId, SlotId, Tier
from kvtierd.core.leases import FetchTicket
from kvtierd.core.outcome import MoveResult, Transfer
from kvtierd.core.policy import Edge, WritePolicy
from kvtierd.core.slots import SLOT_RETIRING, SlotState

_BACKGROUND: Final = (WRITE_THROUGH, WATERMARK)
"""Causes of copies that nobody waits for, and that leave their source where it is."""


@dataclass(slots=True)
class EdgeRecord:
    """What an edge has done, and how it does. Times are sums over blocks, in nanoseconds."""

    blocks: int = 0
    bytes: int = 0
    failures: int = 0
    queue_ns: int = 0
    copy_ns: int = 0
    failed_in_a_row: int = 0
    degraded_until: int = 0


class Flight:
    """A copy of a block that is under way."""

    __slots__ = ("block", "cause", "copy", "dst", "source", "src")

    def __init__(self, block: Block, src: Tier, dst: Tier, source: Copy, copy: Copy, cause: Cause) -> None:
        self.block = block
        self.src = src
        self.dst = dst
        self.source = source
        self.copy = copy
        self.cause = cause

    @property
    def edge(self) -> Edge:
        return self.src, self.dst


class Flights:
    """Plans copies and applies their results: a copy is READY only after its bytes are there, and its source is valid
    until then; a failed one leaves the source as it was."""

    def __init__(self, state: GroupState) -> None:
        self._state = state
        self._through = state.policy.write_policy is WritePolicy.THROUGH
        self._flights: dict[MoveId, list[Flight]] = {}
        self._waiters: dict[Copy, list[FetchTicket]] = {}
        """Fetches that wait for a copy to become READY."""
        self._sinking: dict[Block, Tier] = {}
        """Blocks that were moved while a copy of theirs was under way, and where to."""
        self.background = 0
        """Copies that nobody waits for."""
        self.to_disk = 0
        self.cleaning = dict.fromkeys(state.tiers, 0)
        """Those of them, by source, that make a slot clean."""
        self.edges: dict[Edge, EdgeRecord] = {
            (src, dst): EdgeRecord() for src in state.tiers for dst in state.tiers if src is not dst
        }

    @property
    def active(self) -> int:
        """Moves, deletions on disk included, whose results are outstanding."""
        return len(self._flights) + self._state.retiring_moves

    def all(self) -> list[Flight]:
        return [flight for flights in self._flights.values() for flight in flights]

    def usable(self, src: Tier, dst: Tier, now: int) -> bool:
        """The edge is not degraded, and neither end of it is out of service."""
        return self._state.lost.isdisjoint((src, dst)) and self.edges[src, dst].degraded_until <= now

    def start(self, block: Block, src: Tier, dst: Tier, cause: Cause) -> Copy:
        """Plans a copy. ``dst`` has a free slot and the block no copy there."""
        move, source, copy = self._state.start_copy(block, src, dst, cause)
        if cause in _BACKGROUND:
            self._count_background(src, 1)
        self.to_disk += dst is DISK
        flight = Flight(block, src, dst, source, copy, cause)
        flights = self._flights.get(move)
        if flights is None:
            self._flights[move] = [flight]
        else:
            flights.append(flight)
        return copy

    def sink(self, block: Block, tier: Tier) -> None:
        """Somebody moves the block to this tier: the idle copies above go as soon as no copy of it is under way."""
        if _under_way(block):
            self._sinking[block] = tier

    def complete(self, result: MoveResult, now: int) -> list[FetchTicket]:
        """Applies a result. Returns the fetches that were waiting for one of its copies, once a copy each."""
        if self._state.retired(result.id, result.failed, now):
            return []
        flights = self._flights.pop(result.id, None)
        if flights is None:
            raise InvariantViolation(f"move {result.id} completes unplanned")
        self._account(flights, result, now)
        first = flights[0]
        transfer = self._state.transfer(first.src, first.dst, result.queue_ns, result.copy_ns)  # one for all its events
        waiters: list[FetchTicket] = []
        for position, flight in enumerate(flights):
            self._land(flight, position in result.failed, position in result.corrupt, transfer)
            if self._waiters:
                waiters.extend(self._waiters.pop(flight.copy, ()))
        return waiters

    def await_copy(self, copy: Copy, ticket: FetchTicket) -> None:
        """The fetch is told once the copy, which is FILLING, has ended."""
        self._waiters.setdefault(copy, []).append(ticket)

    def forget(self, copy: Copy, ticket: FetchTicket) -> None:
        """The fetch no longer waits for it, if it did."""
        if copy in self._waiters:
            others = [waiter for waiter in self._waiters.pop(copy) if waiter is not ticket]
            if others:
                self._waiters[copy] = others

    def _account(self, flights: list[Flight], result: MoveResult, now: int) -> None:
        src, dst = flights[0].src, flights[0].dst
        record = self.edges[src, dst]
        bad = len(result.failed)
        good = len(flights) - bad - len(result.corrupt)
        record.blocks += good
        record.bytes += good * self._state.shape.slot_bytes[dst]
        record.failures += bad
        record.queue_ns += result.queue_ns * len(flights)
        record.copy_ns += result.copy_ns
        record.failed_in_a_row = record.failed_in_a_row + 1 if bad and not good else 0
        if record.failed_in_a_row >= self._state.policy.degrade_after:
            record.degraded_until = now + self._state.policy.degraded_ns
            record.failed_in_a_row = 0

    def _land(self, flight: Flight, failed: bool, corrupt: bool, transfer: Transfer) -> None:
        state = self._state
        block, src, dst, source, copy = flight.block, flight.src, flight.dst, flight.source, flight.copy
        if flight.cause in _BACKGROUND:
            self._count_background(src, -1)
        self.to_disk -= dst is DISK
        source.reads -= DOWNWARDS if dst > src else UPWARDS
        arrived = block.copies[dst] is copy and dst not in state.lost
        attached = arrived and block.copies[src] is source and not state.spoiled(block)
        if failed or corrupt or not attached or not self._parent_below(block, dst):
            state.abandon(block, dst, copy, written=dst is DISK and not failed and not corrupt)
            self._source_stays(flight)
            for ticket in self._waiters.get(copy, ()):
                ticket.failed.add(block)
            if corrupt:
                removal.lose_bytes(state, block, src, source)
        else:
            self._arrive(flight, transfer)
        if block.copies[src] is not source:
            self._settle_source(flight)
        if block in self._sinking and not _under_way(block):
            del self._sinking[block]

    def _count_background(self, src: Tier, by: int) -> None:
        self.background += by
        self.cleaning[src] += by

    def _parent_below(self, block: Block, dst: Tier) -> bool:
        """The disk stays prefix-closed: a block whose parent's own copy failed does not stay there."""
        if dst is not DISK or block.parent is None:
            return True
        above = block.parent.copies[DISK]
        return above is not None and above.valid

    def _source_stays(self, flight: Flight) -> None:
        if flight.block.copies[flight.src] is flight.source:
            self._state.stay(flight.block, flight.src)
            self._state.reconsider(flight.block)

    def _settle_source(self, flight: Flight) -> None:
        """The source was detached while it was read; it is freed by its last reader."""
        tier, source = flight.src, flight.source
        retiring = self._state.slots[tier].state(source.slot) is SLOT_RETIRING
        if retiring and source.reads == 0 and source.holds == 0:
            self._state.settle(flight.block, tier, source)

    def _arrive(self, flight: Flight, transfer: Transfer) -> None:
        state, block, src, dst = self._state, flight.block, flight.src, flight.dst
        before = block.residency
        state.arrive(block, dst)
        cause = flight.cause
        if flight.source.phase is LEAVING:
            state.detach(block, src)
            if cause in _BACKGROUND:
                cause = CAPACITY  # it would have stayed, had its slot not been wanted since
        elif cause is WATERMARK:
            state.copied_ahead(block, src)
        elif self._promoted(flight):
            state.detach(block, src)
        target = self._sinking.get(block)
        if target is not None and block.residency & BITS[target]:
            for tier in state.above[target]:
                if self._idle(block, tier):
                    state.detach(block, tier)
        if block.residency != before:  # else it sinks past the tier that it came to
            state.recorder.change(UPDATED, cause, state.group, block, transfer)
        state.reconsider(block)

    def _promoted(self, flight: Flight) -> bool:
        """Promotion from host frees the source unless somebody needs it; promotion from disk keeps it, and so does a
        cache that writes through."""
        upwards = flight.dst is DEVICE and flight.src is HOST
        return upwards and not self._through and self._idle(flight.block, HOST)

    def _idle(self, block: Block, tier: Tier) -> bool:
        copy = block.copies[tier]
        return copy is not None and copy.still and block.claims == 0


def _under_way(block: Block) -> bool:
    return any(copy is not None and (copy.phase is FILLING or copy.reads) for copy in block.copies)


OK: Final = BlockResult.OK
EXISTS: Final = BlockResult.EXISTS
PARENT_MISSING: Final = BlockResult.PARENT_MISSING
PARENT_CONFLICT: Final = BlockResult.PARENT_CONFLICT


@dataclass(slots=True, frozen=True)
class PartialMatch:
    """A block of which the first ``tokens`` continue a chain, and others follow, or none."""

    key: Key
    tokens: int
    residency: int


@dataclass(slots=True, frozen=True)
class GroupSpan:
    """A group's part of a match: the blocks that it needs of the prefix, each with its residency set."""

    group: GroupId
    needed: Needed
    residency: tuple[int, ...]


@dataclass(slots=True, frozen=True)
class Match:
    """The longest prefix that the named groups can serve together, with a span for each.

    ``partial``: the block that continues the prefix, where the request asked for it.
    """

    blocks: int
    groups: tuple[GroupSpan, ...]
    partial: PartialMatch | None = None


@dataclass(slots=True, frozen=True)
class Location:
    """``slots``: by tier; None where the residency set lacks it."""

    residency: int
    slots: tuple[SlotId | None, SlotId | None, SlotId | None]


@dataclass(slots=True, frozen=True)
class ListingRow:
    key: Key
    parent: Key | None
    residency: int
    priority: int
    label: Label | None = None
    parent_label: Label | None = None
    pinned: int = 0
    """The tiers where it is pinned, as a bit set."""


@dataclass(slots=True, frozen=True)
class Listing:
    """``next_page``: where to go on; 0 = nowhere."""

    rows: tuple[ListingRow, ...]
    next_page: int


class CommitItem(NamedTuple):
    """``duration_ms``: how long it keeps its priority, counted from its release; 0 = for ever."""

    slot: SlotId
    key: Key
    parent: Key | None
    priority: int
    duration_ms: int = 0
    label: Label | None = None


@dataclass(slots=True, frozen=True)
class ChainRequest:
    """Keys of a chain, the root first. Fewer than ``min_blocks`` of it are of no use.

    ``priorities``: new ones for what is found of it, one a key, or none to leave its retention as it is.
    ``durations_ms``: to go with them, one a key; none: for ever. ``counted``: the chain was asked for before.
    """

    keys: Sequence[Key]
    min_blocks: int = 0
    priorities: Sequence[int] = ()
    durations_ms: Sequence[int] = ()
    counted: bool = False


@dataclass(slots=True, frozen=True)
class ResetReport:
    """``kept``: blocks in use, and their ancestors; ``roots``: the kept blocks without a parent. ``following``: where
    to go on, None = nowhere."""

    dropped: int
    kept: int
    following: tuple[GroupId, int] | None = None
    roots: tuple[tuple[GroupId, Key], ...] = ()


@dataclass(slots=True, frozen=True)
class TierCount:
    """Slots by state, which sum to ``capacity``; ``held``: under a lease or a fetch, blank and orphaned ones
    included; ``clean``: free, or with a block that is valid in a lower tier, too."""

    capacity: int
    states: Mapping[SlotState, int]
    held: int
    clean: int


@dataclass(slots=True, frozen=True)
class GroupCounts:
    """One window group. ``pinned``: slots. ``hits``, ``queried``, ``found``: as in :class:`Uses`.
    ``shadow_misses``: blocks that each policy of eviction would have missed, an estimate."""

    blocks: int
    tiers: Mapping[Tier, TierCount]
    pinned: Mapping[Tier, int]
    hits: Mapping[Tier, int]
    queried: int
    found: int
    stored: int
    removed: int
    shadow_misses: Mapping[str, int]


@dataclass(slots=True, frozen=True)
class ManagerStats:
    """``held_by``: slots by session. Sums over the groups of the cache. Orphaned leases are among the ``leases``.
    ``lost``: tiers that are out of service."""

    blocks: int
    tiers: Mapping[Tier, TierCount]
    edges: Mapping[Edge, EdgeRecord]
    hits: Mapping[Tier, int]
    queried: int
    found: int
    stored: int
    removed: int
    waiting: int
    held_by: Mapping[SessionId, int]
    groups: Mapping[GroupId, GroupCounts]
    leases: int
    orphaned_leases: int
    lost: frozenset[Tier]
