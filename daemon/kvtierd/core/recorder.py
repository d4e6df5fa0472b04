"""Collects what one call of the core tells its caller to do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from kvtierd.core.block import Block
from kvtierd.core.bulk import rows
from kvtierd.core.events import REMOVED, STORED, BlockChange, Cause, Event, EventSequencer, EventType
from kvtierd.core.ids import DISK, CacheId, GroupId, MoveId, SessionId, SlotId, Tier
from kvtierd.core.outcome import Content, Grant, Move, MoveItem, Outcome, Ownership, Refusal, SlotRef

MAX_EVENT_BLOCKS: Final = 256
MAX_MOVE_BLOCKS: Final = 16


@dataclass(slots=True, frozen=True)
class Transfer:
    """What an ``updated`` event says of the move behind it. ``block_bytes``: of one block."""

    src: Tier
    dst: Tier
    block_bytes: int
    queue_ns: int
    copy_ns: int


_Header = tuple[EventType, Cause, GroupId, Transfer | None]


@dataclass(slots=True, frozen=True)
class _Lane:
    group: GroupId
    src: Tier
    dst: Tier | None
    cause: Cause


_DISK_LANES: Final = (DISK, None)
"""Only the newest lane that writes or deletes on disk takes items: ancestors are committed before or with their
descendants, and a deletion before a slot or a key is written again, so none of them may overtake another by joining an
older move."""


class Recorder:
    """One for all groups of a cache, emptied by :meth:`take` at the end of each call.

    Changes with the same header that follow each other become one event; items of the same lane become one move.
    """

    def __init__(self, cache: CacheId, sequencer: EventSequencer) -> None:
        self._cache = cache
        self._sequencer = sequencer
        self._last_move = 0
        self._reset()

    def _reset(self) -> None:
        self._begins: dict[SlotRef, None] = {}
        self._ends: dict[SlotRef, Block] = {}
        self._restated: dict[SlotRef, Block] = {}
        self._disowned: dict[SlotRef, Block] = {}
        self._owners: dict[SlotRef, SessionId | None] = {}
        self._events: list[tuple[_Header, list[BlockChange]]] = []
        self._moves: list[tuple[MoveId, _Lane, list[MoveItem]]] = []
        self._open_lanes: dict[_Lane, int] = {}
        self._grants: list[Grant] = []
        self._refusals: list[Refusal] = []

    def begin_write(self, ref: SlotRef) -> None:
        """The slot's bytes are, or are about to be, no block's: its generation is odd until :meth:`end_write`."""
        self._ends.pop(ref, None)
        self._begins[ref] = None

    def free(self, ref: SlotRef) -> None:
        """The slot's bytes are no block's, and it is nobody's."""
        self.begin_write(ref)
        self._owners[ref] = None

    def end_write(self, ref: SlotRef, block: Block) -> None:
        """The slot's bytes are the block's."""
        self._ends[ref] = block

    def disown(self, ref: SlotRef, block: Block) -> None:
        """The slot's bytes stand for those who hold or copy them; they are the block's no more."""
        if self._ends.get(ref) is None:
            self._disowned[ref] = block

    def restate(self, ref: SlotRef, block: Block) -> None:
        """The slot's bytes are the block's, whose traits have changed."""
        if ref not in self._ends:
            self._restated[ref] = block

    def owner(self, ref: SlotRef, session: SessionId | None) -> None:
        self._owners[ref] = session

    def owners(self, refs: Iterable[SlotRef], session: SessionId | None) -> None:
        """The same of many slots."""
        self._owners.update(dict.fromkeys(refs, session))

    def change(
        self, type: EventType, cause: Cause, group: GroupId, block: Block, transfer: Transfer | None = None
    ) -> None:
        """Records the block as it is now, after the change."""
        residency = 0 if type is REMOVED else block.residency
        above = block.parent if type is STORED else None
        above_label = above.traits.label if above is not None else None
        change = BlockChange(block.key, block.parent_key, residency, block.priority, block.traits.label, above_label)
        header = (type, cause, group, transfer)
        if self._events:
            last, changes = self._events[-1]
            if last == header and len(changes) < MAX_EVENT_BLOCKS:
                changes.append(change)
                return
        self._events.append((header, [change]))

    def mark(self, type: EventType, cause: Cause, group: GroupId) -> None:
        """An event of the whole group: created or cleared."""
        self._events.append(((type, cause, group, None), []))

    def plan(self, group: GroupId, src: Tier, dst: Tier | None, cause: Cause, item: MoveItem) -> MoveId:
        """Adds an item to a move along this edge. Items of one move come back in the order they were planned in."""
        lane = _Lane(group, src, dst, cause)
        position = self._open_lanes.get(lane)
        if position is None or len(self._moves[position][2]) >= MAX_MOVE_BLOCKS:
            self._close_rivals(lane)
            self._last_move += 1
            position = self._open_lanes[lane] = len(self._moves)
            self._moves.append((MoveId(self._last_move), lane, []))
        move, _, items = self._moves[position]
        items.append(item)
        return move

    def _close_rivals(self, lane: _Lane) -> None:
        if lane.dst not in _DISK_LANES:
            return
        for rival in [rival for rival in self._open_lanes if rival.dst in _DISK_LANES]:
            del self._open_lanes[rival]

    def grant(self, grant: Grant) -> None:
        self._grants.append(grant)

    def refuse(self, refusal: Refusal) -> None:
        self._refusals.append(refusal)

    def take(self, now: int, capacity: dict[GroupId, tuple[tuple[Tier, int], ...]], *, again: bool = False) -> Outcome:
        """The outcome of the call, its event ids assigned; the recorder is empty again."""
        outcome = Outcome(
            moves=tuple(
                Move(move, lane.group, lane.src, lane.dst, lane.cause, tuple(items))
                for move, lane, items in self._moves
            ),
            grants=tuple(self._grants),
            refusals=tuple(self._refusals),
            begin_write=tuple(self._begins),
            contents=(
                *_contents(self._ends),
                *(Content(ref, None, None, block.traits) for ref, block in self._disowned.items()),
            ),
            end_write=tuple(self._ends),
            restated=tuple(_contents(self._restated)),
            owners=tuple(rows(Ownership, self._owners, self._owners.values())),
            events=tuple(self._event(header, changes, now, capacity) for header, changes in self._events),
            again=again,
        )
        self._reset()
        return outcome

    def _event(
        self,
        header: _Header,
        changes: list[BlockChange],
        now: int,
        capacity: dict[GroupId, tuple[tuple[Tier, int], ...]],
    ) -> Event:
        type, cause, group, transfer = header
        event = (self._sequencer.take(), type, cause, self._cache, group, now, tuple(changes))
        if type is EventType.CREATED:
            return Event(*event, capacity=capacity[group])
        if transfer is None:
            return Event(*event)
        moved = transfer.src, transfer.dst, transfer.block_bytes * len(changes), transfer.queue_ns, transfer.copy_ns
        return Event(*event, *moved)


def _contents(ends: dict[SlotRef, Block]) -> Iterator[Content]:
    """What slots hold that are some blocks'."""
    if not ends:
        return iter(())
    blocks = ends.values()
    keys, parents = [block.key for block in blocks], [block.parent_key for block in blocks]
    return rows(Content, ends, keys, parents, [block.traits for block in blocks])


def move_item(block: Block, src: SlotId, dst: SlotId | None) -> MoveItem:
    """The wire of a move: what the mover needs to know of a block."""
    return MoveItem(block.key, block.parent_key, block.traits, src, dst)
