"""The words of the API: tiers, causes, results, cursors. Numeric values are the wire's unless said otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from kvtier.abi.attention import Needed
from kvtier.abi.keys import KEY_BYTES
from kvtier.abi.spec import CacheSpec
from kvtier.abi.words import TIERS as TIERS  # noqa: PLC0414
from kvtier.abi.words import BlockResult as BlockResult  # noqa: PLC0414  others take it from here
from kvtier.abi.words import Cause as Cause  # noqa: PLC0414  others take it from here
from kvtier.abi.words import EventType as EventType  # noqa: PLC0414  others take it from here
from kvtier.abi.words import Tier as Tier  # noqa: PLC0414  others take it from here

ROOT_PARENT: Final = bytes(KEY_BYTES)
"""On the wire: the parent of a chain's first block."""

DEFAULT_PRIORITY: Final = 35


MAPPED_TIERS: Final = (Tier.DEVICE, Tier.HOST)
"""Tiers whose slots a client can map, the fastest first: leases exist there and only there."""


@dataclass(slots=True, frozen=True, order=True)
class Cursor:
    """A place in the event stream: the last event seen. ``id`` 0 = before the first; ``epoch`` 0 = the current one."""

    epoch: int
    id: int

    def __str__(self) -> str:
        return f"{self.epoch}:{self.id}"


@dataclass(slots=True, frozen=True)
class LeaseTicket:
    """A lease of one process, which others join with it: see :meth:`kvtier.Cache.join`. It can be pickled. It is worth
    nothing without the right to read or write the cache."""

    cache: str
    group: int
    tier: Tier
    lease_id: int
    secret: bytes = field(repr=False)
    slots: tuple[int, ...]


@dataclass(slots=True, frozen=True)
class WriteTicket(LeaseTicket):
    """Of a :class:`kvtier.WriteLease`."""


@dataclass(slots=True, frozen=True)
class ReadTicket(LeaseTicket):
    """Of a :class:`kvtier.ReadLease`, whose attributes these are."""

    keys: tuple[bytes, ...]
    generations: tuple[int, ...]
    found_in: bytes
    matched: int
    needed: Needed


def tiers_of(residency: int) -> Iterator[Tier]:
    """The tiers of a residency set, the fastest first."""
    return (tier for tier in TIERS if residency & tier.bit)


def fastest(residency: int) -> Tier | None:
    """The fastest tier of a residency set; None for the empty one."""
    return next(tiers_of(residency), None)


def size(nbytes: float) -> str:
    """Bytes as a person reads them: ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def count(number: float) -> str:
    """A number in at most five columns up to 10^15: ``0.5``, ``9999``, ``10.0k``, ``1.2M``."""
    if abs(number) < 9999.5:
        return f"{number:.1f}".removesuffix(".0") if abs(number) < 9.95 else f"{number:.0f}"
    for unit in ("k", "M", "G"):
        number /= 1000
        if abs(number) < 999.5:
            return f"{number:.1f}{unit}" if abs(number) < 99.95 else f"{number:.0f}{unit}"
    return f"{number / 1000:.0f}T"


def duration(ns: float) -> str:
    """Nanoseconds as a person reads them: ``1.2ms``."""
    for unit in ("ns", "µs", "ms"):
        if abs(ns) < 1000:
            return f"{ns:.0f}{unit}" if unit == "ns" else f"{ns:.1f}{unit}"
        ns /= 1000
    return f"{ns:.1f}s"


def clean(text: str) -> str:
    """What another process calls itself, fit for a terminal: nothing in it moves a cursor or sets a colour."""
    return "".join(character if character.isprintable() else "?" for character in text)


class WritePolicy(IntEnum):
    """When blocks are copied down. Values as on the wire."""

    DEFAULT = 0
    """The daemon's, or of a cache that exists, its own."""
    BACK = 1
    """When the slot is wanted, or ahead of that to keep slots clean."""
    THROUGH = 2
    """To the lowest tier as soon as they are committed."""
    SELECTIVE = 3
    """At their second use; dropped instead of demoted before."""

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(slots=True, frozen=True)
class CacheOptions:
    """What a cache is opened with. What is left out is the cache's own where it exists, else the daemon's default."""

    write_policy: WritePolicy = WritePolicy.DEFAULT
    eviction: str = ""
    """Name of an eviction policy, such as "lru"."""
    event_hash: str = ""
    """What blocks are named by in events besides their keys: v1_block_key, v2_sha256 or v2_sha256_64."""
    keep_tokens: bool = False
    """Token ids are kept, and sent to watchers that may see them."""
    thresholds: Mapping[tuple[Tier, Tier], int] = field(default_factory=dict)
    """By edge, the least priority at which a block goes down it: 0 to 101, 101 = never."""
    checksum: str = ""
    """``disk``: a block's bytes are checked from their write to disk on. ``commit``: from their commit on, where they
    are committed in the CPU's memory."""


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
    queried: int
    found: int
    stored: int
    removed: int


