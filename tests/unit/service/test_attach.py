from __future__ import annotations

import asyncio
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from kvtier.abi import attach
from kvtier.v1 import admin_pb2, blocks_pb2
from kvtierd.rights import AllowRule, Right
from kvtierd.service.daemon import Daemon
from tests.unit.service.rig import (
    DEVICE,
    AttachSocket,
    Client,
    attached,
    chain,
    channel_to,
    close_all,
    config,
    eventually,
    running,
)

CHILD = """
import json, socket, sys, os
from kvtier.abi import attach
if sys.argv[2:] == ["--uid"]:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect(attach.socket_path(sys.argv[1], attach.ATTACH_SOCKET))
for line in sys.stdin:
    command = json.loads(line)
    if command == "hang up":
        sock.close()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect(attach.socket_path(sys.argv[1], attach.ATTACH_SOCKET))
        print(json.dumps("connected"), flush=True)
    else:
        sock.send(json.dumps(command).encode())
        print(sock.recv(70000).decode() or json.dumps("closed"), flush=True)
"""
"""Sends each line of its input as an attach message and prints the answer."""


class ChildProcess:
    """A process of its own behind an attach connection; its calls are made by the test, with its token."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls, daemon: Daemon, *flags: str) -> ChildProcess:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CHILD, daemon.address, *flags, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        return cls(process)

    async def ask(self, message: object) -> object:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        async with asyncio.timeout(20):
            return json.loads(await self.process.stdout.readline())

    async def hello(self, token: str | None = None) -> attach.Welcome:
        answer = await self.ask({"op": "hello", "version": 1} | ({"token": token} if token else {}))
        return _welcome(answer)

    async def end(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.communicate()


def _welcome(answer: object) -> attach.Welcome:
    welcome = attach.decode_welcome(json.dumps(answer).encode())
    assert isinstance(welcome, attach.Welcome), welcome
    return welcome


@pytest.fixture
async def daemon(short_dir: Path) -> AsyncIterator[Daemon]:
    async with running(config(short_dir, host=16, device=8)) as daemon:
        yield daemon


@pytest.fixture
async def observer(daemon: Daemon) -> AsyncIterator[Client]:
    async with attached(daemon) as client:
        yield client


@pytest.fixture
async def child(daemon: Daemon) -> AsyncIterator[ChildProcess]:
    process = await ChildProcess.start(daemon)
    yield process
    await process.end()


async def stats(observer: Client) -> admin_pb2.StatsResponse:
    answer: admin_pb2.StatsResponse = await observer.call(observer.admin.Stats, admin_pb2.StatsRequest())
    return answer


async def session_of(observer: Client, pid: int) -> admin_pb2.SessionStats | None:
    return next((session for session in (await stats(observer)).sessions if session.pid == pid), None)


async def device(observer: Client) -> admin_pb2.TierStats:
    return next(tier for tier in (await stats(observer)).caches[0].tiers if tier.tier == DEVICE)


def as_child(daemon: Daemon, welcome: attach.Welcome) -> Client:
    return Client(AttachSocket(socket.socket()), welcome, channel_to(daemon))


async def test_a_hello_is_answered_with_who_and_which_daemon(daemon: Daemon, child: ChildProcess) -> None:
    welcome = await child.hello()
    assert (welcome.pid, welcome.epoch, welcome.boot, welcome.resumed) == (os.getpid(), 1, 1, False)
    assert len(welcome.token) == 32


async def test_the_session_names_the_real_process(child: ChildProcess, observer: Client) -> None:
    await child.hello()
    session = await session_of(observer, child.process.pid)
    assert session is not None
    assert (session.uid, session.attached, session.held_slots) == (os.getuid(), True, 0)
    assert "kvtier.abi" in session.command


async def test_a_killed_process_gives_its_slots_back_within_100_ms(
    daemon: Daemon, child: ChildProcess, observer: Client
) -> None:
    cache = await observer.open()
    client = as_child(daemon, await child.hello())
    await client.open()
    await client.reserve(cache, 8)
    assert (await device(observer)).blank == 8
    child.process.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    await _until_free(observer, 8)
    assert time.monotonic() - killed < 0.1
    assert await session_of(observer, child.process.pid) is None
    await client.close()


async def test_a_broken_connection_keeps_the_slots_out_of_circulation_until_the_process_returns(
    daemon: Daemon, child: ChildProcess, observer: Client
) -> None:
    cache = await observer.open()
    welcome = await child.hello()
    client = as_child(daemon, welcome)
    await client.open()
    reserved = await client.reserve(cache, 3)
    assert await child.ask("hang up") == "connected"

    await _until_detached(observer, child)
    assert (await device(observer)).orphaned == 3
    code, detail = await client.refusal(client.admin.Stats, admin_pb2.StatsRequest())
    assert (code, detail.reason) == (grpc.StatusCode.UNAUTHENTICATED, "DETACHED_SESSION")

    again = await child.hello(welcome.token)
    assert again.resumed
    assert again.session_id == welcome.session_id
    tier = await device(observer)
    assert (tier.orphaned, tier.blank) == (0, 3)
    await client.release(cache, reserved.lease_id)
    assert (await device(observer)).free == 8
    await client.close()


async def test_a_detached_session_ends_with_its_process(daemon: Daemon, child: ChildProcess, observer: Client) -> None:
    cache = await observer.open()
    client = as_child(daemon, await child.hello())
    await client.open()
    await client.reserve(cache, 3)
    await child.ask("hang up")
    await _until_detached(observer, child)
    child.process.kill()
    await _until_free(observer, 8)
    await client.close()


async def test_another_process_cannot_take_a_session_over(
    daemon: Daemon, child: ChildProcess, observer: Client
) -> None:
    welcome = await child.hello()
    stranger = await AttachSocket.connect(daemon.address)
    answer = await stranger.hello(welcome.token)
    assert isinstance(answer, attach.Failure)
    assert answer.reason == "PERMISSION_DENIED"
    assert await stranger.receive() == (b"", [])
    stranger.close()
    session = await session_of(observer, child.process.pid)
    assert session is not None
    assert session.attached


async def test_a_token_of_nobody_is_refused(daemon: Daemon) -> None:
    sock = await AttachSocket.connect(daemon.address)
    answer = await sock.hello("0" * 32)
    assert isinstance(answer, attach.Failure)
    assert answer.reason == "UNKNOWN_SESSION"
    assert await sock.receive() == (b"", [])
    sock.close()


async def test_a_new_connection_supersedes_one_that_the_daemon_still_believes_in(daemon: Daemon) -> None:
    async with attached(daemon) as client:
        cache = await client.open()
        await client.reserve(cache, 2)
        second = await AttachSocket.connect(daemon.address)
        answer = await second.hello(client.welcome.token)
        assert isinstance(answer, attach.Welcome)
        assert answer.resumed
        assert await client.socket.receive() == (b"", []), "the first connection is over"
        tier = await device(client)
        assert (tier.blank, tier.orphaned) == (2, 0)
        second.close()


async def test_a_goodbye_ends_the_session_at_once(daemon: Daemon, child: ChildProcess, observer: Client) -> None:
    cache = await observer.open()
    client = as_child(daemon, await child.hello())
    await client.open()
    await client.reserve(cache, 8)
    assert await child.ask({"op": "bye"}) == "closed"
    assert (await device(observer)).free == 8
    assert await session_of(observer, child.process.pid) is None
    await client.close()


@pytest.mark.skipif(os.getuid() != 0, reason="needs to become another user")
async def test_another_user_is_refused_and_hung_up_on(daemon: Daemon, short_dir: Path) -> None:
    _let_everybody_in(short_dir)
    process = await ChildProcess.start(daemon, "--uid")
    try:
        answer = await process.ask({"op": "hello", "version": 1})
        assert isinstance(answer, dict)
        assert (answer["ok"], answer["reason"]) == (False, "PERMISSION_DENIED")
    finally:
        await process.end()


@pytest.mark.skipif(os.getuid() != 0, reason="needs to become another user")
async def test_a_user_that_the_configuration_allows_may_attach(short_dir: Path) -> None:
    async with running(
        config(short_dir, allow=(AllowRule(uids=(65534,), caches=("*",), verbs=(Right.READ,)),))
    ) as daemon:
        _let_everybody_in(short_dir)
        process = await ChildProcess.start(daemon, "--uid")
        try:
            await process.hello()
        finally:
            await process.end()


@pytest.mark.parametrize(
    "message",
    [
        b"\0",
        b"not json",
        b"[]",
        b'{"op":"map","cache_id":1,"write":false}',
        b'{"op":"hello","version":2}',
        b'{"op":"hello","version":1,"extra":1}',
        b'{"op":"' + b"x" * 65_500 + b'"}',
        b" " * 65_537,
    ],
)
async def test_garbage_ends_the_connection_and_nobody_elses(daemon: Daemon, observer: Client, message: bytes) -> None:
    sock = await AttachSocket.connect(daemon.address)
    await sock.send(message)
    data, _ = await sock.receive()
    assert isinstance(attach.decode_welcome(data), attach.Failure)
    assert await sock.receive() == (b"", [])
    sock.close()
    assert (await stats(observer)).pid == os.getpid()


async def test_garbage_after_the_hello_ends_the_connection_but_not_the_session(
    daemon: Daemon, observer: Client
) -> None:
    async with attached(daemon) as client:
        await client.socket.send(b"{}")
        data, _ = await client.socket.receive()
        assert isinstance(attach.decode_mapped(data), attach.Failure)
        again = await AttachSocket.connect(daemon.address)
        answer = await again.hello(client.welcome.token)
        assert isinstance(answer, attach.Welcome)
        assert answer.resumed
        again.close()


async def test_descriptors_that_a_client_sends_along_are_not_kept(daemon: Daemon) -> None:
    before = len(os.listdir("/proc/self/fd"))
    sock = await AttachSocket.connect(daemon.address)
    pipe = os.pipe()
    socket.send_fds(sock.sock, [attach.encode(attach.Hello())], list(pipe))
    await sock.receive()
    close_all(pipe)
    sock.close()
    await eventually(lambda: len(os.listdir("/proc/self/fd")) <= before + 1)  # the idle session's pidfd


async def test_a_client_that_never_reads_is_hung_up_on(daemon: Daemon, observer: Client) -> None:
    sock = await AttachSocket.connect(daemon.address)
    await sock.hello()
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        async with asyncio.timeout(20):
            while True:
                await sock.send(attach.encode(attach.Map(99, write=False)))
    sock.close()
    assert (await stats(observer)).pid == os.getpid()


async def test_too_many_sessions_are_refused_until_an_idle_one_can_give_way(short_dir: Path) -> None:
    async with running(config(short_dir, max_sessions=4)) as daemon:
        socks = [await AttachSocket.connect(daemon.address) for _ in range(3)]
        answers = [await sock.hello() for sock in socks]
        assert [type(answer) for answer in answers] == [attach.Welcome, attach.Welcome, attach.Failure]
        for sock in socks:
            sock.close()
        async with asyncio.timeout(5):  # until the daemon has seen that they are closed
            while not isinstance(await (sock := await AttachSocket.connect(daemon.address)).hello(), attach.Welcome):
                sock.close()
        sock.close()


async def test_only_a_cache_that_the_session_opened_is_mapped(daemon: Daemon, observer: Client) -> None:
    cache = await observer.open()
    async with attached(daemon) as client:
        answers = [await client.socket.map(wanted, write=False) for wanted in (cache + 1, cache)]
        reasons = [answer.reason for answer, fds in answers if isinstance(answer, attach.Failure) and not fds]
        assert reasons == ["UNKNOWN_CACHE", "CACHE_NOT_OPENED"]
        await client.open()
        answer, fds = await client.socket.map(cache, write=False)
        assert isinstance(answer, attach.Mapped)
        assert answer.fds == ("control", "host", "device")
        close_all(fds)


@pytest.mark.parametrize("write", [False, True])
async def test_control_is_read_only_and_data_is_as_asked(daemon: Daemon, write: bool) -> None:
    async with attached(daemon) as client:
        _, fds = await client.socket.map(await client.open(), write=write)
        for fd, writable in zip(fds, (False, write, write), strict=True):
            if writable:
                mmap.mmap(fd, 0).close()
            else:
                mmap.mmap(fd, 0, prot=mmap.PROT_READ).close()
                with pytest.raises(PermissionError):
                    mmap.mmap(fd, 0)
        close_all(fds)


async def test_a_map_asked_for_twice_gives_descriptors_twice(daemon: Daemon) -> None:
    async with attached(daemon) as client:
        cache = await client.open()
        for _ in range(2):
            answer, fds = await client.socket.map(cache, write=True)
            assert isinstance(answer, attach.Mapped)
            assert len(fds) == 3
            close_all(fds)


@pytest.mark.parametrize("after_s", [0.0, 0.001, 0.005])
async def test_a_call_that_waits_for_room_dies_with_its_process(short_dir: Path, after_s: float) -> None:
    async with running(config(short_dir, chaos_seed=1)) as daemon, attached(daemon) as observer:
        cache = await observer.open()
        await observer.put(cache, chain(8))
        child = await ChildProcess.start(daemon)
        client = as_child(daemon, await child.hello())
        await client.open()
        request = blocks_pb2.ReserveRequest(cache_id=cache, tier=DEVICE, count=8, seq=1)
        waiting = asyncio.create_task(client.call(client.blocks.Reserve, request))
        await asyncio.sleep(after_s)
        child.process.kill()
        await asyncio.wait([waiting])
        assert waiting.exception() is None or isinstance(waiting.exception(), grpc.aio.AioRpcError)
        async with asyncio.timeout(5):
            while (tier := await device(observer)).held or tier.filling or tier.retiring:
                pass
        assert tier.free + tier.ready == 8
        await client.close()
        await child.end()


async def _until_free(observer: Client, slots: int) -> None:
    async with asyncio.timeout(5):
        while (await device(observer)).free < slots:
            pass


async def _until_detached(observer: Client, child: ChildProcess) -> None:
    async with asyncio.timeout(5):
        while True:
            session = await session_of(observer, child.process.pid)
            assert session is not None
            if not session.attached:
                return


def _let_everybody_in(directory: Path) -> None:
    for path in (directory, directory / "run"):
        path.chmod(0o755)
    for name in (attach.ATTACH_SOCKET, attach.RPC_SOCKET):
        (directory / "run" / name).chmod(0o666)
