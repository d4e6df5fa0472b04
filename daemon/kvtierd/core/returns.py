"""Return times: how soon requests ask for a block again, learnt by the number of its uses and the length of its last
request, and simulations that tell whether eviction by them beats LRU on the present traffic.

The value of keeping a block is its hit density at the best horizon: the expected number of returns for each second of
a slot's time (LHD: Beckmann et al., NSDI 2018).
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Final
from zlib import crc32

from kvtierd.core.block import Block, Use
from kvtierd.core.ids import Key

LRU: Final = "lru"
LEARNED: Final = "learned"

BUCKETS: Final = 64
_AN_OCTAVE: Final = 4
"""Buckets of age for each doubling, from a second on. The last bucket begins after 15 hours."""
_SECONDS: Final = [2 ** (bucket / _AN_OCTAVE) - 1 for bucket in range(BUCKETS + 1)]
_LATER: Final = [int(1e9 * seconds) for seconds in _SECONDS[1:-1]]
"""Ages in nanoseconds at which the buckets after the first begin."""
_NUMBERS: Final = 8
"""Kinds of uses by their number: the first, the second and third, the fourth to seventh, and so on."""
_LONG: Final = (256, 4_096)
"""Kinds of uses by the length of the request: below, between and above these numbers of blocks."""
_LENGTHS: Final = len(_LONG) + 1
_KINDS: Final = _NUMBERS * _LENGTHS
_BORROWED: Final = 1_000
"""Uses of the same number, and of any length, that count with the uses of each kind."""
_LEARN_EVERY: Final = 128
"""Largest number of requests between two calculations of the values; fewer while there are few."""
_HALVE_AT: Final = 1 << 18
"""Uses of a kind after which earlier uses count half."""
DRAWS: Final = 32
"""Candidates that are compared to find the block of the least value."""

SAMPLE: Final = 128
"""Least number of slots of a shadow, if the tier has as many."""
_FADE: Final = 0.95
"""Weight of earlier misses once a shadow has seen as many more keys as it has slots."""
_WORSE: Final = 1.05
"""LRU decides while the learned policy's shadow misses more than this multiple of LRU's misses. Shadows are samples."""
_TURNS: Final = 3
"""Blocks asked for, of the tier's slots, before the learned policy may decide."""


