"""One moment of all that is shown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kvtier.cli.top.counters import Counters, total
from kvtier.cli.top.history import Minute
from kvtier.stats import CacheStats, DaemonStats, EdgeStats, LeaseInfo, TierStats


@dataclass(slots=True, frozen=True)
class Leases:
    """As they were told last, the oldest first; where they are not told, ``refused`` says why."""

    held: tuple[LeaseInfo, ...] = ()
    refused: str = ""


@dataclass(slots=True, frozen=True)
class Frame:
    """``stats`` are the last that came. ``trouble``: why nothing newer comes, and for how many seconds that is so;
    None while the daemon answers. ``cache``: the one that is shown, None = all together."""

    address: str
    interval: float
    stats: DaemonStats
    minute: Minute
    leases: Leases
    cache: str | None = None
    trouble: tuple[str, float] | None = None
    paused: bool = False

    @property
    def caches(self) -> tuple[CacheStats, ...]:
        """Those that are shown."""
        return tuple(cache for cache in self.stats.caches if self.cache in (None, cache.name))

    @property
    def counters(self) -> Counters:
        """Since the caches were opened."""
        return total(map(Counters.of, self.caches))

    @property
    def tiers(self) -> list[TierStats]:
        """Summed over the caches shown, the fastest first."""
        return summed_tiers(tier for cache in self.caches for tier in cache.tiers)

    @property
    def edges(self) -> list[EdgeStats]:
        """Summed over the caches shown. A queue is the daemon's own, and the same in each."""
        found: dict[str, EdgeStats] = {}
        for edge in (edge for cache in self.caches for edge in cache.edges):
            before = found.get(edge.edge)
            found[edge.edge] = edge if before is None else _both(before, edge)
        return [found[name] for name in sorted(found)]

    @property
    def held_leases(self) -> tuple[LeaseInfo, ...]:
        """Of the caches shown, the oldest first."""
        return tuple(lease for lease in self.leases.held if self.cache in (None, lease.cache))


def summed_tiers(tiers: Iterable[TierStats]) -> list[TierStats]:
    found: dict[int, TierStats] = {}
    for tier in tiers:
        before = found.get(tier.tier)
        found[tier.tier] = tier if before is None else _added(before, tier)
    return [found[number] for number in sorted(found)]


def _added(one: TierStats, other: TierStats) -> TierStats:
    return TierStats(
        tier=one.tier,
        capacity=one.capacity + other.capacity,
        free=one.free + other.free,
        blank=one.blank + other.blank,
        filling=one.filling + other.filling,
        ready=one.ready + other.ready,
        retiring=one.retiring + other.retiring,
        orphaned=one.orphaned + other.orphaned,
        quarantined=one.quarantined + other.quarantined,
        held=one.held + other.held,
        clean=one.clean + other.clean,
    )


def _both(one: EdgeStats, other: EdgeStats) -> EdgeStats:
    return replace(
        one,
        blocks=one.blocks + other.blocks,
        bytes=one.bytes + other.bytes,
        failures=one.failures + other.failures,
        queued_blocks=max(one.queued_blocks, other.queued_blocks),
        queue_ns=one.queue_ns + other.queue_ns,
        copy_ns=one.copy_ns + other.copy_ns,
        degraded=one.degraded or other.degraded,
    )
