"""Blocks whose keys begin with one of some prefixes, found for thousands of keys in one step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from kvtier.v1 import events_pb2
from kvtierd.core.ids import KEY_BYTES

HEAD_BYTES: Final = 8
"""So much of a key is compared as one number; only keys that agree so far are looked at one by one."""

WORTH_A_SEARCH: Final = 4
"""So many prefixes are searched for in serialised events before these are parsed: each search goes over all bytes."""

Heads = NDArray[np.uint64]


@dataclass(slots=True, frozen=True)
class KeyPrefixes:
    """``prefixes``: 1 to 32 bytes each, in order, none of which begins another. ``lows``, ``highs``: the least and the
    greatest head of a key that begins with one; the ranges are in order and do not overlap."""

    prefixes: tuple[bytes, ...]
    lows: Heads = field(compare=False, repr=False)
    highs: Heads = field(compare=False, repr=False)

    @classmethod
    def of(cls, prefixes: Iterable[bytes]) -> Self:
        least = tuple(_without_longer(sorted(prefixes)))
        heads = list(_without_longer([prefix[:HEAD_BYTES] for prefix in least]))
        return cls(least, _numbers(heads, b"\x00"), _numbers(heads, b"\xff"))

    def match(self, key: bytes) -> bool:
        return key.startswith(self.prefixes)

    def absent_from(self, body: bytes) -> bool:
        """True only if no key in these bytes begins with any of them. A search, which is a tenth of the parsing."""
        return len(self.prefixes) <= WORTH_A_SEARCH and not any(prefix in body for prefix in self.prefixes)

    def places(self, packed: bytes) -> list[int]:
        """The numbers, rising, of the packed keys that begin with one of them."""
        if not packed:
            return []
        heads = np.frombuffer(packed, ">u8")[:: KEY_BYTES // HEAD_BYTES].astype(np.uint64)
        above = np.searchsorted(self.lows, heads, side="right")
        near = np.flatnonzero((above > 0) & (heads <= self.highs[above - 1]))
        return [place for place in near.tolist() if packed.startswith(self.prefixes, place * KEY_BYTES)]

    def only_theirs(self, events: Sequence[events_pb2.Event]) -> list[events_pb2.Event]:
        """Events with blocks that match, cut down to these, and events that carry no keys."""
        packed = [event.keys for event in events]
        places = self.places(b"".join(packed))
        kept, seen, first = [], 0, 0
        for event, keys in zip(events, packed, strict=True):
            end = first + len(keys) // KEY_BYTES
            here = places[seen : bisect_left(places, end, seen)]
            if here or not keys:
                _keep(event, [place - first for place in here], end - first)
                kept.append(event)
            seen, first = seen + len(here), end
        return kept


def _without_longer(ordered: Iterable[bytes]) -> Iterator[bytes]:
    """Without those that begin with another; a prefix comes right before what it begins."""
    last: bytes | None = None
    for prefix in ordered:
        if last is None or not prefix.startswith(last):
            last = prefix
            yield prefix


def _numbers(heads: Sequence[bytes], fill: bytes) -> Heads:
    return np.array([int.from_bytes(head.ljust(HEAD_BYTES, fill), "big") for head in heads], np.uint64)


def _keep(event: events_pb2.Event, places: Sequence[int], count: int) -> None:
    """Leaves of an event with ``count`` blocks those at ``places``, in all of its parallel fields."""
    if len(places) == count:
        return
    event.keys = _cut(event.keys, places, count)
    event.parents = _cut(event.parents, places, count)
    event.residency = _cut(event.residency, places, count)
    event.priorities = _cut(event.priorities, places, count)
    event.event_hashes = _cut(event.event_hashes, places, count)
    event.parent_hashes = _cut(event.parent_hashes, places, count)
    event.moved_bytes = event.moved_bytes * len(places) // count
    if event.tokens:
        tokens = [event.tokens[place] for place in places]
        event.ClearField("tokens")
        event.tokens.extend(tokens)


def _cut(packed: bytes, places: Sequence[int], count: int) -> bytes:
    """Of ``count`` values of one width; an absent field stays absent."""
    width = len(packed) // count
    return b"".join(packed[place * width : (place + 1) * width] for place in places)