class ReturnTimes:
    """Learns from the uses of blocks, including blocks that have left and come back."""

    def __init__(self) -> None:
        self._uses = [0] * _KINDS
        self._returns = [[0] * BUCKETS for _ in range(_KINDS)]
        """Returns of the blocks of each kind, by the bucket of their age."""
        self._values: list[list[float] | None] = [None] * _KINDS
        self.requests = 0
        self._learn_at = 0
        self.now = 0
        """Time of the last request, in nanoseconds."""
        self._unknown = Use(1, 0, 0)
        """For blocks that no request has used since the start."""

    def request(self, blocks: Sequence[Block], now: int, length: int) -> None:
        """Counts blocks of a request of this length, and sets their last use."""
        self.now = now
        self.requests += 1
        if self.requests >= self._learn_at:
            self._values = [None] * _KINDS
            self._learn_at = self.requests + min(_LEARN_EVERY, 8 + self.requests // 16)
        uses: dict[Use | None, Use] = {}
        for before, count in Counter(map(attrgetter("use"), blocks)).items():
            if before is not None:
                self._returns[before.kind][bisect(_LATER, now - before.at)] += count
            number = 1 if before is None else before.number + 1
            uses[before] = use = Use(number, _kind(number, length), now)
            self._count(use.kind, count)
        for block in blocks:
            block.use = uses[block.use]

    def _count(self, kind: int, uses: int) -> None:
        self._uses[kind] += uses
        if self._uses[kind] > _HALVE_AT:
            self._uses[kind] //= 2
            self._returns[kind] = [returns // 2 for returns in self._returns[kind]]

    def value(self, use: Use | None) -> float:
        """Expected returns for each second that a block stays, by its last use."""
        use = use or self._unknown
        values = self._values[use.kind]
        if values is None:
            values = self._values[use.kind] = self._calculated(use.kind)
        return values[bisect(_LATER, self.now - use.at)]

    def _calculated(self, kind: int) -> list[float]:
        """Values by bucket of age: slopes of the upper hull of returns over block-seconds, from the right."""
        alike = slice(first := kind - kind % _LENGTHS, first + _LENGTHS)
        weight = _BORROWED / max(sum(self._uses[alike]), _BORROWED)
        staying, seconds, returned = self._uses[kind] + weight * sum(self._uses[alike]), 0.0, 0.0
        points = [(seconds, returned)]
        for bucket, column in enumerate(zip(*self._returns[alike], strict=True)):
            returns = column[kind - first] + weight * sum(column)
            seconds += max(staying - returns / 2, 1e-6) * (_SECONDS[bucket + 1] - _SECONDS[bucket])
            staying -= returns
            returned += returns
            points.append((seconds, returned))
        values: list[float] = []
        hull = [points.pop()]
        for point in reversed(points):
            while len(hull) > 1 and _slope(point, hull[-1]) <= _slope(hull[-1], hull[-2]):
                hull.pop()
            values.append(_slope(point, hull[-1]))
            hull.append(point)
        return values[::-1]


def _kind(number: int, length: int) -> int:
    return (min(number.bit_length(), _NUMBERS) - 1) * _LENGTHS + bisect(_LONG, length)


def _slope(point: tuple[float, float], later: tuple[float, float]) -> float:
    return (later[1] - point[1]) / (later[0] - point[0])


class Draws:
    """Draws places of a list, by a linear congruential generator with Knuth's constants."""

    def __init__(self) -> None:
        self._state = 0

    def places(self, entries: int, draws: int) -> list[int]:
        state = self._state
        places = [(state := state * 1_664_525 + 1_013_904_223 & 0xFFFF_FFFF) * entries >> 32 for _ in range(draws)]
        self._state = state
        return places


class Shadow:
    """A simulated tier of ``slots`` without bytes. The least recently used key leaves first."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._uses: dict[Key, Use | None] = {}
        """Last use of each key."""
        self.misses = 0

    def see(self, key: Key, use: Use | None) -> None:
        """Looks the key up, and stores it on a miss."""
        if key in self._uses:
            del self._uses[key]
        else:
            self.misses += 1
            if len(self._uses) == self._slots:
                del self._uses[next(iter(self._uses))]
        self._uses[key] = use


class LearnedShadow(Shadow):
    """A shadow that the least valuable of some keys leaves."""

    def __init__(self, slots: int, times: ReturnTimes) -> None:
        super().__init__(slots)
        self._times = times
        self._keys: list[Key] = []
        self._draws = Draws()

    def see(self, key: Key, use: Use | None) -> None:
        if key not in self._uses:
            self.misses += 1
            if len(self._keys) < self._slots:
                self._keys.append(key)
            else:
                place = self._victim()
                del self._uses[self._keys[place]]
                self._keys[place] = key
        self._uses[key] = use

    def _victim(self) -> int:
        value, uses, keys = self._times.value, self._uses, self._keys
        return min(self._draws.places(len(keys), DRAWS // 2), key=lambda place: value(uses[keys[place]]))


class Shadows:
    """Shadows of one window group whose lowest tier has ``slots``, on a sample of the keys.

    A shadow sees 1/k of the keys and has 1/k of the slots, so its miss ratio is the tier's. Shadows know neither
    priorities nor chains: requests use their blocks deepest first, which keeps prefixes whole in any order.
    """

    def __init__(self, slots: int, times: ReturnTimes) -> None:
        self._every = 1 << max((slots // SAMPLE).bit_length() - 1, 0)
        self._mask = self._every - 1
        sample = slots // self._every
        self._times = times
        self._shadows = {LRU: Shadow(sample), LEARNED: LearnedShadow(sample, times)}
        self._period = sample
        self._seen = 0
        self._scores = dict.fromkeys(self._shadows, 0.0)

    def see(self, blocks: Iterable[Block]) -> None:
        """Counts a request for these blocks, deepest first; blocks not found are stored."""
        mask = self._mask
        for block in blocks:
            if not crc32(block.key) & mask:
                self._see(block.key, block.use)

    def _see(self, key: Key, use: Use | None) -> None:
        self._seen += 1
        for name, shadow in self._shadows.items():
            before = shadow.misses
            shadow.see(key, use)
            self._scores[name] += shadow.misses - before
        if self._seen % self._period == 0:
            self._scores = {name: _FADE * score for name, score in self._scores.items()}

    @property
    def favour_learned(self) -> bool:
        """Whether the learned policy has seen enough requests, and has recently missed hardly more than LRU."""
        return self._seen > _TURNS * max(self._period, SAMPLE) and self._scores[LEARNED] <= _WORSE * self._scores[LRU]

    @property
    def misses(self) -> dict[str, int]:
        """Estimated number of blocks that each policy would have missed. Hits cannot be estimated from the sample: most
        hits are of a few keys, which the sample contains or not."""
        return {name: shadow.misses * self._every for name, shadow in self._shadows.items()}
