"""Who may leave a tier, and in which order: lists of candidates, each a promise about those that stand on it.

``core/group.py`` says which lists a block belongs on, ``core/room.py`` chooses victims from them.
"""

from __future__ import annotations

from typing import Final

from kvtierd.core.block import COLD_RANK, WHOLE_RANK, Block, Copy
from kvtierd.core.evict import Ranked
from kvtierd.core.ids import Tier

REDUNDANT: Final = 1
DEMOTABLE: Final = 2
CLEAN: Final = 4
LEAF: Final = 8
DIRTY: Final = 16
_GOES_FREELY: Final = REDUNDANT | CLEAN


class Candidates:
    """Who may leave one tier. A block stands only where all of what the list's name promises is true of it.

    All candidates are indexed, READY, unheld, unread and unclaimed there (a demotable one may be read by one copy
    downwards), and:

    - ``redundant``: valid in a tier above; on disk besides, no disk-resident child needs it. The first victims.
    - ``demotable``: not redundant, and its priority or a copy below lets it go down.
    - ``clean``: valid in a tier below: may go without a copy.
    - ``leaf``: resident nowhere else and without indexed children: may be dropped.
    - ``dirty``: demotable, unread, and neither in a tier below nor on the way there. Only of a cache with watermarks.

    ``cleans``: how many are clean or redundant: those that can go without a copy.

    Hot blocks are protected in the lowest tier (``lowest``), which blocks leave for good. Kept above as well, they
    would take places twice: what was promoted from disk stays there.
    """

    __slots__ = ("_counts", "clean", "cleans", "demotable", "dirty", "leaf", "redundant")

    def __init__(self, tier: Tier, *, lowest: bool) -> None:
        self._counts = WHOLE_RANK if lowest else COLD_RANK
        self.redundant = Ranked(tier, REDUNDANT)
        self.demotable = Ranked(tier, DEMOTABLE)
        self.clean = Ranked(tier, CLEAN)
        self.leaf = Ranked(tier, LEAF)
        self.dirty = Ranked(tier, DIRTY)
        self.cleans = 0

    def place_of(self, rank: int) -> int:
        """Where a block of this rank stands on the lists; :meth:`put` does the same."""
        return rank & self._counts

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
