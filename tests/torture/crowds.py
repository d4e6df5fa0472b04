"""A crowd in a process of its own: ``python -m tests.torture.crowds KIND SIZE ADDRESS``. The crowd stands until its
standard input ends."""

import asyncio
import itertools
import os
import socket
import sys
from contextlib import AsyncExitStack, suppress
from typing import Any

import grpc.aio
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from kvtier.abi.attach import MAX_MESSAGE
from kvtier.v1 import blocks_pb2
from tests import packets
from tests.integration import http2
from tests.integration.raw import attached, channel_to

CHANNELS = 3
KEPT = 64
KEYS = 2_000
UNDER_WAY = 64


async def idle(stack: AsyncExitStack, size: int, address: str) -> None:
    """Opens connections that send nothing."""
    for _ in range(size):
        with suppress(BlockingIOError, TimeoutError):  # a full backlog
            stack.enter_context(await asyncio.to_thread(http2.connected, address))


async def health(stack: AsyncExitStack, size: int, address: str) -> None:
    """Begins watches of health. The daemon keeps only some of them."""
    channels = [await stack.enter_async_context(channel_to(address)) for _ in range(CHANNELS)]
    stubs: list[Any] = [HealthStub(channel) for channel in channels]
    calls = [stubs[number % CHANNELS].Watch(HealthCheckRequest()) for number in range(size)]
    ended = [asyncio.create_task(read(call)) for call in calls]
    for task in ended:
        stack.callback(task.cancel)
    for first in itertools.islice(asyncio.as_completed(ended), max(0, size - KEPT)):
        await first


async def read(watch: Any) -> None:
    """Reads a watch until the daemon ends it."""
    with suppress(grpc.aio.AioRpcError):
        async for _ in watch:
            pass


async def halves(stack: AsyncExitStack, size: int, address: str) -> None:
    """Begins calls, each on a connection of its own, whose messages of 15 MiB never come."""
    for _ in range(size):
        sock = stack.enter_context(await asyncio.to_thread(http2.connected, address))
        await asyncio.to_thread(http2.begin, sock, 1, "/kvtier.v1.Blocks/Commit", announced=15 << 20)


async def readers(stack: AsyncExitStack, size: int, address: str) -> None:
    """Opens sessions that each have many matches of long prompts under way."""
    for sock, request in [await reader(stack, address) for _ in range(size)]:
        stack.callback(asyncio.create_task(keep_matching(sock, request)).cancel)


async def deaf(stack: AsyncExitStack, size: int, address: str) -> None:
    """Opens sessions that send matches of long prompts and read no answer."""
    for sock, request in [await reader(stack, address) for _ in range(size)]:
        sock.settimeout(0.2)
        with suppress(TimeoutError):  # the daemon takes no more
            for number in itertools.count():
                await asyncio.to_thread(sock.send, match_call(number, request))


async def reader(stack: AsyncExitStack, address: str) -> tuple[socket.socket, bytes]:
    """Returns the socket of a new session, and a request that its connection can repeat."""
    raw = await stack.enter_async_context(attached(address))
    stack.callback(raw.detach)
    cache = (await raw.open("bystander")).cache_id
    return raw.socket.sock, blocks_pb2.MatchRequest(cache_id=cache, keys=os.urandom(32 * KEYS)).SerializeToString()


async def keep_matching(sock: socket.socket, request: bytes) -> None:
    loop, numbers = asyncio.get_running_loop(), itertools.count()
    sock.setblocking(False)
    under_way = 0
    while True:
        while under_way < UNDER_WAY:
            await loop.sock_sendall(sock, match_call(next(numbers), request))
            under_way += 1
        await loop.sock_recv(sock, MAX_MESSAGE)
        under_way -= 1


def match_call(number: int, request: bytes) -> bytes:
    return packets.call(number, "/kvtier.v1.Blocks/Match", request)


KINDS = {"idle": idle, "health": health, "halves": halves, "readers": readers, "deaf": deaf}


async def main(kind: str, size: str, address: str) -> None:
    async with AsyncExitStack() as stack:
        await KINDS[kind](stack, int(size), address)
        print("stands", flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
