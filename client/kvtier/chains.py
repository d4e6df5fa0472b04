"""What the key index of a mapped cache says of chains of keys. None everywhere: it cannot tell, ask the daemon."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.abi.key_index import Found, IndexReader
from kvtier.abi.keys import KEY_BYTES
from kvtier.abi.spec import CacheSpec
from kvtier.answers import AcrossMatch, GroupSpan, Locations, Match
from kvtier.types import Cursor

_TRIES: Final = 3
"""How often a match is made anew whose blocks leave while it is made."""
_LEAST_LOOKED_UP: Final = 64
"""Keys of a sliding group that are looked up at a time, or its window where that is longer."""


class Chains:
    """Lookups of one mapped cache; ``keys`` are packed. Threads may share it.

    ``as_of`` of an answer is an event that the index showed before the lookup began.
    """

    def __init__(self, index: IndexReader, spec: CacheSpec) -> None:
        self._index: Final = index
        self._spans: Final = tuple(-(-group.window_tokens // spec.tokens_per_block) for group in spec.groups)
        """By group: how many blocks cover its window; 0 = all."""

    def is_sliding(self, group: int) -> bool:
        return self._spans[group] > 0

    def find(self, keys: bytes, group: int) -> Found:
        return self._index.find(keys, group)

    def stands(self, keys: bytes, group: int, found: Found) -> bool:
        """Whether the last block of a chain of a full-attention group is where ``found`` has it: then none of the chain
        has been forgotten meanwhile. A slot alone does not tell: of a block that is dropped while it is copied, it
        keeps its generation until the copy ends."""
        entry = self._index.entry(keys[-KEY_BYTES:], group)
        places = (found.host_slots, found.host_generations, found.device_slots, found.device_generations)
        return entry is not None and entry.residency != 0 and entry[1:] == tuple(int(column[-1]) for column in places)

    def prefix_length(self, keys: bytes, group: int) -> int | None:
        """How many blocks of the chain are stored, from its first on."""
        if not self.is_sliding(group):
            return self._index.prefix_length(keys, group)
        found = self._index.find(keys, group)
        return leading(found, found.residency != 0)

    def match(self, keys: bytes, group: int) -> Match | None:
        as_of = self._as_of()
        if not self.is_sliding(group):
            length = self._index.prefix_length(keys, group)
            if length is None:
                return None
            keys = keys[: length * KEY_BYTES]
        found = self._index.find(keys, group)
        length = leading(found, found.residency != 0)
        return None if length is None else Match(length, found.residency[:length].tobytes(), as_of)

    def match_across(self, keys: bytes) -> AcrossMatch | None:
        """See :meth:`kvtier.across.AcrossGroups.match`."""
        for _ in range(_TRIES):
            as_of = self._as_of()
            spans = self._spans_of(keys)
            if spans is None:
                return None
            length = spans[0].first_block + len(spans[0].residency)
            if all(all(span.residency) for span in spans):
                return AcrossMatch(length, spans, as_of)
        return None

    def locate(self, keys: bytes, group: int) -> Locations | None:
        found = self._index.find(keys, group)
        if not found.sure.all():
            return None
        return Locations(
            found.residency, found.device_slots, found.device_generations, found.host_slots, found.host_generations
        )

    def _as_of(self) -> Cursor:
        shown = self._index.shown()
        return Cursor(shown.epoch, shown.event)

    def _spans_of(self, keys: bytes) -> tuple[GroupSpan, ...] | None:
        """What each group has of the longest prefix. A residency of 0: the block has left meanwhile."""
        bound: int | None = len(keys) // KEY_BYTES
        for group, span in enumerate(self._spans):
            if not span and bound:
                bound = self._index.prefix_length(keys[: bound * KEY_BYTES], group)
        if bound is None:
            return None
        windows = {
            group: _Window(self._index, keys, group, span, bound) for group, span in enumerate(self._spans) if span
        }
        length: int | None = bound
        before = None
        while length != before:
            before = length
            for window in windows.values():
                length = window.unbroken(length) if length is not None else None
        if length is None:
            return None
        return tuple(
            GroupSpan(group, windows[group].first_block(length), windows[group].residency(length))
            if span
            else GroupSpan(group, 0, self._index.find(keys[: length * KEY_BYTES], group).residency.tobytes())
            for group, span in enumerate(self._spans)
        )


class _Window:
    """A sliding group's side of a match. Looks up every key once, and no more than it must, from the end on."""

    def __init__(self, index: IndexReader, keys: bytes, group: int, span: int, bound: int) -> None:
        self._index = index
        self._keys = keys
        self._group = group
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
        """That length, where no block is missing of what it needs, else the greatest lower one that may do."""
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
        found = self._index.find(self._keys[start * KEY_BYTES : self._low * KEY_BYTES], self._group)
        self._residency[start : self._low] = found.residency
        self._sure[start : self._low] = found.sure
        self._low = start


def leading(found: Found, wanted: NDArray[np.bool_]) -> int | None:
    """How many of the first are wanted. None: whether the next one is cannot be told."""
    length = count_leading(wanted)
    return length if length == len(wanted) or found.sure[length] else None


def count_leading(wanted: NDArray[np.bool_]) -> int:
    """How many are true before the first that is not."""
    end = int(wanted.argmin()) if len(wanted) else 0
    return len(wanted) if not len(wanted) or wanted[end] else end
