"""Collects what one call of the core tells its caller to do."""

from __future__ import annotations

from typing import NamedTuple

from kvtierd.core.block import Block
from kvtierd.core.bulk import rows
from kvtierd.core.events import REMOVED, STORED, Cause, Changes, Event, EventSequencer, EventType
from kvtierd.core.ids import DISK, CacheId, GroupId, Key, MoveId, SlotId, Tier
from kvtierd.core.ledger import Ledger
from kvtierd.core.outcome import Grant, Move, MoveItem, Outcome, Refusal
from kvtierd.core.policy import Policy
from kvtierd.core.traits import Label, Traits


class Transfer(NamedTuple):
    """What an ``updated`` event says of the move behind it. ``block_bytes``: of one block."""

    src: Tier
    dst: Tier
    block_bytes: int
    queue_ns: int
    copy_ns: int


class _Telling:
    """An event that may still grow. What of a block may change afterwards, in columns; the rest is asked of it then."""

    __slots__ = ("blocks", "cause", "group", "priorities", "residencies", "transfer", "type")

    def __init__(self, type: EventType, cause: Cause, group: GroupId, transfer: Transfer | None) -> None:
        self.type = type
        self.cause = cause
        self.group = group
        self.transfer = transfer
        self.blocks: list[Block] = []
        self.residencies: list[int] = []
        self.priorities: list[int] = []

    def takes(self, type: EventType, cause: Cause, group: GroupId, transfer: Transfer | None) -> bool:
        """Whether a change with this header belongs to it."""
        return (
            self.type is type
            and self.cause is cause
            and self.group == group
            and (self.transfer is transfer or self.transfer == transfer)
        )

    def changes(self) -> Changes:
        blocks = self.blocks
        keys, parents = [block.key for block in blocks], [block.parent_key for block in blocks]
        labels = [block.traits.label for block in blocks]
        above: list[Label | None] = [None] * len(blocks)
        if self.type is STORED:
            above = [None if block.parent is None else block.parent.traits.label for block in blocks]
        return Changes(keys, parents, self.residencies, self.priorities, labels, above)


class _Planned:
    """A move that may still grow, along one lane: a group's edge and why. Its items are columns."""

    __slots__ = ("cause", "dst", "group", "id", "keys", "parents", "slots", "src", "to", "traits")

    def __init__(self, id: MoveId, group: GroupId, src: Tier, dst: Tier | None, cause: Cause) -> None:
        self.id = id
        self.group = group
        self.src = src
        self.dst = dst
        self.cause = cause
        self.keys: list[Key] = []
        self.parents: list[Key | None] = []
        self.traits: list[Traits] = []
        self.slots: list[SlotId] = []
        self.to: list[SlotId | None] = []

    def is_along(self, group: GroupId, src: Tier, dst: Tier | None, cause: Cause) -> bool:
        return self.src is src and self.dst is dst and self.cause is cause and self.group == group

    @property
    def touches_disk(self) -> bool:
        """Only the newest lane that writes or deletes on disk takes items: ancestors are committed before or with their
        descendants, and a deletion before a slot or a key is written again, so none of them may overtake another by
        joining an older move."""
        return self.dst is DISK or self.dst is None

    def move(self) -> Move:
        items = rows(MoveItem, self.keys, self.parents, self.traits, self.slots, self.to)
        return Move(self.id, self.group, self.src, self.dst, self.cause, tuple(items))


