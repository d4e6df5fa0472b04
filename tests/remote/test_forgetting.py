"""Forgotten means gone: at every daemon that shares a store, and where new bytes come under an old key."""

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest

from kvtier import BlockResult, Tier
from kvtierd.service.cache import prefix_of
from kvtierd.service.remote.telling import object_name
from kvtierd.tiers.remote.opening import open_store
from tests.integration.blocks import BLOCK_BYTES, SPEC, chain
from tests.integration.test_cli import kvtier
from tests.integration.waiting import eventually
from tests.remote.shared import ROOMY, SharedStore, unwritten


def made(keys, mark):
    """Bytes that follow from a key and a mark, as two versions of a model make them."""
    return [np.frombuffer(hashlib.shake_256(key + mark).digest(BLOCK_BYTES), np.uint8) for key in keys]


async def read(cache, keys):
    """The marks of the bytes that a prefix has."""
    found = await cache.get(keys)
    return "".join(
        next((mark for mark in "ab" if np.array_equal(row, made([key], mark.encode())[0])), "?")
        for key, row in zip(keys, found, strict=False)
    )


async def write(client, cache, keys, mark):
    """Puts blocks, and waits until the store has them."""
    await cache.put(keys, made(keys, mark.encode()), tier=Tier.HOST)
    await eventually(lambda: unwritten(client), lambda blocks: blocks == 0)


async def reset(client, cache, keys):
    assert not (await cache.reset()).kept_in_store
    return cache


async def drop(client, cache, keys):
    report = await cache.drop([*keys[:1], *chain("nobody's", 1)])
    assert (report.results[1], report.kept_in_store) == (BlockResult.NOT_FOUND, False)
    return cache


async def remove(client, cache, keys):
    report = await client.remove_cache(cache.info.name, force=True)
    assert not report.kept_in_store
    return await client.open_cache(cache.info.name, SPEC, budgets=ROOMY)


@pytest.mark.parametrize("verb", [reset, drop, remove])
async def test_nothing_comes_back(start, opened, verb):
    keys = chain("gone", 4)
    async with opened(start()) as (client, cache), opened(start()) as (_, other):
        await write(client, cache, keys, "a")
        assert await read(other, keys) == "aaaa", "it has blocks of its own now"
        cache = await verb(client, cache, keys)
        assert await read(cache, keys) == ""
        assert (await cache.match(keys, remote=True)).remote_blocks == 0
        await eventually(lambda: read(other, keys), lambda marks: marks == "")
        async with opened(start()) as (_, third):
            assert await read(third, keys) == ""
        await write(client, cache, keys, "b")
        await eventually(lambda: read(other, keys), lambda marks: marks == "bbbb")
        async with opened(start()) as (_, third):
            assert await read(third, keys) == "bbbb"


async def test_a_drop_takes_all_that_stands_on_it(start, opened):
    """Blocks that the dropping daemon has not got are forgotten with the block that they stand on."""
    keys = chain("branch", 6)
    async with opened(start()) as (client, cache), opened(start()) as (_, other):
        await write(client, cache, keys, "a")
        assert await read(other, keys[:3]) == "aaa"
        await other.drop(keys[2:3])
        assert await read(other, keys) == "aa"
        await eventually(lambda: read(cache, keys), lambda marks: marks == "aa")
        await cache.put(keys[:4], made(keys[:4], b"b"), tier=Tier.HOST)
        assert await read(cache, keys) == "aabb"
        await eventually(lambda: read(other, keys), lambda marks: marks == "aabb")


async def test_a_held_block_is_dropped_once_nobody_holds_it(start, opened):
    keys = chain("held", 2)
    async with opened(start()) as (client, cache), opened(start()) as (_, other):
        await write(client, cache, keys, "a")
        async with other.acquire(keys, Tier.HOST) as lease:
            assert len(lease.slots) == 2
            await cache.drop(keys)
            assert await read(cache, keys) == ""
        await eventually(lambda: read(other, keys), lambda marks: marks == "")


