"""A simulated mover: moves end in every order that the real mover allows, some with failures.

Moves that write or delete on disk begin, end and are reported in the order planned, other moves in any order. A copy
may touch its bytes at any moment between its begin and its end.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from kvtierd.core.ids import Key, MoveId, SlotId, Tier
from kvtierd.core.outcome import Move, MoveItem, MoveResult
from tests.simulation.chooser import Chooser
from tests.simulation.disk import Disk, Write
from tests.simulation.memory import TORN, Content, Memory
from tests.simulation.violation import require

FAILS_WHOLE: Final = 6
FAILS_IN_PART: Final = 4
CHANGED_IN_MEMORY: Final = 2
"""Per cent of the writes to disk that find bytes changed since their commit."""
BATCH: Final = 4
"""Maximum number of moves reported at once."""


class Stage(IntEnum):
    QUEUED = 0
    RUNNING = 1
    ENDED = 2


@dataclass(slots=True, eq=False)
class Journey:
    """A move between its plan and its report. ``before``: contents of each source when the move began. ``doomed``: the
    tier was lost meanwhile. ``spoiled``: sources whose bytes were found bad before the end."""

    move: Move
    stage: Stage = Stage.QUEUED
    before: list[Content] = field(default_factory=list)
    failed: frozenset[int] = frozenset()
    corrupt: frozenset[int] = frozenset()
    doomed: bool = False
    spoiled: frozenset[int] = frozenset()

    @property
    def writes_disk(self) -> bool:
        return self.move.dst is Tier.DISK or self.move.dst is None


class Mover:
    """Carries out moves on the simulated memories and disk."""

    def __init__(self, memories: Mapping[Tier, Memory], disk: Disk | None) -> None:
        self._memories = memories
        self._disk = disk
        self._journeys: dict[MoveId, Journey] = {}
        self._written: Counter[tuple[Tier, SlotId]] = Counter()
        self._read: Counter[tuple[Tier, SlotId]] = Counter()
        self._parents_written: Counter[Key] = Counter()
        self.deletions_failed = False
        """Whether a deletion failed in this life of the daemon, which does not write the slot again."""

    @property
    def in_flight(self) -> int:
        return len(self._journeys)

    def submit(self, move: Move) -> None:
        """Takes a move. No other move in flight may touch its destinations or write its sources."""
        require(bool(move.items), f"move {move.id} has no items")
        require(move.id not in self._journeys, f"move {move.id} is planned twice")
        for item in move.items:
            if move.dst is Tier.DISK:
                self._expect_ancestor(item)
            self._occupy(move, item)
        self._journeys[move.id] = Journey(move)

    def progress(self, choose: Chooser) -> None:
        """Some moves begin or end; no move is reported."""
        for journey in choose.each(list(self._journeys.values()), 15):
            if journey.stage is Stage.QUEUED and self._may_begin(journey):
                self._begin(journey)
            elif journey.stage is Stage.RUNNING:
                self._end(journey, choose)

    def report(self, choose: Chooser, *, faults: bool = True) -> list[MoveResult]:
        """Ends and reports some of the moves in flight."""
        return [self._report_one(choose, faults) for _ in range(choose.between(1, BATCH)) if self._journeys]

    def lose(self, tier: Tier) -> None:
        """Lets moves of a lost tier fail from now on."""
        for journey in self._journeys.values():
            move = journey.move
            if tier in (move.src, move.dst) or (tier is Tier.DISK and journey.writes_disk):
                journey.doomed = True

    def spoil(self, tier: Tier, slot: SlotId) -> None:
        """Bytes in memory were found bad: a write to disk that is still to read them finds it, too."""
        for journey in self._journeys.values():
            if journey.move.src is tier and journey.stage is not Stage.ENDED:
                items = enumerate(journey.move.items)
                journey.spoiled |= {position for position, item in items if item.src == slot}

    # -- one move ----------------------------------------------------------------------------------------------------

    def _report_one(self, choose: Chooser, faults: bool) -> MoveResult:
        journey = choose.pick(list(self._journeys.values()))
        if journey.writes_disk:
            journey = next(other for other in self._journeys.values() if other.writes_disk)
        if journey.stage is Stage.QUEUED:
            self._begin(journey)
        if journey.stage is Stage.RUNNING:
            self._end(journey, choose if faults else None)
        self._release(journey.move)
        del self._journeys[journey.move.id]
        return MoveResult(journey.move.id, journey.failed, journey.corrupt, choose.below(1000), choose.below(1000))

    def _may_begin(self, journey: Journey) -> bool:
        """Returns whether a move may begin. One thread writes the disk: a batch begins when earlier batches have
        ended."""
        if not journey.writes_disk:
            return True
        ahead = next(other for other in self._journeys.values() if other.writes_disk and other.stage is not Stage.ENDED)
        return ahead is journey

    def _begin(self, journey: Journey) -> None:
        journey.stage = Stage.RUNNING
        move = journey.move
        if move.dst is None:
            return
        journey.before = [self._peek(move.src, item.src) for item in move.items]
        for item in move.items:
            if move.dst is Tier.DISK:
                self._store.put_payload(_slot(item), TORN)
            else:
                self._memories[move.dst].contents[_slot(item)] = TORN

    def _end(self, journey: Journey, choose: Chooser | None) -> None:
        journey.stage = Stage.ENDED
        journey.failed = _failures(journey, choose) if choose is not None else frozenset()
        if journey.move.dst is None:
            self._retire(journey)
        elif journey.move.dst is Tier.DISK:
            if choose is not None and choose.chance(CHANGED_IN_MEMORY):
                journey.spoiled |= frozenset(choose.each(range(len(journey.move.items)), 30))
            journey.corrupt = journey.spoiled - journey.failed
            self._write(journey)
        else:
            self._copy(journey, self._memories[journey.move.dst])

    def _copy(self, journey: Journey, target: Memory) -> None:
        corrupt = set()
        for position, item in enumerate(journey.move.items):
            if position in journey.failed:
                continue
            if journey.move.src is not Tier.DISK:
                target.contents[_slot(item)] = self._copied(journey, position, item)
            elif (content := self._store.read(item.key, item.src)) is not None:
                target.contents[_slot(item)] = content
            else:
                corrupt.add(position)
                self._store.bad.add(item.src)
        journey.corrupt = frozenset(corrupt)

    def _write(self, journey: Journey) -> None:
        writes = {}
        for position, item in enumerate(journey.move.items):
            if position not in journey.failed | journey.corrupt:
                content = self._copied(journey, position, item)
                self._store.put_payload(_slot(item), content)
                writes[item.key] = Write(item.key, item.parent, item.traits, _slot(item), content)
        refused = self._store.commit(list(writes.values()), ())
        journey.failed |= {n for n, item in enumerate(journey.move.items) if item.key in refused}

    def _retire(self, journey: Journey) -> None:
        items = enumerate(journey.move.items)
        self._store.commit((), [(item.key, item.src) for n, item in items if n not in journey.failed])
        self.deletions_failed |= bool(journey.failed)

    def _copied(self, journey: Journey, position: int, item: MoveItem) -> Content:
        """Returns the bytes of a copy that read its source at any moment between its begin and its end."""
        before, after = journey.before[position], self._peek(journey.move.src, item.src)
        return after if before == after else TORN

    def _peek(self, tier: Tier, slot: SlotId) -> Content:
        return self._store.slab[slot] if tier is Tier.DISK else self._memories[tier].contents[slot]

    @property
    def _store(self) -> Disk:
        require(self._disk is not None, "a move touches a disk that the cache does not have")
        assert self._disk is not None
        return self._disk

    # -- slots in use by moves ---------------------------------------------------------------------------------------

    def _occupy(self, move: Move, item: MoveItem) -> None:
        source = (move.src, item.src)
        require(not self._written[source], f"{move.src} slot {item.src} is read while a copy fills it")
        if move.dst is None:
            require(not self._read[source], f"disk slot {item.src} is retired while a copy reads it")
            self._written[source] += 1
            return
        target = (move.dst, _slot(item))
        busy = self._written[target] or self._read[target]
        require(not busy, f"{move.dst} slot {item.dst} is given to a copy while another touches it")
        self._read[source] += 1
        self._written[target] += 1
        if move.dst is Tier.DISK:
            self._parents_written[item.key] += 1

    def _release(self, move: Move) -> None:
        for item in move.items:
            if move.dst is None:
                self._written[move.src, item.src] -= 1
                continue
            self._read[move.src, item.src] -= 1
            self._written[move.dst, _slot(item)] -= 1
            if move.dst is Tier.DISK:
                self._parents_written[item.key] -= 1

    def _expect_ancestor(self, item: MoveItem) -> None:
        """Checks that a block is written to disk only after its parent, or behind its parent in the queue."""
        known = item.parent is None or item.parent in self._store.records or self._parents_written[item.parent] > 0
        known |= not self._store.chained
        require(known, f"disk slot {item.dst} is to be written before the block's parent")


def _slot(item: MoveItem) -> SlotId:
    assert item.dst is not None
    return item.dst


def _failures(journey: Journey, choose: Chooser) -> frozenset[int]:
    positions = range(len(journey.move.items))
    if choose.chance(60 if journey.doomed else FAILS_WHOLE):
        return frozenset(positions)
    return frozenset(choose.each(positions, 50)) if choose.chance(FAILS_IN_PART) else frozenset()
