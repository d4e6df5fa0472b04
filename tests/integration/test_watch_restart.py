"""Watching over restarts: what goes on, what is told to be lost, and what a cursor of before is worth.

The daemon keeps past events in memory and in a log on disk. After a clean stop any cursor of before goes on without a
hole; without a log only one at the last event does, and an older one is refused with the oldest id that is held. After
an unclean stop a cursor of before first gets the rest of what was logged, then the range that is lost, then the new
epoch.
"""

import asyncio

import pytest

from kvtier import (
    Cause,
    Cursor,
    CursorCompacted,
    Event,
    EventType,
    Gap,
    InvalidArgument,
    SnapshotEnd,
    SnapshotSlice,
    SnapshotStart,
    Tier,
    connect,
)
from kvtier.events import WatchItem
from tests.integration.blocks import SPEC, blocks, chain, put_chain, sizes
from tests.integration.conftest import own_daemon
from tests.integration.residency import ResidencyTable
from tests.integration.seeing import last_event
from tests.integration.waiting import PATIENCE_S, eventually, heard, patient

SLOTS = {"device": 8, "host": 16, "disk": 64}
daemon = own_daemon(**SLOTS)


async def cleanly(daemon):
    await asyncio.to_thread(daemon.restart)


async def uncleanly(daemon):
    await asyncio.to_thread(daemon.crash)


BOTH = pytest.mark.parametrize("restart", [cleanly, uncleanly])


async def on_disk(client, name):
    """A cache with a chain of its name, on disk."""
    cache = await client.open_cache("c", SPEC)
    keys = await put_chain(cache, name, 6)
    await cache.move(keys, Tier.DISK)
    return cache


async def up_to(watch, cursor):
    """What a watch tells until it has got to ``cursor``."""
    items: list[WatchItem] = []
    async with asyncio.timeout(PATIENCE_S):
        async for item in watch:
            items.append(item)
            if watch.cursor is not None and watch.cursor >= cursor:
                break
    return items


@BOTH
async def test_blocks_of_a_cache_that_did_not_come_back_are_gone(daemon, client, restart):
    """It was in memory only and nobody has opened it again: events alone must say that its blocks are lost."""
    table = ResidencyTable()
    cache = await client.open_cache("volatile", SPEC, budgets=sizes(device=4, host=4))
    await cache.put(chain("v", 3), blocks(chain("v", 3)))
    async with client.watch(oldest=True) as watch:
        for item in await up_to(watch, await last_event(client)):
            table.apply(item)
        assert len(table.blocks("volatile")) == 3
        await restart(daemon)
        await on_disk(client, "another cache")
        for item in await up_to(watch, await last_event(client)):
            table.apply(item)
    assert [info.name for info in await client.caches()] == ["c"]
    assert dict(table.blocks("volatile")) == {}


async def test_any_cursor_goes_on_after_a_clean_stop(daemon, client):
    await on_disk(client, "before")
    last = await last_event(client)
    await cleanly(daemon)
    end = await last_event(client)
    for cursor in (last, Cursor(last.epoch, last.id - 1), Cursor(last.epoch, 1), Cursor(0, 1), Cursor(0, 0)):
        async with client.watch(since=cursor) as watch:
            items = await up_to(watch, end)
        assert [item.event_id for item in items if isinstance(item, Event)] == list(range(cursor.id + 1, end.id + 1))
        assert len(items) == end.id - cursor.id, "and nothing else: no gap"


@BOTH
async def test_one_block_s_life_is_told_over_a_restart_without_those_of_others(daemon, client, restart):
    cache = await on_disk(client, "first")
    await eventually(client.stats, lambda stats: stats.event_log.newest_id >= stats.last_event_id)
    await restart(daemon)
    await heard(client)
    await cache.get(chain("first", 6))
    key = chain("first", 6)[4]
    async with client.watch(oldest=True, keys=[key.hex()[:16]], heartbeats=True, heartbeat_s=0.05) as watch:
        items = await up_to(watch, await last_event(client))
    events = [item for item in items if isinstance(item, Event)]
    assert {tuple(event.keys) for event in events} == {(), (key,)}
    assert {event.type for event in events if not event.keys} == {EventType.CREATED, EventType.CLEARED}
    told = [(event.type, event.cause) for event in events if event.keys]
    assert told[0] == (EventType.STORED, Cause.COMMIT)
    assert (EventType.STORED, Cause.RECOVERED) in told
    assert told[-1][1] is Cause.DEMAND
    assert [item.reason for item in items if isinstance(item, Gap)] == ["unclean-stop"] * (restart is uncleanly)


async def test_without_a_log_an_older_cursor_is_compacted_after_a_clean_stop(start_daemon):
    daemon = start_daemon("--event-log-bytes", "0", **SLOTS)
    async with await connect(daemon.address) as client:
        await on_disk(client, "before")
        last = await last_event(client)
        await cleanly(daemon)
        for cursor in (Cursor(last.epoch, last.id - 1), Cursor(last.epoch, 1), Cursor(0, 1)):
            with pytest.raises(CursorCompacted) as refused:
                await anext(client.watch(since=cursor))
            assert refused.value.oldest == last.id + 1
    assert not (daemon.state_dir / "events").exists()


@pytest.mark.parametrize("kills", [1, 3])
async def test_without_a_log_a_cursor_of_a_lost_epoch_is_told_the_range(start_daemon, kills):
    daemon = start_daemon("--event-log-bytes", "0", **SLOTS)
    async with await patient(daemon.address) as client:
        await on_disk(client, "before")
        last = await last_event(client)
        for _ in range(kills):
            await uncleanly(daemon)
        present = await last_event(client)
        assert present.epoch == last.epoch + kills
        async with client.watch(since=Cursor(last.epoch, last.id - 2)) as watch:
            gap, first, *_ = await up_to(watch, present)
    assert isinstance(gap, Gap) and isinstance(first, Event)
    assert (gap.epoch, gap.first_id, gap.reason) == (last.epoch, last.id - 1, "unclean-stop")
    assert gap.last_id >= last.id, "what was given out is inside"
    assert first.cursor == Cursor(present.epoch, gap.last_id + 1)
    assert first.type is EventType.CREATED


async def test_cursors_that_never_were_are_refused(daemon, client):
    await on_disk(client, "before")
    await uncleanly(daemon)
    present = await last_event(client)
    never = [
        Cursor(present.epoch + 1, 1),
        Cursor(present.epoch, present.id + 1),
        Cursor(present.epoch - 1, present.id),
        Cursor(0, present.id + 1),
    ]
    for cursor in never:
        with pytest.raises(InvalidArgument) as refused:
            await anext(client.watch(since=cursor))
        assert refused.value.field in ("since.epoch", "since.id")
        assert refused.value.limit


async def test_a_snapshot_cut_short_begins_anew(daemon, client):
    cache = await on_disk(client, "before")
    async with client.watch(snapshot=True) as watch:
        assert isinstance(await anext(watch), SnapshotStart)
        await uncleanly(daemon)
        listed = {row.key: row.residency async for row in cache.blocks()}
        table = ResidencyTable()
        slices = starts = 0
        async for item in watch:
            slices += isinstance(item, SnapshotSlice)
            starts += isinstance(item, SnapshotStart)
            table.apply(item)
            if isinstance(item, SnapshotEnd):
                break
    assert starts == slices == 1
    assert table.blocks(cache.name, cache.group) == listed
