"""Lookups and gets in shared memory: what the daemon would say, without asking it."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvtier import BlockResult, Client, InvalidArgument, Tier, buffers, errors
from kvtier.wire import ReadCounts
from tests.integration.blocks import BLOCK_BYTES, SPEC, assert_bytes, blocks, chain, opened_cache, put_chain, sizes
from tests.integration.models import VSWA, assert_content, by_hand, content, groups_of
from tests.integration.seeing import cache_stats, tier_stats
from tests.integration.stuck import stuck_disk
from tests.integration.supervised import SupervisedDaemon
from tests.integration.waiting import PATIENCE_S, eventually, patient

SLOTS = 16


@pytest.fixture
async def cache(client, name):
    cache = await client.open_cache(name, SPEC, budgets=sizes(device=SLOTS, host=SLOTS, disk=4 * SLOTS))
    assert cache.lookups == "shared memory"
    yield cache
    await cache.close()


async def spread(cache, name):
    """A chain whose blocks are in every combination of tiers, the last ones nowhere."""
    keys = chain(name, 12)
    assert await cache.put(keys[:9], blocks(keys[:9]), tier=Tier.HOST) == [BlockResult.OK] * 9
    assert await cache.move(keys[2:4], Tier.DEVICE) == [BlockResult.OK] * 2
    assert await cache.move(keys[7:9], Tier.DISK) == [BlockResult.OK] * 2
    return keys


async def test_lookups_say_what_the_daemon_says(cache, client):
    keys = await spread(cache, "lookups")
    async with opened_cache(client.address, cache.name, wait=PATIENCE_S) as (_, raw):
        raw.arena.stale = True
        for part in (keys, keys[:5], keys[9:], keys[:1], keys[8:10], chain("strangers", 3)):
            before = raw.reads.calls
            asked, told = await raw.match(part), await cache.match(part)
            raw.arena.stale = True
            assert (asked.blocks, asked.residency) == (told.blocks, told.residency)
            assert await cache.prefix_length(part) == told.blocks
            places = await raw.locate(part)
            raw.arena.stale = True
            assert places == await cache.locate(part)
            each = [*part, *reversed(part)]
            probed = await raw.probe(each)
            raw.arena.stale = True
            assert probed == await cache.probe(each) == bytes(place.residency for place in [*places, *places[::-1]])
            assert raw.reads.calls == before + 3
    assert cache.reads == ReadCounts(lookups=24)
    assert (await cache.match(keys)).as_of.id == (await client.stats()).last_event_id


async def test_a_get_copies_what_is_mapped_and_asks_for_the_rest(cache):
    keys = await spread(cache, "get")
    assert_bytes(keys[:7], await cache.get(keys[:7]))
    assert (cache.reads.hits, cache.reads.misses, cache.reads.calls) == (7, 0, 0)
    in_memory = [place.residency & 3 for place in await cache.locate(keys)]
    assert in_memory[:7] == [2, 2, 1, 1, 2, 2, 2], "what is read stays where it is"
    out = np.zeros((12, BLOCK_BYTES), np.uint8)
    assert_bytes(keys[:9], await cache.get(keys, out))
    assert_bytes(keys[:9], list(out[:9]))
    assert not out[9:].any()
    assert (cache.reads.hits, cache.reads.calls) == (14, 1)
    assert await cache.get(chain("strangers", 5)) == []
    assert (cache.reads.misses, cache.reads.calls) == (5, 1)


async def test_a_tier_that_is_asked_for_is_the_one_that_is_read(cache):
    keys = await spread(cache, "tier")
    assert_bytes(keys[:2], await cache.get(keys[:2], tier=Tier.HOST))
    assert cache.reads.calls == 0
    assert_bytes(keys[:4], await cache.get(keys[:4], tier=Tier.HOST))
    assert (cache.reads.hits, cache.reads.calls) == (4, 1)
    with pytest.raises(InvalidArgument, match="tier"):
        await cache.get(keys, tier=Tier.DISK)


async def test_what_was_copied_is_compared_with_the_daemons_memory(cache):
    keys = await spread(cache, "verified")
    assert_bytes(keys[:9], await cache.get(keys, verify=True))
    assert await cache.get(chain("strangers", 1), verify=True) == []
    await cache.move(keys[5:9], Tier.DISK)
    out = np.zeros((9, BLOCK_BYTES), np.uint8)
    assert_bytes(keys[:9], await cache.get(keys[:9], out, verify=True))
    assert_bytes(keys[:9], list(out))
    await cache.move(keys[:5], Tier.HOST)
    with pytest.MonkeyPatch.context() as damage:
        right = buffers.out_of_slots

        def flipping(pools, slots, rows):
            right(pools, slots, rows)
            rows[-1][0] ^= 1

        damage.setattr(buffers, "out_of_slots", flipping)
        with pytest.raises(errors.DamagedTransfer, match="block 4"):
            await cache.get(keys[:5], tier=Tier.HOST, verify=True)


async def test_what_is_wrong_is_refused_though_nothing_is_called(cache):
    keys = await spread(cache, "wrong")
    with pytest.raises(InvalidArgument, match="timeout"):
        await cache.match(keys, timeout=0)
    with pytest.raises(InvalidArgument, match="keys"):
        await cache.locate(bytes(32 * 16_385))
    for verb in (cache.match, cache.locate, cache.get, cache.across.match, cache.across.get):
        with pytest.raises(InvalidArgument, match="keys"):
            await verb([keys[0], keys[1], keys[0]])
    await cache.close()
    with pytest.raises(errors.ClientClosed):
        await cache.match(keys)


async def test_blocks_are_copied_to_where_the_caller_wants_them(cache):
    keys = await put_chain(cache, "out", 4, tier=Tier.HOST)
    out = np.zeros((4, BLOCK_BYTES), np.uint8)
    for into in (out, list(out), out.reshape(4, 2, -1), out.view(np.int16)):
        out[:] = 0
        found = await cache.get(keys, into, tier=Tier.HOST)
        assert all(np.shares_memory(row, out) for row in found)
        assert_bytes(keys, list(out))
    short = [*out[:3], out[3, 1:]]
    long = np.zeros((4, BLOCK_BYTES + 1), np.uint8)
    for wrong in (short, long, out[:3], out[:, 1:], np.broadcast_to(out[:1], out.shape)):
        with pytest.raises(InvalidArgument, match="out"):
            await cache.get(keys, wrong, tier=Tier.HOST)
    assert (cache.reads.hits, cache.reads.calls) == (16, 0)


async def test_what_was_dropped_while_it_was_copied_is_not_remembered(daemon, name):
    """Its slot keeps its generation for as long as the disk takes; what is stored under its key by then is the new."""
    async with await patient(daemon.address) as client:
        cache = await client.open_cache(name, SPEC, budgets=sizes(host=SLOTS, disk=SLOTS))
        keys = await put_chain(cache, "dropped", 3)
        assert_bytes(keys, await cache.get(keys))
        with stuck_disk(daemon, name):
            moving = asyncio.create_task(cache.move(keys, Tier.DISK))
            await eventually(lambda: tier_stats(client, name, Tier.DISK), lambda stats: stats.filling == 3)
            dropping = asyncio.create_task(cache.drop(keys[:1]))  # answers when the disk has forgotten them, too
            await eventually(lambda: cache.prefix_length(keys), lambda length: length == 0)
            assert await cache.get(keys) == []
            await cache.put(keys, blocks(keys)[::-1])
            for got, stored in zip(await cache.get(keys), blocks(keys)[::-1], strict=True):
                assert np.array_equal(got, stored)
        await moving
        assert (await dropping).dropped == 3


async def test_what_is_read_without_calls_outlives_what_is_not(cache, client):
    read, unread = chain("read", 4), chain("unread", 4)
    for keys in (read, unread):
        await cache.put(keys, blocks(keys), tier=Tier.HOST)
    before = (await cache_stats(client, cache.name)).hits_host
    assert_bytes(read, await cache.get(read))
    assert cache.reads.calls == 0
    assert await cache.get(chain("nowhere", 2)) == []
    stats = await eventually(
        lambda: cache_stats(client, cache.name), lambda stats: stats.hits_host - before == 4 and stats.queried == 6
    )
    assert (stats.hits_host, stats.found) == (before + 4, 4)
    assert stats.index_places >= 2 * SLOTS
    assert stats.unindexed == 0
    async with cache.reserve(SLOTS - 4, Tier.HOST):
        assert [place.residency & Tier.HOST.bit for place in await cache.locate(read)] == [Tier.HOST.bit] * 4
        assert [place.residency & Tier.HOST.bit for place in await cache.locate(unread)] == [0] * 4


def test_the_synchronous_client_reads_in_the_calling_thread(daemon, name):
    with Client(daemon.address) as client:
        cache = client.open_cache(name, SPEC, budgets=sizes(host=SLOTS, disk=SLOTS))
        keys = chain("sync", 6)
        cache.put(keys, blocks(keys))
        run = cache.thread.run
        cache.thread.run = None  # type: ignore[assignment,method-assign]
        assert cache.lookups == "shared memory"
        assert cache.prefix_length(keys) == 6
        assert cache.match([*keys, bytes(32)]).residency == b"\2" * 6
        assert [place.residency for place in cache.locate(keys)] == [2] * 6
        assert cache.probe([bytes(32), *keys[3:]]) == b"\0\2\2\2"
        assert_bytes(keys, cache.get([*keys, bytes(32)]))
        out = [np.zeros(BLOCK_BYTES, np.uint8) for _ in keys]
        assert all(filled is given for filled, given in zip(cache.get(keys, out), out, strict=True))
        assert_bytes(keys, out)
        assert (cache.reads.lookups, cache.reads.hits, cache.reads.misses, cache.reads.calls) == (4, 12, 1, 0)
        cache.thread.run = run  # type: ignore[method-assign]
        cache.move(keys[4:], Tier.DISK)
        out = [np.zeros(BLOCK_BYTES, np.uint8) for _ in keys]
        assert_bytes(keys, cache.get(keys, out))
        assert_bytes(keys, out)
        assert cache.reads.calls == 1
        with pytest.raises(InvalidArgument, match="timeout"):
            cache.match(keys, timeout=-1)
        cache.close()
        with pytest.raises(errors.ClientClosed):
            cache.prefix_length(keys)


async def test_several_groups(start_for):
    daemon = start_for(VSWA, host=16, disk=16)
    async with await patient(daemon.address) as client:
        cache = await client.open_cache("c", VSWA, budgets=by_hand(VSWA, host=16, disk=16))
        keys = chain("across", 12)
        await cache.across.put(keys, {group: content(VSWA, group, keys) for group in groups_of(VSWA)})
        match = await cache.across.match([*keys, bytes(32)])
        assert match.blocks == 12
        assert [span.first_block for span in match.groups] == [8, 0, 5]
        found = await cache.across.get([*keys, bytes(32)])
        assert cache.reads.calls == 0
        for span in match.groups:
            assert_content(VSWA, span.group, keys[span.first_block :], found[span.group][span.first_block :])
        nothing = await cache.across.get(chain("strangers", 2))
        assert (nothing, cache.reads.calls) == ({0: [], 1: [], 2: []}, 0)
        await cache.in_group(1).move(keys[3:4], Tier.DISK)
        found = await cache.across.get(keys)
        assert ([len(found[group]) for group in groups_of(VSWA)], cache.reads.calls) == ([12] * 3, 1)
        for span in match.groups:
            assert_content(VSWA, span.group, keys[span.first_block :], found[span.group][span.first_block :])
        with pytest.raises(InvalidArgument):
            await cache.across.get(keys, tier=Tier.DISK)


async def test_reads_go_on_without_a_daemon_and_with_the_next_one(start_daemon):
    daemon = start_daemon(host=SLOTS, disk=4 * SLOTS)
    async with await patient(daemon.address) as client:
        caches = [await client.open_cache(name, SPEC, budgets=sizes(host=8, disk=32)) for name in ("a", "b")]
        keys = chain("kept", 6)
        for cache in caches:
            await cache.put(keys, blocks(keys))
            await cache.move(keys, Tier.DISK)
            assert_bytes(keys, await cache.get(keys, tier=Tier.HOST))
        first = [cache.arena for cache in caches]
        calls = [cache.reads.calls for cache in caches]
        daemon.kill()
        for cache in caches:
            assert_bytes(keys, await cache.get([*keys, bytes(32)]))
            assert await cache.prefix_length([*keys, bytes(32)]) == 6
            assert cache.lookups.startswith("shared memory")
        assert [cache.reads.calls for cache in caches] == calls
        await asyncio.to_thread(daemon.start)
        await eventually(lambda: first, lambda arenas: all(arena.stale for arena in arenas))
        # the next daemon's, which was asked for it in the background
        await eventually(lambda: caches[0].lookups, lambda said: said == "shared memory")
        for cache, before in zip(caches, calls, strict=True):
            assert_bytes(keys, await cache.get(keys))
            assert cache.reads.calls == before + 1, "a new daemon, new memory: the blocks come from disk"
            assert cache.lookups == "shared memory"
            assert_bytes(keys, await cache.get(keys))
            assert cache.reads.calls == before + 1


@pytest.mark.parametrize("end", [SupervisedDaemon.kill, SupervisedDaemon.upgrade])
async def test_a_restart_under_a_reader(short_dir, end):
    """The host tier outlives the daemon: a thread that reads all the time sees nothing of its end."""
    keys, ending = chain("read", 8), threading.Event()
    with (
        SupervisedDaemon(short_dir, sizes(host=SLOTS)) as daemon,
        Client(daemon.address) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        cache = client.open_cache("c", SPEC)
        cache.put(keys, blocks(keys))

        def read():
            while not ending.is_set():
                assert_bytes(keys, cache.get(keys))

        reading, old = pool.submit(read), cache.arena
        try:
            for _ in range(2):
                await asyncio.to_thread(end, daemon)
            await eventually(lambda: old.stale, bool)
            hits = cache.reads.hits
            await eventually(lambda: cache.reads.hits > hits and not cache.arena.stale, bool)
        finally:
            ending.set()
        reading.result(PATIENCE_S)
        await eventually(lambda: cache.lookups, lambda said: said == "shared memory")
