"""The core's instructions to its caller.

Every mutating call of the core returns one :class:`Outcome`. The caller carries it out whole in the same loop turn,
with no ``await`` in between, in this order: ``begun`` of all ``slots``; ``owners``; ``events``; ``moves``; ``filled``,
``disowned`` and ``restated`` of all ``slots``; the key index, from ``events``; ``grants``; ``refusals``.

An object made for each block is a named tuple or a place in a column: a frozen dataclass takes much longer to make.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from kvtier.abi.attention import NOTHING, Needed
from kvtierd.core.block import Block
from kvtierd.core.events import NO_CHANGES, REMOVED, STORED, BlockChanges, BlockEvent, Cause, EventSequencer, EventType
from kvtierd.core.ids import (
    DISK,
    CacheId,
    GroupId,
    Key,
    LeaseId,
    MoveId,
    SessionId,
    SlotId,
    TicketId,
    Tier,
    Traits,
)
from kvtierd.core.policy import Policy


@dataclass(slots=True, eq=False)
class SlotChanges:
    """Changes of the slots of one group in one tier, so a slot's number says which slot. Each call has its own.

    ``begun``: the bytes are no block's, now or soon; generations are odd until the slots are filled. ``filled``: the
    bytes are these blocks'. ``disowned``: look-ups must not find the bytes any more, which stay for their holders and
    readers. ``restated``: the bytes stay, and the block's retention has changed. ``owners``: the sessions that lease
    the slots from now on; None = no session.
    """

    group: GroupId
    tier: Tier
    begun: dict[SlotId, None] = field(default_factory=dict)
    filled: dict[SlotId, Block] = field(default_factory=dict)
    disowned: dict[SlotId, None] = field(default_factory=dict)
    restated: dict[SlotId, Block] = field(default_factory=dict)
    owners: dict[SlotId, SessionId | None] = field(default_factory=dict)

    @property
    def changed(self) -> bool:
        return bool(self.begun or self.filled or self.disowned or self.restated or self.owners)

    def begin_write(self, slot: SlotId) -> None:
        """Marks the slot's bytes as no block's: its generation is odd until :meth:`end_write`."""
        if self.filled:
            self.filled.pop(slot, None)
        self.begun[slot] = None

    def free(self, slot: SlotId) -> None:
        """Marks the slot's bytes as no block's and the slot as unowned."""
        self.begin_write(slot)
        self.owners[slot] = None

    def end_write(self, slot: SlotId, block: Block) -> None:
        """Marks the slot's bytes as the block's."""
        self.filled[slot] = block

    def disown(self, slot: SlotId) -> None:
        """Marks the slot's bytes as no longer their block's. Holders and readers may still use the bytes."""
        if slot not in self.filled:
            self.disowned[slot] = None

    def restate(self, slot: SlotId, block: Block) -> None:
        """Records that the traits of the slot's block have changed."""
        if slot not in self.filled:
            self.restated[slot] = block

    def own(self, slots: Iterable[SlotId], session: SessionId | None) -> None:
        """Sets the session that leases the slots; None = no session."""
        for slot in slots:
            self.owners[slot] = session


class MoveItem(NamedTuple):
    """A block of a move. ``dst`` is None if a disk slot is retired: its index record goes, and nothing is copied.

    A disk record stores the ``traits``.
    """

    key: Key
    parent: Key | None
    traits: Traits
    src: SlotId
    dst: SlotId | None


@dataclass(slots=True, frozen=True)
class Move:
    """planned, growing --end of the call--> in flight --MoveResult--> ended: each item is done, failed or corrupt

    A planned copy of blocks along one edge. Its slots belong to it until its result is reported.
    """

    id: MoveId
    group: GroupId
    src: Tier
    dst: Tier | None
    cause: Cause
    items: list[MoveItem] = field(default_factory=list)
    """In the order of planning."""

    @property
    def touches_disk(self) -> bool:
        """Whether the move writes or deletes on disk. Only the newest disk lane takes items: ancestors are committed
        before or with their descendants, and a deletion before its slot or key is written again, so no item may
        overtake another by joining an older move."""
        return self.dst is DISK or self.dst is None


