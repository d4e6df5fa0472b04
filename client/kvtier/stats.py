"""What the daemon knows of itself and of its caches: plain values for ``client.stats()`` and ``client.caches()``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvtier.abi.spec import CacheSpec
from kvtier.retention import CacheOptions
from kvtier.types import Tier


@dataclass(slots=True, frozen=True)
class TierStats:
    """Slots by state; ``free`` to ``quarantined`` sum to ``capacity``. ``held``: under a lease.

    ``clean``: free, or with a block that is ready in a lower tier, too, so that reclaiming it takes no copy.
    """

    tier: Tier
    capacity: int
    free: int
    blank: int
    filling: int
    ready: int
    retiring: int
    orphaned: int
    quarantined: int
    held: int
    clean: int = 0


@dataclass(slots=True, frozen=True)
class EdgeStats:
    """Everything that went along an edge since the cache was opened. Times are sums over blocks, in nanoseconds."""

    edge: str
    """``"device>host"``"""
    blocks: int
    bytes: int
    failures: int
    queued_blocks: int
    queue_ns: int
    copy_ns: int
    degraded: bool


@dataclass(slots=True, frozen=True)
class GroupStats:
    """One window group's part of its cache's numbers. ``window_tokens`` 0 = full attention."""

    group: int
    window_tokens: int
    blocks: int
    tiers: tuple[TierStats, ...]
    hits_device: int
    hits_host: int
    hits_disk: int
    misses: int
    stored: int
    removed: int


@dataclass(slots=True, frozen=True)
class CacheStats:
    """One cache. Hits are blocks acquired, or read without a call, by the fastest tier they were found in at the moment
    of the match."""

    cache_id: int
    name: str
    blocks: int
    tiers: tuple[TierStats, ...]
    edges: tuple[EdgeStats, ...]
    hits_device: int
    hits_host: int
    hits_disk: int
    misses: int
    stored: int
    removed: int
    waiting: int
    """Calls waiting for room."""
    groups: tuple[GroupStats, ...]
    index_places: int = 0
    """For blocks in the key index, where clients look them up; 0 = it has none, and clients call."""
    unindexed: int = 0
    """Blocks without a place there; unless 0, clients call for what they do not find."""


@dataclass(slots=True, frozen=True)
class SessionStats:
    """One client process. ``attached`` is False where its connection broke and its process lives."""

    session_id: int
    pid: int
    uid: int
    command: str
    attached: bool
    leases: int
    held_slots: int


@dataclass(slots=True, frozen=True)
class LeaseInfo:
    """One lease and whose it is. ``age_ns``: since it was granted.

    ``blank_slots`` are leased to write, ``held_blocks`` to read. ``orphaned``: the connection of its session broke and
    its process lives.
    """

    lease_id: int
    cache: str
    group: int
    tier: Tier
    blank_slots: int
    held_blocks: int
    orphaned: bool
    age_ns: int
    session_id: int
    pid: int
    uid: int
    command: str


@dataclass(slots=True, frozen=True)
class KickReport:
    """What was given back, or would be."""

    leases: int
    slots: int


@dataclass(slots=True, frozen=True)
class RemovalReport:
    """What went with a cache, or would go. ``freed``: bytes by tier that its budgets took."""

    blocks: int
    freed: Mapping[Tier, int]


@dataclass(slots=True, frozen=True)
class WatcherStats:
    """One stream of events and whose it is. ``lag``: how many events it has not been sent yet."""

    session_id: int
    pid: int
    uid: int
    command: str
    lag: int


@dataclass(slots=True, frozen=True)
class EventLogStats:
    """Past events on disk. ``max_bytes``: of its file, 0 = there is no log; ``bytes``: that records take.

    ``oldest_id``, ``newest_id``: first and last id in it, 0 = none. ``failures``: attempts to write that failed, and
    ``lost_events``: that will never be in it, both of this life of the daemon. ``failing``: why it cannot be written at
    present, empty where it can.
    """

    max_bytes: int = 0
    bytes: int = 0
    oldest_id: int = 0
    newest_id: int = 0
    oldest_age_ns: int = 0
    failures: int = 0
    lost_events: int = 0
    failing: str = ""


@dataclass(slots=True, frozen=True)
class DeviceStats:
    """What the device tiers are on. ``kind``: ``cuda``, or ``stand-in`` for shared memory in the place of a GPU's,
    which has neither ``name`` nor ``uuid``. ``memory_bytes``: that the GPU has, whoever uses them."""

    kind: str
    name: str = ""
    uuid: str = ""
    memory_bytes: int = 0


@dataclass(slots=True, frozen=True)
class DaemonStats:
    """``problems`` is empty on a healthy daemon. ``start_time_ns``: nanoseconds since the Unix epoch.

    ``uptime_ns``: by a clock that never jumps, taken with the counters: rates are differences over its differences.
    ``watcher_stats``: of the ``watchers``, those of the ``sessions``. ``device``: None where there is no device tier.
    """

    version: str
    pid: int
    epoch: int
    boot: int
    start_time_ns: int
    last_event_id: int
    watchers: int
    caches: tuple[CacheStats, ...]
    sessions: tuple[SessionStats, ...]
    problems: tuple[str, ...]
    uptime_ns: int = 0
    watcher_stats: tuple[WatcherStats, ...] = ()
    event_log: EventLogStats = EventLogStats()
    device: DeviceStats | None = None


@dataclass(slots=True, frozen=True)
class GroupTier:
    """What a window group has of a tier: ``slots``, ``slot_bytes`` apart, in ``tokens`` and in ``bytes``."""

    tier: Tier
    slots: int
    slot_bytes: int
    tokens: int
    bytes: int


@dataclass(slots=True, frozen=True)
class GroupInfo:
    """One window group. Only tiers that the cache has, the fastest first."""

    group: int
    window_tokens: int
    tiers: tuple[GroupTier, ...]


@dataclass(slots=True, frozen=True)
class CacheInfo:
    """One cache: what its bytes mean and where they may live."""

    cache_id: int
    name: str
    spec: CacheSpec
    fingerprint: bytes
    groups: tuple[GroupInfo, ...]
    blocks: int
    sessions: int
    options: CacheOptions
