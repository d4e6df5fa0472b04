"""The key index of one window group."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Final, NamedTuple

from kvtierd.core.block import Block, Copy, Use
from kvtierd.core.events import Cause
from kvtierd.core.ids import NO_LABEL, TIERS, Key, SessionId, Tier, Traits

REMEMBERED: Final = 1 << 15
_MOST_REMEMBERED: Final = 1 << 20
SWEPT_A_REMOVAL: Final = 4
"""Places of the order list that one removal looks at while removed blocks are swept out."""
_GONE: Final = Block(Key(b""), None, None, Traits(0))
"""Placeholder for a block that has been swept out."""


class Departure(NamedTuple):
    """Why a block left, and its last ``use``. ``session``: its request took the room; ``NOBODY``: the daemon, or
    another cause."""

    time_ns: int
    cause: Cause
    session: SessionId
    use: Use | None


class Departed:
    """Remembers the last departures from a window group: one for each slot of the lowest tier, up to a bound, and
    :data:`REMEMBERED` more. Blocks of the same last use that leave in one call share a departure."""

    def __init__(self, slots: int) -> None:
        self._half = (min(slots, _MOST_REMEMBERED) + REMEMBERED) // 2
        self._new: dict[int, Departure] = {}
        """Departures by the digest of the key, which has 8 bytes."""
        self._old: dict[int, Departure] = {}
        self._leaving: defaultdict[tuple[Cause, SessionId, Use | None], list[int]] = defaultdict(list)
        """Digests of the blocks that leave in this call."""

    def add(self, block: Block, cause: Cause, session: SessionId) -> None:
        self._leaving[cause, session, block.use].append(hash(block.key))

    def stamp(self, now: int) -> None:
        """Ends a call, which is the time of its departures."""
        if self._leaving:
            for reason, digests in self._leaving.items():
                self._new.update(dict.fromkeys(digests, Departure(now, *reason)))
            self._leaving.clear()
            if len(self._new) > self._half:
                self._old, self._new = self._new, {}

    def get(self, key: Key) -> Departure | None:
        digest = hash(key)
        return self._new.get(digest) or self._old.get(digest)


class BlockIndex:
    """Maps keys to blocks, and pages through the blocks in the order of indexing.

    Each block gets a number above all earlier numbers. Parents are indexed before their children, so every page can be
    replayed in order. The order list keeps removed blocks until they outnumber the indexed blocks. Then each removal
    sweeps a few places, newest first, so that a long removed chain is not freed all at once. A page costs O(log n) plus
    its length plus the removed blocks it skips.
    """

    def __init__(self) -> None:
        self._blocks: dict[Key, Block] = {}
        self.get: Callable[[Key], Block | None] = self._blocks.get
        self._order: list[Block] = []
        self._numbers = array("Q")
        """Numbers of the blocks in the order list."""
        self._last = 0
        self._swept = self._kept = 0
        """The order list holds blocks before place ``_swept`` and from place ``_kept`` on, and none in between."""
        self._roots: dict[Block, None] = {}
        """Roots whose tokens are known."""

    def close(self) -> None:
        """Unlinks the blocks one by one, so that other threads can run in between."""
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
        """Removes a block. The caller clears ``Block.indexed`` afterwards."""
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
        """Yields the children of a block, or the roots whose tokens are known; newest first."""
        return reversed(self._roots) if parent is None else parent.children

    def before(self, number: int, limit: int) -> tuple[list[Block], int]:
        """Returns at most ``limit`` blocks with numbers under ``number``, newest first, and the number to go on from
        (0: no more blocks)."""
        newer = range(bisect_left(self._numbers, number, self._kept) - 1, self._kept - 1, -1)
        older = range(bisect_left(self._numbers, number, 0, self._swept) - 1, -1, -1)
        return self._indexed(chain(newer, older), limit)

    def page(self, after: int, limit: int) -> tuple[list[Block], int]:
        """Returns at most ``limit`` blocks with numbers above ``after``, and the number to go on from (0: no more
        blocks)."""
        older = range(bisect_right(self._numbers, after, 0, self._swept), self._swept)
        newer = range(bisect_right(self._numbers, after, self._kept), len(self._order))
        return self._indexed(chain(older, newer), limit)

    def _indexed(self, places: Iterable[int], limit: int) -> tuple[list[Block], int]:
        """The first indexed blocks at these places, and the number of the last; 0 if there are no more."""
        found: list[Block] = []
        last = 0
        for place in places:
            block = self._order[place]
            if not block.indexed:
                continue
            if len(found) == limit:
                return found, last
            found.append(block)
            last = self._numbers[place]
        return found, 0


_SETS: Final = 1 << len(TIERS)


class Residencies:
    """Counts the blocks by residency. The only writer of :attr:`Block.residency`."""

    def __init__(self) -> None:
        self._blocks = [0] * _SETS

    def change(self, block: Block, to: int) -> None:
        """Sets the tiers in which the block's copies are valid."""
        self._blocks[block.residency] -= 1
        self._blocks[to] += 1
        block.residency = to

    def count(self, residency: int) -> int:
        """Number of blocks with exactly this residency, which is not empty."""
        return self._blocks[residency]

    def doubled(self, tier: Tier) -> int:
        """Number of blocks that are valid in the tier and in a lower tier."""
        return sum(self._blocks[both] for both in range(2 * tier.bit, _SETS) if both & tier.bit)


class Pins:
    """Pin counts of a window group's copies. Few copies are pinned, so a copy has no field for its count."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._of_tier: dict[Tier, dict[Copy, tuple[Block, int]]] = {tier: {} for tier in tiers}

    def slots(self, tier: Tier) -> int:
        return len(self._of_tier[tier])

    def count(self, tier: Tier, copy: Copy) -> int:
        return self._of_tier[tier][copy][1] if copy in self._of_tier[tier] else 0

    def change(self, tier: Tier, block: Block, copy: Copy, by: int) -> int:
        """Changes the pin count of a copy. Returns the new count."""
        count = self.count(tier, copy) + by
        if count:
            self._of_tier[tier][copy] = (block, count)
        else:
            del self._of_tier[tier][copy]
        return count

    def forget(self, tier: Tier, copy: Copy) -> bool:
        """Forgets a copy that has gone. Returns whether it was pinned."""
        return self._of_tier[tier].pop(copy, None) is not None

    def residency(self, block: Block) -> int:
        """The tiers where the block is pinned, as a bit set."""
        return sum(tier.bit for tier, pinned in self._of_tier.items() if block.copies[tier] in pinned)

    def blocks(self) -> Iterator[Block]:
        """Yields the pinned blocks, each once a tier."""
        return (block for pinned in self._of_tier.values() for block, _ in pinned.values())

    def copies(self, tier: Tier) -> Iterator[tuple[Block, Copy]]:
        for copy, (block, _) in self._of_tier[tier].items():
            yield block, copy
