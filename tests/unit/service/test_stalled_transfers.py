"""A peer of a transfer that neither sends nor takes anything is given up, and holds nothing any more."""

import asyncio
import gc
import warnings
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import xxhash

from kvtier.v1 import admin_pb2, blocks_pb2, transfer_pb2
from kvtierd.service.daemon import Daemon
from tests.unit.service.rig import HOST, SPEC, Client, attached, chain, config, parents_of, refusal, running

KEYS = chain(2)
SLOTS = 2048
BLOCK = bytes(SPEC.block_bytes(0))
PATIENCE_S = 30.0


@pytest.fixture
async def daemon(short_dir: Path) -> AsyncIterator[Daemon]:
    async with running(config(short_dir, device=0, host=SLOTS, transfer_idle_seconds=0.1)) as daemon:
        yield daemon


def header(cache: int, keys: Sequence[bytes]) -> transfer_pb2.PutChunk:
    commit = blocks_pb2.CommitRequest(cache_id=cache, keys=b"".join(keys), parents=parents_of(keys))
    sums = xxhash.xxh3_128_digest(bytes(SPEC.block_bytes(0))) * len(keys)
    return transfer_pb2.PutChunk(header=transfer_pb2.PutHeader(commit=commit, tier=HOST, checksums=sums))


async def held(client: Client) -> int:
    """Slots under leases."""
    stats = await client.call(client.admin.Stats, admin_pb2.StatsRequest())
    return sum(tier.held for cache in stats.caches for tier in cache.tiers)


@asynccontextmanager
async def sending(daemon: Daemon, keys: Sequence[bytes] = KEYS) -> AsyncIterator[tuple[Client, int, Any]]:
    """A client, its cache, and a call that has told what blocks it will send."""
    async with attached(daemon) as client:
        cache = await client.open()
        call = client.transfer.Put(metadata=client.metadata)
        await call.write(header(cache, keys))
        yield client, cache, call


@pytest.mark.parametrize("nbytes", [16, 2 * SPEC.block_bytes(0)], ids=["a few bytes", "all bytes"])
async def test_a_sender_that_never_ends_is_given_up(daemon: Daemon, nbytes: int) -> None:
    async with sending(daemon) as (client, cache, call):
        await call.write(transfer_pb2.PutChunk(bytes=transfer_pb2.BlockBytes(data=bytes(nbytes))))
        code, detail = await refusal(call)
        assert (code, detail.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "STALLED")
        assert await held(client) == 0
        match = blocks_pb2.MatchRequest(cache_id=cache, keys=b"".join(KEYS))
        assert (await client.call(client.blocks.Match, match)).blocks == 0


def piece(start: int, stop: int) -> transfer_pb2.PutChunk:
    """Bytes of the stream, counted from its first."""
    block, offset = divmod(start, SPEC.block_bytes(0))
    return transfer_pb2.PutChunk(bytes=transfer_pb2.BlockBytes(block=block, offset=offset, data=bytes(stop - start)))


async def test_a_sender_that_trickles_is_given_up(daemon: Daemon) -> None:
    """A byte at a time is a message at a time, but at no pace that slots are held for."""
    async with sending(daemon) as (client, _, call):
        sent = 0
        with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):  # the call may be over before the test looks
            while sent < 2000 and not call.done():
                await call.write(piece(sent, sent := sent + 1))
                await held(client)  # at the pace of one call for each
        assert sent < 2000
        code, _ = await refusal(call)
        assert code in {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.INTERNAL}, "the latter in mid-message"
        assert await held(client) == 0


async def test_a_sender_that_keeps_the_pace_may_take_longer(short_dir: Path) -> None:
    idle_s = 1.0
    keys = chain(64)
    settings = config(short_dir, device=0, host=len(keys), transfer_idle_seconds=idle_s)
    async with running(settings) as daemon, sending(daemon, keys) as (_, _, call):
        for block in range(len(keys)):
            await asyncio.sleep(1.5 * idle_s / len(keys))
            await call.write(transfer_pb2.PutChunk(bytes=transfer_pb2.BlockBytes(block=block, data=BLOCK)))
        await call.done_writing()
        assert len((await call).results) == len(keys)


async def test_a_reader_that_takes_nothing_is_given_up(short_dir: Path) -> None:
    """More bytes than gRPC takes on its own while nobody reads."""
    settings = config(short_dir, device=0, host=SLOTS, transfer_idle_seconds=1.0)
    async with running(settings) as daemon, attached(daemon) as client:
        cache = await client.open()
        keys = chain(SLOTS - 1)
        await client.put(cache, keys, HOST)
        chains = [blocks_pb2.Chain(keys=b"".join(keys))]
        acquire = blocks_pb2.AcquireRequest(cache_id=cache, tier=HOST, chains=chains)
        call = client.transfer.Get(transfer_pb2.GetRequest(acquire=acquire), metadata=client.metadata)
        assert (await call.read()).header.found.blocks == SLOTS - 1
        assert await held(client) == SLOTS - 1
        async with asyncio.timeout(PATIENCE_S):
            while await held(client):
                pass

        async def read_on() -> None:
            while await call.read() is not grpc.aio.EOF:
                pass

        assert (await refusal(read_on()))[1].reason == "STALLED"


async def test_a_sender_that_is_refused_before_its_first_message_leaves_no_warning(short_dir: Path) -> None:
    """gRPC's iterator of its messages gives one where it is asked for and never awaited."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        async with running(config(short_dir, device=0, host=SLOTS)) as daemon, attached(daemon) as client:
            assert (await refusal(client.transfer.Put(iter([]))))[1].reason == "NO_SESSION"
        gc.collect()
    assert [str(one.message) for one in said if "never awaited" in str(one.message)] == []
