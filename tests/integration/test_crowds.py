"""Clients that come in crowds: whoever they are and whatever they may do, the others are served."""

import asyncio
import os
import resource
import socket
import time
from collections import Counter
from contextlib import AsyncExitStack, ExitStack, suppress
from functools import partial
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from kvtier import connect
from kvtier.errors import RetryableError
from kvtier.v1 import blocks_pb2, events_pb2, session_pb2
from tests import packets
from tests.integration import http2
from tests.integration.blocks import SPEC, assert_bytes, blocks, chain, opened_cache, put_chain, sizes
from tests.integration.raw import AttachSocket, attached, channel_to, refusal
from tests.integration.scraping import port_of, scrape
from tests.integration.waiting import PATIENCE_S, eventually, patient

Code = grpc.StatusCode
MAX_UNAUTHENTICATED = 64
MAX_WATCHES = 64

# -- descriptors in flight ---------------------------------------------------------------------------------------------


def in_flight(sock):
    """Descriptors that wait to be read from a socket."""
    with open(f"/proc/self/fdinfo/{sock.fileno()}") as info:
        return next(int(line.split()[1]) for line in info if line.startswith("scm_fds"))


async def test_a_reader_of_no_answers_has_descriptors_of_one_in_flight(client, raw, daemon, name):
    cache = await client.open_cache(name, SPEC, budgets=sizes(device=4, host=4))
    cache_id = (await raw.open(name)).cache_id
    question, asked = packets.map_cache(cache_id, write=False), 20
    for _ in range(asked):
        raw.socket.send(question)
    await eventually(lambda: in_flight(raw.socket.sock), bool)
    keys = await put_chain(cache, name, 4)
    assert_bytes(keys, await cache.get(keys))
    of_one = in_flight(raw.socket.sock)
    for _ in range(asked):  # whoever reads gets all of them
        _, fds = raw.socket.receive()
        assert len(fds) == of_one
        for fd in fds:
            os.close(fd)


async def test_connections_whose_answers_are_not_read_count(start_daemon):
    """The descriptors stay in flight as long as the client keeps its end, also after the daemon has hung up."""
    daemon = start_daemon("--max-sessions", "8", host=4)  # one user may have 36 connections
    with ExitStack() as stack:
        async with attached(daemon.address) as raw:
            cache_id = (await raw.open("c", budgets=sizes(host=4))).cache_id
            question, held = packets.map_cache(cache_id, write=False), []
            for _ in range(100):
                sock = stack.enter_context(AttachSocket(daemon.address))
                held.append(sock.sock)
                with suppress(OSError):  # it was turned away
                    sock.hello(raw.welcome.token)
                    sock.send(question)
                    await eventually(partial(in_flight, sock.sock), bool)
                    sock.send(b"{}")  # on which the daemon hangs up
            assert 0 < sum(in_flight(sock) for sock in held) <= 2 * 36
            stack.close()
            await eventually(partial(welcomed, raw), bool)


async def welcomed(raw):
    raw.detach()
    try:
        return isinstance(raw.attach_again(), session_pb2.Welcome)
    except OSError:
        return False


async def test_too_many_descriptors_in_flight_are_told_as_such(start_fresh):
    daemon = start_fresh(host=4)
    daemon.stop()
    daemon.within = ["prlimit", "--nofile=256:256"]
    if os.getuid() == 0:  # the kernel spares who may raise limits
        daemon.within += ["setpriv", "--bounding-set", "-sys_resource,-sys_admin"]
    daemon.start()
    async with await connect(daemon.address) as client:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        with ours, theirs:
            for _ in range(2):
                socket.send_fds(ours, [b"x"], [ours.fileno()] * 200)
            with pytest.raises(RetryableError, match="descriptors") as failed:
                await client.open_cache("c", SPEC)
            assert failed.value.reason == "TOO_MANY_DESCRIPTORS"
            (problem,) = (await client.stats()).problems
            assert "memory cannot be mapped" in problem
        cache = await client.open_cache("c", SPEC)
        keys = await put_chain(cache, "c", 2)
        assert_bytes(keys, await cache.get(keys))
        assert (await client.stats()).problems == ()


