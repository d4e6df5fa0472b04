"""Eviction order: one small class for each policy.

A block's place in the order is its rank, one number a block: so no parent ranks under its child, in whatever tiers the
two are, and a tier's candidates are ordered by comparing numbers. What differs between policies is what a use does to a
rank.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Final

from kvtierd.core.block import COLD_RANK, WHOLE_RANK, Block, Copy
from kvtierd.core.ids import Key, Tier

PROTECTED: Final = 0.5
"""At most so many blocks of a group are hot, as a share of the slots of its lowest tier."""
STAY: Final = 3
"""A hot block that is not used while so many times the slots of its lowest tier have left is hot no more."""
WORTH: Final = 2
"""Unless protecting has lately saved more than so many misses for each that it has caused."""
SETTLED_AT_ONCE: Final = 64
"""Hot blocks that are looked at in one call, so that those that have outstayed do not cool all at once."""
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

    __slots__ = ("_caused", "_departed", "_last_to_leave", "_order", "_rebuild_at", "_saved", "_slots", "_warming")

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self._slots = slots
        self._departed = Departed(slots)
        self._order: list[tuple[int, int, Block]] = []
        """A heap of the hot blocks by their last use, with how many had left by then, and with stale entries."""
        self._warming: set[Block] = set()
        """Parents of blocks that were hot when used: they are at their own use, which is to come."""
        self._rebuild_at = 64
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
            heapq.heappush(self._order, (self._clock, self._departed.count, block))
            if block.parent is not None:
                self._warming.add(block.parent)

    def settle(self) -> Iterator[Block]:
        if self._saved + self._caused > self._slots:
            self._saved, self._caused = self._saved // 2, self._caused // 2
        looked = 0
        while self._order and (self.hot > self.most_hot or looked < SETTLED_AT_ONCE):
            looked += 1
            clock, departures, block = self._order[0]
            current = block.hot and block.last_use == clock
            if current and self.hot <= self.most_hot and not self._outstayed(departures):
                break
            heapq.heappop(self._order)
            if current:
                self._cool(block)
                yield block
        if len(self._order) > self._rebuild_at:
            self._order = [entry for entry in self._order if entry[2].hot and entry[2].last_use == entry[0]]
            heapq.heapify(self._order)
            self._rebuild_at = 2 * len(self._order) + 64

    def _outstayed(self, departures: int) -> bool:
        """Of a hot block that was used last after so many had left."""
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
    whole heap to be gone through.
    """

    __slots__ = ("_bit", "_heap", "_old", "_sweep_at", "_swept", "_tier")

    def __init__(self, tier: Tier, bit: int) -> None:
        self._tier = tier
        self._bit = bit
        self._heap: list[tuple[int, Block]] = []
        self._old: list[tuple[int, Block]] = []
        """What is left of the heap before this one. Taken from its end, so it stays a heap."""
        self._swept: set[int] = set()
        """Ranks that have been moved: a block may have been offered twice."""
        self._sweep_at = 64

    def offer(self, rank: int, block: Block) -> None:
        """The block becomes a candidate, or is one whose rank is another now."""
        heapq.heappush(self._heap, (rank, block))
        if self._old or self._swept:
            self._sweep()
        elif len(self._heap) > self._sweep_at:
            self._old, self._heap = self._heap, []

    def _listed(self, rank: int, block: Block) -> bool:
        copy = block.copies[self._tier]
        return copy is not None and copy.listed & self._bit != 0 and copy.ranked == rank

    def _sweep(self) -> None:
        for _ in range(min(SWEPT_AN_OFFER, len(self._old))):
            rank, block = self._old.pop()
            if rank not in self._swept and self._listed(rank, block):
                self._swept.add(rank)
                heapq.heappush(self._heap, (rank, block))
        if not self._old:
            self._sweep_at = 2 * len(self._swept) + 64  # what was offered meanwhile may be stale again
            self._swept = set()

    def victim(self, spared: Collection[Block] = ()) -> Block | None:
        """The candidate to go first, but none of the few ``spared``. It stays a candidate until its record says
        otherwise."""
        if not spared:
            return self._first()
        aside: list[tuple[int, Block]] = []
        found = None
        while found is None and (heap := self._lower()):
            rank, block = heap[0]
            if not self._listed(rank, block):
                heapq.heappop(heap)
            elif block in spared:
                aside.append(heapq.heappop(heap))
            else:
                found = block
        for entry in aside:
            heapq.heappush(self._heap, entry)
        return found

    def _first(self) -> Block | None:
        while heap := self._lower():
            rank, block = heap[0]
            if self._listed(rank, block):
                return block
            heapq.heappop(heap)
        return None

    def _lower(self) -> list[tuple[int, Block]]:
        """Of the two heaps that with the lowest rank."""
        heap, old = self._heap, self._old
        return old if old and (not heap or old[0][0] < heap[0][0]) else heap

    def __iter__(self) -> Iterator[Block]:
        """Every candidate once, in any order."""
        entries = chain(self._heap, self._old)
        return iter({block: None for rank, block in entries if self._listed(rank, block)})


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
    children: may be dropped. ``dirty``: demotable, unread, and neither in a tier below nor on the way there; only of a
    cache with watermarks. ``unsettled``: of the lowest tier, those that a store beyond the host is to have. ``cleans``:
    how many are clean or redundant. Hot blocks are protected in the lowest tier (``lowest``), which blocks leave for
    good; kept above as well, they would take places twice.
    """

    __slots__ = ("_counts", "clean", "cleans", "demotable", "dirty", "leaf", "redundant", "unsettled")

    def __init__(self, tier: Tier, *, lowest: bool) -> None:
        self._counts = WHOLE_RANK if lowest else COLD_RANK
        self.redundant = Ranked(tier, REDUNDANT)
        self.demotable = Ranked(tier, DEMOTABLE)
        self.clean = Ranked(tier, CLEAN)
        self.leaf = Ranked(tier, LEAF)
        self.dirty = Ranked(tier, DIRTY)
        self.unsettled = Ranked(tier, UNSETTLED)
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
        self.cleans += bool(lists & _GOES_FREELY) - bool(before & _GOES_FREELY)
        new = lists & ~unchanged
        if new & REDUNDANT:
            self.redundant.offer(rank, block)
        if new & DEMOTABLE:
            self.demotable.offer(rank, block)
        if new & CLEAN:
            self.clean.offer(rank, block)
        if new & LEAF:
            self.leaf.offer(rank, block)
        if new & DIRTY:
            self.dirty.offer(rank, block)
        if new & UNSETTLED:
            self.unsettled.offer(rank, block)
