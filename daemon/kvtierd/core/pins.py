"""Pins: copies of blocks that stay where they are until they are unpinned, nobody's lease.

A pinned copy counts as held once, so all that spares a leased copy spares it too: it is not evicted, demoted or
dropped, and its block's clock stands. A pin ends with its copy: with its tier, or with bytes that were lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtierd.core.block import Block, Copy
from kvtierd.core.ids import Tier


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
        return sum(tier.bit for tier, pinned in self._of_tier.items() if block.copy(tier) in pinned)

    def blocks(self) -> Iterator[Block]:
        """Those pinned, once a tier."""
        for pinned in self._of_tier.values():
            for block, _ in pinned.values():
                yield block

    def copies(self, tier: Tier) -> Iterator[tuple[Block, Copy]]:
        for copy, (block, _) in self._of_tier[tier].items():
            yield block, copy
