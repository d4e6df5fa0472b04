"""The key index of one window group."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from typing import Final

from kvtierd.core.block import Block, Copy
from kvtierd.core.ids import NO_LABEL, TIERS, Key, Tier


class BlockIndex:
    """Key to block, and pages in the order of indexing.

    Each block has a number, above those of all before it. Parents are indexed before their children, so every page
    order is a valid order to replay. The order list keeps the departed until they outnumber the living: O(1) amortised,
    and a page costs O(log n) plus its length plus the departed it skips.
    """

    __slots__ = ("_blocks", "_last", "_numbers", "_order", "_roots", "get")

    def __init__(self) -> None:
        self._blocks: dict[Key, Block] = {}
        self.get: Callable[[Key], Block | None] = self._blocks.get
        """The block of a key."""
        self._order: list[Block] = []
        self._numbers = array("Q")
        """Of the blocks in the order list."""
        self._last = 0
        self._roots: dict[Block, None] = {}
        """Those whose tokens are known."""

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks.values())

    def add(self, block: Block) -> None:
        self._last += 1
        self._blocks[block.key] = block
        self._order.append(block)
        self._numbers.append(self._last)
        if block.parent_key is None and (block.traits.label or NO_LABEL).tokens:
            self._roots[block] = None

    def remove(self, block: Block) -> None:
        """The block is indexed until its caller says otherwise."""
        del self._blocks[block.key]
        self._roots.pop(block, None)
        if len(self._order) > 2 * len(self._blocks) + 64:
            living = [one.indexed for one in self._order]
            self._numbers = array("Q", compress(self._numbers, living))
            self._order = list(compress(self._order, living))

    def children(self, parent: Block | None) -> Iterator[Block]:
        """Of a block, or the roots whose tokens are known; the newest first."""
        return reversed(self._roots) if parent is None else parent.children

    def before(self, number: int, limit: int) -> tuple[list[Block], int]:
        """At most ``limit`` blocks with numbers under this one, the newest first, and the number to go on from (0:
        there are no more)."""
        found: list[Block] = []
        for position in range(bisect_left(self._numbers, number) - 1, -1, -1):
            if self._order[position].indexed:
                found.append(self._order[position])
                if len(found) == limit:
                    return found, self._numbers[position]
        return found, 0

    def page(self, after: int, limit: int) -> tuple[list[Block], int]:
        """At most ``limit`` blocks with numbers above ``after``, and the one to go on from (0: there are no more)."""
        found: list[Block] = []
        last = 0
        for position in range(bisect_right(self._numbers, after), len(self._order)):
            block = self._order[position]
            if not block.indexed:
                continue
            if len(found) == limit:
                return found, last
            found.append(block)
            last = self._numbers[position]
        return found, 0


_SETS: Final = 1 << len(TIERS)


class Residencies:
    """The only writer of :attr:`Block.residency`."""

    __slots__ = ("_blocks",)

    def __init__(self) -> None:
        self._blocks = [0] * _SETS

    def change(self, block: Block, to: int) -> None:
        """The block's copies are valid in just the tiers of ``to`` now."""
        self._blocks[block.residency] -= 1
        self._blocks[to] += 1
        block.residency = to

    def count(self, residency: int) -> int:
        """Blocks with just this set, which is not empty."""
        return self._blocks[residency]

    def doubled(self, tier: Tier) -> int:
        """Blocks that are in the tier and in a lower one as well."""
        return sum(self._blocks[both] for both in range(2 * tier.bit, _SETS) if both & tier.bit)


class Pins:
    """How often which copies of a window group are pinned. Few are, so nothing is kept with the others."""

    __slots__ = ("_of_tier",)

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._of_tier: dict[Tier, dict[Copy, tuple[Block, int]]] = {tier: {} for tier in tiers}

    def slots(self, tier: Tier) -> int:
        """Pinned ones of the tier."""
        return len(self._of_tier[tier])

    def count(self, tier: Tier, copy: Copy) -> int:
        return self._of_tier[tier][copy][1] if copy in self._of_tier[tier] else 0

    def change(self, tier: Tier, block: Block, copy: Copy, by: int) -> int:
        """Returns how often the copy is pinned now."""
        count = self.count(tier, copy) + by
        if count:
            self._of_tier[tier][copy] = (block, count)
        else:
            del self._of_tier[tier][copy]
        return count

    def forget(self, tier: Tier, copy: Copy) -> bool:
        """The copy is gone. Returns whether it was pinned."""
        return self._of_tier[tier].pop(copy, None) is not None

    def residency(self, block: Block) -> int:
        """The tiers where the block is pinned, as a bit set."""
        return sum(tier.bit for tier, pinned in self._of_tier.items() if block.copies[tier] in pinned)

    def blocks(self) -> Iterator[Block]:
        """Those pinned, once a tier."""
        for pinned in self._of_tier.values():
            for block, _ in pinned.values():
                yield block

    def copies(self, tier: Tier) -> Iterator[tuple[Block, Copy]]:
        for copy, (block, _) in self._of_tier[tier].items():
            yield block, copy
