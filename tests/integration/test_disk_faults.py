"""A disk that lies, shrinks, fills up or hangs: a miss at worst, and never another block's bytes.

The faults are real: files changed behind the daemon's back, a limit on file sizes put on the running process, the
index's lock held by somebody else.
"""

from __future__ import annotations

import asyncio
import os
import resource
import time
from contextlib import asynccontextmanager

import pytest

from kvtier import BlockResult, Cause, Cursor, Event, EventType, Tier, connect
from kvtierd.tiers.disk.records import decode_records
from tests.integration.blocks import SLOT_BYTES, SPEC, assert_bytes, blocks, chain
from tests.integration.seeing import cache_stats, tier_stats
from tests.integration.stored import stored_in
from tests.integration.stuck import stuck_disk
from tests.integration.waiting import PATIENCE_S, eventually

SLOTS = {"device": 8, "host": 8, "disk": 96}
NAMES = ("left", "hurt", "right")
LENGTH = 12
HURT_AT = 5
"""Position in the chain "hurt" of the block whose bytes are changed."""


@pytest.fixture
def daemon(start_daemon):
    return start_daemon(**SLOTS)


async def on_disk(client):
    """A cache with three chains, only on disk."""
    cache = await client.open_cache("c", SPEC)
    for name in NAMES:
        keys = chain(name, LENGTH)
        await cache.put(keys, blocks(keys))
        assert set(await cache.move(keys, Tier.DISK)) == {BlockResult.OK}
    return cache


def slab(daemon):
    return daemon.disk_dir / "caches" / "c" / "group-0.slab"


def disk_slot(daemon, key):
    """Where the index says that a block lies."""
    stored = stored_in(daemon.disk_dir / "caches" / "c")
    return int(decode_records([stored[key]])["slot"][0])


def flip_a_bit(daemon, key):
    with slab(daemon).open("r+b") as file:
        file.seek(disk_slot(daemon, key) * SLOT_BYTES + 1234)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x10]))
        file.flush()
        os.fsync(file.fileno())


@asynccontextmanager
async def losses(client):
    """The events of blocks that left the index, as they come."""
    events: list[Event] = []
    stats = await client.stats()
    watch = client.watch(since=Cursor(stats.epoch, stats.last_event_id), types=[EventType.REMOVED])

    async def read():
        async for item in watch:
            assert isinstance(item, Event)
            events.append(item)

    reading = asyncio.create_task(read())
    yield events
    reading.cancel()
    await asyncio.wait([reading])
    await watch.aclose()


async def told(events, count):
    """Causes by key, once ``count`` blocks are gone."""

    async def causes():
        return {key: event.cause for event in events for key in event.keys}

    return await eventually(causes, lambda found: len(found) >= count)


@pytest.mark.parametrize("running", [True, False])
async def test_a_flipped_bit_costs_its_block_and_what_stands_on_it(daemon, running):
    keys = chain("hurt", LENGTH)
    async with await connect(daemon.address) as client:
        cache = await on_disk(client)
        if running:
            flip_a_bit(daemon, keys[HURT_AT])
        else:
            await asyncio.to_thread(daemon.stop)
            flip_a_bit(daemon, keys[HURT_AT])
            await asyncio.to_thread(daemon.start)
        async with losses(client) as events:
            assert_bytes(keys[:HURT_AT], await cache.get(keys))
            gone = await told(events, LENGTH - HURT_AT)
        expected: dict[bytes, Cause | int] = dict.fromkeys(keys[HURT_AT + 1 :], Cause.ANCESTOR)
        assert gone == expected | {keys[HURT_AT]: Cause.CORRUPT}
        assert (await cache.match(keys)).blocks == HURT_AT
        assert (await tier_stats(client, "c", Tier.DISK)).quarantined == 1
        for name in ("left", "right"):
            assert_bytes(chain(name, LENGTH), await cache.get(chain(name, LENGTH)))
        # What was lost can be stored again, and the bad place stays out of use over a restart.
        await cache.put(keys, blocks(keys))
        await cache.move(keys, Tier.DISK)
        await asyncio.to_thread(daemon.stop)
        await asyncio.to_thread(daemon.start)
        assert_bytes(keys, await cache.get(keys))
        assert (await tier_stats(client, "c", Tier.DISK)).quarantined == 1


async def test_every_block_flipped_is_a_miss_for_every_chain(daemon):
    async with await connect(daemon.address) as client:
        cache = await on_disk(client)
        slab(daemon).write_bytes(b"\xa5" * slab(daemon).stat().st_size)
        for name in NAMES:
            assert await cache.get(chain(name, LENGTH)) == []
            assert (await cache.match(chain(name, LENGTH))).blocks == 0
        assert (await cache_stats(client, "c")).blocks == 0


