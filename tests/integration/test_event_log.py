"""The event log of a real daemon: what is still told after restarts and kills, and of a log that was damaged."""

import asyncio
import os
import shutil
import stat
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvtier import Cursor, CursorCompacted, Event, Gap, connect
from kvtier.events import WatchItem
from kvtier.v1 import blocks_pb2, events_pb2
from tests.integration.blocks import SPEC, put_chain
from tests.integration.conftest import own_daemon
from tests.integration.raw import attached
from tests.integration.seeing import last_event
from tests.integration.test_slow_watchers import BLOCKS, store
from tests.integration.waiting import PATIENCE_S, eventually
from tests.integration.witness import Witness

daemon = own_daemon(fresh=True, device=8, host=16, disk=64)


class Told:
    """What a watch told, as runs of ids by epoch, and its gaps."""

    def __init__(self, items):
        self.ids: dict[int, list[int]] = {}
        self.gaps: list[Gap] = []
        for item in items:
            match item:
                case Event():
                    self.ids.setdefault(item.epoch, []).append(item.event_id)
                case Gap():
                    self.gaps.append(item)

    @property
    def reasons(self):
        return [gap.reason for gap in self.gaps]


async def told(client, **start):
    """Everything from a start up to now."""
    end = await last_event(client)
    items: list[WatchItem] = []
    async with asyncio.timeout(PATIENCE_S), client.watch(**start, heartbeats=True, heartbeat_s=0.02) as watch:
        while watch.cursor is None or watch.cursor < end:
            items.append(await anext(watch))
    return Told(items)


async def put(cache, name, count=2):
    await put_chain(cache, name, count)


async def logged(client):
    """The last id, once the log has it."""
    last = (await last_event(client)).id
    await eventually(client.stats, lambda stats: stats.event_log.newest_id >= last)
    return last


