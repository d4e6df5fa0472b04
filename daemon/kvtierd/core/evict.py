"""Eviction order: one small class behind one Protocol."""

from __future__ import annotations

import heapq
from typing import Protocol

from kvtierd.core.block import Block


class Evictor(Protocol):
    """An ordered set of candidates. The window manager decides who is a candidate; an evictor only who goes first."""

    def offer(self, block: Block) -> None:
        """Adds the block, or takes note that its rank may have changed."""

    def withdraw(self, block: Block) -> None:
        """Removes the block; nothing happens if it is not a candidate."""

    def victim(self) -> Block | None:
        """The candidate to go first. It stays a candidate until withdrawn."""

    def __contains__(self, block: Block) -> bool: ...

    def __len__(self) -> int: ...


class PriorityLru:
    """Lowest priority first, inside a priority least recently used first.

    A heap whose stale entries are skipped when they surface: O(log n) an offer, no scan ever. It is rebuilt when most
    of it is stale, so memory stays within a small factor of the candidates.
    """

    __slots__ = ("_heap", "_ranks")

    def __init__(self) -> None:
        self._ranks: dict[Block, int] = {}
        self._heap: list[tuple[int, int, Block]] = []

    def offer(self, block: Block) -> None:
        rank = block.rank()
        if self._ranks.get(block) == rank:
            return
        self._ranks[block] = rank
        heapq.heappush(self._heap, (rank, block.id, block))
        if len(self._heap) > 4 * len(self._ranks) + 64:
            self._heap = [(rank, block.id, block) for block, rank in self._ranks.items()]
            heapq.heapify(self._heap)

    def withdraw(self, block: Block) -> None:
        self._ranks.pop(block, None)

    def victim(self) -> Block | None:
        while self._heap:
            rank, _, block = self._heap[0]
            if self._ranks.get(block) == rank:
                return block
            heapq.heappop(self._heap)
        return None

    def __contains__(self, block: Block) -> bool:
        return block in self._ranks

    def __len__(self) -> int:
        return len(self._ranks)