async def test_a_slab_cut_short_while_stopped_costs_what_was_cut_off(daemon):
    async with await connect(daemon.address) as client:
        cache = await on_disk(client)
        await asyncio.to_thread(daemon.stop)
        left = min(disk_slot(daemon, key) for name in ("hurt", "right") for key in chain(name, LENGTH))
        os.truncate(slab(daemon), left * SLOT_BYTES)
        await asyncio.to_thread(daemon.start)
        assert "has lost part of its" in daemon.log
        assert_bytes(chain("left", LENGTH), await cache.get(chain("left", LENGTH)))
        for name in ("hurt", "right"):
            assert await cache.get(chain(name, LENGTH)) == []
            assert (await cache.match(chain(name, LENGTH))).blocks == 0


async def test_a_slab_cut_short_under_a_running_daemon_is_a_miss(daemon):
    """Reads fail, so nothing is known of the bytes: they stay listed, are not served, and health says so."""
    async with await connect(daemon.address) as client:
        cache = await on_disk(client)
        os.truncate(slab(daemon), SLOT_BYTES)
        for name in NAMES:
            keys = chain(name, LENGTH)
            found = await cache.get(keys)
            assert_bytes(keys[: len(found)], found)
            assert len(found) <= 1, "only the first slot is left"
        stats = await client.stats()
        assert any("disk>device is not in use" in problem for problem in stats.problems), stats.problems
        # Memory is as good as ever.
        fresh = chain("fresh", 4)
        await cache.put(fresh, blocks(fresh))
        assert_bytes(fresh, await cache.get(fresh))


async def test_writes_that_fail_leave_their_blocks_where_they_are(daemon):
    """The far half of the slab cannot be written: what is there stays, what comes is kept in memory or dropped."""
    async with await connect(daemon.address) as client:
        cache = await on_disk(client)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (len(NAMES) * LENGTH * SLOT_BYTES, hard))
        keys = chain("late", 6)
        await cache.put(keys, blocks(keys))
        for _ in range(3):
            results = await cache.move(keys, Tier.DISK)
            assert set(results) <= {BlockResult.FAILED, BlockResult.NO_ROOM}
        assert not any(residency & Tier.DISK.bit for residency in (await cache.match(keys)).residency)
        assert_bytes(keys, await cache.get(keys))
        stats = await client.stats()
        assert any("device>disk is not in use" in problem for problem in stats.problems), stats.problems
        # More than memory holds: something is dropped, nothing waits for the disk for ever.
        for number in range(8):
            more = chain(f"more {number}", 4)
            await cache.put(more, blocks(more), timeout=PATIENCE_S)
            assert_bytes(more, await cache.get(more))
        for name in NAMES:
            assert_bytes(chain(name, LENGTH), await cache.get(chain(name, LENGTH)))
        # The disk has recovered: blocks go down again, and after a while all is well.
        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (hard, hard))
        last = chain("last", 2)
        await cache.put(last, blocks(last))
        await eventually(lambda: cache.move(last, Tier.DISK), lambda results: set(results) == {BlockResult.OK})
        await eventually(client.stats, lambda stats: not stats.problems)


async def test_deletions_that_fail_cost_no_slot_once_the_disk_is_well(daemon):
    async with await connect(daemon.address) as client:
        cache = await on_disk(client)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (0, hard))
        await cache.drop(chain("hurt", LENGTH))
        disk = await eventually(lambda: tier_stats(client, "c", Tier.DISK), lambda disk: disk.quarantined > 0)
        assert disk.quarantined == LENGTH
        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (hard, hard))
        await eventually(lambda: tier_stats(client, "c", Tier.DISK), lambda disk: disk.quarantined == 0)
        await asyncio.to_thread(daemon.kill)
        await asyncio.to_thread(daemon.start)
        for name in NAMES:
            assert (await cache.match(chain(name, LENGTH))).blocks == (0 if name == "hurt" else LENGTH)


async def test_a_hanging_disk_stops_neither_lookups_nor_memory(daemon):
    async with await connect(daemon.address) as client:
        cache = await on_disk(client)
        keys = chain("in memory", 4)
        with stuck_disk(daemon, "c"):
            await cache.put(keys, blocks(keys))
            moving = asyncio.create_task(cache.move(keys, Tier.DISK))
            await eventually(lambda: _queued(client), lambda queued: queued > 0)
            began = time.monotonic()
            for name in NAMES:
                assert (await cache.match(chain(name, LENGTH))).blocks == LENGTH
                assert len(await cache.locate(chain(name, LENGTH))) == LENGTH
            assert_bytes(keys, await cache.get(keys))
            assert time.monotonic() - began < 1.0
            assert not moving.done()
        assert set(await moving) == {BlockResult.OK}
        assert_bytes(keys, await cache.get(keys))


@pytest.mark.long
async def test_a_hanging_disk_shows_in_health(daemon):
    async with await connect(daemon.address) as client:
        cache = await on_disk(client)
        keys = chain("in memory", 4)
        await cache.put(keys, blocks(keys))
        with stuck_disk(daemon, "c"):
            moving = asyncio.create_task(cache.move(keys, Tier.DISK))
            stats = await eventually(client.stats, lambda stats: stats.problems, within=3 * PATIENCE_S)
            assert "disk-writer-finish: stuck" in stats.problems[0]
        await moving
        assert (await client.stats()).problems == ()


async def _queued(client):
    return sum(edge.queued_blocks for edge in (await cache_stats(client, "c")).edges)
