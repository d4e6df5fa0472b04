"""Events over a line, a socket of their own: each watch as good as a call; and the client's way with it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest

from kvtier import AsyncClient, ClientClosed, Cursor, Event, SnapshotEnd, Tier, Watch, connect
from kvtier.abi import attach
from kvtier.event_line import EventLines
from kvtier.rpc_errors import Fault, failed_with, fault_of
from kvtier.v1 import blocks_pb2, events_pb2
from tests.integration.actors import Actor
from tests.integration.blocks import SPEC, blocks, chain, sizes
from tests.integration.daemon import DaemonProcess, StartDaemon
from tests.integration.raw import AttachSocket, Connect, RawClient, attached, nowhere, older, refusal
from tests.integration.waiting import PATIENCE_S, eventually

Code = grpc.StatusCode
MANY = 2048
"""Blocks: their events are longer than a packet."""


class RawLine(AttachSocket):
    """The client's end of a line; blocking."""

    def open(self, token: str) -> attach.Opened | attach.Failure:
        self.send(attach.encode(attach.Events(token)))
        return attach.decode_opened(self.receive()[0])

    def batch(self) -> events_pb2.WatchBatch:
        whole = b""
        while (packet := self.receive()[0])[:1] == attach.MORE:
            whole += packet[1:]
        assert packet[:1] == attach.LAST, packet
        return events_pb2.WatchBatch.FromString(whole + packet[1:])

    def fault(self) -> Fault:
        """Behind all batches; nothing follows it."""
        while (packet := self.receive()[0])[:1] in (attach.MORE, attach.LAST):
            pass
        assert packet[:1] == attach.ENDED, packet
        assert self.receive() == (b"", [])
        return fault_of(failed_with(packet[1:]))


@contextmanager
def opened(raw: RawClient, request: events_pb2.WatchRequest | None = None) -> Iterator[RawLine]:
    with RawLine(raw.address) as line:
        assert line.open(raw.welcome.token) == attach.Opened()
        if request is not None:
            line.send(request.SerializeToString())
        yield line


