"""A daemon whose state directory is lost counts its events from the beginning again: what is made of cursors of before,
once its ids have passed theirs."""

import asyncio
import shutil

import pytest

from kvtier import Event, EventType, Gap, KvtierError, Mirror, MirrorState
from tests.integration.blocks import SPEC, blocks, chain, opened_cache, put_chain, sizes
from tests.integration.seeing import last_event
from tests.integration.steering import Steering
from tests.integration.test_watch_restart import up_to
from tests.integration.waiting import PATIENCE_S, eventually, patient

SLOTS = {"device": 8, "host": 16, "disk": 32}


async def beyond(client, cursor):
    """Another cache's blocks, until the daemon's ids have passed the cursor's."""
    cache = await client.open_cache("c", SPEC)
    number = 0
    while (await last_event(client)).id <= cursor.id:
        await put_chain(cache, f"after {number}", 4)
        number += 1


async def without_state(daemon):
    await asyncio.to_thread(daemon.stop)
    for directory in (daemon.state_dir, daemon.disk_dir):
        shutil.rmtree(directory)
    await asyncio.to_thread(daemon.start)


@pytest.mark.parametrize("log", ["64MiB", "0"])
async def test_a_watch_is_told_and_begins_with_the_oldest_event(start_daemon, log):
    daemon = start_daemon("--event-log-bytes", log, **SLOTS)
    async with await patient(daemon.address) as client, client.watch(oldest=True) as watch:
        cache = await client.open_cache("c", SPEC)
        await put_chain(cache, "before", 6)
        await up_to(watch, await last_event(client))
        old = watch.cursor
        assert old is not None
        await without_state(daemon)  # the watch is not asked for anything, and so does not come back meanwhile
        await beyond(client, old)
        present = await last_event(client)
        gap, *items = await up_to(watch, present)
        assert gap == Gap(old.epoch, old.id + 1, old.id + 1, "lost-state")
        assert [item.event_id for item in items if isinstance(item, Event)] == list(range(1, present.id + 1))
        assert isinstance(items[0], Event) and items[0].type is EventType.CREATED


@pytest.mark.parametrize("passed", [True, False], ids=["ids have passed its cursor", "its cursor lies ahead"])
async def test_a_mirror_takes_another_snapshot(start_daemon, monkeypatch, passed):
    steering = Steering().installed(monkeypatch)
    daemon = start_daemon(**SLOTS)
    keys = chain("before", 6)
    async with (
        opened_cache(daemon.address, "c", wait=PATIENCE_S) as (client, cache),
        Mirror(client, ["c"], heartbeat_s=0.1) as mirror,
    ):
        await cache.put(keys, blocks(keys))
        await mirror.synced(await last_event(client), timeout=PATIENCE_S)
        old = mirror.cursor
        assert old is not None
        steering.hold()
        await eventually(lambda: steering.holding, lambda watches: watches == 1)
        await without_state(daemon)
        if passed:
            await beyond(client, old)
        assert mirror.longest_prefix(keys) == 6, "it has not looked yet"
        steering.go_to(None)
        await eventually(lambda: mirror.resyncs, lambda resyncs: resyncs == 1)
        assert mirror.longest_prefix(keys) == 0
        cache = await client.open_cache("c", SPEC)
        await cache.put(keys[:2], blocks(keys[:2]))
        await mirror.synced(await last_event(client), timeout=PATIENCE_S)
        assert (mirror.longest_prefix(keys), mirror.state) == (2, MirrorState.EXACT)
        await steering.assert_agrees(mirror, cache)


@pytest.mark.parametrize("lost", ["disk", "disk/caches/c"])
async def test_a_directory_of_blocks_that_is_lost_is_told(start_daemon, lost):
    daemon = start_daemon(**SLOTS)
    keys = chain("before", 6)
    async with await patient(daemon.address) as client:
        both = {"c": sizes(host=4, disk=8), "memory": sizes(host=8)}
        for name, budgets in both.items():
            cache = await client.open_cache(name, SPEC, budgets=budgets)
            await cache.put(keys[:2], blocks(keys[:2]))
            await cache.close()
        await asyncio.to_thread(daemon.stop)
        shutil.rmtree(daemon.home / lost)
        await asyncio.to_thread(daemon.start)
        says = f"cache c has lost its blocks: {daemon.disk_dir / 'caches/c'} was missing at the start"
        assert (await client.stats()).problems == (says,)
        assert len([line for line in daemon.log.splitlines() if says in line and "level=warning" in line]) == 1
        cache = await client.open_cache("c", SPEC, budgets=both["c"])
        await cache.close()
        assert (await client.stats()).problems == (says,), "that it is made again brings nothing back"
        await client.remove_cache("c")
        assert not (await client.stats()).problems


async def test_a_cache_that_was_never_made_or_is_being_removed_is_not_lost(start_daemon):
    daemon = start_daemon(**SLOTS)
    async with await patient(daemon.address) as client:
        await client.open_cache("c", SPEC)
        await asyncio.to_thread(daemon.kill)
        (daemon.disk_dir / "caches/c").rename(daemon.disk_dir / "caches/.gone-c")
        (daemon.disk_dir / "caches/.new-x").mkdir()
        await asyncio.to_thread(daemon.start)
        assert not (await client.stats()).problems
        assert not (daemon.disk_dir / "caches/.gone-c").exists()
        # A disk that has no room for a cache has never had it.
        (daemon.disk_dir / "caches/.new-big").write_text("in the way")
        with pytest.raises(KvtierError):
            await client.open_cache("big", SPEC)
        (daemon.disk_dir / "caches/.new-big").unlink()
        await asyncio.to_thread(daemon.restart)
        assert not (await client.stats()).problems


async def test_ids_go_on_above_those_of_a_log_that_is_left(start_daemon):
    daemon = start_daemon(**SLOTS)
    async with await patient(daemon.address) as client, client.watch(oldest=True) as watch:
        cache = await client.open_cache("c", SPEC)
        await put_chain(cache, "before", 6)
        before = await up_to(watch, await last_event(client))
        await asyncio.to_thread(daemon.stop)
        (daemon.state_dir / "SUPERBLOCK").unlink()
        shutil.rmtree(daemon.state_dir / "caches")
        await asyncio.to_thread(daemon.start)
        present = await last_event(client)
        assert present.epoch == 2
        async with client.watch(oldest=True) as again:
            items = await up_to(again, present)
        assert items[: len(before)] == before
        assert [item.reason for item in items if isinstance(item, Gap)] == ["unclean-stop"]