class Recorder:
    """One for all groups of a cache, emptied by :meth:`take` at the end of each call.

    Changes with the same header that follow each other become one event; items of the same lane become one move.
    """

    def __init__(self, cache: CacheId, sequencer: EventSequencer, policy: Policy) -> None:
        self._cache = cache
        self._sequencer = sequencer
        self._blocks_a_move = policy.blocks_a_move
        self._blocks_an_event = policy.blocks_an_event
        self._last_move = 0
        self._touched: list[Ledger] = []
        self._events: list[_Telling] = []
        self._telling: _Telling | None = None
        """The last of the events, where it may grow."""
        self._moves: list[_Planned] = []
        self._open: list[_Planned] = []
        """Those moves that may grow, one a lane."""
        self._grants: list[Grant] = []
        self._refusals: list[Refusal] = []

    def ledger(self, group: GroupId, tier: Tier) -> Ledger:
        """A new one, of slots whose changes become part of the outcome."""
        return Ledger(group, tier, self._touched)

    def change(
        self, type: EventType, cause: Cause, group: GroupId, block: Block, transfer: Transfer | None = None
    ) -> None:
        """Records the block as it is now, after the change."""
        telling = self._telling
        if (
            telling is None
            or len(telling.blocks) >= self._blocks_an_event
            or not telling.takes(type, cause, group, transfer)
        ):
            self._telling = telling = _Telling(type, cause, group, transfer)
            self._events.append(telling)
        telling.blocks.append(block)
        telling.residencies.append(0 if type is REMOVED else block.residency)
        telling.priorities.append(block.priority)

    def mark(self, type: EventType, cause: Cause, group: GroupId) -> None:
        """An event of the whole group: created or cleared."""
        self._events.append(_Telling(type, cause, group, None))
        self._telling = None

    def plan(
        self, group: GroupId, src: Tier, dst: Tier | None, cause: Cause, block: Block, slot: SlotId, to: SlotId | None
    ) -> MoveId:
        """Adds the block to a move along this edge, from one slot to another. Items of one move come back in the order
        they were planned in."""
        move = self._along(group, src, dst, cause)
        move.keys.append(block.key)
        move.parents.append(block.parent_key)
        move.traits.append(block.traits)
        move.slots.append(slot)
        move.to.append(to)
        return move.id

    def _along(self, group: GroupId, src: Tier, dst: Tier | None, cause: Cause) -> _Planned:
        full: _Planned | None = None
        for move in self._open:
            if move.is_along(group, src, dst, cause):
                if len(move.keys) < self._blocks_a_move:
                    return move
                full = move
        self._last_move += 1
        fresh = _Planned(MoveId(self._last_move), group, src, dst, cause)
        if fresh.touches_disk:
            self._open = [move for move in self._open if not move.touches_disk]
        elif full is not None:
            self._open.remove(full)
        self._open.append(fresh)
        self._moves.append(fresh)
        return fresh

    def grant(self, grant: Grant) -> None:
        self._grants.append(grant)

    def refuse(self, refusal: Refusal) -> None:
        self._refusals.append(refusal)

    def take(self, now: int, capacity: dict[GroupId, tuple[tuple[Tier, int], ...]]) -> Outcome:
        """The outcome of the call, its event ids assigned; the recorder is empty again."""
        outcome = Outcome(
            tuple([move.move() for move in self._moves]),
            tuple(self._grants),
            tuple(self._refusals),
            tuple([ledger.take() for ledger in self._touched]),
            tuple([self._event(telling, now, capacity) for telling in self._events]),
        )
        self._touched.clear()
        self._events.clear()
        self._telling = None
        self._moves.clear()
        self._open.clear()
        self._grants.clear()
        self._refusals.clear()
        return outcome

    def _event(self, telling: _Telling, now: int, capacity: dict[GroupId, tuple[tuple[Tier, int], ...]]) -> Event:
        type, group, transfer = telling.type, telling.group, telling.transfer
        event = (self._sequencer.take(), type, telling.cause, self._cache, group, now, telling.changes())
        if type is EventType.CREATED:
            return Event(*event, capacity=capacity[group])
        if transfer is None:
            return Event(*event)
        moved_bytes = transfer.block_bytes * len(telling.blocks)
        return Event(*event, transfer.src, transfer.dst, moved_bytes, transfer.queue_ns, transfer.copy_ns)