# -- calls without a session -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("crowd", [3 * MAX_UNAUTHENTICATED, pytest.param(5000, marks=pytest.mark.long)])
async def test_watchers_of_health_without_a_session_give_way_to_others(client, daemon, name, crowd):
    cache = await client.open_cache(name, SPEC, budgets=sizes(host=4))
    keys = chain(name, 2)
    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(channel_to(daemon.address)) for _ in range(3)]
        stubs: list[Any] = [HealthStub(channel) for channel in channels]
        calls = [stubs[n % 3].Watch(HealthCheckRequest()) for n in range(crowd)]
        tasks = [asyncio.create_task(watched(call)) for call in calls]
        await eventually(lambda: sum(task.done() for task in tasks), lambda count: count >= crowd - MAX_UNAUTHENTICATED)
        codes = Counter(task.result() for task in tasks if task.done())
        # In a large crowd gRPC tells some calls only that they were cancelled.
        assert codes.most_common(1)[0][0] is Code.RESOURCE_EXHAUSTED
        assert codes.keys() <= {Code.RESOURCE_EXHAUSTED, Code.CANCELLED}
        reply = await stubs[0].Check(HealthCheckRequest(), timeout=PATIENCE_S)
        assert reply.status == reply.SERVING
        await cache.put(keys, blocks(keys))
        assert_bytes(keys, await cache.get(keys))
        for call in calls:
            call.cancel()
        await asyncio.gather(*tasks)


async def watched(call):
    """How a watch of health ends."""
    with suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
        async for _ in call:
            pass
    return await call.code()


async def test_a_call_without_a_session_ends_before_its_message_comes(daemon, client):
    with http2.connected(daemon.address) as sock:
        streams = range(1, 81, 2)
        for stream in streams:
            http2.begin(sock, stream, "/kvtier.v1.Blocks/Commit", announced=15 << 20)
        http2.ended(sock, streams)
    assert (await client.stats()).problems == ()


@pytest.mark.parametrize(
    "method", ["/kvtier.v1.Blocks/Match", "/kvtier.v1.Events/Watch", "/grpc.health.v1.Health/Check"]
)
async def test_half_a_message_does_not_hold_a_call_for_ever(daemon, raw, method):
    with http2.connected(daemon.address) as sock:
        http2.begin(sock, 1, method, raw.welcome.token)
        await asyncio.to_thread(http2.ended, sock, [1])


async def test_a_request_larger_than_any_must_be(client, raw):
    fault = await raw.refusal(raw.stubs.blocks.Match, blocks_pb2.MatchRequest(keys=bytes(17 << 20)))
    assert fault.code is Code.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("method", ["/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"])  # fmt: skip
async def test_bytes_that_are_no_request_are_told_as_such(daemon, method):
    async with channel_to(daemon.address) as channel:
        ask: Any = channel.unary_unary(method)
        fault = await refusal(ask(b"\xff\xff\xff", timeout=PATIENCE_S))
    assert (fault.code, fault.detail.field) == (Code.INVALID_ARGUMENT, "request")
    daemon.assert_healthy_log()


async def test_bytes_that_are_no_session_request_are_told_as_such(start_daemon):
    everybody = '{"anonymous": true, "caches": ["*"], "verbs": ["read"]}'
    daemon = start_daemon("--listen-tcp", "127.0.0.1:0", "--tcp-insecure", "--allow", everybody, host=4)
    async with grpc.aio.insecure_channel(daemon.tcp_address) as channel:
        begin: Any = channel.stream_stream("/kvtier.v1.Sessions/Session")
        call = begin(iter([b"\xff\xff\xff"]), timeout=PATIENCE_S)
        fault = await refusal(call.read())
    assert (fault.code, fault.detail.field) == (Code.INVALID_ARGUMENT, "request")
    daemon.assert_healthy_log()


