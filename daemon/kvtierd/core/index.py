"""The key index of one window group."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Final

from kvtierd.core.block import Block, Copy
from kvtierd.core.ids import NO_LABEL, TIERS, Key, Tier, Traits

SWEPT_A_REMOVAL: Final = 4
"""Places of the order list that a removal looks at, where the departed are to go."""
_GONE: Final = Block(Key(b""), None, None, Traits(0))
"""In the place of a block that has been swept."""


class BlockIndex:
    """Key to block, and pages in the order of indexing.

    Each block has a number, above those of all before it. Parents are indexed before their children, so every page
    order is a valid order to replay. The order list keeps the departed until they outnumber the living; then each
    removal sweeps a few places of it, the newest first, so that no chain of the departed is forgotten at once. A page
    costs O(log n) plus its length plus the departed it skips.
    """

    __slots__ = ("_blocks", "_kept", "_last", "_numbers", "_order", "_roots", "_swept", "get")

    def __init__(self) -> None:
        self._blocks: dict[Key, Block] = {}
        self.get: Callable[[Key], Block | None] = self._blocks.get
        """The block of a key."""
        self._order: list[Block] = []
        self._numbers = array("Q")
        """Of the blocks in the order list."""
        self._last = 0
        self._swept = self._kept = 0
        """Nothing is in between these places of the order list, but before the former, and from the latter on."""
        self._roots: dict[Block, None] = {}
        """Those whose tokens are known."""

    def close(self) -> None:
        """Takes the blocks apart one by one, so that other threads have their turn."""
        self._blocks.clear()
        self._roots.clear()
        while self._order:
            self._order.pop().part()

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
        if not self._swept and len(self._order) > 2 * len(self._blocks) + 64:
            self._swept = self._kept = len(self._order)
        if self._swept:
            self._sweep()

    def _sweep(self) -> None:
        order, numbers = self._order, self._numbers
        for place in range(self._swept - 1, max(self._swept - SWEPT_A_REMOVAL, 0) - 1, -1):
            block, order[place] = order[place], _GONE
            if block.indexed:
                self._kept -= 1
                order[self._kept], numbers[self._kept] = block, numbers[place]
            self._swept = place
        if not self._swept:
            del order[: self._kept], numbers[: self._kept]
            self._kept = 0

    def children(self, parent: Block | None) -> Iterator[Block]:
        """Of a block, or the roots whose tokens are known; the newest first."""
        return reversed(self._roots) if parent is None else parent.children

    def before(self, number: int, limit: int) -> tuple[list[Block], int]:
        """At most ``limit`` blocks with numbers under this one, the newest first, and the number to go on from (0:
        there are no more)."""
        found: list[Block] = []
        for position in chain(
            range(bisect_left(self._numbers, number, self._kept) - 1, self._kept - 1, -1),
            range(bisect_left(self._numbers, number, 0, self._swept) - 1, -1, -1),
        ):
            if self._order[position].indexed:
                found.append(self._order[position])
                if len(found) == limit:
                    return found, self._numbers[position]
        return found, 0

    def page(self, after: int, limit: int) -> tuple[list[Block], int]:
        """At most ``limit`` blocks with numbers above ``after``, and the one to go on from (0: there are no more)."""
        found: list[Block] = []
        last = 0
        for position in chain(
            range(bisect_right(self._numbers, after, 0, self._swept), self._swept),
            range(bisect_right(self._numbers, after, self._kept), len(self._order)),
        ):
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
