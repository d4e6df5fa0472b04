"""In which order copies would leave a tier if slots were wanted there one after another, and nothing else happened.

``core/room.py`` chooses victims for good; here the same choices are gone through without carrying out any, as far as
one block's turn or a bound on the work. Nothing changes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from kvtierd.core.block import Block
from kvtierd.core.evict import Ranked
from kvtierd.core.group import GroupState
from kvtierd.core.ids import DISK, Tier

LOOKED_AT: Final = 128
"""Entries of lists that the answers for one block may take, all tiers together: one answer must not hold
up the loop, however deep a block stands."""


class Precision(IntEnum):
    """How a number is meant. Values are the wire's (``kvtier.v1.Precision``)."""

    EXACT = 1
    AT_LEAST = 2
    ABOUT = 3


@dataclass(slots=True, frozen=True)
class Standing:
    """``before``: copies that leave the tier before this one."""

    before: int
    precision: Precision


def standing(state: GroupState, tier: Tier, block: Block, *, sinks: bool, limit: int) -> Standing | None:
    """Where the block's copy in the tier stands in the order of eviction; None where making room alone does not take
    it, or not among the first ``limit`` entries.

    ``sinks``: what is to go down finds a way down; where that is not so, others may go first.
    """
    order = _Order(state, tier, limit, sinks=sinks)
    before = 0
    try:
        for victim in order.victims():
            if victim is block:
                return Standing(before, Precision.EXACT if order.exact else Precision.ABOUT)
            before += 1
    except _TooMany:
        copy = block.copy(tier)
        return Standing(before, Precision.AT_LEAST) if copy is not None and copy.listed else None
    return None


class _TooMany(Exception):
    """More entries than may be looked at."""


class _Line:
    """One list of candidates, and those that join it as others go."""

    __slots__ = ("_head", "_joined", "_listed")

    def __init__(self, ranked: Ranked) -> None:
        self._listed = ranked.in_order()
        self._head: tuple[int, Block] | None = None
        self._joined: list[tuple[int, Block]] = []

    def join(self, place: int, block: Block) -> None:
        heapq.heappush(self._joined, (place, block))

    def first(self, order: _Order) -> tuple[int, Block] | None:
        """Of those that have not gone, with its place."""
        while self._head is None or self._head[1] in order.gone:
            try:
                self._head = next(self._listed)
            except StopIteration:
                self._head = None
                break
            order.look()
        while self._joined and self._joined[0][1] in order.gone:
            heapq.heappop(self._joined)
        heads = [head for head in (self._head, self._joined[0] if self._joined else None) if head is not None]
        return min(heads, key=lambda head: head[0], default=None)


class _Order:
    """The choices of ``Room._vacate_one``, again and again. ``gone``: copies that have left; ``exact``: nothing that
    could change the order was left out."""

    def __init__(self, state: GroupState, tier: Tier, limit: int, *, sinks: bool) -> None:
        lists = state.candidates(tier)
        self._state, self._tier, self._lists = state, tier, lists
        self._redundant, self._leaves, self._demotable = map(_Line, (lists.redundant, lists.leaf, lists.demotable))
        self._children: dict[Block, int] = {}
        """Of parents that have lost some: how many are left."""
        self._disk_children: dict[Block, int] = {}
        self._tops: dict[Block, int] = {}
        """Of parents that have lost some: how many children are left that give it its priority."""
        self._fallen: set[Block] = set()
        """Those whose priority is lower since."""
        self._left = limit
        self._sinks = sinks
        self.gone: set[Block] = set()
        self.exact = True

    def look(self, entries: int = 1) -> None:
        self._left -= entries
        if self._left < 0:
            raise _TooMany

    def victims(self) -> Iterator[Block]:
        while True:
            leaf = self._leaves.first(self)
            if (first := self._redundant.first(self)) is not None:
                self._leave(first[1], dropped=False)
            elif (leaf is not None and self._expendable(leaf[1])) or (first := self._demotable.first(self)) is None:
                first = leaf
                if first is None:
                    return
                self._leave(first[1], dropped=True)
            else:
                self.exact &= self._sinks
                self._leave(first[1], dropped=False)
            yield first[1]

    def _expendable(self, leaf: Block) -> bool:
        """What has no children has its own priority, and no other."""
        return leaf.own_priority < self._state.floor[self._tier] or self._state.expendable(leaf, self._tier)

    def _leave(self, block: Block, *, dropped: bool) -> None:
        """``dropped``: it leaves the index as well; else it stays in another tier."""
        self.gone.add(block)
        parent = block.parent
        if parent is None:
            return
        if self._tier is DISK:
            self._disk_children[parent] = self._disk_children.get(parent, parent.disk_children) - 1
        if dropped:
            self._children[parent] = self._children_of(parent) - 1
            self._fall(parent, block.priority)
        self._join(parent)

    def _children_of(self, parent: Block) -> int:
        known = self._children.get(parent)
        if known is not None:
            return known
        count = 0
        for _ in parent.children:
            self.look()
            count += 1
        return count

    def _fall(self, parent: Block | None, lost: int) -> None:
        """A child that had the priority ``lost`` has gone."""
        while parent is not None and parent not in self._fallen and lost == parent.priority > parent.own_priority:
            tops = self._tops[parent] = self._tops.get(parent, self._state.priorities.top_children(parent)) - 1
            if tops > 0:
                return
            self._fallen.add(parent)
            copy = parent.copy(self._tier)
            self.exact &= copy is None or not copy.listed  # else its place on the lists is another now
            parent = parent.parent

    def _join(self, parent: Block) -> None:
        """The parent may be a candidate now that it was not."""
        copy = parent.copy(self._tier)
        if copy is None or not copy.still or parent.claims or parent in self.gone:
            return
        place_of, childless = self._lists.place_of, self._children.get(parent) == 0
        if parent.residency == self._tier.bit:
            if childless and parent.copies.count(None) == 2:
                self._leaves.join(place_of(parent.rank_at(parent.own_priority)), parent)
        elif self._disk_children.get(parent) == 0 and parent.residency & (self._tier.bit - 1):
            self.exact &= parent not in self._fallen or childless
            priority = parent.own_priority if childless else parent.priority
            self._redundant.join(place_of(parent.rank_at(priority)), parent)
