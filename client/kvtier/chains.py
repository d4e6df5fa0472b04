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
from kvtier.windows import LookUp, Window, longest, spans

_TRIES: Final = 3
"""How often a match is made anew whose blocks leave while it is made."""


class Chains:
    """Lookups of one mapped cache; ``keys`` are packed. Threads may share it.

    ``as_of`` of an answer is an event that the index showed before the lookup began.
    """

    def __init__(self, index: IndexReader, spec: CacheSpec) -> None:
        self._index: Final = index
        self._spans: Final = spans([group.window_tokens for group in spec.groups], spec.tokens_per_block)
        """By group: how many blocks cover its window; 0 = all."""

    def is_sliding(self, group: int) -> bool:
        return self._spans[group] > 0

    def find(self, keys: bytes, group: int) -> Found:
        return self._index.find(keys, group)

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
            found = self._spans_of(keys)
            if found is None:
                return None
            length = found[0].first_block + len(found[0].residency)
            if all(all(span.residency) for span in found):
                return AcrossMatch(length, found, as_of)
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
            group: Window(self._look_up(keys, group), span, bound) for group, span in enumerate(self._spans) if span
        }
        length = longest(bound, windows.values())
        if length is None:
            return None
        return tuple(
            GroupSpan(group, windows[group].first_block(length), windows[group].residency(length))
            if span
            else GroupSpan(group, 0, self._index.find(keys[: length * KEY_BYTES], group).residency.tobytes())
            for group, span in enumerate(self._spans)
        )

    def _look_up(self, keys: bytes, group: int) -> LookUp:
        def look_up(start: int, stop: int) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
            found = self._index.find(keys[start * KEY_BYTES : stop * KEY_BYTES], group)
            return found.residency, found.sure

        return look_up


def leading(found: Found, wanted: NDArray[np.bool_]) -> int | None:
    """How many of the first are wanted. None: whether the next one is cannot be told."""
    length = count_leading(wanted)
    return length if length == len(wanted) or found.sure[length] else None


def count_leading(wanted: NDArray[np.bool_]) -> int:
    """How many are true before the first that is not."""
    end = int(wanted.argmin()) if len(wanted) else 0
    return len(wanted) if not len(wanted) or wanted[end] else end


def are_distinct(keys: bytes) -> bool:
    """Whether no key stands twice, for which the daemon refuses a call. Rarely False where none does."""
    words = np.sort(np.frombuffer(keys, "<u8")[:: KEY_BYTES // 8])
    return not bool((words[1:] == words[:-1]).any())
