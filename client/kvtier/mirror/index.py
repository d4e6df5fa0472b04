"""Residency and priority of every block, from events, and the longest prefixes of these blocks.

Items are idempotent, so slices and events of a snapshot may overlap.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import repeat, zip_longest
from typing import Final, NamedTuple

import numpy as np

from kvtier.abi.attention import Attention
from kvtier.abi.keys import KEY_BYTES
from kvtier.abi.spec import MAX_GROUPS
from kvtier.chains import longest
from kvtier.errors import DaemonError
from kvtier.events import Event, SnapshotSlice
from kvtier.types import EventType
from kvtier.wire import GroupSpan, split_keys

ALL_TIERS: Final = 0xFF
_PRIORITY_SHIFT: Final = 8

Blocks = dict[bytes, int]
"""The blocks of a window group: key to residency set | priority << 8, one number to save memory."""

_NUMBERS: Final[dict[int, int]] = {}
"""The values in use, one shared object each to save memory."""


class MirroredBlock(NamedTuple):
    """A block of a mirror. ``residency``: a set of tiers, as bits. ``priority``: the effective priority."""

    key: bytes
    residency: int
    priority: int


class MirrorIndex:
    """The blocks of one cache. Only one thread applies items; other threads see each block before or after a change."""

    __slots__ = ("_attentions", "_groups", "fingerprint", "room")

    def __init__(self) -> None:
        self._groups: dict[int, Blocks] = {}
        self._attentions: tuple[Attention, ...] = ()
        """The attention of each group; empty while unknown."""
        self.fingerprint = b""
        """Fingerprint of the specification; empty if the cache was never seen."""
        self.room = 0
        """Most blocks that the daemon may tell."""

    def __len__(self) -> int:
        return sum(map(len, list(self._groups.values())))

    def apply(self, item: Event | SnapshotSlice) -> None:
        """Applies an event, or a slice of a snapshot. Raises :class:`DaemonError` for columns of different lengths, and
        for an impossible window group."""
        kind = item.type if isinstance(item, Event) else None
        if kind in (None, EventType.CREATED):
            self._reshape(item)
        blocks = self._blocks(item.group)
        match kind:
            case EventType.CREATED | EventType.CLEARED:
                self._groups[item.group] = {}  # another thread may iterate over the old dict
            case EventType.REMOVED:
                for key in split_keys(item.packed_keys):
                    blocks.pop(key, None)
            case _:
                _put(blocks, item)

    def get(self, group: int, key: bytes) -> MirroredBlock | None:
        value = self._groups.get(group, {}).get(key)
        return None if value is None else _block(key, value)

    def blocks(self, group: int) -> Iterator[MirroredBlock]:
        """The present blocks, unordered."""
        now = self._groups.get(group, {}).copy()
        return map(_block, now.keys(), now.values())

    def _blocks(self, group: int) -> Blocks:
        if group >= MAX_GROUPS:
            raise DaemonError(f"window group {group} of a cache", reason="BAD_ANSWER")
        return self._groups.setdefault(group, {})

    def _reshape(self, item: Event | SnapshotSlice) -> None:
        """Adopts the cache's windows. Drops groups of an earlier cache of this name."""
        windows = item.all_window_tokens
        groups = max(len(windows), len(item.all_sink_tokens), len(item.all_flat))
        if not item.tokens_per_block or not windows or groups > MAX_GROUPS:
            raise DaemonError("an event of a cache without its windows, or with too many", reason="BAD_ANSWER")
        self.fingerprint = item.fingerprint
        kinds = zip_longest(windows, item.all_sink_tokens, item.all_flat, fillvalue=0)
        self._attentions = tuple(Attention.of(item.tokens_per_block, w, s, flat=bool(flat)) for w, s, flat in kinds)
        for group in [group for group in self._groups if group >= len(windows)]:
            del self._groups[group]

    def match(self, keys: bytes, tiers: int, group: int | None = None) -> tuple[GroupSpan, ...]:
        """The longest prefix of packed ``keys`` that every group, or this one, can serve, by group: see
        :mod:`kvtier.chains`. ``tiers``: bits of the tiers that count. Nothing if the cache does not exist."""
        groups = [each for each in range(len(self._attentions)) if group in (None, each)]
        sides = [(self._attentions[each], self._groups.get(each, {})) for each in groups]
        length = self._prefix_length(sides, keys, tiers)
        return tuple(
            GroupSpan(each, needed.first, _residencies(blocks, needed.cut(keys, KEY_BYTES), ALL_TIERS), needed.sinks)
            for each, (attention, blocks) in zip(groups, sides, strict=True)
            for needed in [attention.needs(length)]
        )

    def _prefix_length(self, sides: list[tuple[Attention, Blocks]], keys: bytes, tiers: int) -> int:
        bound = len(keys) // KEY_BYTES if sides else 0
        for attention, blocks in sides:
            bound = _present(blocks, keys, bound) if attention.chained else bound
        found = [(each, _residencies(blocks, keys[: bound * KEY_BYTES], tiers)) for each, blocks in sides]
        return longest(bound, ((each, np.frombuffer(residencies, np.uint8) != 0) for each, residencies in found))


def _put(blocks: Blocks, item: Event | SnapshotSlice) -> None:
    keys = split_keys(item.packed_keys)
    if not len(keys) == len(item.residency) == len(item.priorities):
        says = f"{len(keys)} keys with {len(item.residency)} residencies and {len(item.priorities)} priorities"
        raise DaemonError(says, reason="BAD_ANSWER")
    rows = zip(item.residency, item.priorities, strict=True)
    values = [residency | priority << _PRIORITY_SHIFT for residency, priority in rows]
    blocks.update(zip(keys, map(_NUMBERS.setdefault, values, values), strict=True))


def _block(key: bytes, value: int) -> MirroredBlock:
    return MirroredBlock(key, value & ALL_TIERS, value >> _PRIORITY_SHIFT)


def _present(blocks: Blocks, keys: bytes, bound: int) -> int:
    """Number of present blocks of a chain, of the first ``bound``, by bisection: chains are closed under parents."""
    return bisect_left(
        range(bound), True, key=lambda place: keys[place * KEY_BYTES : (place + 1) * KEY_BYTES] not in blocks
    )


def _residencies(blocks: Blocks, keys: bytes, tiers: int) -> bytes:
    """The residencies, one byte per block, without the bits of other tiers."""
    return bytes([value & tiers for value in map(blocks.get, split_keys(keys), repeat(0))])
