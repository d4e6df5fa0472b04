"""The types of the API: tiers, causes, results, cursors. Numeric values are the wire's unless stated otherwise."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, TypeAlias

from kvtier.abi.attention import Needed
from kvtier.abi.spec import CacheSpec
from kvtier.abi.words import ROOT_PARENT as ROOT_PARENT  # noqa: PLC0414  re-exported
from kvtier.abi.words import TIERS as TIERS  # noqa: PLC0414
from kvtier.abi.words import BlockResult as BlockResult  # noqa: PLC0414  re-exported
from kvtier.abi.words import Cause as Cause  # noqa: PLC0414  re-exported
from kvtier.abi.words import EventType as EventType  # noqa: PLC0414  re-exported
from kvtier.abi.words import Tier as Tier  # noqa: PLC0414  re-exported

DEFAULT_PRIORITY: Final = 35


AnyTier: TypeAlias = Tier | str
"""A tier, or its name: ``Tier.HOST`` or ``"host"``."""
AnySize: TypeAlias = int | str
"""A number of bytes, or its text: ``64 << 20`` or ``"64MiB"``."""

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?) ?(?:([KMGTP])(i?)B|B?)", re.IGNORECASE)

MAPPED_TIERS: Final = (Tier.DEVICE, Tier.HOST)
"""Tiers whose slots a client can map, the fastest first. Leases exist only in these tiers."""


@dataclass(slots=True, frozen=True, order=True)
class Cursor:
    """A position in the event stream: the last seen event. ``id`` 0 = before the first; ``epoch`` 0 = the current
    epoch."""

    epoch: int
    id: int

    def __str__(self) -> str:
        return f"{self.epoch}:{self.id}"


@dataclass(slots=True, frozen=True)
class LeaseTicket:
    """A ticket with which other processes join a lease: see :meth:`kvtier.Cache.join`. Tickets can be pickled. A ticket
    is useless without the right to read or write the cache."""

    cache: str
    group: int
    tier: Tier
    lease_id: int
    secret: bytes = field(repr=False)
    slots: tuple[int, ...]


@dataclass(slots=True, frozen=True)
class WriteTicket(LeaseTicket):
    """Ticket of a :class:`kvtier.WriteLease`."""


@dataclass(slots=True, frozen=True)
class ReadTicket(LeaseTicket):
    """Ticket of a :class:`kvtier.ReadLease`, with the attributes of the lease."""

    keys: tuple[bytes, ...]
    generations: tuple[int, ...]
    found_in: bytes
    matched: int
    needed: Needed


def tiers_of(residency: int) -> Iterator[Tier]:
    """The tiers of a residency set, the fastest first."""
    return (tier for tier in TIERS if residency & tier.bit)


def fastest(residency: int) -> Tier | None:
    """The fastest tier of a residency set; None for the empty set."""
    return next(tiers_of(residency), None)


def parsed_size(text: str) -> int | None:
    """Converts ``500GiB`` or ``2TB`` to bytes; None for anything else."""
    if (found := _SIZE.fullmatch(text)) is None:
        return None
    power = "KMGTP".index(found[2].upper()) + 1 if found[2] else 0
    return int(float(found[1]) * (1024 if found[3] else 1000) ** power)


def size(nbytes: float) -> str:
    """Bytes in readable form: ``1.5 GiB``."""
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
    """Nanoseconds in readable form: ``1.2ms``."""
    for unit in ("ns", "µs", "ms"):
        if abs(ns) < 1000:
            return f"{ns:.0f}{unit}" if unit == "ns" else f"{ns:.1f}{unit}"
        ns /= 1000
    return f"{ns:.1f}s"


def clean(text: str) -> str:
    """A name from another process, safe for a terminal: unprintable characters, which could move the cursor or set a
    colour, become ``?``."""
    return "".join(character if character.isprintable() else "?" for character in text)


class WritePolicy(IntEnum):
    """When blocks are copied down. Values as on the wire."""

    DEFAULT = 0
    """The policy of an existing cache, else the daemon's."""
    BACK = 1
    """When the slot is needed, or ahead of need to keep slots clean."""
    THROUGH = 2
    """To the lowest tier, as soon as blocks are committed."""
    SELECTIVE = 3
    """At their second use; before that, blocks are dropped instead of demoted."""

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(slots=True, frozen=True)
class CacheOptions:
    """Options to open a cache with. The existing cache, or else the daemon, has a value for each omitted option."""

    write_policy: WritePolicy = WritePolicy.DEFAULT
    eviction: str = ""
    """Name of an eviction policy, for example "lru"."""
    event_hash: str = ""
    """Hash that names blocks in events besides their keys: v1_block_key, v2_sha256 or v2_sha256_64."""
    keep_tokens: bool = False
    """Whether token ids are kept, and sent to watchers that may see them."""
    thresholds: Mapping[tuple[Tier, Tier], int] = field(default_factory=dict)
    """Least priority at which a block goes down an edge (from, to): 0 to 101, 101 = never."""
    checksum: str = ""
    """``disk``: checksums protect a block's bytes from the write to disk on. ``commit``: from the commit on, for blocks
    committed in the CPU's memory."""


