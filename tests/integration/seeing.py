"""What a daemon says of itself, picked apart for tests."""

from dataclasses import replace
from pathlib import Path

from kvtier import AsyncClient, Cursor, Tier
from kvtier.types import CacheStats, DaemonStats, EdgeStats, EventLogStats, SessionStats, TierStats
from kvtier.v1 import admin_pb2
from tests.integration.daemon import DaemonProcess
from tests.integration.raw import RawClient


def memory(daemon: DaemonProcess) -> int:
    """Resident bytes that are its own: anonymous, so without the arenas."""
    lines = Path(f"/proc/{daemon.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


async def state(raw: RawClient) -> bytes:
    """All that a call could have changed: slots, blocks, leases, counters, and the last event's id. Not what changes by
    itself: the uptime, and what of the events is on disk yet."""
    stats: admin_pb2.StatsResponse = await raw.call(raw.stubs.admin.Stats, admin_pb2.StatsRequest())
    stats.ClearField("uptime_ns")
    stats.ClearField("event_log")
    return stats.SerializeToString(deterministic=True)


async def state_seen_by(client: AsyncClient) -> DaemonStats:
    """The same, as a client has it."""
    return replace(await client.stats(), uptime_ns=0, event_log=EventLogStats())


async def last_event(client: AsyncClient) -> Cursor:
    """Of the last event that there is."""
    stats = await client.stats()
    return Cursor(stats.epoch, stats.last_event_id)


async def cache_stats(client: AsyncClient, name: str) -> CacheStats:
    return next(cache for cache in (await client.stats()).caches if cache.name == name)


async def tier_stats(client: AsyncClient, name: str, tier: Tier) -> TierStats:
    return next(one for one in (await cache_stats(client, name)).tiers if one.tier is tier)


async def edge_stats(client: AsyncClient, name: str, edge: str) -> EdgeStats | None:
    """None while nothing ever went along the edge."""
    return next((one for one in (await cache_stats(client, name)).edges if one.edge == edge), None)


async def session_of(client: AsyncClient, pid: int) -> SessionStats | None:
    """The session of a process; None where it has none."""
    return next((one for one in (await client.stats()).sessions if one.pid == pid), None)
