"""Watches of a daemon inside the test, whose log or rights fail them at a chosen moment.

``tests/integration`` shows what else a watch promises.
"""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvtier.v1 import admin_pb2, blocks_pb2, events_pb2
from kvtierd.event_log.segments import LogSegments
from kvtierd.rights import Rights
from kvtierd.service.calls import Access
from kvtierd.service.daemon import Daemon
from kvtierd.service.hub import EventHub
from tests.integration.waiting import eventually
from tests.unit.service.rig import Client, attached, chain, config, refusal, running

Code = grpc.StatusCode


class Watch:
    """A watch and the batches that it has got."""

    def __init__(self, client: Client, **request: Any) -> None:
        call = client.events.Watch(events_pb2.WatchRequest(**request), metadata=client.metadata)
        self.batches: list[events_pb2.WatchBatch] = []
        self._stream = aiter(call)

    async def next(self) -> events_pb2.WatchBatch:
        async with asyncio.timeout(10):
            batch: events_pb2.WatchBatch = await anext(self._stream)
        self.batches.append(batch)
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


async def churn(client: Client, cache: int, rounds: int, seed: int = 0) -> None:
    for number in range(rounds):
        await client.put(cache, chain(4, seed=seed + number))


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
        await eventually(lambda: log.status().newest == daemon._hub.last, bool)
        logged = daemon._hub.last
        with monkeypatch.context() as patch:
            patch.setattr(LogSegments, "append", full)
            await churn(client, cache, 3, seed=100)
            await daemon._engine.settle()
            last = daemon._hub.last
            await eventually(lambda: log.status().failing, bool)
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