@dataclass(slots=True, frozen=True)
class TierStats:
    """Slots by state; ``free`` to ``quarantined`` sum to ``capacity``. ``held``: slots under a lease. ``clean``: slots
    that are free, or whose block is also ready in a lower tier, so reclaiming them needs no copy."""

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
    """Totals of an edge since the cache was opened. Times are sums over blocks, in nanoseconds."""

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
    """A window group's share of its cache's numbers. ``window_tokens`` 0 = full attention."""

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
    """Statistics of one cache. Hits are blocks acquired, or read without a call, by their fastest tier at the match.
    ``queried``: blocks of the chains asked for, each chain once; ``found``: how many of these were found."""

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
    groups: tuple[GroupStats, ...]
    index_places: int = 0
    """Places in the key index, where clients look blocks up; 0 = the cache has no index, and clients call."""
    unindexed: int = 0
    """Blocks without a place in the index; if above 0, clients call for blocks that they do not find."""
    device: str = ""
    """The cache's device, as in :class:`CacheInfo`."""


@dataclass(slots=True, frozen=True)
class SessionStats:
    """A client process. ``attached`` is False if its connection broke and its process lives."""

    session_id: int
    pid: int
    uid: int
    command: str
    attached: bool
    leases: int
    held_slots: int


@dataclass(slots=True, frozen=True)
class LeaseInfo:
    """A lease and its owner. ``age_ns``: time since the grant. ``blank_slots`` are leased to write, ``held_blocks`` to
    read. ``orphaned``: the session's connection broke, and its process lives."""

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
    """Numbers of leases and slots that a kick gave back, or would give back."""

    leases: int
    slots: int


@dataclass(slots=True, frozen=True)
class RemovalReport:
    """The effect of removing a cache. ``freed``: bytes of its budgets by tier. ``kept_in_store``: as in
    :class:`kvtier.ResetReport`."""

    blocks: int
    freed: Mapping[Tier, int]
    kept_in_store: bool = False


@dataclass(slots=True, frozen=True)
class ResizeReport:
    """The effect of a resize: its seconds, the longest time that the daemon let calls about the cache wait, and the
    number of blocks that left."""

    took_s: float
    stalled_s: float
    evicted: int


@dataclass(slots=True, frozen=True)
class RemoteGcReport:
    """Objects deleted from the remote store, or that would be, and objects kept."""

    objects: int
    bytes: int
    kept_objects: int
    kept_bytes: int


@dataclass(slots=True, frozen=True)
class WatcherStats:
    """A watcher and its owner. ``lag``: number of events not sent to it yet."""

    session_id: int
    pid: int
    uid: int
    command: str
    lag: int


