"""The ring of events in memory: what it holds, what it cannot tell, and whom it wakes."""

import asyncio
from dataclasses import replace

import pytest

from kvtier.v1 import events_pb2
from kvtierd.core.events import BlockChanges, BlockEvent, Cause, EventType
from kvtierd.core.ids import CacheId, EventId, GroupId, Key, Label
from kvtierd.event_log import EventRun
from kvtierd.service import hub as hub_module
from kvtierd.service.hub import BUSY_S, RUN_EVENTS, SHARE_S, CacheHeader, EventHub, Loss

HEADERS = {CacheId(1): CacheHeader("cache")}


def event(number: int, blocks: int = 1, label: Label | None = None) -> BlockEvent:
    keys = [Key(index.to_bytes(32, "big")) for index in range(blocks)]
    return BlockEvent(
        EventId(number),
        EventType.STORED,
        Cause.COMMIT,
        CacheId(1),
        GroupId(0),
        7,
        BlockChanges(keys, [None] * blocks, [1] * blocks, [35] * blocks, [label] * blocks, [None] * blocks),
    )


def hub(max_bytes: int = 1 << 20) -> EventHub:
    return EventHub(1, 0, 1, HEADERS, max_bytes)


def ids(run: EventRun | None) -> list[int]:
    assert run is not None
    return [event.id for event in events_pb2.WatchBatch.FromString(run.body).events]


def publish(to: EventHub, first: int, count: int) -> None:
    to.publish([event(number) for number in range(first, first + count)])


async def readable(from_: EventHub, last: int) -> None:
    async with asyncio.timeout(5):
        while from_.readable < last:
            await from_.news(from_.readable)


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
