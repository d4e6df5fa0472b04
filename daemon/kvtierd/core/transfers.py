"""Copies in flight: planned, and not yet reported complete."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvtier.abi.attention import Needed
from kvtier.abi.words import BlockResult as BlockResult  # noqa: PLC0414  re-exported
from kvtierd.core import removal
from kvtierd.core.block import DOWNWARDS, FILLING, LEAVING, UPWARDS, Block, Copy
from kvtierd.core.errors import InvariantViolation
from kvtierd.core.events import CAPACITY, UPDATED, WATERMARK, WRITE_THROUGH, Cause
from kvtierd.core.group import GroupState
from kvtierd.core.ids import BITS, DEVICE, DISK, HOST, GroupId, Key, Label, MoveId, SessionId, SlotId, Tier
from kvtierd.core.leases import FetchTicket
from kvtierd.core.outcome import MoveResult, Transfer
from kvtierd.core.policy import Edge, WriteMode
from kvtierd.core.slots import SLOT_RETIRING, SlotState

_BACKGROUND: Final = (WRITE_THROUGH, WATERMARK)
"""Causes of copies that leave their source in place and count against the limit of background copies. A move or
demotion to disk may wait for ancestors copied as WRITE_THROUGH."""


@dataclass(slots=True)
class EdgeRecord:
    """Counts and health of an edge. Nanoseconds; ``queue_ns`` is summed over blocks, ``copy_ns`` over moves."""

    blocks: int = 0
    bytes: int = 0
    failures: int = 0
    queue_ns: int = 0
    copy_ns: int = 0
    failed_in_a_row: int = 0
    degraded_until: int = 0


@dataclass(slots=True, eq=False)
class CopyInFlight:
    """A copy of a block in flight."""

    block: Block
    src: Tier
    dst: Tier
    source: Copy
    copy: Copy
    cause: Cause

    @property
    def edge(self) -> Edge:
        return self.src, self.dst


class Transfers:
    """Plans copies and applies their results. A copy is READY only after its bytes are there; its source stays valid
    until then. A failed copy leaves the source as it was."""

    def __init__(self, state: GroupState) -> None:
        self._state = state
        self._through = state.policy.write_policy is WriteMode.THROUGH
        self._in_flight: defaultdict[MoveId, list[CopyInFlight]] = defaultdict(list)
        self._waiters: defaultdict[Copy, list[FetchTicket]] = defaultdict(list)
        """Fetches that wait for a copy to become READY."""
        self._demoting: dict[Block, Tier] = {}
        """Target tiers of blocks that a client moved while a copy of the block was in flight."""
        self.to_disk = 0
        self.cleaning = dict.fromkeys(state.tiers, 0)
        """Number of background copies in flight by source tier; each is to make a slot clean."""
        self.edges: dict[Edge, EdgeRecord] = {
            (src, dst): EdgeRecord() for src in state.tiers for dst in state.tiers if src is not dst
        }

    @property
    def background(self) -> int:
        """Number of background copies in flight."""
        return sum(self.cleaning.values())

    @property
    def active(self) -> int:
        """Number of moves, disk deletions included, whose results are outstanding."""
        return len(self._in_flight) + self._state.retiring_moves

    def all(self) -> list[CopyInFlight]:
        return [flight for in_flight in self._in_flight.values() for flight in in_flight]

    def usable(self, src: Tier, dst: Tier, now: int) -> bool:
        """Whether the edge is not degraded and both its tiers are in service."""
        return self._state.lost.isdisjoint((src, dst)) and self.edges[src, dst].degraded_until <= now

    def start(self, block: Block, src: Tier, dst: Tier, cause: Cause) -> Copy:
        """Plans a copy. ``dst`` has a free slot, and the block has no copy there."""
        move, source, copy = self._state.start_copy(block, src, dst, cause)
        self.cleaning[src] += cause in _BACKGROUND
        self.to_disk += dst is DISK
        flight = CopyInFlight(block, src, dst, source, copy, cause)
        self._in_flight[move].append(flight)
        return copy

    def demote_to(self, block: Block, tier: Tier, cause: Cause) -> None:
        """Drops the block's idle copies above this tier, where a client has moved it: once the block is there, and no
        copy of the block is in flight."""
        if _under_way(block):
            self._demoting[block] = tier
        for above in self._idle_above(block, tier):
            self._state.free_copy(block, above, cause)

    def complete(self, result: MoveResult, now: int) -> list[FetchTicket]:
        """Applies a result. Returns the fetches that waited for its copies, once a copy."""
        if self._state.retired(result.id, result.failed, now):
            return []
        in_flight = self._in_flight.pop(result.id, None)
        if in_flight is None:
            raise InvariantViolation(f"move {result.id} completes unplanned")
        self._account(in_flight, result, now)
        first = in_flight[0]
        nbytes = self._state.shape.slot_bytes[first.dst]
        transfer = Transfer(first.src, first.dst, nbytes, result.queue_ns, result.copy_ns)  # shared by all events
        waiters: list[FetchTicket] = []
        for position, flight in enumerate(in_flight):
            self._land(flight, position in result.failed, position in result.corrupt, transfer)
            if self._waiters:
                waiters.extend(self._waiters.pop(flight.copy, ()))
        return waiters

    def await_copy(self, copy: Copy, ticket: FetchTicket) -> None:
        """Adds a fetch that waits for a FILLING copy to end."""
        self._waiters[copy].append(ticket)

    def forget(self, copy: Copy, ticket: FetchTicket) -> None:
        """Ends the fetch's wait for the copy, if it waits."""
        if copy in self._waiters:
            others = [waiter for waiter in self._waiters.pop(copy) if waiter is not ticket]
            if others:
                self._waiters[copy] = others

    def _account(self, in_flight: list[CopyInFlight], result: MoveResult, now: int) -> None:
        src, dst = in_flight[0].src, in_flight[0].dst
        record = self.edges[src, dst]
        bad = len(result.failed)
        good = len(in_flight) - bad - len(result.corrupt)
        record.blocks += good
        record.bytes += good * self._state.shape.slot_bytes[dst]
        record.failures += bad
        record.queue_ns += result.queue_ns * len(in_flight)
        record.copy_ns += result.copy_ns
        record.failed_in_a_row = record.failed_in_a_row + 1 if bad and not good else 0
        if record.failed_in_a_row >= self._state.policy.degrade_after:
            record.degraded_until = now + self._state.policy.degraded_ns
            record.failed_in_a_row = 0

    def _land(self, flight: CopyInFlight, failed: bool, corrupt: bool, transfer: Transfer) -> None:
        state = self._state
        block, src, dst, source, copy = flight.block, flight.src, flight.dst, flight.source, flight.copy
        self.cleaning[src] -= flight.cause in _BACKGROUND
        self.to_disk -= dst is DISK
        source.reads -= DOWNWARDS if dst > src else UPWARDS
        arrived = block.copies[dst] is copy and dst not in state.lost
        attached = arrived and block.copies[src] is source
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
        if block in self._demoting and not _under_way(block):
            del self._demoting[block]

    def _parent_below(self, block: Block, dst: Tier) -> bool:
        """Whether the block may stay in ``dst``: on disk its parent must be there too, so that the disk stays
        prefix-closed."""
        if dst is not DISK or block.parent is None:
            return True
        above = block.parent.copies[DISK]
        return above is not None and above.valid

    def _source_stays(self, flight: CopyInFlight) -> None:
        if flight.block.copies[flight.src] is flight.source:
            self._state.stay(flight.block, flight.src)
            self._state.reconsider(flight.block)

    def _settle_source(self, flight: CopyInFlight) -> None:
        """Frees a source that was detached while it was read, after its last reader."""
        tier, source = flight.src, flight.source
        retiring = self._state.slots[tier].state(source.slot) is SLOT_RETIRING
        if retiring and source.reads == 0 and source.holds == 0:
            self._state.settle(flight.block, tier, source)

    def _arrive(self, flight: CopyInFlight, transfer: Transfer) -> None:
        state, block, src, dst = self._state, flight.block, flight.src, flight.dst
        before = block.residency
        state.arrive(block, dst)
        cause = flight.cause
        if flight.source.phase is LEAVING:
            state.detach(block, src)
            if cause in _BACKGROUND:
                cause = CAPACITY  # the source leaves because its slot was wanted meanwhile
        elif cause is WATERMARK:
            state.clean_copies[src].add(block)
        elif self._promoted(flight):
            state.detach(block, src)
        if block in self._demoting:
            for tier in self._idle_above(block, self._demoting[block]):
                state.detach(block, tier)
        if block.residency != before:  # else the block goes on below ``dst``
            state.recorder.change(UPDATED, cause, state.group, block, transfer)
        state.reconsider(block)

    def _promoted(self, flight: CopyInFlight) -> bool:
        """Whether the promotion frees its source: from host, if the source is idle and the cache does not write
        through. A promotion from disk keeps its source."""
        upwards = flight.dst is DEVICE and flight.src is HOST
        return upwards and not self._through and self._idle(flight.block, HOST)

    def _idle_above(self, block: Block, tier: Tier) -> list[Tier]:
        """The tiers above with an idle copy of the block, if the block is valid in this tier."""
        there = block.residency & BITS[tier]
        return [above for above in self._state.above[tier] if there and self._idle(block, above)]

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
    """A block whose first ``tokens`` tokens continue a chain; further tokens, if any, differ."""

    key: Key
    tokens: int
    residency: int


