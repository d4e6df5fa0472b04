"""What a commit costs as a unary call, as a message on ``Blocks.Commits``, a stream that stays open, and on a line.

``python -m benchmarks.commit_transport [--json]``. One private daemon, one client, one session. Every round commits and
releases fresh blocks; the ways take turns. CPU is of all threads.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, cast

from kvtier.aio import connect
from kvtier.bench.place import chains, spec_of
from kvtier.bench.result import Result
from kvtier.lease import WriteLease
from kvtier.private import PrivateDaemon, TierSlots
from kvtier.session import Deadline
from kvtier.types import ROOT_PARENT
from kvtier.v1 import blocks_pb2

BATCHES = (1, 64)
BLOCK_BYTES = 4096
WARM_UP = 20


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


async def measure(batch: int, rounds: int) -> AsyncIterator[Result]:
    spec = spec_of(BLOCK_BYTES)
    sizes = TierSlots(device=4 * batch, host=0, disk=0).as_bytes(spec)
    async with PrivateDaemon(sizes) as daemon, await connect(daemon.address) as client:
        cache = await client.open_cache("bench", spec)
        link = await client._session.link(Deadline(10))

        async def unary(request: blocks_pb2.CommitRequest) -> blocks_pb2.CommitResponse:
            reply: Any = link.stubs.blocks.Commit(request, timeout=30, metadata=link.metadata)
            return cast(blocks_pb2.CommitResponse, await reply)

        stream: Any = link.stubs.blocks.Commits(metadata=link.metadata)

        async def streamed(request: blocks_pb2.CommitRequest) -> blocks_pb2.CommitResponse:
            await stream.write(request)
            answer: blocks_pb2.CommitAnswer = await stream.read()
            return answer.done

        async def by_line(request: blocks_pb2.CommitRequest) -> blocks_pb2.CommitResponse:
            return await link.commits.commit(request, 30)

        ways: dict[str, Callable[[blocks_pb2.CommitRequest], Awaitable[blocks_pb2.CommitResponse]]]
        ways = {"unary": unary, "stream": streamed, "line": by_line}
        costs = {name: Costs() for name in ways}
        keys = chains(batch)
        for turn in range(rounds + WARM_UP):
            for name in list(ways)[:: 1 if turn % 2 else -1]:
                chain = next(keys)
                request = _request(await cache.reserve(batch), chain, client._session.next_seq())
                before = cpu_us(os.getpid()), cpu_us(daemon.pid)
                started = perf_counter()
                reply = await ways[name](request)
                wall = perf_counter() - started
                after = cpu_us(os.getpid()), cpu_us(daemon.pid)
                assert reply.results == bytes(batch), reply
                if turn >= WARM_UP:
                    costs[name].wall.append(1e6 * wall)
                    costs[name].client_cpu.append(after[0] - before[0])
                    costs[name].daemon_cpu.append(after[1] - before[1])
                await cache.drop(chain[:1])
        assert link.commits.open
        stream.cancel()
    params = {"blocks": batch, "rounds": rounds}
    for what in ("wall", "client_cpu", "daemon_cpu"):
        medians = {name: statistics.median(getattr(costs[name], what)) for name in ways}
        for name in ("stream", "line"):
            yield Result(f"commit {batch} {name} {what}", params, medians[name], "us", medians["unary"])


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
    results = [result for batch in BATCHES async for result in measure(batch, arguments.rounds)]
    if arguments.json:
        print(json.dumps([result.to_json() for result in results], indent=2))
        return
    for result in results:
        print(f"{result.name:26} {result.value:6.0f} us, unary {result.floor or 0:6.0f} us, ratio {result.ratio:.2f}")


if __name__ == "__main__":
    asyncio.run(main())
