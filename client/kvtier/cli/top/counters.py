"""What a daemon counts, cache by cache: numbers that only rise, and how far they rose between two looks at them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvtier.stats import CacheStats
from kvtier.types import Tier


@dataclass(slots=True, frozen=True)
class Moved:
    """Along one edge."""

    blocks: int = 0
    bytes: int = 0

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.blocks + other.blocks, self.bytes + other.bytes)


@dataclass(slots=True, frozen=True)
class Counters:
    """Of one cache, or of several together. ``hits``: blocks by the tier they were found in. ``moved``: by edge, as
    ``"device>host"``."""

    hits: Mapping[Tier, int] = field(default_factory=dict)
    misses: int = 0
    stored: int = 0
    removed: int = 0
    moved: Mapping[str, Moved] = field(default_factory=dict)

    @classmethod
    def of(cls, cache: CacheStats) -> Counters:
        hits = {Tier.DEVICE: cache.hits_device, Tier.HOST: cache.hits_host, Tier.DISK: cache.hits_disk}
        moved = {edge.edge: Moved(edge.blocks, edge.bytes) for edge in cache.edges}
        return cls(hits, cache.misses, cache.stored, cache.removed, moved)

    @property
    def asked(self) -> int:
        """Blocks that were looked for."""
        return sum(self.hits.values()) + self.misses

    @property
    def hit_share(self) -> float | None:
        """Of the blocks that were looked for; None where none were."""
        return sum(self.hits.values()) / self.asked if self.asked else None

    def since(self, earlier: Counters) -> Counters | None:
        """What was counted in between; None where any of them went back, so that nobody knows.

        An edge appears with its first move: before, it stood at nothing.
        """
        edges = self.moved.keys() | earlier.moved.keys()
        moved = {edge: _moved_since(self.moved.get(edge), earlier.moved.get(edge, Moved())) for edge in edges}
        risen = Counters(
            {tier: self.hits.get(tier, 0) - earlier.hits.get(tier, 0) for tier in Tier},
            self.misses - earlier.misses,
            self.stored - earlier.stored,
            self.removed - earlier.removed,
            {edge: one for edge, one in moved.items() if one != Moved()},
        )
        return risen if risen._none_negative() else None

    def _none_negative(self) -> bool:
        moved = [number for one in self.moved.values() for number in (one.blocks, one.bytes)]
        return min(*self.hits.values(), self.misses, self.stored, self.removed, *moved) >= 0


def _moved_since(now: Moved | None, earlier: Moved) -> Moved:
    now = now or Moved()
    return Moved(now.blocks - earlier.blocks, now.bytes - earlier.bytes)


def total(counters: Iterable[Counters]) -> Counters:
    hits = dict.fromkeys(Tier, 0)
    moved: dict[str, Moved] = {}
    misses = stored = removed = 0
    for one in counters:
        for tier, blocks in one.hits.items():
            hits[tier] += blocks
        for edge, blocks_and_bytes in one.moved.items():
            moved[edge] = moved.get(edge, Moved()) + blocks_and_bytes
        misses += one.misses
        stored += one.stored
        removed += one.removed
    return Counters(hits, misses, stored, removed, moved)
