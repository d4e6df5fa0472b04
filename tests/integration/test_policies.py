"""A cache that writes through has lost nothing after a kill; one that writes selectively keeps what was used twice."""

import asyncio

import pytest

from kvtier import (
    BlockResult,
    CacheOptions,
    CallerError,
    Cause,
    Event,
    InvalidArgument,
    Tier,
    WritePolicy,
    connect,
)
from kvtier.wire import split_keys
from tests.integration.blocks import SPEC, assert_bytes, blocks, chain, opened_cache, sizes
from tests.integration.seeing import cache_stats

KEYS = chain("policies", 6)
THROUGH = CacheOptions(write_policy=WritePolicy.THROUGH)


async def reached_disk(client, cache, keys):
    """Returns when copies to disk that nobody asked for have been told of all these blocks."""
    async with (
        asyncio.timeout(20),
        client.watch(oldest=True, causes=[Cause.WRITE_THROUGH], caches=[cache.name]) as watch,
    ):
        async for each in watch:
            if isinstance(each, Event) and each.moved_to is Tier.DISK:
                keys -= set(split_keys(each.packed_keys))
            if not keys:
                return


async def test_what_was_written_through_survives_a_kill(start_daemon):
    daemon = start_daemon(device=8, host=8, disk=16)
    async with opened_cache(daemon.address, "through", options=THROUGH) as (client, cache):
        assert await cache.put(KEYS, blocks(KEYS)) == [BlockResult.OK] * len(KEYS)
        await reached_disk(client, cache, set(KEYS))
        daemon.kill()
    daemon.start()
    async with opened_cache(daemon.address, "through") as (_, cache):
        assert cache.info.options.write_policy is WritePolicy.THROUGH
        assert_bytes(KEYS, await cache.get(KEYS))


async def test_selective_writes_what_is_used_again(start_daemon):
    daemon = start_daemon(device=8, host=8, disk=16)
    async with await connect(daemon.address) as client:
        cache = await client.open_cache("s", SPEC, options=CacheOptions(write_policy=WritePolicy.SELECTIVE))
        await cache.put(KEYS, blocks(KEYS))
        await cache.get(KEYS[:2])
        await reached_disk(client, cache, set(KEYS[:2]))
        assert (await cache.match(KEYS)).residency == bytes([1 | 4] * 2 + [1] * 4)


async def test_a_threshold_keeps_blocks_from_an_edge(client, name):
    options = CacheOptions(write_policy=WritePolicy.THROUGH, thresholds={(Tier.DEVICE, Tier.DISK): 50})
    cache = await client.open_cache(name, SPEC, budgets=sizes(device=8, host=8, disk=16), options=options)
    assert cache.info.options.thresholds == options.thresholds
    await cache.put(KEYS[:1], blocks(KEYS[:1]), priorities=49)
    await cache.put(KEYS[:2][1:], blocks(KEYS[1:2]), parent=None, priorities=50)
    await reached_disk(client, cache, set(KEYS[1:2]))
    assert [place.residency for place in await cache.locate(KEYS[:2])] == [1, 1 | 4]


async def test_only_edges_that_lead_down_have_a_threshold(client, name):
    for thresholds in ({(Tier.HOST, Tier.DEVICE): 50}, {(Tier.DEVICE, Tier.HOST): 102}):
        with pytest.raises(InvalidArgument) as refused:
            await client.open_cache(name, SPEC, options=CacheOptions(thresholds=thresholds))
        assert refused.value.field.startswith("options.thresholds[0]")


async def test_a_threshold_keeps_blocks_from_going_down(start_daemon):
    daemon = start_daemon("--demotion-threshold", "101", host=4, disk=16)
    async with opened_cache(daemon.address, "c") as (_, cache):
        for name in ("a", "b"):
            await cache.put(chain(name, 4), blocks(chain(name, 4)), tier=Tier.HOST)
        assert (await cache.match(chain("a", 4))).blocks == 0


async def test_a_daemon_with_a_disk_alone_can_be_looked_at(start_daemon):
    """Nobody can map a slot of it, so nothing can be put there; it is a valid subset all the same."""
    daemon = start_daemon(disk=8)
    async with opened_cache(daemon.address, "disk") as (client, cache):
        assert cache.tiers == (Tier.DISK,)
        keys = chain("nowhere", 2)
        for call in (cache.reserve(1), cache.acquire(keys), cache.put(keys, blocks(keys))):
            with pytest.raises(CallerError, match="has only disk"):
                await call
        assert (await cache.match(keys)).blocks == 0
        assert await cache.move(keys, Tier.DISK) == [BlockResult.NOT_FOUND] * 2
        assert [tier.free for tier in (await cache_stats(client, "disk")).tiers] == [8]
