"""What events say of every block: key to residency and priority, by cache and window group, and prefixes in it.

Pure: no connection, no clock. Applying an item twice changes nothing, so slices and events of a snapshot may overlap.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from itertools import repeat
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.abi.keys import KEY_BYTES
from kvtier.answers import GroupSpan
from kvtier.errors import DaemonError
from kvtier.events import Event, SnapshotSlice
from kvtier.types import EventType
from kvtier.windows import LookUp, Window, longest, spans
from kvtier.wire import split_keys

ALL_TIERS: Final = 0xFF
_PRIORITY_SHIFT: Final = 8

Blocks = dict[bytes, int]
"""Of one window group: key to residency set | priority << 8. One number, since an object a block would take as much
memory again as the rest."""

_NUMBERS: Final[dict[int, int]] = {}
"""The numbers in use, one object each: there are some hundreds, and blocks by the million."""


class MirroredBlock(NamedTuple):
    """``residency``: the tiers' bits; ``priority``: the effective one."""

    key: bytes
    residency: int
    priority: int


class MirrorIndex:
    """All caches of one daemon. One thread applies; others may look meanwhile, and see each block before or after."""

    def __init__(self) -> None:
        self._caches: dict[str, _Cache] = {}

    def __len__(self) -> int:
        return sum(len(blocks) for cache in list(self._caches.values()) for blocks in list(cache.groups.values()))

    def apply(self, event: Event) -> None:
        """Raises :class:`DaemonError` where the event's columns are of different lengths."""
        cache = self._cache(event.cache)
        match event.type:
            case EventType.STORED | EventType.UPDATED:
                _put(cache.blocks(event.group), event.packed_keys, event.residency, event.priorities)
            case EventType.REMOVED:
                # At the speed of the interpreter's own loops; what is not there was removed before.
                deque(map(cache.blocks(event.group).pop, split_keys(event.packed_keys), repeat(None)), maxlen=0)
            case EventType.CREATED:
                cache.shape_is(event.tokens_per_block, event.all_window_tokens)
                cache.groups[event.group] = {}
            case EventType.CLEARED:
                cache.groups[event.group] = {}

    def take(self, part: SnapshotSlice) -> None:
        """As :meth:`apply`, of a slice."""
        cache = self._cache(part.cache)
        cache.shape_is(part.tokens_per_block, part.all_window_tokens)
        _put(cache.blocks(part.group), part.packed_keys, part.residency, part.priorities)

    def get(self, cache: str, group: int, key: bytes) -> MirroredBlock | None:
        """None: it is not indexed."""
        known = self._caches.get(cache)
        value = known.groups.get(group, {}).get(key) if known is not None else None
        return None if value is None else _block(key, value)

    def blocks(self, cache: str, group: int) -> Iterator[MirroredBlock]:
        """As they are at this moment, in no order."""
        known = self._caches.get(cache)
        now = known.groups.get(group, {}).copy() if known is not None else {}
        return map(_block, now.keys(), now.values())

    def prefix_length(self, cache: str, keys: bytes, tiers: int) -> int:
        """Of the longest prefix of packed ``keys`` that every group can serve from ``tiers`` (bits). See
        :mod:`kvtier.windows`."""
        known = self._caches.get(cache)
        return known.prefix_length(keys, tiers) if known is not None else 0

    def match(self, cache: str, keys: bytes, tiers: int) -> tuple[GroupSpan, ...]:
        """That prefix, by group; nothing where there is no such cache."""
        known = self._caches.get(cache)
        return known.match(keys, tiers) if known is not None else ()

    def _cache(self, name: str) -> _Cache:
        known = self._caches.get(name)
        if known is None:
            known = self._caches[name] = _Cache()
        return known


