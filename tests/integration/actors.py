"""Clients in processes of their own, to be stopped, killed or run as somebody else.

A part takes one JSON object from standard input, prints one when it is where it was asked to be, and then stays until
its standard input ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import grpc.aio

from kvtier import Tier
from kvtier.abi import attach
from kvtier.rpc_errors import fault_of
from kvtier.session import Stubs
from kvtier.v1 import admin_pb2, events_pb2
from tests.integration.blocks import SPEC, chain
from tests.integration.raw import AttachSocket, attached, channel_to
from tests.integration.waiting import PATIENCE_S

NOBODY = 65534


class Actor:
    """A part being played, from the moment it says so. SIGKILLed at the end, if not before."""

    def __init__(self, part: str, *, pass_fds: Sequence[int] = (), **script: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.actors", part],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=tuple(pass_fds),
            text=True,
        )
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(script) + "\n")
        self._process.stdin.flush()

    def says(self) -> dict[str, Any]:
        """What it prints; waits for it."""
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], PATIENCE_S * 2)
        line = self._process.stdout.readline() if readable else ""
        assert line, f"the actor says nothing; exit status {self._process.poll()}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL; returns as soon as the kernel says that the process is gone."""
        self._process.kill()
        readable, _, _ = select.select([self.pidfd], [], [], PATIENCE_S)
        assert readable

    def close(self) -> None:
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait(PATIENCE_S)
        os.close(self.pidfd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# -- the parts ---------------------------------------------------------------------------------------------------------


def _say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


async def _stay() -> None:
    await asyncio.to_thread(sys.stdin.read)


async def hold(
    address: str, cache: str, reserve: Mapping[str, int], acquire: Mapping[str, list[Any]], detach: bool = False
) -> None:
    """Reserves so many slots by tier, acquires chains ([name, length] by tier); then perhaps loses its connection."""
    async with attached(address) as client:
        cache_id = (await client.open(cache)).cache_id
        slots = {tier: list((await client.reserve(cache_id, Tier[tier], n)).slots) for tier, n in reserve.items()}
        for tier, (name, length) in acquire.items():
            (got,) = (await client.acquire(cache_id, Tier[tier], chain(name, length))).chains
            assert len(got.slots) == length
        if detach:
            client.detach()
        _say(session=client.welcome.session_id, token=client.welcome.token, slots=slots)
        await _stay()


async def steal(address: str, token: str) -> None:
    """Comes with a token that is not its own to the attach socket, then to gRPC."""
    with AttachSocket(address) as sock:
        answer = sock.hello(token)
    async with channel_to(address) as channel:
        rpc = await _stats(channel, token)
    _say(attach=answer.reason if isinstance(answer, attach.Failure) else "welcome", rpc=rpc)
    await _stay()


async def stare(address: str) -> None:
    """Opens a watch, reads one batch and nothing more."""
    async with attached(address) as client:
        stream = client.stubs.events.Watch(events_pb2.WatchRequest(heartbeat_ns=10_000_000), metadata=client.metadata)
        await stream.read()
        _say(session=client.welcome.session_id)
        await _stay()


async def be_foreign(address: str, token: str, fds: Mapping[str, int]) -> None:
    """As nobody: tries both sockets, and to open the inherited descriptors again for writing."""
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    connects = {name: _connect(address, name) for name in (attach.ATTACH_SOCKET, attach.RPC_SOCKET)}
    hello = None
    if connects[attach.ATTACH_SOCKET] == "connected":
        with AttachSocket(address) as sock:
            answer = sock.hello()
            hello = answer.reason if isinstance(answer, attach.Failure) else "welcome"
    async with channel_to(address) as channel:
        rpc = {"no token": await _stats(channel, None), "stolen token": await _stats(channel, token)}
    _say(connects=connects, hello=hello, rpc=rpc, reopened={name: _reopen(fd) for name, fd in fds.items()})
    await _stay()


def _connect(address: str, name: str) -> str:
    kind = socket.SOCK_SEQPACKET if name == attach.ATTACH_SOCKET else socket.SOCK_STREAM
    with socket.socket(socket.AF_UNIX, kind) as sock:
        try:
            sock.connect(attach.socket_path(address, name))
        except OSError as error:
            return type(error).__name__
    return "connected"


def _reopen(fd: int) -> str:
    try:
        os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDWR))
    except OSError as error:
        return type(error).__name__
    return "opened"


async def _stats(channel: grpc.aio.Channel, token: str | None) -> str:
    metadata = ((attach.SESSION_METADATA_KEY, token),) if token else ()
    try:
        await Stubs.over(channel).admin.Stats(admin_pb2.StatsRequest(), metadata=metadata, timeout=PATIENCE_S)
    except grpc.aio.AioRpcError as error:
        return fault_of(error).code.name
    return "answered"


_PARTS: Mapping[str, Callable[..., Awaitable[None]]] = {
    part.__name__: part for part in (hold, steal, stare, be_foreign)
}


async def _play() -> None:
    assert SPEC.groups  # a foreign user may not be able to import anything any more
    await _PARTS[sys.argv[1]](**json.loads(sys.stdin.readline()))


if __name__ == "__main__":
    asyncio.run(_play())
