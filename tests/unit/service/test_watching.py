"""Watches over a real channel: what a client can rebuild from them, and how they resume."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvtier.v1 import admin_pb2, blocks_pb2, events_pb2
from kvtierd.event_log.segments import Segments
from kvtierd.rights import Rights
from kvtierd.service.calls import Access
from kvtierd.service.daemon import Daemon
from kvtierd.service.hub import EventHub
from tests.unit.service.rig import DEVICE, HOST, Client, attached, chain, config, eventually, refusal, running

Code = grpc.StatusCode
Mirror = dict[bytes, tuple[int, int, bytes]]
"""Residency, priority and parent by key."""


class Watch:
    """A watch and the mirror that it keeps."""

    def __init__(self, client: Client, **request: Any) -> None:
        self.call = client.events.Watch(events_pb2.WatchRequest(**request), metadata=client.metadata)
        self.batches: list[events_pb2.WatchBatch] = []
        self.mirror: Mirror = {}
        self._stream = aiter(self.call)

    async def next(self) -> events_pb2.WatchBatch:
        async with asyncio.timeout(10):
            batch: events_pb2.WatchBatch = await anext(self._stream)
        self.batches.append(batch)
        for event in batch.events:
            _apply(self.mirror, event)
        if batch.HasField("slice"):
            part = batch.slice
            _merge(self.mirror, part.keys, part.parents, part.residency, part.priorities)
        return batch

    async def reach(self, last: int) -> None:
        while (await self.next()).last_id < last:
            pass

    @property
    def ids(self) -> list[int]:
        return [event.id for batch in self.batches for event in batch.events]

    @property
    def gaps(self) -> list[tuple[int, int, int, str]]:
        gaps = [batch.gap for batch in self.batches if batch.HasField("gap")]
        return [(gap.epoch, gap.first_id, gap.last_id, gap.reason) for gap in gaps]


def _apply(mirror: Mirror, event: events_pb2.Event) -> None:
    keys = [event.keys[at : at + 32] for at in range(0, len(event.keys), 32)]
    match event.type:
        case events_pb2.EVENT_TYPE_CLEARED:
            mirror.clear()
        case events_pb2.EVENT_TYPE_REMOVED:
            for key in keys:
                mirror.pop(key, None)
        case events_pb2.EVENT_TYPE_STORED:
            _merge(mirror, event.keys, event.parents, event.residency, event.priorities)
        case events_pb2.EVENT_TYPE_UPDATED:
            parents = b"".join(mirror[key][2] if key in mirror else bytes(32) for key in keys)
            _merge(mirror, event.keys, parents, event.residency, event.priorities)


def _merge(mirror: Mirror, keys: bytes, parents: bytes, residency: bytes, priorities: bytes) -> None:
    for index, (where, priority) in enumerate(zip(residency, priorities, strict=True)):
        at = slice(32 * index, 32 * index + 32)
        mirror[keys[at]] = (where, priority, parents[at])


async def listing(client: Client, cache: int) -> tuple[Mirror, int]:
    listed = await client.call(client.blocks.List, blocks_pb2.ListBlocksRequest(cache_id=cache))
    mirror: Mirror = {}
    _merge(mirror, listed.keys, listed.parents, listed.residency, listed.priorities)
    return mirror, listed.as_of_event.id


async def churn(client: Client, cache: int, rounds: int, seed: int = 0) -> None:
    for number in range(rounds):
        await client.put(cache, chain(4, seed=seed + number))


@pytest.fixture
async def daemon(short_dir: Path) -> AsyncIterator[Daemon]:
    async with running(config(short_dir, device=8, host=16)) as daemon:
        yield daemon


@pytest.fixture
async def client(daemon: Daemon) -> AsyncIterator[Client]:
    async with attached(daemon) as client:
        yield client


async def test_events_alone_rebuild_the_listing(client: Client) -> None:
    watch = Watch(client, oldest=True)
    cache = await client.open()
    await churn(client, cache, 20)
    there, as_of = await listing(client, cache)
    await watch.reach(as_of)
    assert watch.mirror == there
    assert watch.ids == list(range(1, as_of + 1))
    created = watch.batches[-1].events or watch.batches[0].events
    assert created
    assert not watch.gaps


async def test_the_first_event_says_how_large_the_cache_is(client: Client) -> None:
    watch = Watch(client, oldest=True)
    await client.open("named")
    await watch.reach(1)
    (created,) = [event for batch in watch.batches for event in batch.events]
    assert (created.type, created.cache) == (events_pb2.EVENT_TYPE_CREATED, "named")
    assert list(created.num_blocks_per_cache_level) == [8, 16]


async def test_a_watch_from_now_on_begins_at_now(client: Client) -> None:
    cache = await client.open()
    await churn(client, cache, 3)
    _, before = await listing(client, cache)
    watch = Watch(client)
    first = await watch.next()
    assert (first.first_id, first.last_id) == (before + 1, before)
    await churn(client, cache, 1, seed=50)
    _, after = await listing(client, cache)
    await watch.reach(after)
    assert watch.ids == list(range(before + 1, after + 1))


async def test_a_watch_resumes_after_its_cursor_even_inside_a_batch(client: Client) -> None:
    cache = await client.open()
    await churn(client, cache, 10)
    _, last = await listing(client, cache)
    for since in (0, 1, last // 2, last - 1):
        watch = Watch(client, since=blocks_pb2.Cursor(epoch=0, id=since))
        await watch.reach(last)
        assert watch.ids == list(range(since + 1, last + 1))


async def test_a_snapshot_is_exact_at_its_end_while_everything_moves(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtierd.service.servicers.events.SLICE_BLOCKS", 3)
    settings = config(short_dir, device=8, host=64, chaos_seed=5, debug_checks=False)
    async with running(settings) as daemon, attached(daemon) as client:
        cache = await client.open()
        await churn(client, cache, 15)
        busy = asyncio.create_task(churn(client, cache, 15, seed=100))
        watch = Watch(client, snapshot=True)
        while not (await watch.next()).snapshot_end:
            pass
        assert sum(batch.HasField("slice") for batch in watch.batches) >= 10
        await busy
        there, as_of = await listing(client, cache)
        if watch.batches[-1].last_id < as_of:
            await watch.reach(as_of)
        assert watch.mirror == there
        assert not watch.gaps


async def test_a_snapshot_of_one_cache_has_nothing_of_another(client: Client) -> None:
    size = 4 * 4096
    one, two = (
        await client.open("one", {DEVICE: size, HOST: size}),
        await client.open("two", {DEVICE: size, HOST: size}),
    )
    await client.put(one, chain(2, seed=1))
    await client.put(two, chain(2, seed=2))
    watch = Watch(client, snapshot=True, filter=events_pb2.WatchFilter(caches=["two"]))
    while not (await watch.next()).snapshot_end:
        pass
    assert set(watch.mirror) == set(chain(2, seed=2))


@pytest.mark.parametrize(
    ("request_fields", "field"),
    [
        ({"since": {"id": 10**6}}, "since.id"),
        ({"since": {"epoch": 2, "id": 0}}, "since.epoch"),
        ({"heartbeat_ns": 1}, "heartbeat_ns"),
        ({"heartbeat_ns": 2**64 - 1}, "heartbeat_ns"),
        ({"filter": {"types": [9]}}, "filter.types[0]"),
        ({"filter": {"types": [1, 0]}}, "filter.types[1]"),
        ({"filter": {"causes": [99]}}, "filter.causes[0]"),
        ({"filter": {"tiers": [0]}}, "filter.tiers[0]"),
        ({"filter": {"caches": ["a/b"]}}, "filter.caches[0]"),
    ],
)
async def test_a_watch_that_makes_no_sense_is_refused(
    client: Client, request_fields: dict[str, Any], field: str
) -> None:
    code, detail = await refusal(Watch(client, **request_fields).next())
    assert (code, detail.field) == (Code.INVALID_ARGUMENT, field)


@pytest.mark.parametrize("caches", [[], ["cache"]])
async def test_rights_that_change_while_a_watch_looks_for_its_start_hold_for_it(
    daemon: Daemon, client: Client, monkeypatch: pytest.MonkeyPatch, caches: list[str]
) -> None:
    looking, go_on = asyncio.Event(), asyncio.Event()
    since = EventHub.since

    async def slow(hub: EventHub, time_ns: int) -> int:
        looking.set()
        await go_on.wait()
        return await since(hub, time_ns)

    monkeypatch.setattr(EventHub, "since", slow)
    await client.put(await client.open(), chain(2))
    watch = Watch(client, since_time_ns=1, filter=events_pb2.WatchFilter(caches=caches))
    first = asyncio.ensure_future(watch.next())
    await asyncio.wait_for(looking.wait(), 10)
    monkeypatch.setattr(Rights, "everywhere", lambda rights, who: frozenset())
    monkeypatch.setattr(Rights, "somewhere", lambda rights, who: frozenset())
    monkeypatch.setattr(Access, "may", lambda access, session, right, cache: False)
    daemon._events.rights_changed()
    go_on.set()
    if caches:
        assert (await refusal(first))[0] is Code.PERMISSION_DENIED
    else:
        while (await first).last_id < daemon._hub.last:
            first = asyncio.ensure_future(watch.next())
        assert not watch.ids


async def test_a_cursor_older_than_the_ring_is_told_the_oldest(short_dir: Path) -> None:
    settings = config(short_dir, event_ring_bytes=1024, event_log_bytes=0)
    async with running(settings) as daemon, attached(daemon) as client:
        cache = await client.open()
        await churn(client, cache, 10)
        await daemon._engine.settle()
        _, last = await listing(client, cache)
        oldest = Watch(client, oldest=True)
        await oldest.reach(last)
        code, detail = await refusal(Watch(client, since=blocks_pb2.Cursor(epoch=1, id=1)).next())
        assert (code, detail.reason) == (Code.OUT_OF_RANGE, "CURSOR_COMPACTED")
        assert int(detail.limit) == daemon._hub.oldest > 2
        again = Watch(client, since=blocks_pb2.Cursor(epoch=1, id=int(detail.limit) - 1))
        await again.reach(last)
        assert again.ids == list(range(int(detail.limit), last + 1))


async def test_a_clean_restart_keeps_the_epoch_and_the_cursor(short_dir: Path) -> None:
    settings = config(short_dir, device=8, host=16, disk=32)
    async with running(settings) as daemon, attached(daemon) as client:
        cache = await client.open()
        await churn(client, cache, 12)
        there, as_of = await listing(client, cache)
        watch = Watch(client, oldest=True)
        await watch.reach(as_of)
        while True:  # moves may be under way: what counts is the last event before the stop
            await daemon._engine.settle()
            _, last = await listing(client, cache)
            if last == as_of:
                break
            await watch.reach(last)
            as_of = last
    async with running(settings) as daemon, attached(daemon) as client:
        again = Watch(client, since=blocks_pb2.Cursor(epoch=1, id=as_of))
        cache = await client.open()
        there, as_of = await listing(client, cache)
        assert there, "something was on disk"
        again.mirror = watch.mirror
        await again.reach(as_of)
        assert again.mirror == there
        assert again.ids[0] == watch.ids[-1] + 1
        assert not again.gaps


async def test_after_an_unclean_stop_the_lost_range_is_declared_first(short_dir: Path) -> None:
    settings = config(short_dir, device=8, host=16, disk=32)
    daemon = await Daemon.start(settings)
    async with attached(daemon) as client:
        cache = await client.open()
        await churn(client, cache, 12)
        _, seen = await listing(client, cache)
    await _crash(daemon)
    async with running(settings) as daemon, attached(daemon) as client:
        watch = Watch(client, since=blocks_pb2.Cursor(epoch=1, id=seen))
        first = await watch.next()
        (gap,) = watch.gaps
        assert gap[:2] == (1, seen + 1)
        assert gap[3] == "unclean-stop"
        assert (first.epoch, first.first_id) == (2, gap[2] + 1)
        cache = await client.open()
        there, as_of = await listing(client, cache)
        await watch.reach(as_of)
        assert watch.mirror == there, "cleared comes first: what the watcher knew before does not matter"
        assert watch.ids == list(range(gap[2] + 1, as_of + 1))
        code, detail = await refusal(Watch(client, since=blocks_pb2.Cursor(epoch=1, id=gap[2] + 1)).next())
        assert (code, detail.field) == (Code.INVALID_ARGUMENT, "since.id")


async def test_what_the_log_lacks_at_a_clean_stop_is_declared_at_the_next_start(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(short_dir)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    daemon = await Daemon.start(settings)
    async with attached(daemon) as client:
        cache = await client.open()
        await churn(client, cache, 3)
        await daemon._engine.settle()
        log = daemon._log
        assert log is not None
        await eventually(lambda: log.status().newest == daemon._hub.last)
        logged = daemon._hub.last
        with monkeypatch.context() as patch:
            patch.setattr(Segments, "append", full)
            await churn(client, cache, 3, seed=100)
            await daemon._engine.settle()
            last = daemon._hub.last
            await eventually(lambda: log.status().failing)
            stats = await client.call(client.admin.Stats, admin_pb2.StatsRequest())
            assert any("No space left" in problem for problem in stats.problems)
            assert await daemon.stop(), "a log that fails is no reason for an unclean stop"
            assert "No space left" in (log.status().failing or "")
    async with running(settings) as daemon, attached(daemon) as client:
        watch = Watch(client, since=blocks_pb2.Cursor(epoch=1, id=0))
        await churn(client, await client.open(), 1)
        await watch.reach(last + 1)
        assert watch.gaps == [(1, logged + 1, last, "not-logged")]
        assert watch.ids[: logged + 1] == [*range(1, logged + 1), last + 1]


async def _crash(daemon: Daemon) -> None:
    """Stops it without what makes a stop clean."""
    state = daemon._directories.state
    close = state.close
    state.close = lambda last: close(None)  # type: ignore[method-assign]
    await daemon.stop()


NO_READ_AHEAD = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))
"""Else gRPC reads some megabytes for a client that does not."""


@pytest.mark.parametrize("log_bytes", [0, 64 << 20])
async def test_a_watcher_that_does_not_read_delays_nobody_and_misses_only_what_no_log_has(
    short_dir: Path, log_bytes: int
) -> None:
    settings = config(
        short_dir, device=8, host=16, event_ring_bytes=16 << 10, event_log_bytes=log_bytes, debug_checks=False
    )
    async with running(settings) as daemon, attached(daemon) as client, attached(daemon, NO_READ_AHEAD) as other:
        cache = await client.open()
        lazy = Watch(other, oldest=True)
        await lazy.next()
        keen = Watch(client, oldest=True)
        reading = asyncio.create_task(keen.reach(10**9))
        for seed in range(0, 500, 100):
            await churn(client, cache, 100, seed=seed)
        there, as_of = await listing(client, cache)
        await eventually(lambda: keen.batches[-1].last_id >= as_of)
        reading.cancel()
        assert keen.mirror == there
        assert not keen.gaps
        await lazy.reach(as_of)
        covered = lazy.ids + [number for _, first, last, _ in lazy.gaps for number in range(first, last + 1)]
        assert sorted(covered) == list(range(1, as_of + 1))
        assert {reason for *_, reason in lazy.gaps} == (set() if log_bytes else {"slow"})


async def test_watchers_may_leave_in_any_way_at_any_time(
    daemon: Daemon, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    cache = await client.open()
    busy = asyncio.create_task(churn(client, cache, 60))
    for number in range(20):
        async with attached(daemon) as other:
            watch = Watch(other, oldest=True)
            await watch.next()
            if number % 2:
                watch.call.cancel()
    await busy
    await eventually(lambda: len(daemon._hub.watchers) == 0)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_watchers_are_counted(daemon: Daemon, client: Client) -> None:
    watches = [Watch(client) for _ in range(3)]
    for watch in watches:
        await watch.next()
    assert len(daemon._hub.watchers) == 3
    for watch in watches:
        watch.call.cancel()
    await eventually(lambda: len(daemon._hub.watchers) == 0)
