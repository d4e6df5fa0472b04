"""Blocks beyond the host: daemons with state of their own, and one store that all of them have. What every engine does.

Daemons and stores are those of earlier tests; each test has a cache of its own name.
"""

import asyncio
import json
import time

import numpy as np
import pytest

from kvtier import Cause, Client, EventType, Retention, Tier, TokenRange
from kvtier.errors import InvalidArgument
from tests.integration.blocks import BLOCK_BYTES, SLOT_BYTES, SPEC, assert_bytes, chain, sizes
from tests.integration.waiting import eventually
from tests.remote.shared import SharedStore, fetched, put, read_bytes

KEPT = Retention((TokenRange(0, None, 60),))


@pytest.fixture
async def store(shared_url, name):
    store = SharedStore(shared_url, name)
    yield store
    await store.close()


@pytest.fixture
def elsewhere(start, opened, store):
    """Stores chains through another host."""

    async def elsewhere(*chains):
        async with opened(start()) as (_, cache):
            for keys in chains:
                await put(cache, keys)
                await store.has(keys)

    return elsewhere


async def test_what_one_host_stores_another_reads(start, opened, store):
    keys = chain("shared", 4)
    async with opened(start()) as (client, cache):
        assert cache.info.remote
        await put(cache, keys)
        await store.has(keys)
    async with opened(start()) as (client, other):
        before = await fetched(client)
        assert (await other.match(keys)).blocks == 0
        found = await other.match(keys, remote=True)
        assert (found.blocks, found.remote_blocks) == (0, 4)
        assert_bytes(keys, await other.get(keys))
        assert (await other.match(keys)).blocks == 4
        assert await fetched(client) - before == 4
        assert_bytes(keys, await other.get(keys))
        assert await fetched(client) - before == 4, "they are here now"


async def test_what_one_host_evicts_another_reads(start, opened, store):
    keys = chain("evicted", 4)
    async with opened(start(write="evict", ahead=1.0), sizes(host=8)) as (_, cache):
        await put(cache, keys)
        await store.has(keys)
        for number in range(6):
            others = chain(f"other {number}", 4)
            await put(cache, others)
            await store.has(others)
        assert (await cache.match(keys)).blocks == 0
        assert_bytes(keys, await cache.get(keys))
    async with opened(start()) as (_, other):
        assert_bytes(keys, await other.get(keys))


async def test_only_the_rest_is_written(start, opened, store):
    keys = chain("half", 6)
    async with opened(start()) as (_, cache):
        await put(cache, keys[:3])
        await store.has(keys[:3])
    async with opened(start(fresh=True)) as (client, other):
        await put(other, keys)
        await store.has(keys)

        async def counts():
            return (await client.stats()).remote.blocks

        await eventually(counts, lambda found: found.get("written") == 3)
        assert (await counts())["there already"] == 3


async def test_only_the_rest_comes(start, opened, elsewhere):
    keys = chain("rest", 6)
    await elsewhere(keys)
    async with opened(start()) as (client, other):
        before = await fetched(client)
        await put(other, keys[:2])
        async with other.acquire(keys, Tier.HOST) as lease:
            assert len(lease.slots) == 6
        assert await fetched(client) - before == 4
        async with other.acquire(chain("rest", 9), Tier.HOST) as lease:
            assert len(lease.slots) == 6


async def test_blocks_of_a_prefetch_come_too(start, opened, elsewhere):
    keys = chain("prefetch", 3)
    await elsewhere(keys)
    async with opened(start()) as (_, other):
        await other.move(keys, Tier.HOST)
        assert (await other.match(keys)).blocks == 3


async def test_callers_at_once_share_a_fetch(start, opened, elsewhere):
    keys = chain("at once", 8)
    await elsewhere(keys)
    async with opened(start()) as (client, other):
        before, bytes_before = await fetched(client), await read_bytes(client)
        for rows in await asyncio.gather(*(other.get(keys) for _ in range(6))):
            assert_bytes(keys, rows)
        assert await fetched(client) - before == 8
        assert await read_bytes(client) - bytes_before < 2 * 8 * BLOCK_BYTES + 8 * 1024


async def test_both_journeys_are_events(start, opened, store):
    keys = chain("told", 2)
    async with opened(start()) as (client, cache):
        async with client.watch() as watch:
            await put(cache, keys)
            gone = await _journey(watch, EventType.UPDATED)
        assert (gone.moved_from, gone.moved_to, gone.moved_bytes) == (Tier.HOST, Tier.REMOTE, 2 * SLOT_BYTES)
        assert gone.copy_ns > 0
        assert list(gone.keys) == keys
        await store.has(keys)
    async with opened(start()) as (client, other):
        async with client.watch() as watch:
            await other.get(keys)
            stored = await _journey(watch, EventType.STORED)
            came = await _journey(watch, EventType.UPDATED)
        assert list(stored.keys) == list(came.keys) == keys
        assert (came.moved_from, came.moved_to, came.moved_bytes) == (Tier.REMOTE, Tier.HOST, 2 * SLOT_BYTES)


async def _journey(watch, kind):
    async for event in watch:
        if event.type is kind and event.cause is Cause.REMOTE:
            return event
    raise AssertionError("the stream ended")


async def test_objects_that_have_gone_are_misses(start, opened, store):
    keys = chain("gone", 4)
    async with opened(start()) as (_, cache):
        await put(cache, keys)
        await store.has(keys)
        await store.delete(keys)
        await cache.reset()
        assert (await cache.match(keys)).blocks == 0
        assert await cache.get(keys) == []


