"""A watch: loss is judged by ranges, breaks are resumed at the cursor, and nothing is lost in silence."""

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import status_pb2

import kvtier
from kvtier import Cursor, Disconnected, Event, Gap, Heartbeat, Reconnected
from kvtier.v1 import common_pb2, events_pb2
from tests.integration.waiting import eventually
from tests.unit.client.fake_daemon import FakeDaemon, play

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


def batch(first: int, last: int, *, shown: list[int] | None = None, epoch: int = 1, **more: Any) -> Any:
    """A batch that covers ids [first, last] and shows them all, or only some."""
    ids = range(first, last + 1) if shown is None else shown
    events = [events_pb2.Event(id=n, type=events_pb2.EVENT_TYPE_CLEARED, cache="c") for n in ids]
    return events_pb2.WatchBatch(epoch=epoch, first_id=first, last_id=last, events=events, **more)


def compacted(oldest: int) -> Any:
    packed = any_pb2.Any()
    packed.Pack(common_pb2.ErrorDetail(reason="CURSOR_COMPACTED", field="since.id", value="1", limit=str(oldest)))
    status = status_pb2.Status(code=grpc.StatusCode.OUT_OF_RANGE.value[0], message="gone", details=[packed])
    return grpc.StatusCode.OUT_OF_RANGE, (("grpc-status-details-bin", status.SerializeToString()),)


async def take(watch: kvtier.Watch, count: int) -> list[Any]:
    async with asyncio.timeout(10):
        return [await anext(watch) for _ in range(count)]


def short(items: list[Any]) -> list[Any]:
    """Events by their ids; everything else as it is."""
    return [item.event_id if isinstance(item, Event) else item for item in items]


async def test_a_break_is_resumed_after_the_last_id_that_was_covered(
    daemon: FakeDaemon, client: kvtier.AsyncClient
) -> None:
    play(daemon, [batch(5, 9, shown=[6]), UNAVAILABLE], [batch(10, 10), None])
    async with client.watch(since=Cursor(1, 4)) as watch:
        assert short(await take(watch, 2)) == [6, 10]
    assert [call.since.id for call in daemon.calls["Watch"]] == [4, 9]


async def test_a_break_is_told_once_if_asked_for_with_what_it_was(
    daemon: FakeDaemon, client: kvtier.AsyncClient
) -> None:
    play(daemon, [batch(5, 5), UNAVAILABLE], [UNAVAILABLE], [batch(6, 6, epoch=1), None])
    async with client.watch(since=Cursor(1, 4), breaks=True) as watch:
        items = await take(watch, 4)
    assert short(items) == [5, Disconnected("as scripted"), Reconnected(1, 1, restarted=False), 6]


async def test_ids_that_the_filter_hides_are_no_gap_but_a_hole_between_ranges_is(
    daemon: FakeDaemon, client: kvtier.AsyncClient
) -> None:
    play(daemon, [batch(5, 9, shown=[6]), batch(10, 12, shown=[12]), batch(15, 15), None])
    async with client.watch(since=Cursor(1, 4)) as watch:
        assert short(await take(watch, 4)) == [6, 12, Gap(1, 13, 14, "unexplained"), 15]


async def test_an_epoch_that_joins_the_one_before_is_no_gap_and_one_that_does_not_is(
    daemon: FakeDaemon, client: kvtier.AsyncClient
) -> None:
    play(daemon, [batch(5, 5), batch(6, 5, epoch=2), batch(6, 6, epoch=2), batch(8, 8, epoch=3), None])
    async with client.watch(since=Cursor(1, 4), heartbeats=True) as watch:
        assert short(await take(watch, 3)) == [5, Heartbeat(Cursor(2, 5)), 6]
        assert watch.cursor == Cursor(2, 6)
        assert short(await take(watch, 2)) == [Gap(3, 7, 7, "unexplained"), 8]


async def test_the_lost_end_of_an_epoch_leads_into_the_next(daemon: FakeDaemon, client: kvtier.AsyncClient) -> None:
    gap = events_pb2.Gap(epoch=1, first_id=5, last_id=999, reason="unclean-stop")
    play(daemon, [batch(1000, 999, epoch=2, gap=gap), batch(1000, 1001, epoch=2), UNAVAILABLE], [None])
    async with client.watch(since=Cursor(1, 4)) as watch:
        items = await take(watch, 3)
        assert short(items) == [Gap(1, 5, 999, "unclean-stop"), 1000, 1001]
        assert items[1].epoch == 2
        assert watch.cursor == Cursor(2, 1001)
        resumed = asyncio.create_task(take(watch, 1))
        await daemon.until(lambda: len(daemon.calls["Watch"]) == 2)
        resumed.cancel()
        await asyncio.wait([resumed])
    assert (daemon.calls["Watch"][1].since.epoch, daemon.calls["Watch"][1].since.id) == (2, 1001)


