"""Clients that keep the daemon busy, or read no answer, do not starve another client of the same user."""

import asyncio
import sys
import time
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from kvtier import connect
from kvtier.v1 import blocks_pb2
from tests import packets
from tests.integration.blocks import SPEC, blocks, chain, sizes
from tests.integration.raw import attached, channel_to
from tests.torture.crowds import match_call
from tests.torture.runs import scaled

READERS = 10
DEAF = 60
ROUNDS = scaled(6, 2)
"""Rounds without and with a crowd, in turn."""
CALLS = 200
PROBES = 20
MOST_TIMES = 100
"""Limit of a call's time beside the readers, in medians of a call alone. Without fair turns it is far exceeded."""


@asynccontextmanager
async def crowd(kind, size, address):
    command = (sys.executable, "-m", "tests.torture.crowds", kind, str(size), address)
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"stands\n"
        yield
    finally:
        await process.communicate(b"")
    assert process.returncode == 0


def matches(raw, request, times):
    """Makes calls of the other client, one after another."""
    for number in range(CALLS):
        began = time.perf_counter()
        raw.socket.send(match_call(number, request))
        assert packets.reply(raw.socket.receive()[0]).status == 0
        times.append(time.perf_counter() - began)


async def probes(channel, times):
    stub: Any = HealthStub(channel)
    for _ in range(PROBES):
        began = time.perf_counter()
        await stub.Check(HealthCheckRequest())
        times.append(time.perf_counter() - began)


@pytest.mark.limit(600)
async def test_a_client_beside_pipelining_readers_has_its_turns(start_fresh, found):
    daemon = start_fresh(host=64)
    alone: list[float] = []
    beside: list[float] = []
    health: list[float] = []
    async with attached(daemon.address) as raw, channel_to(daemon.address) as channel:
        cache = (await raw.open("bystander", budgets=sizes(host=32))).cache_id
        request = blocks_pb2.MatchRequest(cache_id=cache, keys=b"".join(chain("other", 4))).SerializeToString()
        matches(raw, request, [])
        for _ in range(ROUNDS):
            matches(raw, request, alone)
            async with crowd("readers", READERS, daemon.address):
                matches(raw, request, beside)
                await probes(channel, health)
    p50, p99 = ([float(np.quantile(each, q)) * 1000 for each in (alone, beside, health)] for q in (0.5, 0.99))
    assert np.quantile(beside, 0.9) < MOST_TIMES * np.median(alone)
    found(
        f"{READERS} pipelining readers: p99 of another's match {p99[1]:.1f} ms, {p99[0]:.1f} alone; "
        f"p50 {p50[1]:.1f}, {p50[0]:.1f} alone; health {p99[2]:.1f} ms"
    )


async def test_clients_that_read_no_answer_leave_others_their_calls(start_fresh):
    daemon = start_fresh(host=64)
    async with await connect(daemon.address) as client:
        cache = await client.open_cache("bystander", SPEC, budgets=sizes(host=32))
        async with crowd("deaf", DEAF, daemon.address):
            keys = chain("other", 4)
            for _ in range(CALLS):
                await cache.put(keys, blocks(keys))
                await cache.drop(keys)
            assert len((await client.stats()).sessions) == DEAF + 1
