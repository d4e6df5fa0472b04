"""Estimates the misses of each eviction policy on the present traffic, with shadow tiers on a sample of the keys.

A shadow sees 1/k of the keys and has 1/k of the slots, so its miss ratio is the tier's. Shadows know neither priorities
nor chains: requests use their blocks deepest first, which keeps prefixes whole in any order.
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
"""Number of uses of a block that count, the first included."""
REMEMBERED: Final = 32_768
"""Number of departed keys whose uses are remembered, in addition to one a slot."""
SAMPLE: Final = 128
"""Least number of slots of a shadow, if the tier has as many."""
_MEMORY: Final = 16
"""Limit of the keys that a shadow remembers, in multiples of its slots: each key takes memory of every cache."""
_FADE: Final = 0.95
"""Weight of earlier misses once a shadow has seen as many more keys as it has slots."""


class Departed:
    """The levels of the last ``most`` keys added, by digests of 8 bytes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._ring = array("q")
        self._levels = bytearray()
        self._next = 0
        self._places: dict[int, int] = {}
        """Place in the ring, by digest."""

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
        """Returns and forgets the key's level; None if the key is not remembered."""
        place = self._places.pop(hash(key), None)
        return None if place is None else self._levels[place]


class Shadow:
    """A simulated tier of ``slots`` without bytes. ``lift``: number of uses by which each level delays a block's
    eviction."""

    def __init__(self, slots: int, lift: int, remembered: int) -> None:
        self._slots = slots
        self._lift = lift
        self._clock = 0
        self._levels: dict[Key, int] = {}
        self._queues: list[OrderedDict[Key, int]] = [OrderedDict() for _ in range(LEVELS if lift else 1)]
        """Keys with their last use by level, least recently used first."""
        self._departed = Departed(remembered)
        self.misses = 0

    def see(self, key: Key) -> None:
        """Looks the key up, and stores it on a miss."""
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
    """Shadows of one window group whose lowest tier has ``slots``."""

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
        """Counts a request for these blocks, deepest first; blocks not found are stored."""
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
        """Whether this policy has recently missed no more than plain LRU."""
        return self._scores[name] <= self._scores[LRU]

    @property
    def misses(self) -> dict[str, int]:
        """Estimated number of blocks that each policy would have missed. Hits cannot be estimated from the sample: most
        hits are of a few keys, which the sample contains or not."""
        return {name: shadow.misses * self._every for name, shadow in self._shadows.items()}
