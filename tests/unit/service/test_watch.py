from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from kvtier.v1 import common_pb2, events_pb2
from kvtierd.core.events import BlockChange, Cause, Changes, Event, EventType
from kvtierd.core.ids import CacheId, EventId, GroupId, Key, Tier
from kvtierd.service import watch as watch_module
from kvtierd.service.errors import CallRefused
from kvtierd.service.hub import CacheHeader, EventHub
from kvtierd.service.watch import EventFilter, Watcher
from kvtierd.service.wire import TIER_TO_WIRE

HEADERS = {CacheId(1): CacheHeader("one"), CacheId(2): CacheHeader("two")}
BLOCK = BlockChange(Key(b"k" * 32), None, Tier.HOST.bit, 35)
QUIET_S = 3600.0


def hub(last: int = 0, max_bytes: int = 1 << 30, epoch: int = 1, epoch_first: int = 1) -> EventHub:
    return EventHub(epoch, last, epoch_first, HEADERS, max_bytes)


def watcher(ring: EventHub, cursor: int, wanted: EventFilter, heartbeat_s: float, epoch: int | None = None) -> Watcher:
    """Of a daemon without a log."""
    return Watcher(ring, epoch or ring.epoch, cursor, wanted, heartbeat_s)


def stored(number: int, cache: int = 1, cause: Cause = Cause.COMMIT) -> Event:
    return Event(EventId(number), EventType.STORED, cause, CacheId(cache), GroupId(0), 0, Changes.of([BLOCK]))


def moved(number: int, src: Tier, dst: Tier) -> Event:
    return Event(
        EventId(number),
        EventType.UPDATED,
        Cause.CAPACITY,
        CacheId(1),
        GroupId(0),
        0,
        Changes.of([BLOCK]),
        moved_from=src,
        moved_to=dst,
        moved_bytes=1,
    )


def removed(number: int) -> Event:
    return Event(EventId(number), EventType.REMOVED, Cause.CAPACITY, CacheId(1), GroupId(0), 0, Changes.of([BLOCK]))


def wants(tiers: tuple[Tier, ...] = (), **fields: object) -> EventFilter:
    message = events_pb2.WatchFilter(tiers=[TIER_TO_WIRE[tier] for tier in tiers], **fields)  # type: ignore[arg-type]
    return EventFilter.of(message)


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


async def test_everything_arrives_and_the_ranges_say_so() -> None:
    ring = hub()
    ring.publish([stored(number) for number in range(1, 1001)])
    got = await batches(watcher(ring, 0, wants(), QUIET_S).follow(), 1000)
    assert [event.id for batch in got for event in batch.events] == list(range(1, 1001))
    assert_covered(got, 1, 1000)


EVENTS = [
    stored(1),
    stored(2, cache=2),
    moved(3, Tier.DEVICE, Tier.HOST),
    moved(4, Tier.HOST, Tier.DISK),
    removed(5),
    stored(6, cause=Cause.RECOVERED),
    Event(EventId(7), EventType.CREATED, Cause.COMMIT, CacheId(2), GroupId(0), 0, capacity=((Tier.HOST, 4),)),
]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (wants(), [1, 2, 3, 4, 5, 6, 7]),
        (wants(types=[events_pb2.EVENT_TYPE_STORED]), [1, 2, 6]),
        (wants(types=[events_pb2.EVENT_TYPE_REMOVED, events_pb2.EVENT_TYPE_CREATED]), [5, 7]),
        (wants(causes=[common_pb2.CAUSE_RECOVERED]), [6]),
        (wants(caches=["two"]), [2, 7]),
        (wants(caches=["three"]), []),
        (wants(tiers=(Tier.DISK,)), [4]),
        (wants(tiers=(Tier.DEVICE,)), [3]),
        (wants(tiers=(Tier.HOST,)), [1, 2, 3, 4, 6]),
        (wants(tiers=(Tier.HOST,), causes=[common_pb2.CAUSE_CAPACITY]), [3, 4]),
    ],
)
async def test_filters_choose_events_and_ranges_cover_the_rest(wanted: EventFilter, expected: list[int]) -> None:
    ring = hub()
    ring.publish([*EVENTS, stored(8, cache=1)])
    ring.close()
    follow = watcher(ring, 0, wanted, heartbeat_s=0.0).follow()
    got = await batches(follow, 8)
    with pytest.raises(CallRefused):
        await anext(follow)
    assert [event.id for batch in got for event in batch.events if event.id < 8] == expected
    assert_covered(got, 1, 8)


async def test_what_is_filtered_away_is_covered_by_the_next_heartbeat() -> None:
    ring = hub()
    follow = watcher(ring, 0, wants(caches=["two"]), heartbeat_s=0.05).follow()
    await anext(follow)
    ring.publish([stored(1), stored(2)])
    got = await batches(follow, 2)
    assert [(batch.first_id, batch.last_id, len(batch.events)) for batch in got] == [(1, 2, 0)]


async def test_a_watch_begins_by_saying_where_it_is() -> None:
    async with aclosing(watcher(hub(last=9), 9, wants(), QUIET_S).follow()) as follow:
        async with asyncio.timeout(5):
            batch = events_pb2.WatchBatch.FromString(await anext(follow))
    assert (batch.epoch, batch.first_id, batch.last_id) == (1, 10, 9)


