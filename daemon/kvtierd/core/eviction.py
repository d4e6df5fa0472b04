"""Eviction order: one small class for each policy.

A block's place in the order is its rank, one number for all tiers. So no parent ranks under its child, even in
another tier, and comparing numbers orders a tier's candidates. Policies differ in how a use changes the rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Final

from kvtierd.core.block import Block, Copy
from kvtierd.core.ids import SlotId, Tier
from kvtierd.core.shadow import LEVELS, LFUDA, LRU, REMEMBERED, Departed, Shadows

USES: Final = 2.5
"""Uses of a block by one request: on a find or store, and on the release."""
_LEVEL_STEP: Final = 8
"""Distance between the orders of two uses; the level of a block fits in between."""
_SLOT_BITS: Final = 32
_SLOT: Final = (1 << _SLOT_BITS) - 1
SWEPT_AN_OFFER: Final = 2
"""Entries of a candidate list that one offer looks at while stale entries are swept out."""


class Lru:
    """Ranks the blocks of one group: lowest priority first, then least recently used. Base class of the other policies.

    Orders inside a priority are unique. A parent's order is above its child's once both have been used.
    """

    def __init__(self, slots: int, shadows: Shadows) -> None:
        """``slots``: slots of the group's lowest tier. ``shadows``: estimate the misses of each policy."""
        self._clock = 0
        self.lift = 0
        """Distance in the order that one level adds. The last bits of a block's order are its level."""

    def use(self, block: Block) -> None:
        """Counts a use of the block. The caller also uses all its ancestors, children before parents."""
        self._clock += 1
        block.used(self._clock)

    def enter(self, block: Block) -> None:
        """Counts the first use of a block that is now indexed."""
        self.use(block)

    def found(self, blocks: Sequence[Block]) -> None:
        """Counts one use of each block that a request found, however often the request touches the block."""

    def settle(self) -> None:
        """Lets the policy change how a use ranks. Called when every use has reached all ancestors."""

    def leave(self, block: Block) -> None:
        """Forgets a block that is no longer indexed."""


class Lfuda(Lru):
    """Keeps blocks that are used more often longer: LFU with dynamic aging (Arlitt et al., 2000) for chains.

    Each use after the first, up to :data:`LEVELS`, moves a block as far back in the order as one use of every slot
    would. Uses are remembered after a block has left. While the shadows say that plain LRU finds more, LRU alone
    decides. A block's level, at most its parent's, is the last bits of its order, so orders are unique.
    """

    def __init__(self, slots: int, shadows: Shadows) -> None:
        super().__init__(slots, shadows)
        self.lift = int(USES * slots) * _LEVEL_STEP
        self._lifts = False
        self._shadows = shadows
        self._levels: dict[Block, int] = {}
        """Levels of the blocks that have been used more than once."""
        self._least: dict[Block, int] = {}
        """Least level of each parent whose child has just been used and whose own use is still to come."""
        self._departed = Departed(slots + REMEMBERED)

    def use(self, block: Block) -> None:
        self._clock += 1
        level = self._levels.get(block, 0) if self._lifts else 0
        if self._least:
            level = max(level, self._least.pop(block, 0))
        order = self._order(level)
        while order <= block.order:  # children that are not used now must keep lower ranks
            level += 1
            order = self._order(level)
        block.used(order)
        if level and block.parent is not None:
            self._least[block.parent] = max(level, self._least.get(block.parent, 0))

    def _order(self, level: int) -> int:
        return self._clock * _LEVEL_STEP + level * (self.lift + 1)

    def enter(self, block: Block) -> None:
        level = self._departed.recall(block.key)
        if level is not None:
            self._levels[block] = min(level + 1, LEVELS - 1)
        block.used(0)
        self.use(block)

    def found(self, blocks: Sequence[Block]) -> None:
        levels = self._levels
        for block in blocks:
            levels[block] = min(levels.get(block, 0) + 1, LEVELS - 1)

    def settle(self) -> None:
        self._lifts = self._shadows.favour(LFUDA)

    def leave(self, block: Block) -> None:
        self._least.pop(block, None)
        self._departed.add(block.key, self._levels.pop(block, 0))


EVICTORS: Final[Mapping[str, type[Lru]]] = {LRU: Lru, LFUDA: Lfuda}
"""Policies by their name in a cache's options."""


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
    tier, blocks for the remote store. ``cleans``: number of clean or redundant blocks. ``lift``: distance in the order
    that a level adds; it is taken off here, except in the lowest tier (0), which blocks leave for good.
    """

    def __init__(self, tier: Tier, slots: int, lift: int) -> None:
        self._lift = lift
        self._blocks: list[Block | None] = [None] * slots
        self.redundant = Ranked(tier, REDUNDANT, self._blocks)
        self.demotable = Ranked(tier, DEMOTABLE, self._blocks)
        self.clean = Ranked(tier, CLEAN, self._blocks)
        self.leaf = Ranked(tier, LEAF, self._blocks)
        self.dirty = Ranked(tier, DIRTY, self._blocks)
        self.unsettled = Ranked(tier, UNSETTLED, self._blocks)
        self.cleans = 0

    def put(self, block: Block, copy: Copy, lists: int) -> None:
        """Puts the block on exactly these lists, at its present rank."""
        before, rank = copy.listed, block.rank
        if self._lift and rank % _LEVEL_STEP:
            rank -= rank % _LEVEL_STEP * self._lift
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
