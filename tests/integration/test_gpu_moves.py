"""Bytes on their way to and from a GPU, with real daemons on the fake of NVIDIA's bindings, whose streams are late and
refuse whatever nothing orders: every byte is compared, and what fails costs nobody a byte."""

import asyncio
from contextlib import contextmanager
from itertools import permutations

import pytest
import xxhash

from kvtier import BlockResult, TierFull
from kvtier.abi.words import TIERS
from kvtier.v1 import blocks_pb2
from kvtier.wire import tier_to_wire
from tests.integration.actors import Actor
from tests.integration.blocks import SLOT_BYTES, assert_bytes, block, blocks, chain, opened_cache, put_chain, sizes
from tests.integration.on_gpu import calls, gpu_daemon, not_given_back, serving
from tests.integration.raw import attached
from tests.integration.scraping import LISTEN, scrape
from tests.integration.seeing import cache_stats, tier_stats
from tests.integration.test_transfer import header, part
from tests.integration.waiting import PATIENCE_S, eventually

DEVICE, HOST, DISK = TIERS
EDGES = list(permutations(TIERS, 2))
OK = {BlockResult.OK}
OLD_DRIVER = {"driver_version": 12080}
"""Without a call for whole batches."""


@contextmanager
def troubled(home, *flags, gpu, **slots):
    """Its log may name errors. Killed at the end if it runs still."""
    daemon = gpu_daemon(home, sizes(**slots), flags, gpu=gpu)
    daemon.start()
    try:
        yield daemon
    finally:
        if daemon.running:
            daemon.kill()


def opened(daemon):
    """A client and a cache whose bytes pass through the daemon."""
    return opened_cache(daemon.address, "c", mapped=False)


async def problems(client):
    return (await client.stats()).problems


@pytest.mark.parametrize("gpu", [{}, OLD_DRIVER], ids=["batches", "one-by-one"])
async def test_every_edge_carries_every_byte(short_dir, gpu):
    with serving(short_dir, device=6, host=6, disk=12, gpu=gpu) as daemon:
        async with opened(daemon) as (client, cache):
            for number, (src, dst) in enumerate(EDGES):
                keys = await put_chain(cache, f"edge {number}", 5, tier=HOST if src is DISK else src)
                if src is DISK:
                    assert set(await cache.move(keys, DISK)) == OK
                assert set(await cache.move(keys, dst)) == OK
                assert all(residency & dst.bit for residency in (await cache.match(keys)).residency)
                assert_bytes(keys, await cache.get(keys, tier=HOST if dst is DISK else dst))
                await cache.drop(keys[:1])
            stats = await cache_stats(client, "c")
            assert {edge.edge: edge.failures for edge in stats.edges} == {f"{a}>{b}": 0 for a, b in EDGES}


async def test_what_a_device_slot_holds_can_be_checked_from_afar(short_dir):
    with serving(short_dir, device=4) as daemon:
        async with attached(daemon.address) as raw, opened(daemon) as (_, cache):
            keys = await put_chain(cache, "sums", 3, tier=DEVICE)
            cache_id = (await raw.open("c")).cache_id
            request = blocks_pb2.ChecksumsRequest(cache_id=cache_id, keys=b"".join([*keys, *chain("none", 1)]))
            told = await raw.call(raw.stubs.blocks.Checksums, request)
            assert told.known == b"\1\1\1\0"
            assert told.checksums[:48] == b"".join(xxhash.xxh3_128_digest(block(key).data) for key in keys)


async def test_host_memory_is_page_locked_and_counted(short_dir):
    with serving(short_dir, *LISTEN, device=4, host=8) as daemon:
        async with opened(daemon):

            async def locked():
                return (await scrape(daemon)).value("kvtier_page_locked_bytes", cache="c")

            await eventually(locked, lambda nbytes: nbytes == 8 * SLOT_BYTES)


async def test_memory_that_cannot_be_page_locked_is_used_as_it_is(short_dir):
    failure = {"call": "cuMemHostRegister", "code": "CUDA_ERROR_OUT_OF_MEMORY", "times": 0}
    keys = chain("pageable", 4)
    with serving(short_dir, device=4, host=8, gpu={"fail": [failure]}) as daemon:
        async with opened(daemon) as (client, cache):
            (problem,) = await eventually(lambda: problems(client), lambda found: found)
            assert "0 of" in problem and "cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY" in problem
            await cache.put(keys, blocks(keys), tier=DEVICE)
            for tier in (HOST, DEVICE):
                assert set(await cache.move(keys, tier)) == OK
                assert_bytes(keys, await cache.get(keys, tier=tier))


@pytest.mark.parametrize(("call", "times"), [("cuMemcpyBatchAsync", 1), ("cuEventRecord", 1), ("cuEventQuery", 2)])
async def test_a_copy_that_fails_leaves_its_source_and_is_tried_again(short_dir, call, times):
    failure = {"call": call, "code": "CUDA_ERROR_INVALID_VALUE", "times": times}
    with troubled(short_dir, device=4, host=8, gpu={"fail": [failure]}) as daemon:
        async with opened(daemon) as (client, cache):
            keys = await put_chain(cache, "failing", 4, tier=HOST)
            assert BlockResult.OK not in set(await cache.move(keys, DEVICE))
            assert set((await cache.match(keys)).residency) == {HOST.bit}
            assert any(f"{call}: CUDA_ERROR_INVALID_VALUE" in line for line in await problems(client))
            assert_bytes(keys, await cache.get(keys, tier=HOST))
            assert set(await cache.move(keys, DEVICE)) == OK
            assert_bytes(keys, await cache.get(keys, tier=DEVICE))
        daemon.terminate()
        assert daemon.ended() == 0