async def test_once_it_is_quiet_what_was_filtered_away_is_covered_long_before_the_heartbeat() -> None:
    ring = hub()
    ring.publish([stored(1), stored(2)])
    async with aclosing(watcher(ring, 0, wants(caches=["two"]), QUIET_S).follow()) as follow:
        assert_covered(await batches(follow, 2), 1, 2)


async def test_that_is_told_once_and_not_again_while_it_stays_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "COVER_S", 0.0)
    ring = hub()
    async with aclosing(watcher(ring, 0, wants(caches=["two"]), QUIET_S).follow()) as follow:
        ring.publish([stored(1)])
        assert_covered(await batches(follow, 1), 1, 1)
        following = asyncio.ensure_future(anext(follow))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not following.done()
        ring.publish([stored(2, cache=2)])
        assert events_pb2.WatchBatch.FromString(await following).last_id == 2


async def test_a_quiet_watch_gets_heartbeats_that_cover_nothing() -> None:
    ring = hub(last=9)
    async with aclosing(watcher(ring, 9, wants(), heartbeat_s=0.02).follow()) as follow:
        for _ in range(3):
            batch = events_pb2.WatchBatch.FromString(await anext(follow))
            assert (batch.epoch, batch.first_id, batch.last_id, len(batch.events)) == (1, 10, 9, 0)


async def test_a_slow_watcher_is_told_what_it_missed_and_goes_on() -> None:
    ring = hub(max_bytes=20_000)
    async with aclosing(watcher(ring, 0, wants(), QUIET_S).follow()) as follow:
        await anext(follow)
        ring.publish([stored(1)])
        got = [events_pb2.WatchBatch.FromString(await anext(follow))]
        ring.publish([stored(number) for number in range(2, 1001)])
        ring.close()  # packs everything at once: the watcher has had no turn
        got += await batches(follow, 1000)
    gaps = [batch.gap for batch in got if batch.HasField("gap")]
    assert [(gap.epoch, gap.first_id, gap.last_id, gap.reason) for gap in gaps] == [(1, 2, ring.oldest - 1, "slow")]
    assert_covered(got, 1, 1000)


async def test_a_gap_keeps_what_was_filtered_away_before_it_covered() -> None:
    ring = hub(max_bytes=20_000)
    async with aclosing(watcher(ring, 0, wants(caches=["two"]), QUIET_S).follow()) as follow:
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


async def test_the_batch_that_reaches_the_snapshots_end_says_so() -> None:
    ring = hub()
    ring.publish([stored(number) for number in range(1, 601)])
    got = await batches(watcher(ring, 0, wants(), QUIET_S).follow(snapshot_end=300), 600)
    marked = [batch for batch in got if batch.snapshot_end]
    assert len(marked) == 1
    assert marked[0].last_id >= 300 > marked[0].first_id
    assert_covered(got, 1, 600)


async def test_a_snapshot_of_a_quiet_daemon_ends_at_once() -> None:
    ring = hub(last=5)
    async with aclosing(watcher(ring, 5, wants(), QUIET_S).follow(snapshot_end=5)) as follow:
        batch = events_pb2.WatchBatch.FromString(await anext(follow))
    assert (batch.snapshot_end, batch.first_id, batch.last_id) == (True, 6, 5)


async def test_a_filtered_watcher_learns_the_snapshots_end_without_a_matching_event() -> None:
    ring = hub()
    ring.publish([stored(1), stored(2)])
    follow = watcher(ring, 0, wants(caches=["two"]), QUIET_S).follow(snapshot_end=2)
    await anext(follow)
    got = await batches(follow, 2)
    assert [(batch.first_id, batch.last_id, batch.snapshot_end) for batch in got] == [(1, 2, True)]


async def test_a_watch_ends_with_the_hub_after_its_last_event() -> None:
    ring = hub()
    ring.publish([stored(1)])
    ring.close()
    follow = watcher(ring, 0, wants(), QUIET_S).follow()
    assert events_pb2.WatchBatch.FromString(await anext(follow)).last_id == 1
    with pytest.raises(CallRefused) as ended:
        await anext(follow)
    assert ended.value.detail.reason == "SHUTTING_DOWN"


async def test_a_watcher_of_an_earlier_epoch_is_told_the_range_that_is_lost() -> None:
    ring = hub(last=99, epoch=3, epoch_first=100)
    ring.publish([stored(100)])
    ring.close()
    got = await batches(watcher(ring, 60, wants(), QUIET_S, epoch=2).follow(), 100)
    assert [(batch.epoch, batch.first_id, batch.last_id) for batch in got] == [(3, 100, 99), (3, 100, 100)]
    (gap,) = [batch.gap for batch in got if batch.HasField("gap")]
    assert (gap.epoch, gap.first_id, gap.last_id, gap.reason) == (2, 61, 99, "unclean-stop")


async def test_of_an_epoch_that_was_seen_to_its_end_nothing_is_lost() -> None:
    ring = hub(last=99, epoch=3, epoch_first=100)
    ring.publish([stored(100)])
    ring.close()
    (batch,) = await batches(watcher(ring, 99, wants(), QUIET_S, epoch=2).follow(), 100)
    assert (batch.epoch, batch.first_id, batch.HasField("gap")) == (3, 100, False)


async def test_who_waits_for_a_turn_to_catch_up_hears_that_the_daemon_is_there() -> None:
    ring = hub()
    ring.publish([stored(number) for number in range(1, 4097)])
    ring.close()
    one = Watcher(ring, ring.epoch, 0, wants(), 0.01)
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
