"""How long a prefix every window group can serve: the walk, whoever says which blocks are there.

The largest n so that every full-attention group holds blocks [0, n) and every group of a sliding window of w tokens
those covering tokens [max(0, n * tokens_per_block - w), n * tokens_per_block). It starts at the full groups' bound and
goes down; it is never a minimum of separate matches, since a longer prefix may be there where a shorter one is not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

_LEAST_LOOKED_UP: Final = 64
"""Keys of a sliding group that are looked up at a time, or its window where that is longer."""

LookUp: TypeAlias = Callable[[int, int], tuple[NDArray[np.uint8], NDArray[np.bool_]]]
"""Of blocks [start, stop) of the chain: residency, 0 = absent, and whether an absence is sure."""


def spans(windows: Sequence[int], tokens_per_block: int) -> tuple[int, ...]:
    """By group: how many blocks cover its window of so many tokens; 0 = all, as with full attention."""
    return tuple(-(-window // tokens_per_block) for window in windows)


class Window:
    """A sliding group's side of a match of at most ``bound`` blocks, of which it needs the last ``span``.

    Looks up every key once, and no more than it must, from the end on.
    """

    def __init__(self, look_up: LookUp, span: int, bound: int) -> None:
        self._find = look_up
        self._span = span
        self._low = bound
        """From here up to ``bound`` all is looked up."""
        self._residency: NDArray[np.uint8] = np.zeros(bound, np.uint8)
        self._sure: NDArray[np.bool_] = np.ones(bound, np.bool_)

    def first_block(self, length: int) -> int:
        """The first block that a prefix of so many needs."""
        return max(0, length - self._span)

    def residency(self, length: int) -> bytes:
        """Of the blocks that a prefix of so many needs; they have been looked up."""
        return self._residency[self.first_block(length) : length].tobytes()

    def unbroken(self, length: int) -> int | None:
        """That length, where no block is missing of what it needs, else the greatest lower one that may do. None: that
        cannot be told."""
        while True:
            first = self.first_block(length)
            self._look_up(first)
            holes = np.flatnonzero(self._residency[first:length] == 0)
            if not len(holes):
                return length
            length = first + int(holes[-1])
            if not self._sure[length]:
                return None

    def _look_up(self, first: int) -> None:
        if first >= self._low:
            return
        start = max(0, min(first, self._low - max(self._span, _LEAST_LOOKED_UP)))
        self._residency[start : self._low], self._sure[start : self._low] = self._find(start, self._low)
        self._low = start


def longest(bound: int, windows: Collection[Window]) -> int | None:
    """The longest prefix of at most ``bound`` blocks, which is what the full groups have, that no window breaks. None:
    that cannot be told."""
    length: int | None = bound
    before = None
    while length != before:
        before = length
        for window in windows:
            length = window.unbroken(length) if length is not None else None
    return length