@pytest.mark.parametrize(("crowd", "limit"), [(400, 512), pytest.param(4200, 4096, marks=pytest.mark.long)])
async def test_idle_connections_without_a_session_give_way(start_fresh, crowd, limit):
    daemon = start_fresh(host=4)
    daemon.stop()
    daemon.within = ["prlimit", f"--nofile={limit}:{limit}"]
    daemon.start()
    async with opened_cache(daemon.address, "c") as (_, cache):
        with ExitStack() as stack:
            for _ in range(crowd):  # with others in the backlog, all descriptors of the daemon
                with suppress(BlockingIOError, TimeoutError):
                    stack.enter_context(http2.connected(daemon.address))
            await eventually(lambda: len(os.listdir(f"/proc/{daemon.pid}/fd")), lambda count: count < 200)
            keys = await put_chain(cache, "c", 2)
            assert_bytes(keys, await cache.get(keys))
            async with await patient(daemon.address) as other:  # somebody new comes in
                assert (await other.stats()).problems == ()


# -- watchers of events ------------------------------------------------------------------------------------------------


async def test_a_session_has_so_many_watches_and_their_heartbeats_are_spread(start_daemon):
    daemon = start_daemon(host=4)
    async with attached(daemon.address) as raw:
        request = events_pb2.WatchRequest(heartbeat_ns=10_000_000)
        calls = [raw.stubs.events.Watch(request, metadata=raw.metadata) for _ in range(MAX_WATCHES)]
        for call in calls:
            assert await call.read() is not grpc.aio.EOF
        fault = await refusal(raw.stubs.events.Watch(request, metadata=raw.metadata).read())
        assert (fault.code, fault.reason) == (Code.RESOURCE_EXHAUSTED, "TOO_MANY_WATCHES")
        assert str(MAX_WATCHES) in fault.message

        async def four_beats():
            started = time.monotonic()
            for _ in range(4):
                await calls[0].read()
            return time.monotonic() - started

        # What came while there were fewer watches, or while this test did not run, is read first.
        await eventually(four_beats, lambda took: took > 3 * 0.1)
        for call in calls:
            call.cancel()


# -- on the attach socket and the metrics port -------------------------------------------------------------------------


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
async def test_users_that_no_rule_names_keep_nobody_out(start_fresh):
    daemon = start_fresh(host=4)
    for path, mode in ((daemon.home, 0o755), (daemon.home / "run", 0o755), (daemon.sockets[1], 0o666)):
        path.chmod(mode)
    with ExitStack() as stack:
        silent = [stack.enter_context(stranger(daemon.address)) for _ in range(60)]
        await eventually(lambda: sum(map(hung_up, silent)), lambda count: count >= 60 - 8, within=4)
        async with await connect(daemon.address) as client:
            assert (await client.stats()).problems == ()


def stranger(address):
    os.seteuid(65534)  # whom the kernel notes as the peer
    try:
        return AttachSocket(address)
    finally:
        os.seteuid(0)


def hung_up(sock):
    try:
        return sock.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


async def test_a_full_backlog_is_told_as_such(start_fresh):
    daemon = start_fresh(host=4)
    with daemon.paused(), ExitStack() as stack:
        with pytest.raises(BlockingIOError):
            while True:
                sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                sock.setblocking(False)
                sock.connect(str(daemon.sockets[1]))
        with pytest.raises(RetryableError, match="too many clients wait"):
            await connect(daemon.address)


async def test_silent_scrapers_keep_no_other_out(start_fresh):
    daemon = start_fresh("--metrics-listen", "127.0.0.1:0", host=4)
    address = ("127.0.0.1", port_of(daemon))
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(address)) for _ in range(60)]
        for sock in silent:
            sock.setblocking(False)
        for _ in range(4):
            assert (await scrape(daemon)).value("kvtier_sessions") == 0
        await eventually(lambda: sum(map(closed, silent)), lambda count: count >= 60 - 16, within=4)


def closed(sock):
    try:
        return sock.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False


async def test_no_descriptor_left_is_told_as_such(start_fresh):
    daemon = start_fresh(host=4000)
    async with await connect(daemon.address) as client:
        assert (await client.stats()).problems == ()
        soft, hard = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
        used = max(map(int, os.listdir(f"/proc/{daemon.pid}/fd"))) + 1
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (used, hard))
        with pytest.raises(RetryableError, match="Too many open files") as failed:
            for number in range(10):
                await client.open_cache(f"c{number}", SPEC, budgets=sizes(host=4))
        assert (type(failed.value), failed.value.reason) == (RetryableError, "NO_DESCRIPTOR")
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (soft, hard))
        await client.open_cache("c", SPEC, budgets=sizes(host=4))
