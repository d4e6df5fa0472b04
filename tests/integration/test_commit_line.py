"""Commits over a line, a socket of their own: each as good as a call; and the client's way with it."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from kvtier import AsyncClient, BlockResult, Tier
from kvtier.abi import attach
from kvtier.attach import attach_socket
from kvtier.commits import CommitLine
from kvtier.rpc_errors import fault_of
from kvtier.v1 import blocks_pb2, blocks_pb2_grpc
from tests.integration.actors import NOBODY, Actor
from tests.integration.blocks import SPEC, assert_bytes, blocks, chain, sizes
from tests.integration.committing import GARBAGE, OK, in_parts, requests, reserved
from tests.integration.daemon import DaemonProcess, StartDaemon
from tests.integration.raw import AttachSocket, Connect, RawClient, attached, nowhere, older
from tests.integration.waiting import PATIENCE_S, eventually

Code = grpc.StatusCode


class Calls:
    """The stubs of a session, which count commits."""

    def __init__(self, raw: RawClient) -> None:
        self._stubs = raw.stubs.blocks
        self.count = 0

    def Commit(self, request: blocks_pb2.CommitRequest, **named: Any) -> Any:
        self.count += 1
        return self._stubs.Commit(request, **named)


class Deaf(socket.socket):
    """A connection that breaks when the first answer to a commit comes, which nobody hears."""

    heard = 0

    def recv(self, *arguments: Any) -> bytes:
        packet = super().recv(*arguments)
        self.heard += 1
        return packet if self.heard == 1 else b""


def connected(address: str, sock: socket.socket) -> socket.socket:
    sock.setblocking(False)
    sock.connect(attach.socket_path(address, attach.ATTACH_SOCKET))
    return sock


def whole(address: str) -> socket.socket:
    return connected(address, attach_socket())


def deaf(address: str) -> socket.socket:
    return connected(address, Deaf(socket.AF_UNIX, socket.SOCK_SEQPACKET))


@contextmanager
def over(calls: Calls, raw: RawClient, connect: Connect = whole) -> Iterator[CommitLine]:
    stubs = cast("blocks_pb2_grpc.BlocksAsyncStub", calls)
    line = CommitLine(lambda: connect(raw.address), stubs, raw.welcome.token)
    try:
        yield line
    finally:
        line.close()


class RawLine(AttachSocket):
    """The client's end of a line; blocking."""

    def open(self, token: str) -> attach.Opened | attach.Failure:
        self.send(attach.encode(attach.Commits(token)))
        return attach.decode_opened(self.receive()[0])

    def ask(self, message: bytes) -> blocks_pb2.CommitAnswer:
        self.send(message)
        return blocks_pb2.CommitAnswer.FromString(self.receive()[0])


@contextmanager
def opened(raw: RawClient) -> Iterator[RawLine]:
    with RawLine(raw.address) as line:
        assert line.open(raw.welcome.token) == attach.Opened()
        yield line


async def test_commits_at_a_time_are_answered_each_over_one_line(raw: RawClient, name: str) -> None:
    calls = Calls(raw)
    made = await requests(raw, name, 8)
    stored = chain(f"{name} 3", 1)
    made[5].keys = b"".join(stored)
    with over(calls, raw) as line:
        replies = await asyncio.gather(*(line.commit(request, PATIENCE_S) for request in made))
        exists = bytes([int(BlockResult.EXISTS)])
        assert [reply.results for reply in replies] == [OK] * 5 + [exists] + [OK] * 2
        assert line.open
    assert calls.count == 0


async def test_what_broke_off_is_repeated_by_a_call_and_not_doubled(raw: RawClient, name: str) -> None:
    calls = Calls(raw)
    made = await requests(raw, name, 4)
    with over(calls, raw, deaf) as line:
        # Done again, the lease would be unknown.
        replies = await asyncio.gather(*(line.commit(request, PATIENCE_S) for request in made[:3]))
        assert [reply.results for reply in replies] == [OK] * 3
        assert (await line.commit(made[3], PATIENCE_S)).results == OK
        assert not line.open
    assert calls.count == 4


@pytest.mark.parametrize("connect", [older("commits"), nowhere], ids=["older", "nowhere"])
async def test_without_a_line_every_commit_is_a_call(raw: RawClient, name: str, connect: Connect) -> None:
    calls, connections = Calls(raw), 0

    def counting(address: str) -> socket.socket | None:
        nonlocal connections
        connections += 1
        return connect(address)

    with over(calls, raw, counting) as line:
        for request in await requests(raw, name, 3):
            assert (await line.commit(request, PATIENCE_S)).results == OK
    assert (connections, calls.count) == (1, 3)


@pytest.mark.parametrize("connect", [whole, deaf, nowhere])
async def test_commits_in_turn_are_done_in_turn_over_whatever_way(raw: RawClient, name: str, connect: Connect) -> None:
    """The second is of a block under the first's."""
    cache = (await raw.open(name, budgets=sizes(host=4))).cache_id
    parts = in_parts(await reserved(raw, cache, chain(name, 2), 1), 1)
    waited: list[int] = []

    async def may_go(number: int) -> None:
        waited.append(number)
        await asyncio.sleep(0)

    with over(Calls(raw), raw, connect) as line:
        replies = await line.commit_in_turn(parts, PATIENCE_S, may_go)
    assert [reply.results for reply in replies] == [OK, OK]
    assert waited == [1]