def deaf(address: str) -> socket.socket:
    """Of a daemon that hangs up at once."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    theirs.close()
    return ours


def since(cursor: Cursor) -> events_pb2.WatchRequest:
    return events_pb2.WatchRequest(since=blocks_pb2.Cursor(epoch=cursor.epoch, id=cursor.id))


async def now(client: AsyncClient) -> Cursor:
    stats = await client.stats()
    return Cursor(stats.epoch, stats.last_event_id)


async def ids(watch: Watch, end: Cursor) -> list[int]:
    """Of the events up to there."""
    found: list[int] = []
    async with asyncio.timeout(PATIENCE_S):
        while not found or found[-1] < end.id:
            item = await anext(watch)
            assert isinstance(item, Event), item
            found.append(item.event_id)
    return found


def lines_of(client: AsyncClient) -> EventLines:
    link = client._session.live_link
    assert link is not None
    return link.events


async def test_a_client_watches_over_its_line_and_others_of_its_watches_by_calls(
    client: AsyncClient, name: str
) -> None:
    start = await now(client)
    await client.open_cache(name, SPEC, budgets=sizes(host=4))
    end = await now(client)
    async with client.watch(since=start) as first, client.watch(since=start) as second:
        assert await ids(first, end) == await ids(second, end) == list(range(start.id + 1, end.id + 1))
        assert lines_of(client).in_use
    assert not lines_of(client).in_use


@pytest.mark.parametrize("way", [older("events"), deaf, nowhere], ids=["older", "deaf", "nowhere"])
async def test_without_a_line_a_watch_is_a_call(client: AsyncClient, name: str, way: Connect) -> None:
    asked = 0

    def counting() -> socket.socket | None:
        nonlocal asked
        asked += 1
        return way(client.address)

    lines = EventLines(counting, "0" * 32)
    request = events_pb2.WatchRequest(oldest=True)
    assert [await lines.open(request), await lines.open(request)] == [None, None]
    assert (asked, lines.in_use) == (1, False)


async def test_what_comes_is_what_a_call_brings(start_daemon: StartDaemon) -> None:
    daemon = start_daemon("--no-debug-checks", host=MANY)
    async with await connect(daemon.address) as client, attached(daemon.address) as raw:
        cache = await client.open_cache("many", SPEC)
        keys = chain("many", MANY)
        await cache.put(keys, blocks(keys), tier=Tier.HOST)
        await cache.drop(keys[1000:1001])
        end = await now(client)
        request = events_pb2.WatchRequest(oldest=True)
        by_call: list[events_pb2.Event] = []
        call = raw.stubs.events.Watch(request, metadata=raw.metadata)
        while not by_call or by_call[-1].id < end.id:
            batch = await call.read()
            assert isinstance(batch, events_pb2.WatchBatch)
            by_call += batch.events
        call.cancel()
        over_line: list[events_pb2.Event] = []
        longest = 0
        with opened(raw, request) as line:
            while not over_line or over_line[-1].id < end.id:
                told = await asyncio.to_thread(line.batch)
                over_line += told.events
                longest = max(longest, told.ByteSize())
        assert over_line == by_call
        assert longest > attach.MAX_MESSAGE, "no batch was longer than a packet: this showed less than it should"


async def test_a_snapshot_comes_over_the_line(start_daemon: StartDaemon) -> None:
    daemon = start_daemon("--no-debug-checks", host=MANY)
    async with await connect(daemon.address) as client:
        cache = await client.open_cache("many", SPEC)
        keys = chain("many", MANY)
        await cache.put(keys, blocks(keys), tier=Tier.HOST)
        found: set[bytes] = set()
        async with client.watch(snapshot=True, caches=["many"]) as watch, asyncio.timeout(PATIENCE_S):
            while not isinstance(item := await anext(watch), SnapshotEnd):
                found.update(getattr(item, "keys", ()))
            assert lines_of(client).in_use
        assert found == set(keys)


@pytest.mark.parametrize(
    "wrong",
    [
        events_pb2.WatchRequest(heartbeat_ns=1),
        events_pb2.WatchRequest(since=blocks_pb2.Cursor(id=1 << 60)),
        events_pb2.WatchRequest(filter=events_pb2.WatchFilter(caches=["no spaces"])),
    ],
)
async def test_it_is_refused_as_a_call_is(raw: RawClient, wrong: events_pb2.WatchRequest) -> None:
    by_call = await refusal(raw.stubs.events.Watch(wrong, metadata=raw.metadata).read())
    with opened(raw, wrong) as line:
        assert await asyncio.to_thread(line.fault) == by_call
    assert by_call.code is Code.INVALID_ARGUMENT


async def test_garbage_is_refused(raw: RawClient) -> None:
    with opened(raw) as line:
        line.send(b"\xff\xff")
        assert (await asyncio.to_thread(line.fault)).code is Code.INVALID_ARGUMENT


async def test_a_request_that_is_too_long_ends_it(raw: RawClient) -> None:
    with opened(raw) as line:
        line.send(bytes(attach.MAX_MESSAGE + 1))
        failure = attach.decode_opened((await asyncio.to_thread(line.receive))[0])
        assert isinstance(failure, attach.Failure)
        assert failure.reason == "TOO_LONG"
        assert await asyncio.to_thread(line.receive) == (b"", [])


async def test_another_process_gets_no_line_with_a_token(daemon: DaemonProcess, raw: RawClient) -> None:
    with Actor("steal", address=daemon.address, token=raw.welcome.token, line="events") as thief:
        assert thief.says()["attach"] == "PERMISSION_DENIED"


async def test_who_hangs_up_watches_no_more(client: AsyncClient, raw: RawClient) -> None:
    before = (await client.stats()).watchers
    with opened(raw, events_pb2.WatchRequest(oldest=True)) as line:
        await asyncio.to_thread(line.batch)
        assert (await client.stats()).watchers == before + 1
    await eventually(client.stats, lambda stats: stats.watchers == before)


async def test_a_newer_line_ends_the_one_before(raw: RawClient) -> None:
    request = events_pb2.WatchRequest(heartbeat_ns=10**8)
    with opened(raw, request) as before:
        await asyncio.to_thread(before.batch)
        with opened(raw, request) as newer:
            await asyncio.to_thread(newer.batch)
            while packet := (await asyncio.to_thread(before.receive))[0]:
                assert packet[:1] == attach.LAST
            await asyncio.to_thread(newer.batch)


async def test_it_ends_with_its_session_and_says_so(daemon: DaemonProcess) -> None:
    async with attached(daemon.address) as raw:
        with opened(raw, events_pb2.WatchRequest(oldest=True)) as line:
            await asyncio.to_thread(line.batch)
            raw.socket.send(attach.encode(attach.Bye()))
            fault = await asyncio.to_thread(line.fault)
            assert (fault.code, fault.reason) == (Code.UNAUTHENTICATED, "UNKNOWN_SESSION")
        raw.detach()


async def test_a_stop_tells_all_that_happened_and_then_that_it_stops(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(host=64)
    async with attached(daemon.address) as raw, await connect(daemon.address) as client:
        with opened(raw, events_pb2.WatchRequest(oldest=True, heartbeat_ns=10**9)) as line:
            cache = await client.open_cache("stops", SPEC)
            keys = chain("stops", 64)
            await cache.put(keys, blocks(keys), tier=Tier.HOST)
            end = await now(client)
            os.kill(daemon.pid, signal.SIGTERM)
            covered = 0
            while covered < end.id:
                covered = (await asyncio.to_thread(line.batch)).last_id
            fault = await asyncio.to_thread(line.fault)
            assert (fault.code, fault.reason) == (Code.UNAVAILABLE, "SHUTTING_DOWN")
        raw.detach()
    assert await asyncio.to_thread(daemon.ended) == 0


async def test_a_client_that_is_closed_ends_its_watch_at_once(daemon: DaemonProcess) -> None:
    """Its heartbeats are an hour apart: nothing but the end of the client can wake it."""
    client = await connect(daemon.address)
    watch = client.watch(oldest=True, heartbeat_s=3600, heartbeats=True)
    await anext(watch)
    assert lines_of(client).in_use
    waiting = asyncio.create_task(_to_its_end(watch))
    async with asyncio.timeout(PATIENCE_S):
        await client.close()
        with pytest.raises(ClientClosed):
            await waiting


async def _to_its_end(watch: Watch) -> None:
    async for _ in watch:
        pass
