"""A cache that writes through has lost nothing after a kill; one that writes selectively keeps what was used twice."""

from __future__ import annotations

import asyncio

import pytest

from kvtier import BlockResult, CacheOptions, Cause, InvalidArgument, Tier, WritePolicy, connect
from kvtier.events import Event
from kvtier.wire import split_keys
from tests.integration.blocks import SPEC, assert_bytes, blocks, chain, sizes

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
    async with await connect(daemon.address) as client:
        cache = await client.open_cache("through", SPEC, options=THROUGH)
        assert await cache.put(KEYS, blocks(KEYS)) == [BlockResult.OK] * len(KEYS)
        await reached_disk(client, cache, set(KEYS))
        daemon.kill()
    daemon.start()
    async with await connect(daemon.address) as client:
        cache = await client.open_cache("through", SPEC)
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