class _Cache:
    """One cache. ``spans``: by group, the blocks that cover its window, 0 = all; empty while that is not known, and so
    for a cache that was only heard to have gone."""

    __slots__ = ("groups", "spans")

    def __init__(self) -> None:
        self.groups: dict[int, Blocks] = {}
        self.spans: tuple[int, ...] = ()

    def blocks(self, group: int) -> Blocks:
        found = self.groups.get(group)
        if found is None:
            found = self.groups[group] = {}
        return found

    def shape_is(self, tokens_per_block: int, windows: tuple[int, ...]) -> None:
        """Groups beyond these were of a cache that had the name before. Raises :class:`DaemonError`."""
        if not tokens_per_block or not windows:
            raise DaemonError("a cache was told of without its windows: the daemon is too old", reason="BAD_ANSWER")
        self.spans = spans(windows, tokens_per_block)
        for group in [group for group in self.groups if group >= len(windows)]:
            del self.groups[group]

    def prefix_length(self, keys: bytes, tiers: int) -> int:
        sides = [(span, self.groups.get(group, {})) for group, span in enumerate(self.spans)]
        if not sides:
            return 0
        bound = len(keys) // KEY_BYTES
        for span, blocks in sides:
            if not span:
                bound = _leading(blocks, keys, bound, tiers)
        windows = [Window(_look_up(blocks, keys, tiers), span, bound) for span, blocks in sides if span]
        return longest(bound, windows) or 0

    def match(self, keys: bytes, tiers: int) -> tuple[GroupSpan, ...]:
        length = self.prefix_length(keys, tiers)
        firsts = [max(0, length - span) if span else 0 for span in self.spans]
        return tuple(
            GroupSpan(group, first, _residencies(self.groups.get(group, {}), keys, first, length, ALL_TIERS))
            for group, first in enumerate(firsts)
        )


def _put(blocks: Blocks, packed: bytes, residency: bytes, priorities: bytes) -> None:
    count = len(residency)
    if len(packed) != count * KEY_BYTES or len(priorities) != count:
        says = f"{len(packed)} bytes of keys with {count} residencies and {len(priorities)} priorities"
        raise DaemonError(says, reason="BAD_ANSWER")
    if not count:
        return
    if residency.count(residency[0]) == count and priorities.count(priorities[0]) == count:  # most often
        value = residency[0] | priorities[0] << _PRIORITY_SHIFT
        value = _NUMBERS.setdefault(value, value)
        if count == 1:
            blocks[packed] = value
        else:
            blocks.update(dict.fromkeys(split_keys(packed), value))
        return
    columns = np.frombuffer(priorities, np.uint8).astype(np.uint16) << _PRIORITY_SHIFT
    values = (columns | np.frombuffer(residency, np.uint8)).tolist()
    blocks.update(zip(split_keys(packed), map(_NUMBERS.setdefault, values, values), strict=True))


def _block(key: bytes, value: int) -> MirroredBlock:
    return MirroredBlock(key, value & ALL_TIERS, value >> _PRIORITY_SHIFT)


def _leading(blocks: Blocks, keys: bytes, bound: int, tiers: int) -> int:
    """How many of the first ``bound`` keys are in these tiers, one after another, in a full-attention group: what is
    indexed is closed under parents, so its end is found by halving; what a tier has of it is not."""
    end = bisect_left(range(bound), True, key=lambda place: _key(keys, place) not in blocks)
    if tiers == ALL_TIERS:
        return end
    return next((place for place in range(end) if not blocks.get(_key(keys, place), 0) & tiers), end)


def _look_up(blocks: Blocks, keys: bytes, tiers: int) -> LookUp:
    def look_up(start: int, stop: int) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        found = _residencies(blocks, keys, start, stop, tiers)
        return np.frombuffer(found, np.uint8), np.ones(stop - start, np.bool_)

    return look_up


def _residencies(blocks: Blocks, keys: bytes, start: int, stop: int, tiers: int) -> bytes:
    """A byte a block, without the bits of other tiers."""
    asked = split_keys(keys[start * KEY_BYTES : stop * KEY_BYTES])
    return bytes([value & tiers for value in map(blocks.get, asked, repeat(0))])


def _key(keys: bytes, place: int) -> bytes:
    return keys[place * KEY_BYTES : (place + 1) * KEY_BYTES]
