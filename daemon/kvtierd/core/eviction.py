"""Eviction order: one small class for each policy.

A block's place in the order is its rank, one number a block: so no parent ranks under its child, in whatever tiers the
two are, and a tier's candidates are ordered by comparing numbers. What differs between policies is what a use does to a
rank.
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Final

from kvtierd.core.block import COLD_RANK, WHOLE_RANK, Block, Copy
from kvtierd.core.ids import Key, SlotId, Tier

PROTECTED: Final = 0.5
"""At most so many blocks of a group are hot, as a share of the slots of its lowest tier."""
STAY: Final = 3
"""A hot block that is not used while so many times the slots of its lowest tier have left is hot no more."""
WORTH: Final = 2
"""Unless protecting has lately saved more than so many misses for each that it has caused."""
SETTLED_AT_ONCE: Final = 64
"""Hot blocks that cool in one call because they have outstayed."""
_SLOT_BITS: Final = 32
_SLOT: Final = (1 << _SLOT_BITS) - 1
SWEPT_AN_OFFER: Final = 2
"""Entries of a list of candidates that an offer looks at, where stale ones are to go."""


class Lru:
    """Ranks the blocks of one group, lowest priority first; inside a priority, the least recently used first. Other
    policies are its subclasses.

    Ranks are unique, and after :meth:`settle` none of a parent is under its child's. ``hot``: how many blocks it
    protects now, :attr:`Block.hot` each, their ancestors among them; never more than ``most_hot``: here none.
    """

    __slots__ = ("_clock", "hot", "most_hot")

    def __init__(self, slots: int) -> None:
        """``slots``: of the group's lowest tier."""
        self._clock = 0
        self.hot = 0
        self.most_hot = 0

    def use(self, block: Block) -> None:
        """It is used. Always with all that it stands on, children before parents."""
        self._clock += 1
        block.used(self._clock)

    def enter(self, block: Block) -> None:
        """The block is indexed: its first use."""
        self.use(block)

    def settle(self) -> Iterable[Block]:
        """Such a prefix has been used whole. Gives the blocks whose rank has changed besides."""
        return ()

    def leave(self, block: Block) -> None:
        """It is indexed no more."""


class TwoQueues(Lru):
    """Blocks that come back after they have left go after all others, each kind least recently used first: 2Q (Johnson
    and Shasha, VLDB 1994) for chains.

    All that a hot block stands on is hot, too; a new block is kept by its last use. A bounded ring of keys remembers
    who has left. Beyond their share, the hot blocks used least recently are hot no more. Hot blocks that nobody wants
    any more would take others' places: they cool once they have waited for :data:`STAY`, except where protecting is
    seen to be worth it. A use of a hot block older than the last cold one to leave is a miss saved. The return of a key
    after fewer departures than there are hot blocks is a miss caused.
    """

    __slots__ = ("_caused", "_departed", "_last_to_leave", "_order", "_saved", "_slots", "_warming")

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self._slots = slots
        self._departed = Departed(slots)
        self._order: OrderedDict[Block, int] = OrderedDict()
        """The hot blocks, the least recently used first, and how many had left when each was used."""
        self._warming: set[Block] = set()
        """Parents of blocks that were hot when used: they are at their own use, which is to come."""
        self._last_to_leave = 0
        """When the cold block that left last had been used."""
        self._saved = 0
        self._caused = 0
        self.most_hot = int(PROTECTED * slots)

    def enter(self, block: Block) -> None:
        departures = self._departed.recall(block.key)
        if departures is not None:
            self._caused += departures < self.hot
            self._heat(block)
        super().use(block)
        self._follow(block)

    def use(self, block: Block) -> None:
        if block in self._warming:
            self._warming.discard(block)
            if not block.hot:
                self._heat(block)
        if block.hot:
            self._saved += block.last_use < self._last_to_leave
        super().use(block)
        self._follow(block)

    def _follow(self, block: Block) -> None:
        if block.hot:
            self._order[block] = self._departed.count
            self._order.move_to_end(block)
            if block.parent is not None:
                self._warming.add(block.parent)

    def settle(self) -> Iterator[Block]:
        if self._saved + self._caused > self._slots:
            self._saved, self._caused = self._saved // 2, self._caused // 2
        cooled = 0
        while self.hot > self.most_hot or (cooled < SETTLED_AT_ONCE and self._outstayed()):
            block = next(iter(self._order))
            self._cool(block)
            cooled += 1
            yield block

    def _outstayed(self) -> bool:
        """The hot block used least recently is hot no more."""
        departures = next(iter(self._order.values()), self._departed.count)
        return self._saved <= WORTH * self._caused and self._departed.count - departures > STAY * self._slots

    def leave(self, block: Block) -> None:
        self._departed.add(block.key)
        self._warming.discard(block)
        if block.hot:
            self._cool(block)
        else:
            self._last_to_leave = block.last_use

    def _heat(self, block: Block) -> None:
        block.heat(hot=True)
        self.hot += 1

    def _cool(self, block: Block) -> None:
        block.heat(hot=False)
        del self._order[block]
        self.hot -= 1