@asynccontextmanager
async def filling(client):
    """A cache with traffic."""
    cache = await client.open_cache("busy", SPEC)

    async def fill():
        number = 0
        while True:
            try:
                await put(cache, f"busy {number}", 4)
            except Exception:  # noqa: BLE001  the daemon is being killed: the client heals, and the next put works
                await asyncio.sleep(0.01)
            number += 1

    task = asyncio.create_task(fill())
    try:
        yield cache
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_kills_in_traffic_lose_what_was_not_logged_and_say_so_once(daemon, client):
    kills, least = 3, []
    async with Witness(client) as live:
        async with filling(client):
            for _ in range(kills):
                begun = (await last_event(client)).id
                await live.more(200)
                newest = await eventually(client.stats, lambda stats, begun=begun: stats.event_log.newest_id > begun)  # type: ignore[misc]
                least.append((newest.epoch, newest.event_log.newest_id))
                await asyncio.to_thread(daemon.crash)
            await live.more(100)
        await live.reach(await last_event(client))
        assert [gap.reason for gap in live.gaps] == ["unclean-stop"] * kills

        late = await told(client, oldest=True)
        assert late.reasons == ["unclean-stop"] * kills
        assert [gap.epoch for gap in late.gaps] == [1, 2, 3]
        following = 1
        for epoch, numbers in late.ids.items():
            assert numbers == list(range(following, numbers[-1] + 1)), "contiguous inside an epoch"
            if epoch <= kills:
                gap = late.gaps[epoch - 1]
                assert gap.first_id == numbers[-1] + 1, "it begins where the log ends"
                assert gap.last_id == live.gaps[epoch - 1].last_id, "and ends where the next epoch begins"
                following = gap.last_id + 1
        assert all(late.ids[epoch][-1] >= newest for epoch, newest in least), "something logged was not told"

        middle = late.ids[2][len(late.ids[2]) // 2]
        resumed = await told(client, since=Cursor(2, middle))
        assert resumed.ids[2] == [number for number in late.ids[2] if number > middle]
        assert resumed.gaps == late.gaps[1:]


async def test_a_watcher_that_falls_out_of_the_log_is_told_that_it_was_compacted(start_fresh):
    flags = ("--event-log-bytes", "1MiB", "--event-ring-bytes", "64KiB")
    daemon = start_fresh(*flags, host=2 * BLOCKS)
    async with await connect(daemon.address) as client, attached(daemon.address) as raw:
        cache = (await raw.open("watched")).cache_id
        start = await last_event(client)
        request = events_pb2.WatchRequest(since=blocks_pb2.Cursor(epoch=start.epoch, id=start.id))
        slow = raw.stubs.events.Watch(request, metadata=raw.metadata)
        for index in range(300):
            await store(raw, cache, f"prompt {index}")
        last = await logged(client)
        covered, gaps = start.id, []
        async with asyncio.timeout(PATIENCE_S):
            while covered < last:
                batch: Any = await slow.read()
                assert batch.first_id == covered + 1
                assert [event.id for event in batch.events] == list(range(batch.first_id, batch.last_id + 1))
                covered = batch.last_id
                if batch.HasField("gap"):
                    assert batch.gap.first_id == covered + 1
                    covered = batch.gap.last_id
                    gaps.append(batch.gap.reason)
        slow.cancel()
        assert set(gaps) == {"compacted"}
        with pytest.raises(CursorCompacted) as refused:
            await told(client, since=start)
        held = await told(client, oldest=True)
        stats = await client.stats()
        assert (held.ids[1], held.gaps) == (list(range(refused.value.oldest, last + 1)), [])
        assert refused.value.oldest <= stats.event_log.oldest_id, "memory may have some that the log has no more"
        size = sum(file.stat().st_size for file in (daemon.state_dir / "events").iterdir())
        assert size == stats.event_log.bytes < 1 << 20 == stats.event_log.max_bytes
        # A time at which some of what is gone happened: that loss comes first.
        since = await told(client, since_time_ns=1)
        assert since.reasons == ["compacted"]
        assert since.ids == held.ids


async def test_a_state_brought_back_from_before_gives_no_id_out_again(daemon, client, short_dir):
    """Only the state is put back, as of a backup; the log is ahead of it."""
    await asyncio.to_thread(daemon.stop)
    shutil.copy(daemon.state_dir / "SUPERBLOCK", short_dir / "backup")
    await asyncio.to_thread(daemon.start)
    for number in range(20):
        await put(await client.open_cache("c", SPEC), f"given out {number}")
    last = await logged(client)
    await asyncio.to_thread(daemon.stop)
    shutil.copy(short_dir / "backup", daemon.state_dir / "SUPERBLOCK")
    await asyncio.to_thread(daemon.start)
    await put(await client.open_cache("c", SPEC), "after")
    everything = await told(client, oldest=True)
    assert everything.reasons == ["unclean-stop"]
    assert everything.ids[1] == list(range(1, len(everything.ids[1]) + 1))
    assert len(everything.ids[1]) >= last  # copies ahead of need may follow
    assert everything.ids[2][0] == everything.gaps[0].last_id + 1 > len(everything.ids[1]) + 1
    assert "the state is older than the event log" in daemon.log


async def test_a_log_that_somebody_deleted_is_missed_and_begun_anew(daemon, client):
    await put(await client.open_cache("c", SPEC), "before")
    last = await logged(client)
    await asyncio.to_thread(daemon.stop)
    shutil.rmtree(daemon.state_dir / "events")
    await asyncio.to_thread(daemon.start)
    with pytest.raises(CursorCompacted) as refused:
        await told(client, since=Cursor(1, 1))
    assert refused.value.oldest == last + 1
    await put(await client.open_cache("c", SPEC), "after")
    held = await told(client, oldest=True)
    assert (held.ids[1][0], held.gaps) == (last + 1, [])
    await logged(client)
    assert stat.S_IMODE(os.stat(daemon.state_dir / "events").st_mode) == 0o700
