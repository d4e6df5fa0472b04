"""A byte that changes in memory after its commit: found where the cache has checksums from the commit on."""

import asyncio

import numpy as np
import pytest

from kvtier import BlockResult, CacheOptions, Cause, Event, Tier
from tests.integration.blocks import SPEC, assert_bytes, block, blocks, chain, put_chain, sizes
from tests.integration.supervised import SupervisedDaemon
from tests.integration.waiting import PATIENCE_S, patient

COMMIT = CacheOptions(checksum="commit")


async def opened(client, name, options=COMMIT, **slots):
    return await client.open_cache(name, SPEC, budgets=sizes(**(slots or {"host": 8, "disk": 16})), options=options)


async def flip(cache, key):
    """One bit of the block's host slot, as failing memory would."""
    (place,) = await cache.locate([key])
    cache.arena.view(Tier.HOST, 0, place.host_slot, write=True)[1][17] ^= 1


async def removals(client, name, count, since):
    found = []
    async with asyncio.timeout(PATIENCE_S):
        async for event in client.watch(since=since, caches=[name]):
            if isinstance(event, Event) and event.cause in (Cause.CORRUPT, Cause.ANCESTOR):
                found += [(key, event.cause) for key in event.keys]
                if len(found) == count:
                    return found


@pytest.mark.parametrize("streamed", [False, True], ids=["mapped", "streamed"])
@pytest.mark.parametrize("seen_by", ["verify", "demotion"])
async def test_a_flipped_bit_is_a_miss_and_an_event(client, name, streamed, seen_by):
    cache = await opened(client, name)
    keys = chain(name, 4)
    writer = await client.open_cache(name, mapped=not streamed)
    assert await writer.put(keys, blocks(keys), tier=Tier.HOST) == [BlockResult.OK] * 4
    since = (await cache.match(keys)).as_of
    await flip(cache, keys[2])
    if seen_by == "verify":
        assert_bytes(keys[:2], await cache.get(keys, verify=True))
    else:
        results = await cache.move(keys, Tier.DISK)
        assert results[:2] == [BlockResult.OK] * 2 and BlockResult.OK not in results[2:]
    assert set(await removals(client, name, 2, since)) == {(keys[2], Cause.CORRUPT), (keys[3], Cause.ANCESTOR)}
    assert (await cache.match(keys)).blocks == 2
    assert await cache.put(keys, blocks(keys)) == [BlockResult.EXISTS] * 2 + [BlockResult.OK] * 2
    assert_bytes(keys, await cache.get(keys, verify=True))


async def test_the_default_promises_the_disk_alone(client, name):
    cache = await opened(client, name, CacheOptions())
    assert cache.info.options.checksum == "disk"
    keys = await put_chain(cache, name, 1, tier=Tier.HOST)
    await flip(cache, keys[0])
    assert not np.array_equal((await cache.get(keys, verify=True))[0], block(keys[0]))


async def test_a_committed_lease_has_checksums_too(client, name):
    cache = await opened(client, name)
    keys = chain(name, 2)
    async with cache.reserve(2, Tier.HOST) as lease:
        for index, key in enumerate(keys):
            for view, start in zip(lease.view(index), (0, SPEC.pool_bytes(0, 0)), strict=True):
                view[:] = block(key)[start : start + len(view)]
        await lease.commit(keys)
    await flip(cache, keys[1])
    assert_bytes(keys[:1], await cache.get(keys, verify=True))


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
async def test_they_outlive_the_daemon(short_dir, ending, tier):
    """In memory with the slots, on disk with the records, from where they come back with the block."""
    daemon = SupervisedDaemon(short_dir, sizes(host=8, disk=16))
    daemon.start()
    ending.callback(daemon.close)
    async with await patient(daemon.address) as client:
        cache = await opened(client, "c")
        keys = await put_chain(cache, "kept", 3, tier=Tier.HOST)
        if tier is Tier.DISK:
            await cache.move(keys, Tier.DISK)
        await asyncio.to_thread(daemon.kill)
        cache = await client.open_cache("c")
        assert_bytes(keys, await cache.get(keys))
        await flip(cache, keys[2])
        for verify in (True, False):
            assert_bytes(keys[: 3 if tier is Tier.DISK else 2], await cache.get(keys, verify=verify))
    assert daemon.stop() == 0