async def test_one_that_is_too_long_for_a_packet_is_not_overtaken(raw: RawClient, name: str) -> None:
    calls, count = Calls(raw), 1024
    cache = (await raw.open(name, budgets=sizes(host=count + 1))).cache_id
    parts = in_parts(await reserved(raw, cache, chain(name, count + 1), 1), count)
    assert parts[0].ByteSize() > attach.MAX_MESSAGE
    with over(calls, raw) as line:
        replies = await line.commit_in_turn(parts, PATIENCE_S)
        assert [reply.results for reply in replies] == [OK * count, OK]
        (after,) = await requests(raw, f"{name}.after", 1)
        after.seq = 3
        assert (await line.commit(after, PATIENCE_S)).results == OK
        assert line.open
    assert calls.count == 2


async def test_more_than_a_socket_takes_are_all_answered(raw: RawClient, name: str) -> None:
    """The daemon, which answers one after another, is sent no more of them than it has room for."""
    cache = (await raw.open(name, budgets=sizes(host=64))).cache_id
    wrong = blocks_pb2.CommitRequest(cache_id=cache, lease_id=1 << 40, keys=bytes(32 * 900), slots=range(900))
    with over(Calls(raw), raw) as line:
        made = [line.commit(wrong, PATIENCE_S) for _ in range(200)]
        for refused in await asyncio.gather(*made, return_exceptions=True):
            assert isinstance(refused, grpc.aio.AioRpcError)
        (right,) = await requests(raw, name, 1)
        assert (await line.commit(right, PATIENCE_S)).results == OK
        assert line.open


async def test_who_goes_away_leaves_the_line_to_the_others(raw: RawClient, name: str) -> None:
    calls = Calls(raw)
    made = await requests(raw, name, 3)
    with over(calls, raw) as line:
        first, gone, last = (asyncio.create_task(line.commit(request, PATIENCE_S)) for request in made)
        await first
        gone.cancel()
        assert (await last).results == OK
        with pytest.raises(asyncio.CancelledError):
            await gone
        # Whether it was done or not, its repeat is answered so.
        assert (await raw.call(raw.stubs.blocks.Commit, made[1])).results == OK
    assert calls.count == 0


async def test_a_commit_is_refused_as_by_a_call_and_the_line_goes_on(raw: RawClient, name: str) -> None:
    calls = Calls(raw)
    wrong, right = await requests(raw, name, 2)
    lease, wrong.lease_id = wrong.lease_id, 1 << 40
    by_call = await raw.refusal(raw.stubs.blocks.Commit, wrong)
    with over(calls, raw) as line:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await line.commit(wrong, PATIENCE_S)
        assert fault_of(caught.value) == by_call
        assert (by_call.code, by_call.reason) == (Code.NOT_FOUND, "UNKNOWN_LEASE")
        wrong.lease_id = lease
        for request in (wrong, right):
            assert (await line.commit(request, PATIENCE_S)).results == OK
    assert calls.count == 0


async def test_a_client_puts_over_its_line(client: AsyncClient, name: str) -> None:
    cache = await client.open_cache(name, SPEC, budgets=sizes(host=8))
    keys = chain(name, 4)
    assert set(await cache.put(keys, blocks(keys), tier=Tier.HOST)) == {BlockResult.OK}
    link = client._session.live_link
    assert link is not None
    assert link.commits.open
    assert_bytes(keys, await cache.get(keys))


async def test_garbage_is_refused_and_the_line_goes_on(raw: RawClient, name: str) -> None:
    (request,) = await requests(raw, name, 1)
    with opened(raw) as line:
        answer = await asyncio.to_thread(line.ask, GARBAGE)
        assert b"BAD_ARGUMENT" in answer.refused
        answer = await asyncio.to_thread(line.ask, request.SerializeToString())
        assert answer.done.results == OK


async def test_a_packet_that_is_too_long_ends_it(raw: RawClient) -> None:
    with opened(raw) as line:
        line.send(bytes(attach.MAX_MESSAGE + 1))
        failure = attach.decode_opened((await asyncio.to_thread(line.receive))[0])
        assert isinstance(failure, attach.Failure)
        assert failure.reason == "TOO_LONG"
        assert await asyncio.to_thread(line.receive) == (b"", [])


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (attach.encode(attach.Commits("0" * 32)), "UNKNOWN_SESSION"),
        (attach.encode(attach.Commits("0" * 32, version=2)), "BAD_VERSION"),
        (b'{"op":"commits","version":1}', "BAD_FIELD"),
    ],
)
async def test_a_line_of_no_session_is_refused(daemon: DaemonProcess, hello: bytes, reason: str) -> None:
    with RawLine(daemon.address) as line:
        line.send(hello)
        failure = attach.decode_opened((await asyncio.to_thread(line.receive))[0])
        assert isinstance(failure, attach.Failure)
        assert failure.reason == reason
        assert await asyncio.to_thread(line.receive) == (b"", [])


