"""How many blocks of a window group have each residency set, counted as they change: what is clean is known unasked."""

from __future__ import annotations

from typing import Final

from kvtierd.core.block import Block
from kvtierd.core.ids import Tier

_SETS: Final = 1 << len(Tier)


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
