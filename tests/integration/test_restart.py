"""A daemon that stops as it should and starts again: what is still there, what is not, and who notices."""

import asyncio

import numpy as np
import pytest

from kvtier import BlockResult, LeaseLost, Tier
from kvtier.abi.layout import first_generation
from kvtier.abi.words import TIERS
from tests.integration.blocks import SPEC, assert_bytes, blocks, chain, opened_cache, sizes
from tests.integration.conftest import own_daemon
from tests.integration.seeing import tier_stats
from tests.integration.starting import refused
from tests.integration.touching import scribble_into
from tests.integration.trial import trial
from tests.integration.waiting import PATIENCE_S, heard, patient

SLOTS = {"device": 8, "host": 16, "disk": 64}
ON_DISK = chain("on disk", 20)
IN_MEMORY = chain("in memory", 5)
daemon = own_daemon(**SLOTS)


async def filled(client):
    """A cache with one chain that is only on disk, and one that is only in memory."""
    cache = await client.open_cache("c", SPEC, budgets=sizes(**SLOTS))
    await cache.put(ON_DISK, blocks(ON_DISK))
    await cache.move(ON_DISK, Tier.DISK)
    await cache.put(IN_MEMORY, blocks(IN_MEMORY))
    assert {row.residency async for row in cache.blocks()} == {Tier.DISK.bit, Tier.DEVICE.bit}
    return cache


async def test_generations_never_restart(daemon):
    async with await patient(daemon.address) as client:
        cache = await filled(client)
        old, slots = cache.arena, np.arange(SLOTS["device"])
        before = old.generations(Tier.DEVICE, cache.group, slots)
        await asyncio.to_thread(daemon.restart)
        await heard(client)
        await cache.match(ON_DISK)
        assert cache.arena is not old
        after = cache.arena.generations(Tier.DEVICE, cache.group, slots)
        assert before.max() < first_generation((await client.stats()).boot) <= after.min()


@pytest.mark.parametrize("cleanly", [True, False])
async def test_leases_die_with_their_daemon(daemon, cleanly):
    async with await patient(daemon.address) as client:
        cache = await filled(client)
        written, read = await cache.reserve(3), await cache.acquire(ON_DISK[:2], Tier.HOST)
        views = [written.view(index) for index in range(3)]
        stop = daemon.stop if cleanly else daemon.kill
        await asyncio.to_thread(stop)
        await asyncio.to_thread(daemon.start)
        with pytest.raises(LeaseLost):
            await written.commit(chain("late", 3))
        for lease in (written, read):
            with pytest.raises(LeaseLost):
                lease.view(0)
            await lease.release()
        # A writer that has not noticed scribbles into memory that is nobody's any more.
        await cache.put(IN_MEMORY, blocks(IN_MEMORY))
        for view in views:
            scribble_into(view)
        assert_bytes(IN_MEMORY, await cache.get(IN_MEMORY))
        assert (await tier_stats(client, "c", Tier.DEVICE)).held == 0


async def test_smaller_memory_is_taken_and_a_smaller_disk_is_refused(daemon):
    async with await patient(daemon.address) as client:
        await filled(client)
    daemon.stop()
    full = dict(daemon.sizes)
    daemon.sizes = full | sizes(disk=SLOTS["disk"] - 1)
    said = refused(daemon, status=2)
    assert "--disk-bytes" in said and "stored caches up to c" in said
    daemon.sizes = full | sizes(device=2, host=3)
    daemon.start()
    async with opened_cache(daemon.address, "c", wait=PATIENCE_S) as (_, cache):
        assert [cache.slots(tier) for tier in TIERS] == [2, 3, SLOTS["disk"]]
        assert_bytes(ON_DISK, await cache.get(ON_DISK))


async def test_clean_stops_under_load(start_daemon):
    """What holds for kills holds here, and more: the epoch stays, and a watcher misses nothing at all."""
    stops = 4
    async with trial(start_daemon, 1) as run:
        for _ in range(stops):
            start = await run.end_and_restart(run.daemon.stop)
            assert start.epoch == 1
            await run.assert_reachable(proved=6)
        await run.settle()
        assert run.witness.gaps == []
        assert (await run.observer.stats()).boot == stops + 1


CHAINS = [chain(f"bad {number}", 16) for number in range(12)]


async def by_reset(cache):
    assert (await cache.reset()).dropped == sum(map(len, CHAINS))


async def by_drop(cache):
    for keys in CHAINS:
        assert (await cache.drop(keys[:1])).dropped == len(keys)


async def matches(client, name):
    cache = await client.open_cache(name, SPEC)
    return sum([(await cache.match(keys)).blocks for keys in CHAINS])


@pytest.mark.parametrize("forget", [by_reset, by_drop])
@pytest.mark.parametrize("settled", [True, False])
async def test_it_stays_forgotten_over_a_kill(start_daemon, forget, settled):
    """``settled``: all of it is on disk before; else some of it is still being written."""
    daemon = start_daemon(host=32, disk=256)
    async with opened_cache(daemon.address, "c", wait=PATIENCE_S) as (_, cache):
        for keys in CHAINS:
            await cache.put(keys, blocks(keys))
            if settled:
                assert await cache.move(keys, Tier.DISK) == [BlockResult.OK] * len(keys)
        await forget(cache)
        daemon.kill()
    daemon.start()
    async with await patient(daemon.address) as client:
        assert await matches(client, "c") == 0
