"""Calls and sessions of a daemon inside the test: faults that only its inside can plant, and calls cut short.

``tests/integration`` shows what each verb answers and refuses.
"""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from kvtier.abi import attach
from kvtier.abi.key_index import IndexReader
from kvtier.abi.layout import INDEXES_HERE, ArenaLayout
from kvtier.v1 import admin_pb2, blocks_pb2, caches_pb2, events_pb2, events_pb2_grpc, session_pb2
from kvtier.wire import spec_to_wire
from kvtierd.service.daemon import Daemon
from kvtierd.tiers.mapped import Chaos
from tests import packets
from tests.integration.waiting import eventually
from tests.unit.service.relay import relay
from tests.unit.service.rig import (
    DEVICE,
    DISK,
    SLOT_BYTES,
    SPEC,
    AttachSocket,
    Client,
    attached,
    chain,
    config,
    refusal,
    running,
)

Code = grpc.StatusCode
KEYS = chain(4)


@pytest.mark.skipif(not INDEXES_HERE, reason="no key index on this processor")
async def test_no_commit_is_answered_before_the_key_index_tells_of_it(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked at where its answer is handed to gRPC."""
    shown: list[int] = []
    readers: list[IndexReader] = []
    unary = grpc.stream_unary_rpc_method_handler

    def looking(call: Any, *, response_serializer: Any, **others: Any) -> Any:
        def serialise(message: Any) -> bytes:
            shown.extend(reader.shown()[1] for reader in readers)
            return bytes(response_serializer(message))

        return unary(call, response_serializer=serialise, **others)

    monkeypatch.setattr(grpc, "stream_unary_rpc_method_handler", looking)
    async with running(config(short_dir, device=16, host=16)) as daemon, attached(daemon) as client:
        cache = await client.open()
        arena = next(iter(daemon._catalog)).runtime.arena
        control = arena._control.array
        readers.append(IndexReader(ArenaLayout.read(control, SPEC), control))
        await client.put(cache, chain(16), release=False)
        readers.clear()
        stats = await client.call(client.admin.Stats, admin_pb2.StatsRequest())
        reserved, committed = shown
        assert reserved < committed == stats.last_event_id


async def test_an_open_that_its_caller_gave_up_is_finished_all_the_same(client: Client) -> None:
    request = caches_pb2.OpenRequest(name="cache", spec=spec_to_wire(SPEC), seq=1)
    call = client.caches.Open(request, metadata=client.metadata)
    await asyncio.sleep(0.002)
    call.cancel()
    again = await client.call(client.caches.Open, request)
    assert [tier.slots for tier in again.info.groups[0].tiers] == [8, 16]
    listed = await client.call(client.caches.List, caches_pb2.ListCachesRequest())
    assert [cache.name for cache in listed.caches] == ["cache"]
    await client.put(again.cache_id, KEYS)


@pytest.mark.parametrize("tier", [DISK, 9])
async def test_a_budget_of_a_tier_that_the_daemon_lacks_is_refused(client: Client, tier: int) -> None:
    code, detail = await refusal(client.open(budgets={tier: SLOT_BYTES}))
    assert (code, detail.field) == (Code.INVALID_ARGUMENT, "budgets[0].tier")


async def test_our_own_bug_is_internal_and_logged(
    daemon: Daemon, client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = await client.open()

    def broken(*_: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(daemon._engine, "manager", broken)
    code, detail = await client.refusal(client.blocks.Match, blocks_pb2.MatchRequest(cache_id=cache, keys=KEYS[0]))
    assert (code, detail.reason) == (Code.INTERNAL, "INTERNAL")
    assert "planted" in caplog.text


@pytest.fixture
async def slow(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    """On a daemon whose copies take up to half a second, so that calls wait for room."""
    monkeypatch.setattr("kvtierd.service.daemon.Chaos", lambda seed: Chaos(seed, max_delay_s=0.5))
    async with running(config(short_dir, chaos_seed=2)) as daemon, attached(daemon) as client:
        yield client


async def cache_stats(client: Client) -> admin_pb2.CacheStats:
    stats = await client.call(client.admin.Stats, admin_pb2.StatsRequest())
    (cache,) = stats.caches
    assert isinstance(cache, admin_pb2.CacheStats)
    return cache


def nothing_held(cache: admin_pb2.CacheStats) -> bool:
    return not (cache.waiting or any(tier.held or tier.filling or tier.retiring for tier in cache.tiers))


@pytest.mark.parametrize("seq", [0, 5])
async def test_a_call_cancelled_while_it_waits_leaves_nothing_held(slow: Client, seq: int) -> None:
    cache = await slow.open()
    await slow.put(cache, chain(8))
    request = blocks_pb2.ReserveRequest(cache_id=cache, tier=DEVICE, count=8, seq=seq)
    call = slow.blocks.Reserve(request, metadata=slow.metadata)
    await eventually(lambda: cache_stats(slow), lambda stats: stats.waiting == 1)
    assert call.cancel()
    await eventually(lambda: cache_stats(slow), nothing_held)


async def test_an_acquire_whose_session_broke_off_is_refused_whole_and_may_be_repeated(slow: Client) -> None:
    cache = await slow.open()
    chosen = [chain(4, seed=seed) for seed in range(3)]
    for keys in chosen:
        await slow.put(cache, keys)
    here, below = b"".join(chosen[2]), b"".join(chosen[0])
    wanted = [blocks_pb2.Chain(keys=here), blocks_pb2.Chain(keys=below)]
    request = blocks_pb2.AcquireRequest(cache_id=cache, tier=DEVICE, chains=wanted, seq=1)
    waiting = asyncio.create_task(slow.refusal(slow.blocks.Acquire, request))
    await eventually(lambda: cache_stats(slow), lambda stats: stats.tiers[0].held > 0)
    slow.socket.close()
    assert (await waiting)[0] is Code.CANCELLED
    slow.socket = await AttachSocket.connect(slow.address)
    assert isinstance(await slow.socket.hello(slow.welcome.token), session_pb2.Welcome)
    await eventually(lambda: cache_stats(slow), nothing_held)
    again = await slow.call(slow.blocks.Acquire, request)
    assert [held.matched for held in again.chains] == [4, 4]
    await slow.release(cache, *[held.groups[0].lease_id for held in again.chains])


ATTACHES = """
import socket, sys
from kvtier.abi import attach
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect(attach.socket_path(sys.argv[1], attach.ATTACH_SOCKET))
sock.send(bytes.fromhex(sys.argv[2]))
print(sock.recv(attach.MAX_MESSAGE).hex())
sys.stdout.flush()
sys.stdin.read()
"""


async def test_a_call_that_waits_for_room_ends_with_its_process(slow: Client) -> None:
    cache = await slow.open()
    await slow.put(cache, chain(8))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", ATTACHES, slow.address, packets.hello().hex()),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    welcome = packets.reply(bytes.fromhex((await process.stdout.readline()).decode()))
    assert isinstance(welcome, session_pb2.Welcome)
    child = Client(slow.socket, welcome, slow.channel)
    await child.open()
    request = blocks_pb2.ReserveRequest(cache_id=cache, tier=DEVICE, count=8, seq=1)
    waiting = asyncio.create_task(child.call(child.blocks.Reserve, request))
    await eventually(lambda: cache_stats(slow), lambda stats: stats.waiting == 1)
    process.kill()
    await process.communicate()
    await asyncio.wait([waiting])
    assert isinstance(waiting.exception(), grpc.aio.AioRpcError | None), "cancelled, or granted just before"
    await eventually(lambda: cache_stats(slow), nothing_held)


async def test_a_new_connection_supersedes_one_that_the_daemon_still_believes_in(client: Client) -> None:
    cache = await client.open()
    await client.reserve(cache, 2)
    second = await AttachSocket.connect(client.address)
    answer = await second.hello(client.welcome.token)
    assert isinstance(answer, session_pb2.Welcome)
    assert answer.resumed
    assert await client.socket.receive() == b"", "the first connection is over"
    device = (await cache_stats(client)).tiers[0]
    assert (device.blank, device.orphaned) == (2, 0)
    second.close()


async def _read_on(watch: AsyncIterator[events_pb2.WatchBatch]) -> None:
    async for _ in watch:
        pass


async def test_a_stop_says_the_last_words_of_every_call_before_it_takes_leave_of_their_connection(
    short_dir: Path,
) -> None:
    daemon = await Daemon.start(config(short_dir))
    rpc_socket = attach.socket_path(daemon.address, attach.RPC_SOCKET)
    async with attached(daemon) as client, relay(short_dir / "relay.sock", rpc_socket) as through:
        async with grpc.aio.insecure_channel(through.address) as channel:
            events: Any = events_pb2_grpc.EventsStub(channel)
            watches = [aiter(events.Watch(events_pb2.WatchRequest(), metadata=client.metadata)) for _ in range(20)]
            for watch in watches:
                await anext(watch)
            reading = [asyncio.create_task(refusal(_read_on(watch))) for watch in watches]
            assert not through.last_words()
            assert await daemon.stop()
            assert {detail.reason for _, detail in await asyncio.gather(*reading)} == {"SHUTTING_DOWN"}
        # A client that answers to the farewell has read what came before it; after it, the connection may be gone.
        assert len(through.last_words()) == len(watches)
        assert max(through.last_words()) < min(through.farewells())


async def test_a_daemon_that_is_stopped_at_once_leaves_no_socket(short_dir: Path) -> None:
    daemon = await Daemon.start(config(short_dir))
    assert await daemon.stop()
    bound_and_open = await asyncio.to_thread(Path("/proc/net/unix").read_text)  # unlinked ones included
    assert f"{short_dir}/" not in bound_and_open
