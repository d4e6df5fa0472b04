"""What a daemon says of itself, picked apart for tests."""

from __future__ import annotations

from kvtier import AsyncClient, Tier
from kvtier.stats import CacheStats, EdgeStats, SessionStats, TierStats


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
