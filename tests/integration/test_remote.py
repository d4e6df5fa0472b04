"""Blocks beyond the host: daemons with state of their own, and one store that all of them have."""

from __future__ import annotations

import asyncio
import contextlib
import json

import numpy as np
import pytest

from kvtier import CacheOptions, Cause, Client, EventType, Retention, Tier, TokenRange, connect
from kvtier.errors import InvalidArgument
from tests.integration.blocks import BLOCK_BYTES, SLOT_BYTES, SPEC, assert_bytes, blocks, chain, sizes
from tests.integration.waiting import eventually

KEPT = Retention((TokenRange(0, None, 60),))
ROOMY = sizes(host=32, disk=64)


class Directory:
    """A store: a directory that the daemons share."""

    def __init__(self, path):
        path.mkdir()
        self.path = path
        self.url = f"file://{path}"

    def objects(self):
        return {path.name: path for path in self.path.rglob("*") if path.is_file() and "#" not in path.name}

    async def has(self, keys):
        """Waits until it has them all."""
        wanted = {key.hex() for key in keys}
        await eventually(self.objects, lambda found: wanted <= found.keys())
        return self.objects()


@pytest.fixture
def store(tmp_path):
    return Directory(tmp_path / "store")


@pytest.fixture
def start(start_fresh, store):
    def start(**table):
        flag = json.dumps({"url": store.url, "write": "through", **table})
        return start_fresh("--remote", flag, host=64, disk=128)

    return start


@contextlib.asynccontextmanager
async def opened(daemon, budgets=ROOMY, spec=SPEC, **options):
    async with await connect(daemon.address) as client:
        yield client, await client.open_cache("c", spec, budgets=budgets, options=CacheOptions(**options))


async def put(cache, keys, **more):
    await cache.put(keys, blocks(keys), tier=Tier.HOST, **more)


async def fetched(client):
    return (await client.stats()).remote.blocks


async def test_what_one_host_stores_another_reads(start, store):
    keys = chain("shared", 4)
    async with opened(start()) as (client, cache):
        assert cache.info.remote
        await put(cache, keys)
        await store.has(keys)
    async with opened(start()) as (client, other):
        assert (await other.match(keys)).blocks == 0
        found = await other.match(keys, remote=True)
        assert (found.blocks, found.remote_blocks) == (0, 4)
        assert_bytes(keys, await other.get(keys))
        assert (await other.match(keys)).blocks == 4
        assert (await fetched(client))["fetched"] == 4
        assert_bytes(keys, await other.get(keys))
        assert (await fetched(client))["fetched"] == 4, "they are here now"


async def test_what_one_host_evicts_another_reads(start, store):
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


async def test_only_the_rest_is_written(start, store):
    keys = chain("half", 6)
    async with opened(start()) as (_, cache):
        await put(cache, keys[:3])
        await store.has(keys[:3])
    async with opened(start()) as (client, other):
        await put(other, keys)
        await store.has(keys)
        await eventually(lambda: fetched(client), lambda counts: counts.get("written") == 3)
        assert (await fetched(client))["there already"] == 3


async def test_only_the_rest_comes(start, store):
    keys = chain("rest", 6)
    async with opened(start()) as (_, cache):
        await put(cache, keys)
        await store.has(keys)
    async with opened(start()) as (client, other):
        await put(other, keys[:2])
        async with other.acquire(keys, Tier.HOST) as lease:
            assert len(lease.slots) == 6
        assert (await fetched(client))["fetched"] == 4
        async with other.acquire(chain("rest", 9), Tier.HOST) as lease:
            assert len(lease.slots) == 6


async def test_blocks_of_a_prefetch_come_too(start, store):
    keys = chain("prefetch", 3)
    async with opened(start()) as (_, cache):
        await put(cache, keys)
        await store.has(keys)
    async with opened(start()) as (_, other):
        await other.move(keys, Tier.HOST)
        assert (await other.match(keys)).blocks == 3


async def test_callers_at_once_share_a_fetch(start, store):
    keys = chain("at once", 8)
    async with opened(start()) as (_, cache):
        await put(cache, keys)
        await store.has(keys)
    async with opened(start()) as (client, other):
        for rows in await asyncio.gather(*(other.get(keys) for _ in range(6))):
            assert_bytes(keys, rows)
        assert (await fetched(client))["fetched"] == 8
        (gets,) = (each for each in (await client.stats()).remote.operations if each.operation == "get")
        assert gets.bytes < 2 * 8 * BLOCK_BYTES + 8 * 1024


async def test_both_journeys_are_events(start, store):
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


async def test_objects_that_have_gone_are_misses(start, store):
    keys = chain("gone", 4)
    async with opened(start()) as (_, cache):
        await put(cache, keys)
        for path in (await store.has(keys)).values():
            path.unlink()
        await cache.reset()
        assert (await cache.match(keys)).blocks == 0
        assert await cache.get(keys) == []


