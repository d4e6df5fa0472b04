"""Eviction order.

A block's place in the order is its rank, one number for all tiers. So no parent ranks under its child, even in
another tier, and comparing numbers orders a tier's candidates. Among the leaves of the lowest tier, the learned value
of a block (``core/returns.py``) may decide instead.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Final

from kvtierd.core.block import Block, Copy, Use
from kvtierd.core.ids import SlotId, Tier
from kvtierd.core.returns import DRAWS, LEARNED, LRU, Draws, ReturnTimes, Shadows

POLICIES: Final[Mapping[str, str]] = {LRU: LRU, LEARNED: LEARNED, "lfuda": LEARNED}
"""Policies by their name in a cache's options. ``lfuda`` is the name in the options of older caches."""

_SLOT_BITS: Final = 32
_SLOT: Final = (1 << _SLOT_BITS) - 1
SWEPT_AN_OFFER: Final = 2
"""Entries of a candidate list that one offer looks at while stale entries are swept out."""


class Evictor:
    """Ranks the blocks of one group: lowest priority first, then least recently used; and values them.

    Orders inside a priority are unique. A parent's order is above its child's once both have been used. With the policy
    "learned", the values choose among the leaves of the lowest tier while the shadows say that fewer requests miss.
    """

    def __init__(self, policy: str, slots: int) -> None:
        """``slots``: slots of the group's lowest tier."""
        self._clock = 0
        self._learned = POLICIES[policy] == LEARNED
        self.times = ReturnTimes()
        self.shadows = Shadows(slots, self.times)
        self.by_value = False
        """Whether values choose."""

    def use(self, block: Block) -> None:
        """Counts a use of the block. The caller also uses all its ancestors, children before parents."""
        self._clock += 1
        block.used(self._clock)

    def asked(self, found: Sequence[Block], made: Sequence[Block], now: int) -> None:
        """Counts a request that found some blocks and made others, parents before children."""
        for blocks in (found, made):
            if blocks:
                self.times.request(blocks, now, (made or found)[-1].depth + 1)
        self.shadows.see(reversed(made))
        self.shadows.see(reversed(found))
        self.by_value = self._learned and self.shadows.favour_learned


class Ranked:
    """A list of candidates, lowest rank first: a heap whose stale entries are skipped when they surface.

    An entry counts while the block's copy in ``tier`` says that the block is on the list ``bit`` at the entry's rank,
    so the list is not told of removals. An offer takes O(log n); no call scans the heap. When most entries may be
    stale, each offer moves a few live entries to a new heap, so that no call waits for the whole heap. An entry is one
    integer, the rank above the slot: with tuples, garbage collection would stop the loop for long. ``blocks``: the
    tier's blocks by slot.
    """

    def __init__(self, tier: Tier, bit: int, blocks: Sequence[Block | None]) -> None:
        self._tier = tier
        self._bit = bit
        self._blocks = blocks
        self._heap: list[int] = []
        self._old: list[int] = []
        """The rest of the previous heap. Entries leave at its end, so it stays a heap."""
        self._swept: set[int] = set()
        """Entries moved to the new heap: a block may have been offered twice."""
        self._sweep_at = 64

    def offer(self, rank: int, slot: SlotId) -> None:
        """Makes the block in the slot a candidate, or changes a candidate's rank."""
        heapq.heappush(self._heap, rank << _SLOT_BITS | slot)
        if self._old or self._swept:
            self._sweep()
        elif len(self._heap) > self._sweep_at:
            self._old, self._heap = self._heap, []

    def _listed(self, entry: int) -> Block | None:
        """The block of an entry; None if the entry is stale."""
        block = self._blocks[entry & _SLOT]
        copy = None if block is None else block.copies[self._tier]
        return block if copy is not None and copy.listed & self._bit and copy.ranked == entry >> _SLOT_BITS else None

    def _sweep(self) -> None:
        for _ in range(min(SWEPT_AN_OFFER, len(self._old))):
            entry = self._old.pop()
            if entry not in self._swept and self._listed(entry) is not None:
                self._swept.add(entry)
                heapq.heappush(self._heap, entry)
        if not self._old:
            self._sweep_at = 2 * len(self._swept) + 64  # entries offered meanwhile may be stale again
            self._swept = set()

    def victim(self, spared: Collection[Block] = ()) -> Block | None:
        """The first candidate that is not ``spared``. The victim stays a candidate until its copy's record changes."""
        aside: list[int] = []
        found = None
        while found is None and (heap := self._lower()):
            block = self._listed(heap[0])
            if block is None:
                heapq.heappop(heap)
            elif block in spared:
                aside.append(heapq.heappop(heap))
            else:
                found = block
        for entry in aside:
            heapq.heappush(self._heap, entry)
        return found

    def _lower(self) -> list[int]:
        """The heap with the lower first rank."""
        heap, old = self._heap, self._old
        return old if old and (not heap or old[0] < heap[0]) else heap

    def __iter__(self) -> Iterator[Block]:
        """Yields every candidate once, in any order."""
        found = (self._listed(entry) for entry in chain(self._heap, self._old))
        return iter({block: None for block in found if block is not None})


