"""What uses of blocks mean in one window group: hits and misses are counted, recency moves, clocks start anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from kvtierd.core.background import Background
from kvtierd.core.block import Block
from kvtierd.core.group import GroupState
from kvtierd.core.ids import Key

TOUCHED_A_CALL: Final = 16_384
"""Blocks after which a touch takes no further key: as many as an acquire can name."""


class Uses:
    """``hits``: blocks, by the tier that they were found in. ``misses``: blocks that were asked for in vain."""

    def __init__(self, state: GroupState, background: Background) -> None:
        self._state = state
        self._background = background
        self.hits = dict.fromkeys(state.tiers, 0)
        self.misses = 0

    def found(self, blocks: Sequence[Block], found_in: Sequence[int], missed: int) -> None:
        """A chain was asked for. ``found_in``: the residency of each then; ``missed``: how many were not found."""
        self._used(blocks, found_in, missed)
        self._state.touch(reversed(blocks))

    def touch(self, keys: Sequence[Key], missed: int) -> None:
        """As if an acquire had found these blocks with all that they stand on; the last key was read last."""
        touched: dict[Block, None] = {}
        for key in reversed(keys):
            block = self._state.index.get(key)
            if block is not None:
                touched |= self._state.prefixes([block], touched)
            if len(touched) >= TOUCHED_A_CALL:
                break
        oldest_first = list(touched)[::-1]
        blocks = sorted(oldest_first, key=lambda block: block.depth)
        self._used(blocks, [block.residency for block in blocks], missed)
        self._state.touch(blocks)

    def _used(self, blocks: Sequence[Block], found_in: Sequence[int], missed: int) -> None:
        """All that a use means but recency. ``blocks``: parents before children."""
        self.misses += missed
        for residency, times in Counter(found_in).items():
            self.hits[next(tier for tier in self._state.tiers if residency & tier.bit)] += times
        self._background.used_again(blocks)
        self._state.clocks.start(*blocks)
