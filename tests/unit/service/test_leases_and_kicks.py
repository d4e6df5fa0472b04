"""What an operator sees of leases, and how one is ended for a client that hangs."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from kvtier import NotFound, connect
from kvtier.v1 import admin_pb2, blocks_pb2, events_pb2, session_pb2
from kvtierd.service import server
from kvtierd.service.daemon import Daemon
from tests import packets
from tests.unit.service.rig import Client, attached, chain, config, refusal, running

Code = grpc.StatusCode
PATIENCE_S = 30.0


@pytest.fixture
async def operator(daemon: Daemon) -> AsyncIterator[Client]:
    async with attached(daemon) as client:
        yield client


engine = operator


async def leases(operator: Client, cache: str = "", session_id: int = 0) -> list[admin_pb2.LeaseInfo]:
    request = admin_pb2.LeasesRequest(cache=cache, session_id=session_id)
    return list((await operator.call(operator.admin.Leases, request)).leases)


async def kick(operator: Client, session_id: int, *, dry_run: bool = False) -> tuple[int, int]:
    request = admin_pb2.KickRequest(session_id=session_id, dry_run=dry_run)
    reply = await operator.call(operator.admin.Kick, request)
    return reply.leases, reply.slots


async def free(operator: Client) -> int:
    stats = await operator.call(operator.admin.Stats, admin_pb2.StatsRequest())
    return int(stats.caches[0].tiers[0].free)


async def test_slots_that_a_kicked_process_may_write_stay_out_of_use_until_it_lets_go(
    operator: Client, engine: Client
) -> None:
    cache = await engine.open()
    await operator.open()
    await engine.put(cache, chain(2), release=False)
    await engine.reserve(cache, 3)
    await engine.socket.send(packets.map_cache(cache, write=True))
    await engine.socket.receive()
    kicked, token = engine.welcome.session_id, engine.welcome.token
    assert await kick(operator, kicked) == (2, 5)
    for _ in range(2):
        (lease,) = await leases(operator)
        assert (lease.session_id, lease.pid, lease.blank_slots, lease.orphaned) == (kicked, os.getpid(), 3, True)
        assert await free(operator) == 3
        assert await kick(operator, kicked) == (1, 3), "a second kick changed something"
    code, detail = await engine.refusal(engine.admin.Stats, admin_pb2.StatsRequest())
    assert (code, detail.reason) == (Code.UNAUTHENTICATED, "UNKNOWN_SESSION")
    await operator.socket.send(packets.of_client(forget=session_pb2.ForgetSession(token=token)))
    async with asyncio.timeout(PATIENCE_S):
        while await free(operator) != 6:
            pass
    assert await leases(operator) == []


async def watchers(operator: Client) -> int:
    return int((await operator.call(operator.admin.Stats, admin_pb2.StatsRequest())).watchers)


async def test_a_kicked_session_s_watch_ends_with_the_reason_that_its_calls_get(
    operator: Client, engine: Client
) -> None:
    """A quiet one, which would not look at anything for an hour."""
    request = events_pb2.WatchRequest(heartbeat_ns=3600 * 10**9)
    watch = engine.events.Watch(request, metadata=engine.metadata)
    other = operator.events.Watch(request, metadata=operator.metadata)
    for each in (watch, other):
        assert await each.read() is not grpc.aio.EOF
    await kick(operator, engine.welcome.session_id)
    code, detail = await refusal(asyncio.wait_for(watch.read(), 10))
    assert (code, detail.reason) == (Code.UNAUTHENTICATED, "UNKNOWN_SESSION")
    assert await watchers(operator) == 1
    other.cancel()


async def test_a_kicked_watcher_that_does_not_read_is_let_go_of_too(operator: Client, engine: Client) -> None:
    cache = await operator.open()
    keys = chain(8)
    watch = engine.events.Watch(events_pb2.WatchRequest(oldest=True), metadata=engine.metadata)
    async with asyncio.timeout(PATIENCE_S):
        while not await watchers(operator):
            pass
    for _ in range(80):  # some 64 KiB, which is what gRPC takes on its own while nobody reads
        await operator.put(cache, keys)
        await operator.call(operator.blocks.Drop, blocks_pb2.DropRequest(cache_id=cache, keys=keys[0]))
    await kick(operator, engine.welcome.session_id)
    async with asyncio.timeout(PATIENCE_S):
        while await watchers(operator):
            pass

    async def read_on() -> None:
        while await watch.read() is not grpc.aio.EOF:
            pass

    code, detail = await refusal(asyncio.wait_for(read_on(), 10))
    assert (code, detail.reason) == (Code.UNAUTHENTICATED, "UNKNOWN_SESSION")


async def test_a_repeated_kick_is_answered_not_repeated(operator: Client, engine: Client) -> None:
    cache = await engine.open()
    await engine.reserve(cache, 3)
    request = admin_pb2.KickRequest(session_id=engine.welcome.session_id, seq=7)
    first, second = [await operator.call(operator.admin.Kick, request) for _ in range(2)]
    assert (first.slots, first) == (3, second)


async def test_a_session_of_an_earlier_daemon_is_not_kicked_in_another_s_place(short_dir: Path) -> None:
    """Numbers begin anew with every daemon: one noted before a restart names somebody else after it."""
    settings = config(short_dir)
    async with running(settings) as first:
        operator = await connect(first.address, wait=30)
    async with operator:
        kicking = asyncio.ensure_future(operator.kick(1))
        async with running(settings):
            with pytest.raises(NotFound, match="restarted"):
                await kicking
            (session,) = (await operator.stats()).sessions
            assert session.session_id == operator.session_id == 1


async def test_a_lease_that_grows_old_shows_in_health(
    operator: Client, engine: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = await engine.open()
    await engine.reserve(cache, 3)
    stats = await operator.call(operator.admin.Stats, admin_pb2.StatsRequest())
    assert list(stats.problems) == []
    monkeypatch.setattr(server, "OLD_LEASE_S", 0)
    stats = await operator.call(operator.admin.Stats, admin_pb2.StatsRequest())
    (problem,) = stats.problems
    for part in ("cache cache", "3 device slots", f"session {engine.welcome.session_id}", f"pid {os.getpid()}"):
        assert part in problem
