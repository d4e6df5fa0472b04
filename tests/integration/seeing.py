"""What a daemon says of itself, picked apart for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import replace

from kvtier import AsyncClient, Cache, Cursor, Mirror, Tier
from kvtier.stats import CacheStats, DaemonStats, EdgeStats, EventLogStats, SessionStats, TierStats
from kvtier.v1 import admin_pb2
from tests.integration.raw import RawClient
from tests.integration.waiting import PATIENCE_S


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


async def listed_without_device(
    client: AsyncClient, cache: Cache, mirror: Mirror, chains: Sequence[Sequence[bytes]]
) -> set[bytes]:
    """The blocks there are, once a device is lost and all is still: none of them on it, and the mirror, which took no
    new snapshot, finds the same prefixes of all chains by events alone."""
    stats = await client.stats()
    async with asyncio.timeout(PATIENCE_S):
        await mirror.synced(Cursor(stats.epoch, stats.last_event_id))
    assert mirror.resyncs == 0
    listed = {block.key: block.residency async for block in cache.blocks()}
    assert not any(residency & Tier.DEVICE.bit for residency in listed.values())
    for keys in chains:
        assert mirror.longest_prefix(keys) == stored_prefix(keys, listed.keys())
    return set(listed)


def stored_prefix(keys: Sequence[bytes], stored: Collection[bytes]) -> int:
    """How many of the first keys of a chain are stored."""
    return next((number for number, key in enumerate(keys) if key not in stored), len(keys))


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