@dataclass(slots=True, frozen=True)
class MoveResult:
    """How a move ended. Indices are into ``Move.items``; an item in neither set succeeded.

    ``failed``: the copy did not happen; the source is unchanged, and the destination's bytes are void. ``corrupt``: the
    source's bytes failed verification and must never be served.
    """

    id: MoveId
    failed: frozenset[int] = frozenset()
    corrupt: frozenset[int] = frozenset()
    queue_ns: int = 0
    copy_ns: int = 0


class RefusalReason(Enum):
    TIER_FULL = "tier_full"
    """All unheld slots together would not make room. Retry after other sessions have released."""
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    TIER_OFFLINE = "tier_offline"
    TOO_SHORT = "too_short"
    """The stored prefix is, or became, shorter than the caller's minimum."""


@dataclass(slots=True, frozen=True)
class SlotHolder:
    session: SessionId
    slots: int


@dataclass(slots=True, frozen=True)
class GroupGrant:
    """A group's part of a grant: ``slots`` of the requested tier, for the ``needed`` blocks of a prefix or blank.

    ``found_in``: the residency set of each block at the match. ``lease``: None where no slot is held.
    """

    group: GroupId
    lease: LeaseId | None
    slots: tuple[SlotId, ...]
    found_in: tuple[int, ...] = ()
    needed: Needed = NOTHING


@dataclass(slots=True, frozen=True)
class Grant:
    """A ticket's answer.

    ``groups``: the slots that a reserve or an acquire got, by window group; none for a move. ``matched``: the length of
    the prefix that an acquire found; ``blocks``: of the prefix that it holds. ``results`` for a move: True for each
    requested block that is READY in the requested tier; ``failed``: places of the other blocks whose copies failed.
    """

    ticket: TicketId
    groups: tuple[GroupGrant, ...] = ()
    matched: int = 0
    blocks: int = 0
    results: tuple[bool, ...] = ()
    failed: frozenset[int] = frozenset()

    @property
    def only(self) -> GroupGrant:
        """The part of the only group that the request named."""
        (part,) = self.groups
        return part

    @property
    def leases(self) -> tuple[LeaseId, ...]:
        return tuple(part.lease for part in self.groups if part.lease is not None)


@dataclass(slots=True, frozen=True)
class Refusal:
    ticket: TicketId
    reason: RefusalReason
    tier: Tier
    wanted: int
    free: int
    holders: tuple[SlotHolder, ...] = ()
    matched: int = 0