async def test_a_cursor_that_was_compacted_while_we_were_away_becomes_a_gap(
    daemon: FakeDaemon, client: kvtier.AsyncClient
) -> None:
    play(daemon, [batch(5, 5), UNAVAILABLE], [compacted(100)], [batch(100, 100), None])
    async with client.watch(since=Cursor(1, 4)) as watch:
        assert short(await take(watch, 3)) == [5, Gap(1, 6, 99, "compacted"), 100]
    again = daemon.calls["Watch"][2].since
    assert (again.epoch, again.id) == (0, 99)


async def test_now_is_pinned_before_the_first_batch(daemon: FakeDaemon, client: kvtier.AsyncClient) -> None:
    """By a watch that is asked where it begins, and nothing else: whoever may watch can."""
    play(daemon, [batch(41, 40, epoch=3), None], [UNAVAILABLE], [batch(41, 41, epoch=3), None])
    async with client.watch() as watch:
        assert short(await take(watch, 1)) == [41]
    asked, *followed = daemon.calls["Watch"]
    assert asked.WhichOneof("start") is None
    assert [(call.since.epoch, call.since.id) for call in followed] == [(3, 40), (3, 40)]


async def test_a_stream_without_even_heartbeats_is_given_up_and_resumed(
    daemon: FakeDaemon, client: kvtier.AsyncClient
) -> None:
    play(daemon, [batch(5, 5), None], [batch(6, 6), None])
    async with client.watch(since=Cursor(1, 4), heartbeat_s=0.05) as watch:
        assert short(await take(watch, 2)) == [5, 6]
    assert len(daemon.hellos) == 2


async def test_a_cancelled_step_loses_neither_its_stream_nor_an_item(
    daemon: FakeDaemon, client: kvtier.AsyncClient
) -> None:
    more = asyncio.Event()
    play(daemon, [batch(5, 6), more, batch(7, 8), UNAVAILABLE], [compacted(100)], [batch(100, 100), None])
    async with client.watch(since=Cursor(1, 4)) as watch:
        await take(watch, 2)
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(watch), 0.01)
        assert watch.live
        more.set()
        assert short(await take(watch, 4)) == [7, 8, Gap(1, 9, 99, "compacted"), 100]
    assert len(daemon.calls["Watch"]) == 3


async def test_a_failure_during_a_cancelled_step_is_raised_by_the_next_one(
    daemon: FakeDaemon, client: kvtier.AsyncClient
) -> None:
    fail = asyncio.Event()
    play(daemon, [batch(5, 5), fail, grpc.StatusCode.PERMISSION_DENIED])
    async with client.watch(since=Cursor(1, 4)) as watch:
        await take(watch, 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(watch), 0.01)
        fail.set()
        await eventually(lambda: watch.live, lambda live: not live)
        with pytest.raises(kvtier.KvtierError, match="as scripted"):
            await take(watch, 1)


async def test_a_watch_knows_how_far_behind_it_is(daemon: FakeDaemon, client: kvtier.AsyncClient) -> None:
    play(daemon, [batch(5, 7, newest_id=20), batch(8, 9, newest_id=9), batch(10, 11), None])
    async with client.watch(since=Cursor(1, 4)) as watch:
        assert (watch.newest, watch.lag) == (None, 0)
        await take(watch, 2)
        assert (watch.newest, watch.lag) == (20, 14)
        await take(watch, 3)
        assert (watch.newest, watch.lag) == (9, 0)
        await take(watch, 1)
        assert (watch.newest, watch.lag) == (11, 1), "of a daemon that does not say, what it has sent"


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        ({"groups": [0, 16]}, "groups[1]"),
        ({"keys": ["ab", "abc"]}, "keys[1]"),
        ({"keys": [bytes(33)]}, "keys[0]"),
        ({"keys": "abcd"}, "keys"),
        ({"keys": [b"a"] * 65}, "keys"),
        ({"oldest": True, "snapshot": True}, "start"),
    ],
    ids=str,
)
async def test_what_is_no_watch_does_not_leave_the_client(
    client: kvtier.AsyncClient, wanted: dict[str, Any], field: str
) -> None:
    with pytest.raises(kvtier.InvalidArgument) as refused:
        client.watch(**wanted)
    assert refused.value.field == field
