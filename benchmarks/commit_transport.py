"""What a commit costs as a unary call and as a message on a stream that stays open.

``python -m benchmarks.commit_transport [--json]``. One private daemon, one client, one session. Every round commits and
releases 64 fresh blocks; the ways take turns. The daemon is kvtierd with one method more: a stream whose messages are
commits, each of which takes the way of a unary one (rights, the memory of replies, the verb). CPU is of all threads.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import grpc
import grpc.aio
import xxhash
from google.protobuf.descriptor import ServiceDescriptor

import kvtierd.service.daemon
from kvtier.aio import connect
from kvtier.bench.place import chains, spec_of
from kvtier.bench.result import Result
from kvtier.lease import WriteLease
from kvtier.private import PrivateDaemon, TierSlots
from kvtier.session import Deadline
from kvtier.types import ROOT_PARENT
from kvtier.v1 import blocks_pb2
from kvtierd.main import main as kvtierd_main
from kvtierd.service.access import NEEDS
from kvtierd.service.calls import Dispatcher, Verb

BATCH = 64
BLOCK_BYTES = 4096
METHOD = "/kvtier.v1.Blocks/CommitStream"
WARM_UP = 20


class StreamingDispatcher(Dispatcher):
    """Serves the method more."""

    def handler(
        self, service: ServiceDescriptor, verbs: Mapping[str, Verb], *others: Any, **named: Any
    ) -> grpc.GenericRpcHandler:
        made = super().handler(service, verbs, *others, **named)
        if "Commit" not in verbs:
            return made
        stream: Any = grpc.stream_stream_rpc_method_handler(self._committing(verbs["Commit"]))
        return _Both(made, stream)

    def _committing(self, verb: Verb) -> Callable[..., AsyncIterator[bytes]]:
        needs = NEEDS["kvtier.v1.Blocks.Commit"]

        async def serve(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            session = self._sessions.authenticate(context.invocation_metadata())
            async for raw in messages:
                request = blocks_pb2.CommitRequest.FromString(raw)
                self._access.require(session, needs, request)
                digest = xxhash.xxh3_128_digest(raw)
                run: Any = partial(verb, session, request)
                reply: Any = await session.replies.answer(request.seq, digest, run, waits=False)
                yield reply.SerializeToString()

        return serve


class _Both(grpc.GenericRpcHandler):
    def __init__(self, made: grpc.GenericRpcHandler, stream: Any) -> None:
        self._made = made
        self._stream = stream

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return self._stream if handler_call_details.method == METHOD else self._made.service(handler_call_details)


@dataclass(slots=True)
class Costs:
    """Of each round, in microseconds."""

    wall: list[float] = field(default_factory=list)
    client_cpu: list[float] = field(default_factory=list)
    daemon_cpu: list[float] = field(default_factory=list)


def cpu_us(pid: int) -> float:
    """Of all threads of a process so far."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e3


async def measure(rounds: int) -> AsyncIterator[Result]:
    spec = spec_of(BLOCK_BYTES)
    sizes = TierSlots(device=4 * BATCH, host=0, disk=0).as_bytes(spec)
    module = ("benchmarks.commit_transport", "daemon")
    async with PrivateDaemon(sizes, module=module) as daemon, await connect(daemon.address) as client:
        cache = await client.open_cache("bench", spec)
        link = await client._session.link(Deadline(10))
        stream: Any = link.channel.stream_stream(
            METHOD,
            request_serializer=blocks_pb2.CommitRequest.SerializeToString,
            response_deserializer=blocks_pb2.CommitResponse.FromString,
        )(metadata=link.metadata)

        async def unary(request: blocks_pb2.CommitRequest) -> blocks_pb2.CommitResponse:
            reply: Any = link.stubs.blocks.Commit(request, timeout=30, metadata=link.metadata)
            return cast(blocks_pb2.CommitResponse, await reply)

        async def streamed(request: blocks_pb2.CommitRequest) -> blocks_pb2.CommitResponse:
            await stream.write(request)
            answer: blocks_pb2.CommitResponse = await stream.read()
            return answer

        ways: dict[str, Callable[[blocks_pb2.CommitRequest], Awaitable[blocks_pb2.CommitResponse]]]
        ways = {"unary": unary, "stream": streamed}
        costs = {name: Costs() for name in ways}
        keys = chains(BATCH)
        for turn in range(rounds + WARM_UP):
            for name in list(ways)[:: 1 if turn % 2 else -1]:
                chain = next(keys)
                request = _request(await cache.reserve(BATCH), chain, client._session.next_seq())
                before = cpu_us(os.getpid()), cpu_us(daemon.pid)
                started = perf_counter()
                reply = await ways[name](request)
                wall = perf_counter() - started
                after = cpu_us(os.getpid()), cpu_us(daemon.pid)
                assert reply.results == bytes(BATCH), reply
                if turn >= WARM_UP:
                    costs[name].wall.append(1e6 * wall)
                    costs[name].client_cpu.append(after[0] - before[0])
                    costs[name].daemon_cpu.append(after[1] - before[1])
                await cache.drop(chain[:1])
        stream.cancel()
    params = {"blocks": BATCH, "rounds": rounds}
    for what in ("wall", "client_cpu", "daemon_cpu"):
        ours, floor = (statistics.median(getattr(costs[name], what)) for name in ("stream", "unary"))
        yield Result(f"commit stream {what}", params, ours, "us", floor)


def _request(lease: WriteLease, chain: list[bytes], seq: int) -> blocks_pb2.CommitRequest:
    lease.released = True  # the commit ends it, in the daemon; nobody here asks again
    return blocks_pb2.CommitRequest(
        cache_id=lease.binding.cache_id,
        lease_id=lease.id,
        slots=lease.slots,
        keys=b"".join(chain),
        parents=b"".join([ROOT_PARENT, *chain[:-1]]),
        release=True,
        seq=seq,
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="a list of {name, params, value, unit, floor, ratio}")
    parser.add_argument("--rounds", type=int, default=500)
    arguments = parser.parse_args()
    results = [result async for result in measure(arguments.rounds)]
    if arguments.json:
        print(json.dumps([result.to_json() for result in results], indent=2))
        return
    for result in results:
        print(f"{result.name:26} {result.value:6.0f} us, unary {result.floor or 0:6.0f} us, ratio {result.ratio:.2f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["daemon"]:
        sys.argv.pop(1)
        setattr(kvtierd.service.daemon, "Dispatcher", StreamingDispatcher)  # noqa: B010  it is not exported
        kvtierd_main()
    else:
        asyncio.run(main())