@dataclass(slots=True, frozen=True)
class Outcome:
    moves: tuple[Move, ...] = ()
    grants: tuple[Grant, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    slots: tuple[SlotChanges, ...] = ()
    """An entry for each group and memory tier with changed slots."""
    events: tuple[BlockEvent, ...] = ()


class Transfer(NamedTuple):
    """The move behind an event. ``dst`` None: nothing was copied, the blocks only left ``src``. ``block_bytes``: bytes
    of one block."""

    src: Tier
    dst: Tier | None = None
    block_bytes: int = 0
    queue_ns: int = 0
    copy_ns: int = 0


_Header = tuple[EventType, Cause, GroupId, Transfer | None]
"""The fields that all blocks of an event share."""

_Lane = tuple[GroupId, Tier, Tier | None, Cause]
"""A group's edge, and the cause of moves along it."""


class Recorder:
    """Collects a cache's outcome of a call, over all groups. :meth:`take` empties it at the end of each call.

    Consecutive changes with the same header become one event; items of the same lane become one move.
    """

    def __init__(self, cache: CacheId, sequencer: EventSequencer, policy: Policy) -> None:
        self._cache = cache
        self._sequencer = sequencer
        self._blocks_a_move = policy.blocks_a_move
        self._blocks_an_event = policy.blocks_an_event
        self._last_move = 0
        self._ledgers: list[dict[Tier, SlotChanges]] = []
        self._events: list[tuple[_Header, BlockChanges]] = []
        """The last event may still grow."""
        self._moves: list[Move] = []
        self._open: dict[_Lane, Move] = {}
        """Moves that may grow, by lane."""
        self._grants: list[Grant] = []
        self._refusals: list[Refusal] = []

    def ledgers(self, group: GroupId, tiers: Iterable[Tier]) -> dict[Tier, SlotChanges]:
        """Returns the group's changes of this call by tier, which become part of the outcome. Each call begins with
        new ones."""
        ledgers = {tier: SlotChanges(group, tier) for tier in tiers}
        self._ledgers.append(ledgers)
        return ledgers

    def change(
        self, type: EventType, cause: Cause, group: GroupId, block: Block, transfer: Transfer | None = None
    ) -> None:
        """Records the block's state after a change."""
        header, last = self._events[-1] if self._events else (None, NO_CHANGES)
        if header != (type, cause, group, transfer) or len(last.keys) >= self._blocks_an_event:
            last = self.mark(type, cause, group, transfer)
        last.keys.append(block.key)
        last.parents.append(block.parent_key)
        last.residencies.append(0 if type is REMOVED else block.residency)
        last.priorities.append(block.priority)
        last.labels.append(block.traits.label)
        parent = block.parent if type is STORED else None
        last.parent_labels.append(None if parent is None else parent.traits.label)

    def mark(self, type: EventType, cause: Cause, group: GroupId, transfer: Transfer | None = None) -> BlockChanges:
        """Begins an event. Without blocks it is an event of the whole group: created or cleared."""
        changes = BlockChanges()
        self._events.append(((type, cause, group, transfer), changes))
        return changes

    def plan(
        self, group: GroupId, src: Tier, dst: Tier | None, cause: Cause, block: Block, slot: SlotId, to: SlotId | None
    ) -> MoveId:
        """Adds the block to a move along this edge, from one slot to another."""
        lane = group, src, dst, cause
        move = self._open.get(lane)
        if move is None or len(move.items) >= self._blocks_a_move:
            move = self._begin_move(lane)
        move.items.append(MoveItem(block.key, block.parent_key, block.traits, slot, to))
        return move.id

    def _begin_move(self, lane: _Lane) -> Move:
        self._last_move += 1
        move = Move(MoveId(self._last_move), *lane)
        if move.touches_disk:
            self._open = {lane: other for lane, other in self._open.items() if not other.touches_disk}
        self._open[lane] = move
        self._moves.append(move)
        return move

    def grant(self, grant: Grant) -> None:
        self._grants.append(grant)

    def refuse(self, refusal: Refusal) -> None:
        self._refusals.append(refusal)

    def take(self, now: int, capacity: dict[GroupId, tuple[tuple[Tier, int], ...]]) -> Outcome:
        """Returns the outcome of the call, with event ids, and empties the recorder."""
        outcome = Outcome(
            tuple(self._moves),
            tuple(self._grants),
            tuple(self._refusals),
            tuple(self._take_slots()),
            tuple([self._event(*event, now, capacity) for event in self._events]),
        )
        self._events.clear()
        self._moves.clear()
        self._open.clear()
        self._grants.clear()
        self._refusals.clear()
        return outcome

    def _take_slots(self) -> Iterator[SlotChanges]:
        for ledgers in self._ledgers:
            for tier, changes in ledgers.items():
                if changes.changed:
                    ledgers[tier] = SlotChanges(changes.group, tier)
                    yield changes

    def _event(
        self, header: _Header, blocks: BlockChanges, now: int, capacity: dict[GroupId, tuple[tuple[Tier, int], ...]]
    ) -> BlockEvent:
        type, cause, group, transfer = header
        event = (self._sequencer.take(), type, cause, self._cache, group, now, blocks)
        if type is EventType.CREATED:
            return BlockEvent(*event, capacity=capacity[group])
        if transfer is None:
            return BlockEvent(*event)
        moved_bytes = transfer.block_bytes * len(blocks)
        return BlockEvent(*event, transfer.src, transfer.dst, moved_bytes, transfer.queue_ns, transfer.copy_ns)
