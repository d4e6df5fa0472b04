"""A disk on which nothing works any more: given up after a grace period, taken back empty when it works again."""

from __future__ import annotations

import os
import resource

from kvtier import BlockResult, Cause, Cursor, Event, EventType, Tier, connect
from tests.integration.blocks import SLOT_BYTES, SPEC, assert_bytes, blocks, chain
from tests.integration.seeing import tier_stats
from tests.integration.waiting import eventually

DISK_SLOTS = 256
KEYS = chain("only there", 80)
IN_MEMORY = chain("in memory", 4)


def slab(daemon):
    return daemon.disk_dir / "caches" / "c" / "group-0.slab"


def limit_files(daemon, nbytes):
    """No write of the daemon's goes beyond so many bytes of any file."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (nbytes, hard))


async def disk_is_lost(client):
    async def problems():
        return tuple(problem for problem in (await client.stats()).problems if "out of service" in problem)

    return await eventually(problems, lambda found: found)


async def test_a_dead_disk_is_given_up_and_a_mended_one_taken_back(start_daemon):
    daemon = start_daemon("--tier-grace-seconds", "0.2", device=8, host=8, disk=DISK_SLOTS)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    async with await connect(daemon.address) as client:
        cache = await client.open_cache("c", SPEC)
        await cache.put(KEYS, blocks(KEYS))
        assert set(await cache.move(KEYS, Tier.DISK)) == {BlockResult.OK}
        await cache.put(IN_MEMORY, blocks(IN_MEMORY))
        stats = await client.stats()
        # Reads find nothing, and no write reaches a slot that is free, or the end of the slab, where the probe goes.
        limit_files(daemon, len(KEYS) // 2 * SLOT_BYTES)
        os.truncate(slab(daemon), 0)
        assert await cache.get(KEYS) == []
        (problem,) = await disk_is_lost(client)
        assert problem.startswith("cache c: the disk tier is out of service, what it held is lost: cannot use ")
        gone: set[bytes] = set()
        async for item in client.watch(since=Cursor(stats.epoch, stats.last_event_id), types=[EventType.REMOVED]):
            assert isinstance(item, Event)
            assert item.cause in (Cause.IO_ERROR, Cause.ANCESTOR)
            gone.update(item.keys)
            if len(gone) == len(KEYS):
                break
        assert gone == set(KEYS)
        assert (await cache.match(KEYS)).blocks == 0
        disk = await tier_stats(client, "c", Tier.DISK)
        assert (disk.ready, disk.quarantined) == (0, DISK_SLOTS)
        # Memory is as good as ever, and only the top of what is more than it holds is kept.
        assert_bytes(IN_MEMORY, await cache.get(IN_MEMORY))
        for number in range(4):
            more = chain(f"more {number}", 6)
            await cache.put(more, blocks(more))
            assert_bytes(more, await cache.get(more))
        # Mended: empty, whole, and in use.
        limit_files(daemon, hard)
        await eventually(client.stats, lambda now: not now.problems)
        assert slab(daemon).stat().st_blocks * 512 >= DISK_SLOTS * SLOT_BYTES
        again = chain("again", 4)
        await cache.put(again, blocks(again))
        assert set(await cache.move(again, Tier.DISK)) == {BlockResult.OK}
        assert_bytes(again, await cache.get(again))
