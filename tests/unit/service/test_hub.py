from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvtier.v1 import events_pb2
from kvtierd.core.events import BlockChange, Cause, Changes, Event, EventType
from kvtierd.core.ids import CacheId, EventId, GroupId, Key, Label
from kvtierd.event_log import Run
from kvtierd.service import hub as hub_module
from kvtierd.service.hub import BUSY_S, MESSAGE_EVENTS, RUN_BLOCKS, RUN_EVENTS, SHARE_S, CacheHeader, EventHub, Loss

HEADERS = {CacheId(1): CacheHeader("cache")}


def event(number: int, blocks: int = 1, label: Label | None = None) -> Event:
    keys = [Key(index.to_bytes(32, "big")) for index in range(blocks)]
    return Event(
        EventId(number),
        EventType.STORED,
        Cause.COMMIT,
        CacheId(1),
        GroupId(0),
        7,
        Changes.of(BlockChange(key, None, 1, 35, label) for key in keys),
    )


def hub(last: int = 0, max_bytes: int = 1 << 20) -> EventHub:
    return EventHub(1, last, 1, HEADERS, max_bytes)


def ids(run: Run | None) -> list[int]:
    assert run is not None
    return [event.id for event in events_pb2.WatchBatch.FromString(run.body).events]


def publish(to: EventHub, first: int, count: int) -> None:
    to.publish([event(number) for number in range(first, first + count)])


async def readable(from_: EventHub, last: int) -> None:
    async with asyncio.timeout(5):
        while from_.readable < last:
            await from_.news(from_.readable)


async def test_every_event_is_read_once_and_in_order() -> None:
    ring = hub()
    for first in range(1, 2000, 3):
        publish(ring, first, 3)
    await readable(ring, 2001)
    cursor, seen = 0, []
    while (run := ring._in_memory(cursor)) is not None:
        assert run.first == cursor + 1
        assert ids(run) == list(range(run.first, run.last + 1))
        assert run.last - run.first < MESSAGE_EVENTS
        seen += ids(run)
        cursor = run.last
    assert seen == list(range(1, 2002))


async def test_events_that_cannot_be_told_are_a_hole_and_keep_no_other_from_being_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ring = hub()
    publish(ring, 1, 2)
    await readable(ring, 2)
    ring.publish([replace(event(3), cache=CacheId(9))])  # of which the hub knows nothing
    await asyncio.sleep(4 * BUSY_S)
    publish(ring, 4, 2)
    await readable(ring, 5)
    assert [ids(ring._in_memory(cursor)) for cursor in (0, 1, 2, 3)] == [[1, 2], [2], [4, 5], [4, 5]]
    assert await ring.after(1, 2) == Loss(1, 3, 3, "unexplained", 1)
    assert [record.args for record in caplog.records] == [(3, 3)]


async def test_of_tokens_that_are_damaged_only_they_are_left_out() -> None:
    """They come from a record on disk, of which nothing verifies this part."""
    ring = hub()
    ring.publish([event(1, 2, Label(b"", b"\xff\xff")), event(2)])
    await readable(ring, 2)
    run = ring._in_memory(0)
    assert run is not None
    damaged, whole = events_pb2.WatchBatch.FromString(run.private).events
    assert (len(damaged.keys), list(damaged.tokens)) == (64, [events_pb2.BlockTokens()] * 2)
    assert len(whole.keys) == 32


async def test_published_ids_are_known_at_once_and_readable_a_little_later() -> None:
    ring = hub(last=40)
    publish(ring, 41, 2)
    assert (ring.last, ring.readable, ring.oldest) == (42, 40, 41)
    assert ring._in_memory(40) is None
    await readable(ring, 42)
    assert ids(ring._in_memory(40)) == [41, 42]


@pytest.mark.parametrize(("watchers", "apart_s"), [(1, BUSY_S), (20, 20 * SHARE_S)])
async def test_under_load_watchers_are_woken_the_less_often_the_more_there_are(watchers: int, apart_s: float) -> None:
    ring, loop, wakes, last = hub(), asyncio.get_running_loop(), 0, 0
    ring.watchers = range(watchers)

    async def watch() -> None:
        nonlocal wakes
        while True:
            await ring.news(ring.readable)
            wakes += 1

    began, watching = loop.time(), asyncio.create_task(watch())
    while wakes < 5:
        last += 1
        publish(ring, last, 1)
        await asyncio.sleep(0)
    await readable(ring, last)
    watching.cancel()
    assert wakes <= (loop.time() - began) / apart_s + 2


async def test_after_a_quiet_time_nothing_waits_for_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "BUSY_S", 3600)
    ring = hub()
    publish(ring, 1, 1)
    await readable(ring, 1)
    publish(ring, 2, 1)
    await asyncio.sleep(2 * hub_module.LINGER_S)
    assert (ring.last, ring.readable) == (2, 1)
    ring.close()
    assert ring.readable == 2