@pytest.mark.long
async def test_ten_thousand_objects_that_have_gone_are_misses(start_daemon, opened, store):
    """The daemon believes each of them to be there."""
    chains = [chain(f"many {number}", 20) for number in range(500)]
    every = [key for keys in chains for key in keys]
    slots = sizes(host=12_000)
    flag = json.dumps({"url": store.url, "write": "through"})
    async with opened(start_daemon("--remote", flag, host=12_000), slots) as (_, cache):
        for keys in chains:
            await put(cache, keys)
        await store.has(every[-1:], within=200)
        await store.has(every)
    async with opened(start_daemon("--remote", flag, host=64), sizes(host=64)) as (client, other):
        for keys in chains:
            assert (await other.match(keys, remote=True)).remote_blocks == len(keys)
        assert_bytes(chains[0], await other.get(chains[0]))
        await store.delete(every)
        before, started = await read_bytes(client), time.monotonic()
        for keys in chains[1:]:
            assert await other.get(keys) == []
        taken = time.monotonic() - started
        print(f"{taken / len(chains) * 1e3:.1f} ms a chain")
        assert taken < 60
        assert await read_bytes(client) == before
        assert (await client.stats()).remote.problem == ""
        assert_bytes(chains[0], await other.get(chains[0]))


DAMAGES = {
    "flipped": lambda data, other: data[:-1] + bytes([data[-1] ^ 1]),
    "truncated": lambda data, other: data[:-1],
    "lengthened": lambda data, other: data + bytes(1 << 20),
    "swapped": lambda data, other: other,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
async def test_a_damaged_object_is_a_miss_and_an_event(start, opened, store, elsewhere, damage):
    keys = chain("damaged", 4)
    await elsewhere(keys)
    await store.write({keys[2]: damage(await store.read(keys[2]), await store.read(keys[1]))})
    async with opened(start()) as (client, other):
        async with client.watch() as watch:
            assert_bytes(keys[:2], await other.get(keys))
            async for event in watch:
                if event.cause is Cause.CORRUPT:
                    break
        assert (event.type, list(event.keys)) == (EventType.REMOVED, [keys[2]])
        assert (event.moved_from, event.moved_to) == (Tier.REMOTE, Tier.HOST)
        assert await store.held(keys) == [*keys[:2], keys[3]], "nobody finds it again"


@pytest.mark.parametrize("across", [False, True])
async def test_what_is_dearer_than_to_compute_is_not_fetched(start, opened, elsewhere, across):
    first, second = chain("first", 2), chain("second", 2)
    await elsewhere(first, second)
    async with opened(start(fresh=True)) as (client, other):
        verbs = other.across if across else other
        async with verbs.acquire(first, recompute_seconds_per_block=1e-9) as lease:
            assert lease.matched == 2, "nothing has been measured yet"
        async with verbs.acquire(second, recompute_seconds_per_block=1e-9) as lease:
            assert lease.matched == 0
        assert (await client.stats()).remote.blocks["dearer than computing"] == 2
        async with verbs.acquire(second, recompute_seconds_per_block=60) as lease:
            assert lease.matched == 2
        for wrong in (-1, float("nan"), 3601):
            with pytest.raises(InvalidArgument, match="recompute_seconds_per_block"):
                await verbs.acquire(second, recompute_seconds_per_block=wrong)


async def test_the_synchronous_client_asks_the_store(start, opened, elsewhere, name):
    keys = chain("sync", 4)
    await elsewhere(keys)
    daemon = start()
    async with opened(daemon):
        with Client(daemon.address) as client:
            cache = client.open_cache(name)
            for verbs in (cache, cache.across):
                found = verbs.match(keys, remote=True)
                assert (found.blocks, found.remote_blocks) == (0, 4)
            with cache.acquire(keys, Tier.HOST, recompute_seconds_per_block=60) as lease:
                assert len(lease.slots) == 4


async def test_what_is_used_twice_goes(start, opened, store):
    once, twice = chain("once", 2), chain("twice", 2)
    async with opened(start(write="second_use")) as (_, cache):
        await put(cache, once)
        await put(cache, twice)
        async with cache.acquire(twice):
            pass
        await store.has(twice)
        assert await store.held(once) == []


async def test_what_is_not_worth_it_stays(start, opened, store):
    cheap, dear, deep = chain("cheap", 1), chain("dear", 1), chain("deep", 3)
    async with opened(start(min_priority=50, first_tokens=2 * SPEC.tokens_per_block)) as (_, cache):
        await put(cache, cheap)
        await put(cache, dear, retention=KEPT)
        await put(cache, deep, retention=KEPT)
        await store.has([*dear, *deep[:2]])
        assert await store.held([*cheap, *deep[2:]]) == []


async def test_no_more_is_written_than_the_limit_lets(start, opened, store):
    """A batch of at most 16 blocks goes at once; each other one waits until those before it have had their time."""
    rate = 64 << 10
    async with opened(start(bytes_per_second=rate)) as (_, cache):
        began = time.monotonic()
        for part in range(4):
            await put(cache, chain(f"part {part}", 8))
        await store.has([key for part in range(4) for key in chain(f"part {part}", 8)])
        took = time.monotonic() - began
        assert took >= 16 * BLOCK_BYTES / rate


async def test_bytes_that_a_client_gets_stay_right_under_pressure(start, opened, store):
    """More chains than the host has room for, read through two hosts at once."""
    chains = [chain(f"pressure {number}", 4) for number in range(24)]
    async with opened(start(), sizes(host=16)) as (_, one), opened(start(), sizes(host=16)) as (_, two):
        for keys in chains:
            await put(one, keys)
            await store.has(keys)
        rng = np.random.default_rng(1)

        async def read(cache):
            for number in rng.permutation(len(chains)):
                rows = await cache.get(chains[number])
                assert_bytes(chains[number], rows)

        await asyncio.gather(read(one), read(two))
