"""Eviction order: one small class behind one Protocol."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Protocol

from kvtierd.core.block import Block

Listed = Callable[[Block], bool]
"""Whether a block is a candidate now: its own record says so, and an evictor need not remember it again."""


class Evictor(Protocol):
    """An ordered set of candidates. The window manager decides who is a candidate; an evictor only who goes first.

    Made with a :data:`Listed` of its list. A block that was offered and is listed is a candidate.
    """

    def offer(self, block: Block) -> None:
        """The block becomes a candidate, or is one whose rank has changed."""

    def withdraw(self, block: Block) -> None:
        """It is a candidate no more."""

    def victim(self) -> Block | None:
        """The candidate to go first. It stays a candidate until withdrawn."""

    def __iter__(self) -> Iterator[Block]:
        """Every candidate once, in any order: for the checker."""


class PriorityLru:
    """Lowest priority first, inside a priority least recently used first.

    A heap whose stale entries are skipped when they surface: O(log n) an offer, no scan ever. It is rebuilt when most
    of it is stale, so memory stays within a small factor of the candidates.
    """

    __slots__ = ("_heap", "_listed", "_rebuild_at")

    def __init__(self, listed: Listed) -> None:
        self._listed = listed
        self._heap: list[tuple[int, Block]] = []
        self._rebuild_at = 64

    def offer(self, block: Block) -> None:
        heapq.heappush(self._heap, (block.rank, block))
        if len(self._heap) > self._rebuild_at:
            self._heap = [(block.rank, block) for block in self]
            heapq.heapify(self._heap)
            self._rebuild_at = 2 * len(self._heap) + 64

    def withdraw(self, block: Block) -> None:
        """Nothing: its entry is stale now."""

    def victim(self) -> Block | None:
        while self._heap:
            rank, block = self._heap[0]
            if block.rank == rank and self._listed(block):
                return block
            heapq.heappop(self._heap)
        return None

    def __iter__(self) -> Iterator[Block]:
        return iter({block: None for rank, block in self._heap if block.rank == rank and self._listed(block)})


EVICTORS: Final[Mapping[str, Callable[[Listed], Evictor]]] = {"lru": PriorityLru}
"""By the name that a cache's options give."""