class Valued(Ranked):
    """Candidates of which the least valuable goes first within the lowest priority.

    The least valuable is found among candidates drawn at random. Then its ancestors follow, as long as they have the
    same last use and so the same value.
    """

    def __init__(self, tier: Tier, bit: int, blocks: Sequence[Block | None], evictor: Evictor) -> None:
        super().__init__(tier, bit, blocks)
        self._evictor = evictor
        self._draws = Draws()
        self._run: Use | None = None
        self._above: Block | None = None
        """The parent of the last victim. ``_run``: the victim's last use."""

    def victim(self, spared: Collection[Block] = ()) -> Block | None:
        first = super().victim(spared)
        if first is None or not self._evictor.by_value:
            return first
        chosen = self._following(first, spared) or self._least(first, spared)
        self._run, self._above = chosen.use, chosen.parent
        return chosen

    def _following(self, first: Block, spared: Collection[Block]) -> Block | None:
        """The parent of the last victim, if it is a candidate of the same value."""
        block, self._above = self._above, None
        if block is None or block.use is not self._run or block.priority != first.priority or block in spared:
            return None
        copy = block.copies[self._tier]
        return block if copy is not None and copy.listed & self._bit else None

    def _least(self, first: Block, spared: Collection[Block]) -> Block:
        value = self._evictor.times.value
        chosen, least = first, value(first.use)
        for entry in self._drawn():
            block = self._listed(entry)
            if block is not None and block.priority == first.priority and block not in spared:
                worth = value(block.use)
                if worth < least or (worth == least and block.rank < chosen.rank):
                    chosen, least = block, worth
        return chosen

    def _drawn(self) -> list[int]:
        """Some entries, of which at least a third are live; all, if they are few."""
        heap, old = self._heap, self._old
        heaped = len(heap)
        entries = heaped + len(old)
        places = self._draws.places(entries, 2 * DRAWS) if entries > 4 * DRAWS else range(entries)
        return [heap[place] if place < heaped else old[place - heaped] for place in places]


REDUNDANT: Final = 1
DEMOTABLE: Final = 2
CLEAN: Final = 4
LEAF: Final = 8
DIRTY: Final = 16
UNSETTLED: Final = 32
_GOES_FREELY: Final = REDUNDANT | CLEAN


class Candidates:
    """Blocks that may leave one tier: indexed, READY, unheld, unread and unclaimed there, in lists.

    ``redundant``: valid in a tier above; on disk, no disk-resident child needs it. The first victims. ``demotable``:
    not redundant, and its priority or a copy below lets it go down; one copy downwards may read it. ``clean``: valid in
    a tier below, so it leaves without a copy. ``leaf``: in no other tier and without indexed children, so it may be
    dropped. ``dirty``: demotable, unread, and not in a tier below or on the way there. ``unsettled``: in the lowest
    tier, blocks for the remote store. ``cleans``: number of clean or redundant blocks. ``evictor``: for the lowest
    tier, which blocks leave for good.
    """

    def __init__(self, tier: Tier, slots: int, evictor: Evictor | None) -> None:
        self._blocks: list[Block | None] = [None] * slots
        self.redundant = Ranked(tier, REDUNDANT, self._blocks)
        self.demotable = Ranked(tier, DEMOTABLE, self._blocks)
        self.clean = Ranked(tier, CLEAN, self._blocks)
        self.leaf = Ranked(tier, LEAF, self._blocks) if evictor is None else Valued(tier, LEAF, self._blocks, evictor)
        self.dirty = Ranked(tier, DIRTY, self._blocks)
        self.unsettled = Ranked(tier, UNSETTLED, self._blocks)
        self.cleans = 0

    def put(self, block: Block, copy: Copy, lists: int) -> None:
        """Puts the block on exactly these lists, at its present rank."""
        before, rank = copy.listed, block.rank
        unchanged = before if rank == copy.ranked else 0
        if lists == unchanged and lists == before:
            return
        copy.listed, copy.ranked = lists, rank
        self._blocks[copy.slot] = block if lists else None
        self.cleans += bool(lists & _GOES_FREELY) - bool(before & _GOES_FREELY)
        new = lists & ~unchanged
        if new & REDUNDANT:
            self.redundant.offer(rank, copy.slot)
        if new & DEMOTABLE:
            self.demotable.offer(rank, copy.slot)
        if new & CLEAN:
            self.clean.offer(rank, copy.slot)
        if new & LEAF:
            self.leaf.offer(rank, copy.slot)
        if new & DIRTY:
            self.dirty.offer(rank, copy.slot)
        if new & UNSETTLED:
            self.unsettled.offer(rank, copy.slot)