class Departed:
    """The last keys that were added, ``most`` of them at most, as digests of 8 bytes. ``count``: all that ever were."""

    __slots__ = ("_next", "_places", "_ring", "count")

    def __init__(self, most: int) -> None:
        self.count = 0
        self._ring = array("q", bytes(8 * most))
        self._next = 0
        self._places: dict[int, int] = {}
        """By digest: where in the ring."""

    def add(self, key: Key) -> None:
        place, digest = self._next, hash(key)
        oldest = self._ring[place]
        if self._places.get(oldest) == place:
            del self._places[oldest]
        self._ring[place] = digest
        self._places[digest] = place
        self._next = (place + 1) % len(self._ring)
        self.count += 1

    def recall(self, key: Key) -> int | None:
        """How many were added after the key; None if it is not remembered. From now on it is not."""
        place = self._places.pop(hash(key), None)
        return None if place is None else (self._next - place - 1) % len(self._ring)


EVICTORS: Final[Mapping[str, type[Lru]]] = {"lru": Lru, "2q": TwoQueues}
"""By the name that a cache's options give."""


class Ranked:
    """A list of candidates, the lowest rank first.

    A block that was offered at a rank is a candidate while its own record, its copy's in the ``tier``, says that it is
    on the list ``bit`` at that rank: the list itself need not be told that one has gone. A heap whose stale entries are
    skipped when they surface: O(log n) an offer, no scan ever. Where most of it may be stale, each offer moves a few
    entries that are not to a new one: so memory stays within a small factor of the candidates, and nobody waits for a
    whole heap to be gone through. An entry is one integer, the rank above the slot: a use of a long chain makes an
    entry a block, and a garbage collection would stop the loop to look at as many tuples.

    Args:
        blocks: The tier's, by slot: all that are on any list.
    """

    __slots__ = ("_bit", "_blocks", "_heap", "_old", "_sweep_at", "_swept", "_tier")

    def __init__(self, tier: Tier, bit: int, blocks: Sequence[Block | None]) -> None:
        self._tier = tier
        self._bit = bit
        self._blocks = blocks
        self._heap: list[int] = []
        self._old: list[int] = []
        """What is left of the heap before this one. Taken from its end, so it stays a heap."""
        self._swept: set[int] = set()
        """Entries that have been moved: a block may have been offered twice."""
        self._sweep_at = 64

    def offer(self, rank: int, slot: SlotId) -> None:
        """The block in the slot becomes a candidate, or is one whose rank is another now."""
        heapq.heappush(self._heap, rank << _SLOT_BITS | slot)
        if self._old or self._swept:
            self._sweep()
        elif len(self._heap) > self._sweep_at:
            self._old, self._heap = self._heap, []

    def _listed(self, entry: int) -> Block | None:
        """The block of an entry that is not stale."""
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
            self._sweep_at = 2 * len(self._swept) + 64  # what was offered meanwhile may be stale again
            self._swept = set()

    def victim(self, spared: Collection[Block] = ()) -> Block | None:
        """The candidate to go first, but none of the few ``spared``. It stays a candidate until its record says
        otherwise."""
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
        """Of the two heaps that with the lowest rank."""
        heap, old = self._heap, self._old
        return old if old and (not heap or old[0] < heap[0]) else heap

    def __iter__(self) -> Iterator[Block]:
        """Every candidate once, in any order."""
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
    """Who may leave one tier: blocks that are indexed, READY, unheld, unread and unclaimed there, in lists.

    ``redundant``: valid in a tier above; on disk besides, no disk-resident child needs it. The first victims.
    ``demotable``: not redundant, and its priority or a copy below lets it go down; one copy downwards may read it.
    ``clean``: valid in a tier below: may go without a copy. ``leaf``: resident nowhere else and without indexed
    children: may be dropped. ``dirty``: demotable, unread, and neither in a tier below nor on the way there.
    ``unsettled``: of the lowest tier, those that a store beyond the host is to have. ``cleans``: how many are clean or
    redundant. Hot blocks are protected in the lowest tier (``lowest``), which blocks leave for good; kept above as
    well, they would take places twice.
    """

    __slots__ = ("_blocks", "_counts", "clean", "cleans", "demotable", "dirty", "leaf", "redundant", "unsettled")

    def __init__(self, tier: Tier, slots: int, *, lowest: bool) -> None:
        self._counts = WHOLE_RANK if lowest else COLD_RANK
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
        if rank & ~self._counts:
            rank &= self._counts  # else the block's own integer does, and takes no memory
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