async def test_while_the_gpu_is_busy_others_are_served_and_nothing_is_ready_too_soon(short_dir):
    hold = short_dir / "hold"
    keys, others = chain("held", 4), chain("others", 4)
    with serving(short_dir, device=4, host=12, gpu={"hold": hold}) as daemon:
        async with opened(daemon) as (client, cache):
            await cache.put(keys, blocks(keys), tier=HOST)
            hold.touch()
            moving = asyncio.create_task(cache.move(keys, DEVICE))
            await eventually(lambda: tier_stats(client, "c", DEVICE), lambda tier: tier.filling == 4)
            assert set(await cache.put(others, blocks(others), tier=HOST)) == OK
            assert_bytes(others, await cache.get(others, tier=HOST))
            assert set((await cache.match(keys)).residency) == {HOST.bit}
            assert not moving.done()
            hold.unlink()
            assert set(await moving) == OK
            assert_bytes(keys, await cache.get(keys, tier=DEVICE))


def one_put(cache_id, key):
    """A put of one block to the device but for the end of its stream: its messages as they are on the wire, in hex."""
    messages = header(cache_id, [key], tier=tier_to_wire(DEVICE)), part(0, 0, block(key).tobytes())
    return [message.SerializeToString().hex() for message in messages]


async def test_a_slot_is_not_given_to_others_while_the_gpu_still_writes_to_it(short_dir):
    """Its session's process is killed in the middle of a put."""
    hold = short_dir / "hold"
    keys = chain("dying", 1)
    with serving(short_dir, device=1, host=4, gpu={"hold": hold}) as daemon:
        async with opened(daemon) as (client, cache):

            async def device():
                return await tier_stats(client, "c", DEVICE)

            hold.touch()
            sent = one_put(cache.info.cache_id, keys[0])
            with Actor("send_half", address=daemon.address, cache="c", messages=sent) as actor:
                actor.says()
                await eventually(lambda: cuda_calls(short_dir, daemon.pid, "cuMemcpyBatchAsync"), bool)
                assert (await device()).blank == 1
                actor.kill()
            await eventually(device, lambda tier: tier.orphaned == 1)
            with pytest.raises(TierFull):
                await cache.put(keys, blocks(keys), tier=DEVICE, timeout=PATIENCE_S)
            hold.unlink()
            await eventually(device, lambda tier: tier.free == 1)
            assert set(await cache.put(keys, blocks(keys), tier=DEVICE)) == OK
            assert_bytes(keys, await cache.get(keys, tier=DEVICE))


async def test_a_stop_waits_not_for_ever_and_frees_no_memory_that_the_gpu_still_copies(short_dir):
    """For a move and for somebody's put, both of which the GPU holds up."""
    hold = short_dir / "hold"
    keys = chain("stop", 2)
    with troubled(short_dir, "--shutdown-seconds", "0.2", device=4, host=8, gpu={"hold": hold}) as daemon:
        pid = daemon.pid
        async with opened(daemon) as (client, cache):
            await cache.put(keys, blocks(keys), tier=HOST)
            hold.touch()
            moving = asyncio.create_task(cache.move(keys, DEVICE))
            await eventually(lambda: tier_stats(client, "c", DEVICE), lambda tier: tier.filling == 2)
            before = cuda_calls(short_dir, pid, "cuMemcpyBatchAsync")
            sent = one_put(cache.info.cache_id, chain("stream", 1)[0])
            with Actor("send_half", address=daemon.address, cache="c", messages=sent) as actor:
                actor.says()
                await eventually(lambda: cuda_calls(short_dir, pid, "cuMemcpyBatchAsync"), lambda made: made > before)
                daemon.terminate()
                assert await asyncio.to_thread(daemon.ended) != 0
            moving.cancel()
            await asyncio.wait([moving])
        assert not_given_back(short_dir, pid).keys() >= {"cuMemUnmap", "cuMemHostUnregister", "cuStreamDestroy"}


async def test_checksums_that_the_gpu_holds_up_take_no_threads_from_others(short_dir):
    """More of them than the loop's own executor has threads, each given up by who asked."""
    hold = short_dir / "hold"
    with serving(short_dir, device=4, disk=16, gpu={"hold": hold}) as daemon:
        async with attached(daemon.address) as raw, opened(daemon) as (_, cache):
            keys = await put_chain(cache, "sums", 1, tier=DEVICE)
            request = blocks_pb2.ChecksumsRequest(cache_id=(await raw.open("c")).cache_id, keys=keys[0])
            hold.touch()
            for _ in range(33):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await raw.call(raw.stubs.blocks.Checksums, request)
            try:
                async with asyncio.timeout(PATIENCE_S / 2):
                    await cache.reset()
            finally:
                hold.unlink()


def cuda_calls(home, pid, name):
    return sum(line["call"] == name for line in calls(home, pid))