def _flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def _lengthen(path):
    path.write_bytes(path.read_bytes() + bytes(1 << 20))


def _swap(path):
    other = next(each for each in path.parent.parent.rglob("*") if each.is_file() and each != path)
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize("damage", [_flip, _truncate, _lengthen, _swap])
async def test_a_damaged_object_is_a_miss_and_an_event(start, store, damage):
    keys = chain("damaged", 4)
    async with opened(start()) as (_, cache):
        await put(cache, keys)
        damage((await store.has(keys))[keys[2].hex()])
    async with opened(start()) as (client, other):
        async with client.watch() as watch:
            assert_bytes(keys[:2], await other.get(keys))
            async for event in watch:
                if event.cause is Cause.CORRUPT:
                    break
        assert (event.type, list(event.keys)) == (EventType.REMOVED, [keys[2]])
        assert (event.moved_from, event.moved_to) == (Tier.REMOTE, Tier.HOST)
        assert keys[2].hex() not in store.objects(), "nobody finds it again"


@pytest.mark.parametrize("across", [False, True])
async def test_what_is_dearer_than_to_compute_is_not_fetched(start, store, across):
    first, second = chain("first", 2), chain("second", 2)
    async with opened(start()) as (_, cache):
        await put(cache, first)
        await put(cache, second)
        await store.has([*first, *second])
    async with opened(start()) as (client, other):
        verbs = other.across if across else other
        async with verbs.acquire(first, recompute_seconds_per_block=1e-9) as lease:
            assert lease.matched == 2, "nothing has been measured yet"
        async with verbs.acquire(second, recompute_seconds_per_block=1e-9) as lease:
            assert lease.matched == 0
        assert (await fetched(client))["dearer than computing"] == 2
        async with verbs.acquire(second, recompute_seconds_per_block=60) as lease:
            assert lease.matched == 2
        for wrong in (-1, float("nan"), 3601):
            with pytest.raises(InvalidArgument, match="recompute_seconds_per_block"):
                await verbs.acquire(second, recompute_seconds_per_block=wrong)


async def test_the_synchronous_client_asks_the_store(start, store):
    keys = chain("sync", 4)
    async with opened(start()) as (_, cache):
        await put(cache, keys)
        await store.has(keys)
    daemon = start()
    async with opened(daemon):
        with Client(daemon.address) as client:
            cache = client.open_cache("c")
            for verbs in (cache, cache.across):
                found = verbs.match(keys, remote=True)
                assert (found.blocks, found.remote_blocks) == (0, 4)
            with cache.acquire(keys, Tier.HOST, recompute_seconds_per_block=60) as lease:
                assert len(lease.slots) == 4


async def test_what_is_used_twice_goes(start, store):
    once, twice = chain("once", 2), chain("twice", 2)
    async with opened(start(write="second_use")) as (_, cache):
        await put(cache, once)
        await put(cache, twice)
        async with cache.acquire(twice):
            pass
        assert (await store.has(twice)).keys() == {key.hex() for key in twice}


async def test_what_is_not_worth_it_stays(start, store):
    cheap, dear, deep = chain("cheap", 1), chain("dear", 1), chain("deep", 3)
    async with opened(start(min_priority=50, first_tokens=2 * SPEC.tokens_per_block)) as (_, cache):
        await put(cache, cheap)
        await put(cache, dear, retention=KEPT)
        await put(cache, deep, retention=KEPT)
        expected = {key.hex() for key in (*dear, *deep[:2])}
        assert (await store.has([*dear, *deep[:2]])).keys() == expected


async def test_a_name_of_another_model_is_another_s(start, store):
    keys = chain("model", 2)
    other_spec = SPEC.__class__(**{**SPEC.to_dict(), "model": "another", "groups": SPEC.groups})
    async with opened(start()) as (_, cache):
        await put(cache, keys)
        await store.has(keys)
    async with opened(start(), spec=other_spec) as (_, other):
        assert await other.get(keys) == []


async def test_a_start_on_a_store_that_refuses_says_so_and_serves_the_rest(start_fresh, tmp_path):
    keys = chain("local", 2)
    readonly = tmp_path / "file"
    readonly.mkdir()
    daemon = start_fresh("--remote", f"file://{readonly}", host=64)
    async with opened(daemon, sizes(host=8)) as (client, cache):
        readonly.rmdir()
        readonly.write_bytes(b"")  # no directory any more
        await put(cache, keys)
        assert_bytes(keys, await cache.get(keys))
        assert await cache.get(chain("elsewhere", 2)) == []
        stats = await client.stats()
        assert stats.remote.problem
        assert [problem for problem in stats.problems if "remote tier" in problem]


async def test_bytes_that_a_client_gets_stay_right_under_pressure(start, store):
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
