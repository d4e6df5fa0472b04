"""A device that is lost while everything happens: what it held goes, with its events, and everything else serves on.

The device tier is a stand-in here, and the daemon a faulty one whose copies and probes fail once a file is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from grpc_health.v1 import health_pb2

import kvtier
from kvtier import (
    AsyncClient,
    BlockResult,
    Cache,
    CacheSpec,
    Cause,
    Cursor,
    DeviceLost,
    Event,
    EventType,
    Gap,
    Heartbeat,
    Mirror,
    Tier,
    connect,
)
from kvtier.abi.attach import RPC_SOCKET
from kvtier.v1 import blocks_pb2, transfer_pb2
from kvtier.wire import tier_to_wire
from kvtierd.tiers.disk.superblock import SUPERBLOCK
from tests import devices
from tests.integration.blocks import BLOCK_BYTES, SPEC, assert_bytes, blocks, chain, sizes
from tests.integration.raw import attached, refusal
from tests.integration.seeing import listed_without_device, tier_stats
from tests.integration.test_transfer import header, part
from tests.integration.torture import FaultyDaemon
from tests.integration.waiting import PATIENCE_S, eventually

SLOTS = {"device": 16, "host": 16, "disk": 64}
ON_HOST = chain("on host", 4)
ON_DEVICE = chain("on the device", 4)
ON_BOTH = chain("on the device and on disk", 4)


pytestmark = pytest.mark.skipif(devices.ON_CUDA, reason="of a stand-in; of a GPU it is test_lost_gpu")


class LosableDaemon(FaultyDaemon):
    fault = "loses_its_device"

    @property
    def _orders(self) -> Path:
        return self.home / "device"

    def start(self) -> None:
        self.variables["KVTIER_TEST_ORDERS"] = str(self._orders)
        super().start()

    def hold_copies(self) -> None:
        self._order("hold")

    def lose_device(self) -> None:
        self._order("lose")

    def mend_device(self) -> None:
        """As a restart finds it."""
        self._orders.unlink()

    def _order(self, what: str) -> None:
        new = self.home / "device.new"
        new.write_text(what)
        new.rename(self._orders)

    def assert_healthy_log(self) -> None:
        """It has failed copies to tell of."""


@pytest.fixture
def start(short_dir: Path) -> Iterator[Callable[..., LosableDaemon]]:
    """Starts one with tiers of so many bytes, and these flags; it is stopped at the end of the test."""
    with ExitStack() as stack:

        def begin(sizes: Mapping[Tier, int], *flags: str) -> LosableDaemon:
            process = LosableDaemon(short_dir, sizes, flags)
            process.start()
            stack.callback(process.stop)
            return process

        yield begin


@pytest.fixture
def daemon(start: Callable[..., LosableDaemon]) -> LosableDaemon:
    return start(sizes(**SLOTS))


async def lost(client: AsyncClient) -> None:
    """Returns when the loss has been told, to the last block and with its epoch."""
    await eventually(client.stats, lambda stats: stats.epoch > 1)


async def filled(client: AsyncClient) -> Cache:
    """The three chains, where their names say, and on the device under the one on the host a child."""
    cache = await client.open_cache("c", SPEC, budgets=sizes(**SLOTS))
    for keys, tier in ((ON_HOST, Tier.HOST), (ON_DEVICE, Tier.DEVICE), (ON_BOTH, Tier.HOST)):
        await cache.put(keys, blocks(keys), tier=tier)
    assert set(await cache.move(ON_BOTH, Tier.DISK)) == {BlockResult.OK}
    async with cache.acquire(ON_BOTH, Tier.DEVICE):
        pass
    return cache


async def test_what_it_held_goes_with_its_events_and_other_tiers_serve_on(daemon: LosableDaemon) -> None:
    async with await connect(daemon.address) as client, Mirror(client, ["c"]) as mirror:
        cache = await filled(client)
        before = await client.stats()
        reading = await cache.acquire(ON_DEVICE, Tier.DEVICE)
        writing = await cache.reserve(2, Tier.DEVICE)
        daemon.hold_copies()
        waiting = asyncio.create_task(_reserve(cache, SLOTS["device"] - 6))
        await eventually(client.stats, lambda stats: any(one.waiting for one in stats.caches))
        daemon.lose_device()

        with pytest.raises(DeviceLost, match="restarted"):
            await waiting
        await lost(client)
        stats = await client.stats()
        assert [problem for problem in stats.problems if "the test has lost it" in problem]
        assert (await cache.match(ON_DEVICE)).blocks == 0
        for keys in (ON_HOST, ON_BOTH):
            assert (await cache.match(keys)).blocks == len(keys)
            assert_bytes(keys, await cache.get(keys, tier=Tier.HOST))
        for refused in (
            cache.reserve(1, Tier.DEVICE),
            cache.acquire(ON_HOST, Tier.DEVICE),
            cache.across.acquire(ON_HOST, Tier.DEVICE),
        ):
            with pytest.raises(DeviceLost):
                await refused
        with pytest.raises(DeviceLost):
            await cache.move(ON_HOST, Tier.DEVICE)
        with pytest.raises(DeviceLost):
            await writing.commit(chain("too late", 1))
        await cache.release(writing, reading)
        device = await tier_stats(client, "c", Tier.DEVICE)
        assert (device.quarantined, device.held) == (SLOTS["device"], 0)

        async with asyncio.timeout(PATIENCE_S):
            await mirror.synced(Cursor(stats.epoch, stats.last_event_id))
        assert mirror.resyncs == 0
        assert mirror.cursor is not None and mirror.cursor.epoch == stats.epoch == 2
        await _assert_exact(mirror, cache)
        await _assert_told(client, Cursor(before.epoch, before.last_event_id))


async def _reserve(cache: Cache, count: int) -> None:
    async with cache.reserve(count, Tier.DEVICE, timeout=60):
        raise AssertionError("there was room after all")


async def _assert_exact(mirror: Mirror, cache: Cache) -> None:
    for keys in (ON_HOST, ON_DEVICE, ON_BOTH):
        assert mirror.longest_prefix(keys) == (await cache.match(keys)).blocks


async def _assert_told(client: AsyncClient, since: Cursor) -> None:
    """A watch from before the loss sees every block go from the device, and the epoch after that, without a gap."""
    gone: set[bytes] = set()
    left: set[bytes] = set()
    async with client.watch(since=since, heartbeats=True) as watch:
        async for item in watch:
            assert not isinstance(item, Gap), item
            if isinstance(item, Event) and item.cause in (Cause.LOST, Cause.ANCESTOR):
                assert item.epoch == 1
                if item.type is EventType.REMOVED:
                    gone.update(item.keys)
                elif item.type is EventType.UPDATED:
                    left.update(item.keys)
                    assert not any(residency & 1 for residency in item.residency)
            if isinstance(item, Heartbeat) and item.cursor.epoch == 2:
                break
    assert gone == set(ON_DEVICE)
    assert left == set(ON_BOTH)


@pytest.mark.parametrize("is_mapped", [True, False], ids=["mapped", "streamed"])
async def test_calls_that_name_no_tier_go_to_the_next_one(daemon: LosableDaemon, is_mapped: bool) -> None:
    async with await connect(daemon.address) as client:
        await filled(client)
        cache = await client.open_cache("c", SPEC, mapped=is_mapped)
        assert cache.lease_tier() is Tier.DEVICE
        daemon.lose_device()
        await lost(client)
        new, more, joint = chain("new", 3), chain("more", 2), chain("joint", 2)
        assert_bytes(ON_BOTH, await cache.get(ON_BOTH))
        assert cache.lease_tier() is Tier.HOST
        assert await cache.put(new, blocks(new)) == [BlockResult.OK] * len(new)
        assert await cache.stream_put(more, blocks(more)) == [BlockResult.OK] * len(more)
        assert_bytes(more, await cache.stream_get(more))
        assert await cache.across.put(joint, {0: blocks(joint)}) == {0: [BlockResult.OK] * len(joint)}
        async with (
            cache.acquire(new) as one,
            cache.acquire_many([more, joint]) as two,
            cache.across.acquire(new) as all_,
        ):
            assert {one.tier, *(lease.tier for lease in two), *(part.tier for part in all_.groups)} == {Tier.HOST}
        with pytest.raises(DeviceLost):
            await cache.stream_get(new, tier=Tier.DEVICE)


async def test_the_first_call_that_names_no_tier_is_not_refused_whichever_it_is(daemon: LosableDaemon) -> None:
    async with await connect(daemon.address) as client:
        await filled(client)
        daemon.lose_device()
        await lost(client)
        one, two, three = chain("one", 1), chain("two", 1), chain("three", 1)

        async def fresh() -> Cache:
            return await client.open_cache("c", SPEC)

        assert await (await fresh()).put(one, blocks(one)) == [BlockResult.OK]
        assert await (await fresh()).stream_put(two, blocks(two)) == [BlockResult.OK]
        assert await (await fresh()).across.put(three, {0: blocks(three)}) == {0: [BlockResult.OK]}
        for take in (
            (await fresh()).reserve(1),
            (await fresh()).acquire(ON_HOST),
            (await fresh()).across.acquire(ON_HOST),
        ):
            async with take:
                pass
        async with (await fresh()).acquire_many([ON_HOST]) as (lease,):
            assert lease.tier is Tier.HOST
        assert (await (await fresh()).across.get(ON_BOTH)).blocks == len(ON_BOTH)


async def test_a_put_whose_bytes_are_on_the_way_is_refused(daemon: LosableDaemon) -> None:
    keys = chain("on the way", 2)
    data = b"".join(block.tobytes() for block in blocks(keys))
    async with attached(daemon.address) as raw, await connect(daemon.address) as client:
        opened = await raw.open("c")
        call = raw.stubs.transfer.Put(metadata=raw.metadata, timeout=60)
        await call.write(header(opened.cache_id, keys, tier=tier_to_wire(Tier.DEVICE)))
        await call.write(part(0, 0, data[: BLOCK_BYTES // 2]))
        await eventually(lambda: tier_stats(client, "c", Tier.DEVICE), lambda seen: seen.held == len(keys))
        daemon.lose_device()
        await lost(client)
        with suppress(asyncio.InvalidStateError):  # it may be refused already
            await call.write(part(0, BLOCK_BYTES // 2, data[BLOCK_BYTES // 2 : BLOCK_BYTES]))
            await call.done_writing()
        assert (await refusal(call)).reason == "DEVICE_LOST"
        await eventually(lambda: tier_stats(client, "c", Tier.DEVICE), lambda seen: seen.held == 0)


async def test_a_get_whose_bytes_are_on_the_way_is_refused(start: Callable[..., LosableDaemon]) -> None:
    spec = CacheSpec.single("large", "uint8", tokens_per_block=64, layers=23, kv_heads=1, head_size=1024)
    keys = chain("large", 8)
    daemon = start({Tier.DEVICE: len(keys) * spec.record_bytes(0)})
    async with attached(daemon.address) as raw, await connect(daemon.address) as client:
        opened = await raw.open("c", spec)
        cache = await client.open_cache("c", spec)
        await cache.put(keys, [np.zeros(spec.block_bytes(0), np.uint8)] * len(keys))
        acquire = blocks_pb2.AcquireRequest(
            cache_id=opened.cache_id,
            tier=tier_to_wire(Tier.DEVICE),
            chains=[blocks_pb2.Chain(keys=b"".join(keys))],
        )
        call = raw.stubs.transfer.Get(transfer_pb2.GetRequest(acquire=acquire), metadata=raw.metadata, timeout=60)
        assert await call.read()
        await eventually(lambda: tier_stats(client, "c", Tier.DEVICE), lambda seen: seen.held == len(keys))
        daemon.lose_device()
        await lost(client)
        assert (await refusal(_to_the_end(call))).reason == "DEVICE_LOST"
        await eventually(lambda: tier_stats(client, "c", Tier.DEVICE), lambda seen: seen.held == 0)
    assert "a bug of kvtier" not in daemon.log and "AssertionError" not in daemon.log


async def _to_the_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_health_and_explanations_say_so(daemon: LosableDaemon) -> None:
    async with await connect(daemon.address) as client:
        assert await _health(daemon, "kvtier.device") == health_pb2.HealthCheckResponse.SERVING
        await filled(client)
        daemon.lose_device()
        await lost(client)
        assert await _health(daemon, "kvtier.device") == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await _health(daemon, "") == health_pb2.HealthCheckResponse.SERVING
        explained = await client.explain(ON_DEVICE[0])
        assert explained.state == "gone"
        assert explained.past is not None and explained.past[-1].cause is Cause.LOST
        assert (await client.explain(ON_HOST[0])).state == "stored"


async def _health(daemon: LosableDaemon, service: str) -> int:
    async with grpc.aio.insecure_channel(f"unix:{Path(daemon.address, RPC_SOCKET)}") as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            health_pb2.HealthCheckRequest.SerializeToString,
            health_pb2.HealthCheckResponse.FromString,
        )
        return int((await check(health_pb2.HealthCheckRequest(service=service))).status)


async def test_the_epoch_waits_for_a_state_directory_that_fails_and_nothing_else_does(daemon: LosableDaemon) -> None:
    in_the_way = daemon.state_dir / f"{SUPERBLOCK}.new"
    async with await connect(daemon.address) as client:
        cache = await filled(client)
        in_the_way.unlink()
        in_the_way.mkdir()
        daemon.lose_device()
        problems = await eventually(
            client.stats, lambda stats: any("cannot begin yet" in one for one in stats.problems)
        )
        assert problems.epoch == 1
        assert (await cache.match(ON_DEVICE)).blocks == 0
        assert_bytes(ON_HOST, await cache.get(ON_HOST, tier=Tier.HOST))
        in_the_way.rmdir()
        await lost(client)
        assert not any("cannot begin yet" in one for one in (await client.stats()).problems)


async def test_new_caches_get_no_device_tier_and_a_restart_brings_it_back(daemon: LosableDaemon) -> None:
    async with await connect(daemon.address) as client:
        await client.open_cache("c", SPEC, budgets=sizes(device=8, host=8, disk=32))
        daemon.lose_device()
        await lost(client)
        with pytest.raises(DeviceLost, match="without the device tier"):
            await client.open_cache("wants-one", SPEC, budgets=sizes(device=8, host=4, disk=4))
        without = await client.open_cache("wants-none", SPEC, budgets=sizes(host=4, disk=4))
        await without.put(ON_HOST, blocks(ON_HOST))
        again = await client.open_cache("c", SPEC)
        await again.put(ON_BOTH, blocks(ON_BOTH), tier=Tier.HOST)
        assert set(await again.move(ON_BOTH, Tier.DISK)) == {BlockResult.OK}
        last = (await client.stats()).last_event_id
    daemon.mend_device()
    daemon.stop()
    daemon.start()
    async with await connect(daemon.address) as client:
        stats = await client.stats()
        assert (stats.epoch, stats.problems) == (2, ())
        cache = await client.open_cache("c", SPEC)
        assert_bytes(ON_BOTH, await cache.get(ON_BOTH, tier=Tier.DEVICE))
        device = await tier_stats(client, "c", Tier.DEVICE)
        assert (device.quarantined, device.ready) == (0, len(ON_BOTH))
        async for item in client.watch(since=Cursor(1, 0)):
            assert not isinstance(item, Gap), item
            assert isinstance(item, Event)
            if item.event_id > last:
                assert item.epoch == 2
                break


async def test_traffic_goes_on_and_the_events_stay_exact(daemon: LosableDaemon) -> None:
    """Nobody hangs: every call ends, well or with the loss."""
    async with await connect(daemon.address) as client, Mirror(client, ["c"]) as mirror:
        cache = await client.open_cache("c", SPEC, budgets=sizes(**SLOTS))
        chains = [chain(f"traffic {number}", 6) for number in range(12)]
        over = asyncio.Event()

        async def use(number: int) -> None:
            turn = number
            while not over.is_set():
                turn += 5
                keys = chains[turn % len(chains)]
                tier = (Tier.DEVICE, Tier.HOST)[turn % 2]
                with suppress(DeviceLost, kvtier.TierFull):
                    await cache.put(keys, blocks(keys), tier=tier, timeout=PATIENCE_S)
                with suppress(DeviceLost, kvtier.TierFull, kvtier.StaleRead):
                    found = await cache.get(keys, tier=(Tier.HOST, Tier.DEVICE)[turn // 2 % 2], timeout=PATIENCE_S)
                    assert_bytes(keys[: len(found)], found)

        users = [asyncio.create_task(use(number)) for number in range(4)]
        await eventually(client.stats, lambda stats: stats.last_event_id > 200)
        daemon.lose_device()
        await lost(client)
        told = (await client.stats()).last_event_id
        await eventually(client.stats, lambda stats: stats.last_event_id > told + 100)
        over.set()
        async with asyncio.timeout(3 * PATIENCE_S):
            await asyncio.gather(*users)
        await listed_without_device(client, cache, mirror, chains)
        assert (await tier_stats(client, "c", Tier.DEVICE)).quarantined == SLOTS["device"]
