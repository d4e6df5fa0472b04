"""A watcher over the events in memory: which batches it gets, and which ids they cover."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from kvtier.v1 import events_pb2
from kvtierd.core.events import BlockChanges, BlockEvent, Cause, EventType
from kvtierd.core.ids import CacheId, EventId, GroupId, Key, Tier
from kvtierd.service import watch as watch_module
from kvtierd.service.errors import CallRefused
from kvtierd.service.hub import CacheHeader, EventHub
from kvtierd.service.watch import EventFilter, Watcher

ALL = EventFilter()
ONLY_TWO = EventFilter.of(events_pb2.WatchFilter(caches=["two"]))
HEADERS = {CacheId(1): CacheHeader("one"), CacheId(2): CacheHeader("two")}
BLOCKS = BlockChanges([Key(b"k" * 32)], [None], [Tier.HOST.bit], [35], [None], [None])


def hub(last: int = 0, max_bytes: int = 1 << 30, epoch: int = 1, epoch_first: int = 1) -> EventHub:
    return EventHub(epoch, last, epoch_first, HEADERS, max_bytes)


def watcher(ring: EventHub, wanted: EventFilter = ALL, cursor: int = 0, heartbeat_s: float = 3600) -> Watcher:
    """Of a daemon without a log."""
    return Watcher(ring, ring.epoch, cursor, wanted, heartbeat_s)


def stored(number: int, cache: int = 1) -> BlockEvent:
    return BlockEvent(EventId(number), EventType.STORED, Cause.COMMIT, CacheId(cache), GroupId(0), 0, BLOCKS)


async def batches(follow: AsyncIterator[bytes], until: int) -> list[events_pb2.WatchBatch]:
    """What a watcher gets until a batch reaches the id."""
    got = []
    async with asyncio.timeout(5):
        async for raw in follow:
            got.append(events_pb2.WatchBatch.FromString(raw))
            if got[-1].last_id >= until:
                return got
    raise AssertionError("the watch ended")


def assert_covered(got: list[events_pb2.WatchBatch], first: int, last: int) -> None:
    """Ranges and gaps together cover [first, last] without a hole or an overlap."""
    following = first
    for batch in got:
        if batch.first_id <= batch.last_id:
            assert batch.first_id == following
            following = batch.last_id + 1
        if batch.HasField("gap"):
            assert batch.gap.first_id == following
            following = batch.gap.last_id + 1
    assert following == last + 1


async def test_once_it_is_quiet_what_was_filtered_away_is_covered_long_before_the_heartbeat() -> None:
    ring = hub()
    ring.publish([stored(1), stored(2)])
    async with aclosing(watcher(ring, ONLY_TWO).follow()) as follow:
        assert_covered(await batches(follow, 2), 1, 2)


async def test_that_is_told_once_and_not_again_while_it_stays_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "COVER_S", 0.0)
    ring = hub()
    async with aclosing(watcher(ring, ONLY_TWO).follow()) as follow:
        ring.publish([stored(1)])
        assert_covered(await batches(follow, 1), 1, 1)
        following = asyncio.ensure_future(anext(follow))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not following.done()
        ring.publish([stored(2, cache=2)])
        assert events_pb2.WatchBatch.FromString(await following).last_id == 2


async def test_a_quiet_watch_gets_heartbeats_that_cover_nothing() -> None:
    async with aclosing(watcher(hub(last=9), cursor=9, heartbeat_s=0.02).follow()) as follow:
        for _ in range(3):
            batch = events_pb2.WatchBatch.FromString(await anext(follow))
            assert (batch.epoch, batch.first_id, batch.last_id, len(batch.events)) == (1, 10, 9, 0)


async def test_a_gap_keeps_what_was_filtered_away_before_it_covered() -> None:
    ring = hub(max_bytes=20_000)
    async with aclosing(watcher(ring, ONLY_TWO).follow()) as follow:
        reading = asyncio.create_task(batches(follow, 1000))
        ring.publish([stored(number) for number in range(1, 11)])
        await ring.news(9)
        for _ in range(10):
            await asyncio.sleep(0)  # turns in which the watcher looks at them and has nothing to say
        ring.publish([stored(number, cache=2) for number in range(11, 1001)])
        ring.close()
        got = await reading
    assert_covered(got, 1, 1000)
    assert any(batch.HasField("gap") for batch in got)


async def test_a_filtered_watcher_learns_the_snapshots_end_without_a_matching_event() -> None:
    ring = hub()
    ring.publish([stored(1), stored(2)])
    follow = watcher(ring, ONLY_TWO).follow(snapshot_end=2)
    await anext(follow)
    got = await batches(follow, 2)
    assert [(batch.first_id, batch.last_id, batch.snapshot_end) for batch in got] == [(1, 2, True)]


async def test_a_watch_ends_with_the_hub_after_its_last_event() -> None:
    ring = hub()
    ring.publish([stored(1)])
    ring.close()
    follow = watcher(ring).follow()
    assert events_pb2.WatchBatch.FromString(await anext(follow)).last_id == 1
    with pytest.raises(CallRefused) as ended:
        await anext(follow)
    assert ended.value.detail.reason == "SHUTTING_DOWN"


async def test_of_an_epoch_that_was_seen_to_its_end_nothing_is_lost() -> None:
    ring = hub(last=99, epoch=3, epoch_first=100)
    ring.publish([stored(100)])
    ring.close()
    (batch,) = await batches(Watcher(ring, 2, 99, ALL, heartbeat_s=3600).follow(), 100)
    assert (batch.epoch, batch.first_id, batch.HasField("gap")) == (3, 100, False)


async def test_who_waits_for_a_turn_to_catch_up_hears_that_the_daemon_is_there() -> None:
    ring = hub()
    ring.publish([stored(number) for number in range(1, 4097)])
    ring.close()
    one = watcher(ring, heartbeat_s=0.01)
    got: list[events_pb2.WatchBatch] = []
    async with aclosing(one.follow()) as follow, asyncio.timeout(10):
        async with ring.reading:  # another watcher reads
            got += [events_pb2.WatchBatch.FromString(await anext(follow)) for _ in range(5)]
        assert not any(batch.events for batch in got)
        assert one.lag == 4096
        while one.lag:
            got.append(events_pb2.WatchBatch.FromString(await anext(follow)))
    assert_covered(got, 1, 4096)
    assert [event.id for batch in got for event in batch.events] == list(range(1, 4097))
