"""A crowd without any right, in a process of its own: ``python -m tests.torture.crowds KIND SIZE ADDRESS``. It stands
until its standard input ends."""

from __future__ import annotations

import asyncio
import itertools
import sys
from contextlib import AsyncExitStack, suppress
from typing import Any

import grpc.aio
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from tests.integration import http2
from tests.integration.raw import channel_to

CHANNELS = 3
KEPT = 64


async def idle(stack: AsyncExitStack, size: int, address: str) -> None:
    """Connections on which nothing follows."""
    for _ in range(size):
        with suppress(BlockingIOError, TimeoutError):  # a full backlog
            stack.enter_context(await asyncio.to_thread(http2.connected, address))


async def health(stack: AsyncExitStack, size: int, address: str) -> None:
    """Watches of health, of which the daemon keeps some."""
    channels = [await stack.enter_async_context(channel_to(address)) for _ in range(CHANNELS)]
    stubs: list[Any] = [HealthStub(channel) for channel in channels]
    calls = [stubs[number % CHANNELS].Watch(HealthCheckRequest()) for number in range(size)]
    ended = [asyncio.create_task(read(call)) for call in calls]
    for task in ended:
        stack.callback(task.cancel)
    for first in itertools.islice(asyncio.as_completed(ended), max(0, size - KEPT)):
        await first


async def read(watch: Any) -> None:
    """Until the daemon ends it."""
    with suppress(grpc.aio.AioRpcError):
        async for _ in watch:
            pass


async def halves(stack: AsyncExitStack, size: int, address: str) -> None:
    """Calls, each on a connection of its own, whose messages of 15 MiB never come."""
    for _ in range(size):
        sock = stack.enter_context(await asyncio.to_thread(http2.connected, address))
        await asyncio.to_thread(http2.begin, sock, 1, "/kvtier.v1.Blocks/Commit", announced=15 << 20)


KINDS = {"idle": idle, "health": health, "halves": halves}


async def main(kind: str, size: str, address: str) -> None:
    async with AsyncExitStack() as stack:
        await KINDS[kind](stack, int(size), address)
        print("stands", flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