@dataclass(slots=True, frozen=True)
class CacheStats:
    """One cache. Hits are blocks acquired, or read without a call, by the fastest tier they were found in at the moment
    of the match. ``queried``: blocks of the chains that were asked for, each chain once; ``found``: of them."""

    cache_id: int
    name: str
    blocks: int
    tiers: tuple[TierStats, ...]
    edges: tuple[EdgeStats, ...]
    hits_device: int
    hits_host: int
    hits_disk: int
    queried: int
    found: int
    stored: int
    removed: int
    waiting: int
    """Calls waiting for room."""
    groups: tuple[GroupStats, ...]
    index_places: int = 0
    """For blocks in the key index, where clients look them up; 0 = it has none, and clients call."""
    unindexed: int = 0
    """Blocks without a place there; unless 0, clients call for what they do not find."""
    device: str = ""
    """As in :class:`CacheInfo`."""


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
    """The effect of removing a cache. ``freed``: bytes by tier that its budgets took. ``kept_in_store``: as in
    :class:`kvtier.ResetReport`."""

    blocks: int
    freed: Mapping[Tier, int]
    kept_in_store: bool = False


@dataclass(slots=True, frozen=True)
class RemoteGcReport:
    """What went of the store beyond the host, or would go, and what stays."""

    objects: int
    bytes: int
    kept_objects: int
    kept_bytes: int


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
class TierBytes:
    """Bytes of a tier. ``device``: that it is on, empty for host and disk. ``given``: by name of the cache that has
    them, of those that you may administer."""

    tier: Tier
    device: str
    size: int
    left: int
    given: Mapping[str, int]


@dataclass(slots=True, frozen=True)
class DeviceStats:
    """What device tiers are on. ``kind``: ``cuda``, or ``stand-in`` for shared memory in the place of a GPU's, which
    has neither ``name`` nor ``uuid``. ``memory_bytes``: that the GPU has, whoever uses them."""

    kind: str
    name: str = ""
    uuid: str = ""
    memory_bytes: int = 0


@dataclass(slots=True, frozen=True)
class RemoteOperation:
    """Calls of one kind that the store beyond the host was asked; ``refused`` ones were not made."""

    operation: str
    calls: int
    failures: int
    refused: int
    bytes: int
    seconds: float


@dataclass(slots=True, frozen=True)
class RemoteStats:
    """The store beyond the host. ``url``: empty where there is none. ``problem``: why it is left alone, if it is.
    ``blocks``: counts by outcome. ``unwritten``: counts of the blocks that the store lacks, by reason."""

    url: str = ""
    problem: str = ""
    operations: tuple[RemoteOperation, ...] = ()
    blocks: Mapping[str, int] = field(default_factory=dict)
    unwritten: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class PeerStats:
    """A daemon that the daemon follows.

    ``state``: exact, syncing, stale, away, refused, idle (no cache is here to follow there) or itself. ``blocks``:
    known to be there, of caches that are here with the same specification. ``problem``: why it is not exact, or a cache
    is not followed; empty where neither is so.
    """

    address: str
    state: str
    blocks: int
    problem: str


@dataclass(slots=True, frozen=True)
class Holding:
    """What a daemon has of a chain in one window group: ``blocks`` of its prefix, by the fastest tier of each.

    ``peer``: its address; empty = the daemon that was asked.
    """

    peer: str
    cache: str
    group: int
    blocks: int
    tiers: Mapping[Tier, int]


@dataclass(slots=True, frozen=True)
class Holdings:
    """Who has what of a chain. ``keys``: the chain's; or those known that begin as asked, at most 32, and if there are
    several, nothing is said of any."""

    keys: tuple[bytes, ...]
    found: tuple[Holding, ...]
    peers: tuple[PeerStats, ...]


@dataclass(slots=True, frozen=True)
class DaemonStats:
    """``problems`` is empty on a healthy daemon. ``start_time_ns``: nanoseconds since the Unix epoch.

    ``uptime_ns``: by a clock that never jumps, taken with the counters: rates are differences over its differences.
    ``watcher_stats``: of the ``watchers``, those of the ``sessions``.
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
    devices: tuple[DeviceStats, ...] = ()
    tiers: tuple[TierBytes, ...] = ()
    remote: RemoteStats = RemoteStats()
    peers: tuple[PeerStats, ...] = ()


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
    """One cache: what its bytes mean and where they may live. ``device``: a GPU's uuid, ``stand-in``, or empty.
    ``remote``: the daemon has a store beyond the host."""

    cache_id: int
    name: str
    spec: CacheSpec
    fingerprint: bytes
    groups: tuple[GroupInfo, ...]
    blocks: int
    sessions: int
    options: CacheOptions
    device: str
    remote: bool = False
