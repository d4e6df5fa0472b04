"""What each policy of eviction would find on the traffic that there is: each has shadows of a sample of the keys.

A shadow has as much fewer slots as it sees keys, so it misses as much of what it sees as a whole tier would. It knows
neither priorities nor chains: requests use their blocks deepest first, which keeps prefixes whole in any order.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final
from zlib import crc32

from kvtierd.core.block import Block
from kvtierd.core.ids import Key

LRU: Final = "lru"
LFUDA: Final = "lfuda"

LEVELS: Final = 6
"""Uses of a block that count, the first included."""
REMEMBERED: Final = 32_768
"""Keys whose uses are remembered after they have left, besides as many as there are slots."""
SAMPLE: Final = 128
"""Least slots of a shadow, where the tier has as many."""
_MEMORY: Final = 16
"""Times its slots a shadow remembers keys at most: each takes 0.15 kB of every cache."""
_FADE: Final = 0.95
"""What earlier misses still count once a shadow has seen as many keys more as it has slots."""


class Departed:
    """The levels of the last keys that were added, ``most`` of them at most, by digests of 8 bytes."""

    __slots__ = ("_levels", "_most", "_next", "_places", "_ring")

    def __init__(self, most: int) -> None:
        self._most = most
        self._ring = array("q")
        self._levels = bytearray()
        self._next = 0
        self._places: dict[int, int] = {}
        """By digest: where in the ring."""

    def add(self, key: Key, level: int) -> None:
        place, digest = self._next, hash(key)
        if place == len(self._ring):
            self._ring.append(digest)
            self._levels.append(level)
        else:
            oldest = self._ring[place]
            if self._places.get(oldest) == place:
                del self._places[oldest]
            self._ring[place] = digest
            self._levels[place] = level
        self._places[digest] = place
        self._next = (place + 1) % self._most

    def recall(self, key: Key) -> int | None:
        """Its level; None if it is not remembered. From now on it is not."""
        place = self._places.pop(hash(key), None)
        return None if place is None else self._levels[place]


class Shadow:
    """A tier of ``slots`` without bytes. ``lift``: how many uses later a block leaves for each level."""

    __slots__ = ("_clock", "_departed", "_levels", "_lift", "_queues", "_slots", "misses")

    def __init__(self, slots: int, lift: int, remembered: int) -> None:
        self._slots = slots
        self._lift = lift
        self._clock = 0
        self._levels: dict[Key, int] = {}
        self._queues: list[OrderedDict[Key, int]] = [OrderedDict() for _ in range(LEVELS if lift else 1)]
        """By level: its keys with their last use, the least recently used first."""
        self._departed = Departed(remembered)
        self.misses = 0

    def see(self, key: Key) -> None:
        """The key is asked for, and stored where it is not found."""
        self._clock += 1
        level = self._levels.get(key)
        if level is not None:
            del self._queues[level][key]
        else:
            self.misses += 1
            if len(self._levels) == self._slots:
                self._evict()
            level = self._departed.recall(key)
        level = 0 if level is None else min(level + 1, len(self._queues) - 1)
        self._levels[key] = level
        self._queues[level][key] = self._clock

    def _evict(self) -> None:
        least, level = 1 << 62, 0
        for other, queue in enumerate(self._queues):
            if queue and (order := next(iter(queue.values())) + other * self._lift) < least:
                least, level = order, other
        key, _ = self._queues[level].popitem(last=False)
        del self._levels[key]
        if self._lift:
            self._departed.add(key, level)


class Shadows:
    """Of one window group whose lowest tier has ``slots``."""

    __slots__ = ("_every", "_mask", "_period", "_scores", "_seen", "_shadows")

    def __init__(self, slots: int) -> None:
        self._every = 1 << max((slots // SAMPLE).bit_length() - 1, 0)
        self._mask = self._every - 1
        sample = slots // self._every
        remembered = min((slots + REMEMBERED) // self._every, _MEMORY * sample)
        self._shadows = {LRU: Shadow(sample, 0, 1), LFUDA: Shadow(sample, sample, remembered)}
        self._period = sample
        self._seen = 0
        self._scores = dict.fromkeys(self._shadows, 0.0)

    def see(self, blocks: Iterable[Block]) -> None:
        """A request asks for these, the deepest first, and they are stored where they were not found."""
        mask = self._mask
        for block in blocks:
            if not crc32(block.key) & mask:
                self._see(block.key)

    def _see(self, key: Key) -> None:
        self._seen += 1
        for name, shadow in self._shadows.items():
            before = shadow.misses
            shadow.see(key)
            self._scores[name] += shadow.misses - before
        if self._seen % self._period == 0:
            self._scores = {name: _FADE * score for name, score in self._scores.items()}

    def favour(self, name: str) -> bool:
        """This policy has lately missed no more than last use alone."""
        return self._scores[name] <= self._scores[LRU]

    @property
    def misses(self) -> dict[str, int]:
        """Blocks that each policy would have missed, as estimated from the sample. Hits are no good for that: most are
        of a few keys, which the sample has or has not."""
        return {name: shadow.misses * self._every for name, shadow in self._shadows.items()}