async def test_small_runs_are_sent_together() -> None:
    ring = hub()
    for number in range(1, 6):
        publish(ring, number, 1)
        await readable(ring, number)
    assert ids(ring._in_memory(0)) == [1, 2, 3, 4, 5]
    assert ids(ring._in_memory(2)) == [3, 4, 5]


async def test_who_asks_the_same_gets_the_same_until_there_is_more() -> None:
    ring = hub()
    publish(ring, 1, 2)
    await readable(ring, 2)
    publish(ring, 3, 1)
    await readable(ring, 3)
    assert ring._in_memory(0) is ring._in_memory(0)
    assert ids(ring._in_memory(1)) == [2, 3]
    publish(ring, 4, 1)
    await readable(ring, 4)
    assert ids(ring._in_memory(1)) == [2, 3, 4]


async def test_a_cursor_inside_a_run_skips_what_it_has_seen() -> None:
    ring = hub()
    publish(ring, 1, 10)
    await readable(ring, 10)
    run = ring._in_memory(6)
    assert run is not None
    assert (run.first, run.last, ids(run)) == (7, 10, [7, 8, 9, 10])


async def test_the_oldest_events_go_when_they_are_too_large() -> None:
    ring = hub(max_bytes=10_000)
    for number in range(1, 101):
        ring.publish([event(number, blocks=10)])
        await readable(ring, number)
    run = ring._in_memory(0)
    assert run is not None
    assert len(run.body) <= 10_000
    assert run.first == ring.oldest > 1
    assert run.last == 100


async def test_one_event_larger_than_the_ring_is_still_held() -> None:
    ring = hub(max_bytes=100)
    ring.publish([event(1, blocks=50)])
    await readable(ring, 1)
    assert ids(ring._in_memory(0)) == [1]


async def test_events_of_many_blocks_make_shorter_runs() -> None:
    ring = hub()
    ring.publish([event(number, blocks=RUN_BLOCKS // 4) for number in range(1, 11)])
    ring.close()
    first = ring._in_memory(0)
    assert first is not None
    assert len(events_pb2.WatchBatch.FromString(first.body).events) <= 10
    assert ring.readable == 10


async def test_all_waiters_wake_and_late_ones_need_not_wait() -> None:
    ring = hub()
    waiters = [asyncio.create_task(ring.news(0)) for _ in range(5)]
    await asyncio.sleep(0)
    publish(ring, 1, 1)
    async with asyncio.timeout(5):
        await asyncio.gather(*waiters)
        await ring.news(0)


async def test_who_waits_until_then_hears_whether_there_was_any_news() -> None:
    ring, loop = hub(), asyncio.get_running_loop()
    assert not await ring.news(0, until=loop.time() + 0.001)
    waiter = asyncio.create_task(ring.news(0, until=loop.time() + 60))
    gives_up = asyncio.create_task(ring.news(0, until=loop.time() + 60))
    await asyncio.sleep(0)
    gives_up.cancel()
    publish(ring, 1, 1)
    async with asyncio.timeout(5):
        assert await waiter
    assert gives_up.cancelled()


async def test_closing_makes_everything_readable_and_wakes_waiters() -> None:
    ring = hub()
    waiter = asyncio.create_task(ring.news(1000))
    await asyncio.sleep(0)
    publish(ring, 1, 3 * RUN_EVENTS)
    ring.close()
    assert ring.readable == 3 * RUN_EVENTS
    async with asyncio.timeout(5):
        await waiter


async def test_no_event_is_lost_when_more_come_while_a_backlog_is_packed() -> None:
    ring = hub()
    publish(ring, 1, 5 * RUN_EVENTS)
    last = 5 * RUN_EVENTS
    for _ in range(20):
        await asyncio.sleep(0.001)
        publish(ring, last + 1, 100)
        last += 100
    await readable(ring, last)
    cursor, seen = 0, 0
    while (run := ring._in_memory(cursor)) is not None:
        seen += len(ids(run))
        cursor = run.last
    assert seen == last


async def test_tokens_are_kept_apart() -> None:
    tokens = events_pb2.BlockTokens(token_ids=bytes(64))
    told, count = hub(), 5
    told.publish([event(number, 128, Label(b"", tokens.SerializeToString())) for number in range(1, count + 1)])
    await readable(told, count)
    first = told._in_memory(0)
    assert first is not None
    assert not any(each.tokens for each in events_pb2.WatchBatch.FromString(first.body).events)
    private = events_pb2.WatchBatch.FromString(first.private).events
    assert all(list(each.tokens) == [tokens] * 128 for each in private)


async def test_without_tokens_a_run_is_held_once() -> None:
    told = hub()
    publish(told, 1, 3)
    await readable(told, 3)
    run = told._in_memory(0)
    assert run is not None
    assert run.private is run.body