async def test_what_a_reset_keeps_goes_once_nobody_holds_it(start, opened):
    """Neither other daemons nor the store get it, and a repeated reset leaves what was stored since."""
    keys, fresh = chain("kept", 3), chain("fresh", 2)
    async with opened(start()) as (client, cache), opened(start()) as (_, other):
        await write(client, cache, keys, "a")
        async with cache.acquire(keys, Tier.HOST):
            first = await cache.reset(force=True)
            assert first.kept == 3
            await write(client, cache, fresh, "b")
            again = await cache.reset(force=True, repeats=first.generation)
            assert (again.generation, bool(again.kept)) == (first.generation, True)
            await eventually(lambda: read(other, keys), lambda marks: marks == "")
            await eventually(lambda: read(other, fresh), lambda marks: marks == "bb")
        await eventually(lambda: read(cache, keys), lambda marks: marks == "")
        assert not (await cache.reset(force=True, repeats=first.generation)).kept
        assert await read(cache, fresh) == "bb"
        async with opened(start()) as (_, third):
            assert (await read(third, keys), await read(third, fresh)) == ("", "bb")


async def test_bytes_of_another_host_are_replaced(start, opened):
    keys = chain("another", 3)
    async with opened(start()) as (client, cache), opened(start(fresh=True)) as (elsewhere, other):
        await write(client, cache, keys, "a")
        await write(elsewhere, other, keys, "b")
        assert (await elsewhere.stats()).remote.blocks["replaced"] == 3
        async with opened(start()) as (_, third):
            assert await read(third, keys) == "bbb"


async def test_another_specification_is_another_cache(start, opened, name):
    keys, wider = chain("spec", 2), replace(SPEC, model="another")
    async with opened(start()) as (client, cache), opened(start(), spec=wider) as (elsewhere, other):
        await write(client, cache, keys, "a")
        await write(elsewhere, other, keys, "b")
        await cache.reset()
        await client.remove_cache(name, force=True)
        await write(elsewhere, other, chain("later", 1), "b")
        assert await read(other, keys) == "bb"
        async with opened(start(), spec=wider) as (_, third):
            assert await read(third, keys) == "bb"


async def test_a_daemon_that_was_down_hears_of_it(start, opened):
    keys = chain("down", 3)
    late = start(fresh=True)
    async with opened(start()) as (client, cache):
        async with opened(late) as (_, other):
            await write(client, cache, keys, "a")
            assert await read(other, keys) == "aaa"
            await other.move(keys, Tier.DISK)
        late.stop()
        await reset(client, cache, keys)
        late.start()
        async with opened(late) as (_, other):
            await eventually(lambda: read(other, keys), lambda marks: marks == "")
        async with opened(start()) as (_, third):
            assert await read(third, keys) == "", "nothing of it was written anew"


async def test_gc_deletes_what_a_reset_has_forgotten(start_daemon, opened, directory, name):
    flag = json.dumps({"url": directory.url, "write": "through"})
    daemons = [start_daemon("--remote", flag, host=64, disk=128) for _ in range(2)]
    keys, store = chain("garbage", 3), SharedStore(directory.url, name)
    async with opened(daemons[0]) as (client, cache):
        await write(client, cache, keys, "a")
        await reset(client, cache, keys)
        await write(client, cache, keys, "b")
        assert await store.held(keys) == keys
        report = await client.remote_gc(caches=[name], keep_bytes=1 << 30)
        assert (report.objects, report.kept_objects) == (3, 3)
        assert await store.held(keys) == []
    async with opened(daemons[1]) as (_, other):
        assert await read(other, keys) == "bbb"
    await store.close()


async def test_an_object_of_a_later_version_is_left_alone(start, opened, shared_url, name):
    """Nothing of the store is read or written for a cache whose past cannot be read."""
    keys, later = chain("later", 2), json.dumps({"version": 2, "since": "tomorrow"}).encode()
    store = open_store(shared_url)
    daemon = start(fresh=True)
    async with opened(start()) as (client, cache):
        await write(client, cache, keys, "a")
    await store.delete([object_name(prefix_of(name, SPEC.fingerprint()))])
    await store.put([object_name(prefix_of(name, SPEC.fingerprint()))], [later])
    async with opened(daemon) as (client, cache):
        assert await read(cache, keys) == ""
        await cache.put(keys, made(keys, b"b"), tier=Tier.HOST)
        assert (await cache.reset()).kept_in_store
        assert "kept in the store" in kvtier("reset", name, "--yes", "--address", daemon.address).stdout
        into = memoryview(bytearray(100))
        assert bytes(into[: (await store.get([object_name(prefix_of(name, SPEC.fingerprint()))], [into]))[0]]) == later
    assert daemon.log.count("it is of version 2; this daemon reads version 1") == 1
    await store.close()
