"""A clean stop: whatever is going on, in time, with nothing left behind."""

import asyncio
import fcntl
import os
import random
import signal
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kvtier import BlockResult, DaemonUnavailable, Tier, connect
from tests.integration.actors import Actor
from tests.integration.blocks import SPEC, assert_bytes, blocks, chain, opened_cache, put_chain, sizes
from tests.integration.conftest import own_daemon
from tests.integration.daemon import DaemonProcess
from tests.integration.seeing import cache_stats
from tests.integration.starting import cut_short
from tests.integration.stuck import stuck_disk
from tests.integration.test_crash import SEED
from tests.integration.waiting import PATIENCE_S, eventually, patient

SLOTS = {"device": 8, "host": 8, "disk": 64}
IN_TIME_S = 5.0
"""Most that a stop may take which waits for nobody: idle watches are given two seconds."""

daemon = own_daemon(**SLOTS)


async def stopped_in(daemon):
    """Seconds that a clean stop took."""
    began = time.monotonic()
    await asyncio.to_thread(daemon.stop)
    return time.monotonic() - began


def assert_nothing_left(daemon, pid, shared_memory):
    assert not any(path.exists() for path in daemon.sockets)
    for lock in (*daemon.home.glob("*/LOCK"), *daemon.home.glob("run/*.lock")):
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert set(os.listdir("/dev/shm")) <= shared_memory
    assert not Path(f"/proc/{pid}").exists()


async def log_says(daemon, words):
    await eventually(lambda: asyncio.to_thread(lambda: daemon.log), lambda log: words in log)


async def test_a_stop_with_everything_going_on(start_daemon):
    """Watches, one of them not read; leases; a call that waits for room; a client frozen in the middle of it all."""
    daemon = start_daemon(device=4, disk=64)
    pid, shared_memory = daemon.pid, set(os.listdir("/dev/shm"))
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(await patient(daemon.address))
        holder = await stack.enter_async_context(await patient(daemon.address))
        cache = await client.open_cache("c", SPEC)
        for _ in range(3):
            await anext(await stack.enter_async_context(client.watch(oldest=True)))
        frozen = stack.enter_context(Actor("stare", address=daemon.address))
        frozen.says()
        frozen.signal(signal.SIGSTOP)
        disk = stack.enter_context(stuck_disk(daemon, "c"))
        await put_chain(cache, "in the way", 3)
        held = await (await holder.open_cache("c", SPEC)).reserve(1)
        waiting = asyncio.create_task(three_blank_slots(cache))
        await eventually(lambda: cache_stats(client, "c"), lambda stats: stats.waiting == 1)
        stopping = asyncio.create_task(stopped_in(daemon))
        await log_says(daemon, "kvtierd.serve stopping")
        disk.release()
        assert await stopping < IN_TIME_S
        assert_nothing_left(daemon, pid, shared_memory)
        assert not waiting.done()
        await asyncio.to_thread(daemon.start)
        await waiting
        await held.release()


async def three_blank_slots(cache):
    async with cache.reserve(3, timeout=PATIENCE_S * 3) as lease:
        assert len(lease) == 3


@pytest.mark.parametrize(("number", "times"), [(signal.SIGTERM, 2), (signal.SIGINT, 1), (signal.SIGINT, 50)])
async def test_signals(daemon, number, times):
    """Either one asks for a clean stop, and so does the next; impatience does not make it less clean."""
    async with opened_cache(daemon.address, "c", wait=PATIENCE_S) as (client, cache):
        keys = await put_chain(cache, "kept", 4)
        await cache.move(keys, Tier.DISK)
        for _ in range(times):
            os.kill(daemon.pid, number)
        assert await asyncio.to_thread(daemon.ended) == 0
        await asyncio.to_thread(daemon.start)
        assert (await client.stats()).epoch == 1
        assert_bytes(keys, await cache.get(keys))


async def moving_down(client):
    """Returns once something is queued for the disk."""
    await eventually(lambda: cache_stats(client, "c"), lambda stats: any(edge.queued_blocks for edge in stats.edges))


async def test_a_hanging_disk_makes_a_stop_unclean_but_not_late(short_dir):
    daemon = DaemonProcess(short_dir, sizes(**SLOTS), ["--shutdown-seconds", "0.5"])
    daemon.start()
    kept, hanging = chain("kept", 4), chain("hanging", 4)
    async with opened_cache(daemon.address, "c", wait=PATIENCE_S) as (client, cache):
        await cache.put(kept, blocks(kept))
        await cache.move(kept, Tier.DISK)
        await cache.put(hanging, blocks(hanging))
        with stuck_disk(daemon, "c"):
            moving = asyncio.create_task(cache.move(hanging, Tier.DISK))
            await moving_down(client)
            began = time.monotonic()
            daemon.terminate()
            assert await asyncio.to_thread(daemon.ended) == 3
            assert time.monotonic() - began < IN_TIME_S
        await asyncio.to_thread(daemon.start)
        assert set(await moving) == {BlockResult.NOT_FOUND}
        assert (await client.stats()).epoch == 2
        assert_bytes(kept, await cache.get(kept))
        assert await cache.get(hanging) == []
    daemon.terminate()
    assert daemon.ended() == 0


async def test_stops_while_it_starts(daemon):
    """A signal that comes before there is anything to stop is not lost, and does no harm."""
    rng = random.Random(SEED)
    async with opened_cache(daemon.address, "c", wait=PATIENCE_S) as (_, cache):
        keys = await put_chain(cache, "kept", 20)
        await cache.move(keys, Tier.DISK)
    daemon.stop()
    for _ in range(6):
        status = await asyncio.to_thread(cut_short, daemon, rng.uniform(0.0, 0.5), signal.SIGTERM)
        assert status in (0, -signal.SIGTERM)
    daemon.start()
    async with await patient(daemon.address) as client:
        assert (await client.stats()).epoch == 1, "none of them was unclean"
        cache = await client.open_cache("c", SPEC)
        assert_bytes(keys, await cache.get(keys))


async def test_nobody_is_let_in_while_it_stops(daemon):
    async with opened_cache(daemon.address, "c", wait=PATIENCE_S) as (client, cache):
        await cache.put(chain("in the way", 4), blocks(chain("in the way", 4)))
        with stuck_disk(daemon, "c") as disk:
            moving = asyncio.create_task(cache.move(chain("in the way", 4), Tier.DISK))
            await moving_down(client)
            stopping = asyncio.create_task(stopped_in(daemon))
            await log_says(daemon, "kvtierd.serve stopping")
            with pytest.raises(DaemonUnavailable):
                await connect(daemon.address)
            disk.release()
            await stopping
        await asyncio.to_thread(daemon.start)
        await moving
