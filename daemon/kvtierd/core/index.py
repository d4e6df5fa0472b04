"""The key index of one window group."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from kvtierd.core.block import Block
from kvtierd.core.ids import Key


class BlockIndex:
    """Key to block, and pages in the order of indexing.

    Parents are indexed before their children, so every page order is a valid order to replay. The order list keeps the
    departed until they outnumber the living: O(1) amortised, and a page costs O(log n) plus its length plus the
    departed it skips.
    """

    __slots__ = ("_blocks", "_order")

    def __init__(self) -> None:
        self._blocks: dict[Key, Block] = {}
        self._order: list[Block] = []

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks.values())

    def get(self, key: Key) -> Block | None:
        return self._blocks.get(key)

    def add(self, block: Block) -> None:
        self._blocks[block.key] = block
        self._order.append(block)

    def remove(self, block: Block) -> None:
        del self._blocks[block.key]
        if len(self._order) > 2 * len(self._blocks) + 64:
            self._order = list(self._blocks.values())

    def before(self, id: int, limit: int) -> list[Block]:
        """At most ``limit`` blocks with ids under this one, the newest first."""
        found: list[Block] = []
        for position in range(bisect_left(self._order, id, key=lambda block: int(block.id)) - 1, -1, -1):
            if len(found) == limit:
                break
            if self._order[position].indexed:
                found.append(self._order[position])
        return found

    def page(self, after: int, limit: int) -> tuple[list[Block], int]:
        """At most ``limit`` blocks with ids above ``after``, and the id to go on from (0: there are no more)."""
        start = bisect_right(self._order, after, key=lambda block: int(block.id))
        found: list[Block] = []
        for position in range(start, len(self._order)):
            block = self._order[position]
            if not block.indexed:
                continue
            if len(found) == limit:
                return found, int(found[-1].id)
            found.append(block)
        return found, 0