@dataclass(slots=True, frozen=True)
class EventLogStats:
    """The log of past events on disk.

    ``max_bytes``: limit of the file, 0 = no log; ``bytes``: size of its records. ``oldest_id``, ``newest_id``: first
    and last event in the log, 0 = none. ``failures``: failed writes; ``lost_events``: events that the log will never
    have; both since this daemon started. ``failing``: why the log cannot be written at present, else empty.
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
    """Bytes of a tier. ``device``: the tier's device, empty for host and disk. ``given``: bytes by the name of the
    owning cache, for caches that the caller may administer."""

    tier: Tier
    device: str
    size: int
    left: int
    given: Mapping[str, int]


@dataclass(slots=True, frozen=True)
class DeviceStats:
    """The device of device tiers. ``kind``: ``cuda``, or ``stand-in`` for shared memory in place of a GPU's, without
    ``name`` and ``uuid``. ``memory_bytes``: the GPU's total memory."""

    kind: str
    name: str = ""
    uuid: str = ""
    memory_bytes: int = 0


@dataclass(slots=True, frozen=True)
class RemoteOperation:
    """Calls of one kind to the remote store; ``refused`` calls were not made."""

    operation: str
    calls: int
    failures: int
    refused: int
    bytes: int
    seconds: float


@dataclass(slots=True, frozen=True)
class RemoteStats:
    """The remote store. ``url``: empty if there is none. ``problem``: why the store is not used, if so. ``blocks``:
    counts by outcome. ``unwritten``: counts of blocks that the store lacks, by reason."""

    url: str = ""
    problem: str = ""
    operations: tuple[RemoteOperation, ...] = ()
    blocks: Mapping[str, int] = field(default_factory=dict)
    unwritten: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class PeerStats:
    """A peer that the daemon follows.

    ``state``: exact, syncing, stale, away, refused, idle (no local cache to follow there) or itself. ``blocks``: blocks
    known there, of caches that exist here with the same specification. ``problem``: why the peer is not exact, or a
    cache is not followed; else empty.
    """

    address: str
    state: str
    blocks: int
    problem: str


@dataclass(slots=True, frozen=True)
class Holding:
    """A daemon's part of a chain in one window group: ``blocks`` of its prefix, by the fastest tier of each. ``peer``:
    the daemon's address; empty = the daemon that was asked."""

    peer: str
    cache: str
    group: int
    blocks: int
    tiers: Mapping[Tier, int]


@dataclass(slots=True, frozen=True)
class Holdings:
    """The holders of a chain. ``keys``: the chain's keys, or for a key prefix the known matching keys, at most 32;
    ``found`` is empty if several match."""

    keys: tuple[bytes, ...]
    found: tuple[Holding, ...]
    peers: tuple[PeerStats, ...]


@dataclass(slots=True, frozen=True)
class DaemonStats:
    """The daemon's statistics. ``problems`` is empty on a healthy daemon. ``start_time_ns``: nanoseconds since the Unix
    epoch. ``notes``: the latest takeovers of budgets.

    ``uptime_ns``: by a clock that never jumps, read with the counters; divide differences of counters by its
    differences to get rates. ``watcher_stats``: the ``watchers`` that belong to ``sessions``.
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
    notes: tuple[str, ...] = ()
    remote: RemoteStats = RemoteStats()
    peers: tuple[PeerStats, ...] = ()


@dataclass(slots=True, frozen=True)
class GroupTier:
    """A window group's part of a tier: ``slots`` at a stride of ``slot_bytes``, and their sum in ``tokens`` and
    ``bytes``."""

    tier: Tier
    slots: int
    slot_bytes: int
    tokens: int
    bytes: int


@dataclass(slots=True, frozen=True)
class GroupInfo:
    """A window group. ``tiers``: the cache's tiers, the fastest first."""

    group: int
    window_tokens: int
    tiers: tuple[GroupTier, ...]


@dataclass(slots=True, frozen=True)
class CacheInfo:
    """A cache: the meaning of its bytes and their places. ``device``: a GPU's uuid, ``stand-in``, or empty. ``remote``:
    the daemon has a remote store. ``idle_s``: seconds since a session had it open. ``last_user``: of the last opening,
    in this daemon's life. ``not_served``: why no client can open it by its name; it then has no specification, and no
    groups."""

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
    idle_s: int = 0
    last_user: str = ""
    not_served: str = ""
