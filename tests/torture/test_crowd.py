"""Crowds: silent connections, watchers that never read, clients that come and go. Another client is served meanwhile,
and the crowd leaves nothing behind."""

import asyncio
import os
import socket
import sys
import time
from collections import Counter
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager

import numpy as np
import pytest

from kvtier import KvtierError, connect
from kvtier.abi.attach import ATTACH_SOCKET, RPC_SOCKET, socket_path
from kvtier.v1 import events_pb2
from tests.integration.blocks import SPEC, assert_bytes, blocks, chain, opened_cache, put_chain, sizes
from tests.integration.raw import attached
from tests.integration.waiting import eventually
from tests.torture.runs import scaled

SILENT = scaled(200, 10)
"""Connections to each socket."""
WATCHERS, OF_A_SESSION = scaled(100, 10), 10
COMERS = scaled(24, 3)
ROUNDS = scaled(6, 2)
"""Rounds without and with a crowd, in turn."""
CALLS = 60
"""Calls of the other client in each round."""
CROWDED = sizes(device=16, host=32, disk=64)
STANDS_S = 2.5
"""Seconds that a crowd stands, so that the daemon sees it when it looks at its clients, once a second."""
MAX_MB, BACK_MB = 100, 40
"""Memory that a crowd may add to the daemon, and memory that may be left afterwards."""
LEFT_FDS = 12
"""Descriptors of the pool of connections that the daemon's gRPC keeps for a moment."""

pytestmark = [pytest.mark.long, pytest.mark.limit(1800)]


async def test_a_crowd_is_served_beside_others_and_leaves_nothing(start_fresh, found):
    daemon = start_fresh(device=32, host=64, disk=128)
    times: dict[str, list[float]] = {"alone": [], "in a crowd": []}
    visits = Counter[str]()
    async with opened_cache(daemon.address, "bystander", budgets=sizes(device=8, host=16, disk=32)) as (client, cache):
        await client.open_cache("crowd", SPEC, budgets=CROWDED)
        await small_calls(cache, [], drop=True)
        fds = len(os.listdir(f"/proc/{daemon.pid}/fd"))
        for _ in range(ROUNDS):
            await small_calls(cache, times["alone"], drop=True)
            async with crowd(daemon.address, visits):
                await small_calls(cache, times["in a crowd"], drop=True)
        left = await eventually(lambda: len(os.listdir(f"/proc/{daemon.pid}/fd")), lambda now: now <= fds + LEFT_FDS)
        stats = await eventually(client.stats, lambda stats: len(stats.sessions) == 1 and not stats.watchers)
        assert stats.problems == ()
    p99 = {when: float(np.quantile(each, 0.99)) * 1000 for when, each in times.items()}
    found(
        f"crowds of {SILENT} + {SILENT} silent connections, {WATCHERS} watchers that do not read and {COMERS} clients "
        f"that come and go ({visits['served']:,} visits, {visits['refused']} refused), {ROUNDS} times: a put and get "
        f"of another's p99 {p99['in a crowd']:.0f} ms ({p99['alone']:.0f} alone), 0 wrong; descriptors {fds} -> {left}"
    )


@pytest.mark.parametrize(("kind", "size"), [("idle", 4200), ("health", 5000), ("halves", 40)])
async def test_a_crowd_without_rights_costs_others_little(start_fresh, found, kind, size):
    daemon = start_fresh(host=64)
    asked = [sys.executable, "-m", "tests.torture.crowds", kind, str(scaled(size, 10)), daemon.address]
    times: dict[str, list[float]] = {"before": [], "during": [], "after": []}
    async with opened_cache(daemon.address, "bystander") as (_, cache):
        await small_calls(cache, [])
        before = during = after = anonymous_mb(daemon.pid)
        for _ in range(ROUNDS):
            await small_calls(cache, times["before"])
            crowd = await asyncio.create_subprocess_exec(
                *asked, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
            try:
                assert crowd.stdout is not None
                standing = asyncio.create_task(crowd.stdout.readline())
                while not standing.done():
                    await small_calls(cache, times["during"])
                assert standing.result() == b"stands\n"
                end = time.monotonic() + STANDS_S
                while time.monotonic() < end:
                    await small_calls(cache, times["during"])
                during = anonymous_mb(daemon.pid)
            finally:
                await crowd.communicate(b"")
            assert crowd.returncode == 0
            await small_calls(cache, times["after"])
            assert during < before + MAX_MB
            after = await eventually(lambda: anonymous_mb(daemon.pid), lambda now: now < before + BACK_MB)
    p99 = [float(np.quantile(each, 0.99)) * 1000 for each in times.values()]
    found(
        f"{asked[4]} of {kind} without a session, {ROUNDS} times: p99 of another's calls {p99[0]:.1f} ms before, "
        f"{p99[1]:.1f} while it comes and stands, {p99[2]:.1f} after; memory {before:.0f}, {during:.0f}, {after:.0f} MB"
    )


def anonymous_mb(pid):
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) / 1024


async def small_calls(cache, times, *, drop=False):
    keys = chain("bystander", 4)
    for _ in range(CALLS):
        began = time.monotonic()
        await cache.put(keys, blocks(keys))
        assert_bytes(keys, await cache.get(keys))
        if drop:
            await cache.drop(keys[2:])
        times.append(time.monotonic() - began)


@asynccontextmanager
async def crowd(address, visits):
    over = asyncio.Event()

    async def come_and_go(number):
        while not over.is_set():
            try:
                async with await connect(address, timeout=20) as client:
                    cache = await client.open_cache("crowd", SPEC)
                    keys = await put_chain(cache, f"crowd/{number}", 4)
                    found = await cache.get(keys)
                    assert_bytes(keys[: len(found)], found)
                visits["served"] += 1
            except KvtierError:
                visits["refused"] += 1

    with ExitStack() as silent:
        for name in (ATTACH_SOCKET, RPC_SOCKET):
            kind = socket.SOCK_SEQPACKET if name == ATTACH_SOCKET else socket.SOCK_STREAM
            for _ in range(SILENT):
                sock = silent.enter_context(socket.socket(socket.AF_UNIX, kind))
                await asyncio.to_thread(sock.connect, socket_path(address, name))
        async with AsyncExitStack() as watching:
            request = events_pb2.WatchRequest(heartbeat_ns=100_000_000)
            calls = []
            for _ in range(0, WATCHERS, OF_A_SESSION):
                raw = await watching.enter_async_context(attached(address))
                calls += [raw.stubs.events.Watch(request, metadata=raw.metadata) for _ in range(OF_A_SESSION)]
            visitors = [asyncio.create_task(come_and_go(number)) for number in range(COMERS)]
            try:
                yield
            finally:
                over.set()
                await asyncio.gather(*visitors)
                for call in calls:
                    call.cancel()