async def test_another_process_gets_no_line_with_a_token(daemon: DaemonProcess, raw: RawClient) -> None:
    with Actor("steal", address=daemon.address, token=raw.welcome.token, line="commits") as thief:
        assert thief.says()["attach"] == "PERMISSION_DENIED"


async def test_who_does_not_read_is_not_read_either(client: AsyncClient, raw: RawClient, name: str) -> None:
    cache = await client.open_cache(name, SPEC, budgets=sizes(host=8))
    with opened(raw) as line:
        line.sock.setblocking(False)
        halts = sent = 0
        while halts < 3:  # it comes to a halt; the others go on meanwhile
            try:
                line.send(GARBAGE)
                halts, sent = 0, sent + 1
                assert sent < 100_000
            except BlockingIOError:
                halts += 1
                keys = chain(f"{name} {halts}", 2)
                assert set(await cache.put(keys, blocks(keys), tier=Tier.HOST)) <= {BlockResult.OK, BlockResult.EXISTS}
        line.sock.settimeout(PATIENCE_S)
        answer = blocks_pb2.CommitAnswer.FromString((await asyncio.to_thread(line.receive))[0])
        assert b"BAD_ARGUMENT" in answer.refused


async def test_a_newer_line_ends_the_one_before(raw: RawClient, name: str) -> None:
    (request,) = await requests(raw, name, 1)
    with opened(raw) as before, opened(raw) as newer:
        assert await asyncio.to_thread(before.receive) == (b"", [])
        assert (await asyncio.to_thread(newer.ask, request.SerializeToString())).done.results == OK


async def test_it_ends_with_its_session(daemon: DaemonProcess) -> None:
    async with attached(daemon.address) as raw:
        with opened(raw) as line:
            raw.socket.send(attach.encode(attach.Bye()))
            assert await asyncio.to_thread(line.receive) == (b"", [])
        raw.detach()


async def test_while_its_session_is_detached_commits_are_refused(raw: RawClient, name: str) -> None:
    (request,) = await requests(raw, name, 1)
    with opened(raw) as line:
        raw.detach()

        async def answer() -> blocks_pb2.CommitAnswer:
            return await asyncio.to_thread(line.ask, blocks_pb2.CommitRequest(cache_id=1).SerializeToString())

        await eventually(answer, lambda told: b"DETACHED_SESSION" in told.refused)
        assert isinstance(raw.attach_again(), attach.Welcome)
        assert (await asyncio.to_thread(line.ask, request.SerializeToString())).done.results == OK


async def test_a_stop_ends_it(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(host=4)
    async with attached(daemon.address) as raw:
        with opened(raw) as line:
            os.kill(daemon.pid, signal.SIGTERM)
            assert await asyncio.to_thread(line.receive) == (b"", [])
        raw.detach()
    assert await asyncio.to_thread(daemon.ended) == 0


async def test_lines_do_not_keep_sessions_out(start_daemon: StartDaemon) -> None:
    """A session has three connections; as many sessions as there may be can all have theirs."""
    most = 40
    daemon = start_daemon("--max-sessions", str(most), "--max-identity-sessions", str(most), host=4)
    sessions = [AttachSocket(daemon.address) for _ in range(most)]
    lines = [(RawLine(daemon.address), AttachSocket(daemon.address)) for _ in range(most)]
    try:
        for session, (commits, events) in zip(sessions, lines, strict=True):
            welcome = await asyncio.to_thread(session.hello)
            assert isinstance(welcome, attach.Welcome), welcome
            assert await asyncio.to_thread(commits.open, welcome.token) == attach.Opened()
            events.send(attach.encode(attach.Events(welcome.token)))
            assert attach.decode_opened((await asyncio.to_thread(events.receive))[0]) == attach.Opened()
    finally:
        for sock in (*itertools.chain.from_iterable(lines), *sessions):
            sock.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
async def test_a_right_that_is_taken_away_counts_from_the_next_commit_on(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    rule = '[[allow]]\nuids = [{uid}]\ncaches = ["*"]\nverbs = [{verbs}]\n'
    file = tmp_path / "kvtierd.toml"
    file.write_text(rule.format(uid=NOBODY, verbs='"read", "write"'))
    daemon = start_daemon("--config", str(file), host=16)
    daemon.home.chmod(0o755)
    os.chmod(daemon.address, 0o755)
    for path in daemon.sockets:
        path.chmod(0o666)
    with Actor("keep_storing", address=daemon.address, cache="theirs") as actor:
        assert await asyncio.to_thread(actor.says) == {"ended": "stored", "line": True}
        await asyncio.to_thread(file.write_text, rule.format(uid=NOBODY, verbs='"read"'))
        os.kill(daemon.pid, signal.SIGHUP)

        async def log() -> str:
            return daemon.log

        await eventually(log, lambda text: "changed=allow" in text)
        actor.go_on()
        assert await asyncio.to_thread(actor.says) == {"ended": "NO_RIGHT", "line": True}