@dataclass(slots=True, frozen=True)
class GroupResidency:
    """A group's part of a match: the blocks that it needs of the prefix, each with its residency set."""

    group: GroupId
    needed: Needed
    residency: tuple[int, ...]


@dataclass(slots=True, frozen=True)
class PrefixMatch:
    """The longest prefix that the named groups can serve together, with a span for each.

    ``partial``: the block that continues the prefix, where the request asked for it.
    """

    blocks: int
    groups: tuple[GroupResidency, ...]
    partial: PartialMatch | None = None


@dataclass(slots=True, frozen=True)
class BlockSlots:
    """The place of a block. ``slots``: by tier; None for a tier outside the residency."""

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
    """Tiers where the block is pinned, as a bit set."""


@dataclass(slots=True, frozen=True)
class Listing:
    """A page of indexed blocks. ``next_page``: number of the next page; 0 = no more."""

    rows: tuple[ListingRow, ...]
    next_page: int


class CommitItem(NamedTuple):
    """A block to commit. ``duration_ms``: how long the block keeps its priority after its release; 0 = for ever."""

    slot: SlotId
    key: Key
    parent: Key | None
    priority: int
    duration_ms: int = 0
    label: Label | None = None


@dataclass(slots=True, frozen=True)
class ChainRequest:
    """Keys of a chain, root first. A prefix shorter than ``min_blocks`` is of no use.

    ``priorities``: new priorities for the blocks found, one a key; empty = retention stays. ``durations_ms``: their
    durations, one a key; empty = for ever. ``counted``: the chain has been counted by an earlier request.
    ``conversation``: tag of the conversation that asks; empty = none.
    """

    keys: Sequence[Key]
    min_blocks: int = 0
    priorities: Sequence[int] = ()
    durations_ms: Sequence[int] = ()
    counted: bool = False
    conversation: bytes = b""


@dataclass(slots=True, frozen=True)
class ResetResult:
    """Result of a slice of a reset. ``kept``: blocks in use and their ancestors. ``roots``: kept blocks without a
    parent. ``following``: start of the next slice; None = the end."""

    dropped: int
    kept: int
    following: tuple[GroupId, int] | None = None
    roots: tuple[tuple[GroupId, Key], ...] = ()


@dataclass(slots=True, frozen=True)
class TierCount:
    """Slots of a tier. ``states``: slots by state, which sum to ``capacity``. ``held``: under a lease or a fetch, blank
    and orphaned slots included. ``clean``: free, or with a block that is valid in a lower tier too."""

    capacity: int
    states: Mapping[SlotState, int]
    held: int
    clean: int


@dataclass(slots=True, frozen=True)
class GroupCounts:
    """Counts of one window group. ``pinned``: slots. ``hits``, ``queried``, ``found``: as in :class:`Uses`.
    ``shadow_misses``: estimated number of blocks that each eviction policy would have missed."""

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
    """Counts of a cache, summed over its groups. ``held_by``: slots by session. ``leases`` includes orphaned leases.
    ``lost``: tiers out of service."""

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
