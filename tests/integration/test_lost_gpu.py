"""A GPU that is lost, as NVIDIA's driver tells it: with real daemons on the fake of its bindings.

The daemon ends, and its supervisor starts it anew until the GPU can be opened again.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

import pytest

from kvtier import Cursor, KvtierError, Mirror, Tier
from tests.integration.blocks import SPEC, assert_bytes, blocks, chain, sizes
from tests.integration.on_gpu import calls, supervised_gpu_daemon
from tests.integration.waiting import PATIENCE_S, eventually, patient

DEVICE, HOST, DISK = 4, 8, 64
ON_GPU: Final = chain("on the GPU", DEVICE - 1)
ON_HOST: Final = chain("on the host", 3)
ON_DISK: Final = chain("on the disk", 2)
ECC: Final = "CUDA_ERROR_ECC_UNCORRECTABLE"


@pytest.fixture
def lost(short_dir):
    """The file by which the fake is told that the GPU is lost, as long as it exists."""
    return short_dir / "lost"


def lose(lost):
    new = lost.with_suffix(".new")
    new.write_text(ECC)
    new.rename(lost)


@pytest.fixture
def daemon(short_dir, lost):
    tiers = sizes(device=DEVICE, host=HOST, disk=DISK)
    with supervised_gpu_daemon(short_dir, tiers, gpu={"lost": str(lost)}) as process:
        yield process


async def ended(daemon, starts):
    """Returns when the daemon has ended, and so many starts after it have failed."""

    told = await eventually(
        lambda: daemon.log, lambda text: text.count("the daemon died status=1") > starts, within=3 * PATIENCE_S
    )
    assert "GPU lost uuid=" in told and ECC in told
    assert "the daemon ends: GPU-" in told


async def test_the_daemon_ends_and_the_next_one_has_what_host_and_disk_held(daemon, lost, short_dir):
    async with await patient(daemon.address) as client:
        cache = await client.open_cache("c", SPEC)
        await cache.put(ON_DISK, blocks(ON_DISK), tier=Tier.HOST)
        await cache.move(ON_DISK, Tier.DISK)
        await cache.put(ON_HOST, blocks(ON_HOST), tier=Tier.HOST)
        await cache.put(ON_GPU, blocks(ON_GPU), tier=Tier.DEVICE)
        lose(lost)
        with suppress(KvtierError):
            await cache.get(ON_GPU, tier=Tier.DEVICE, timeout=0.2)
            await cache.put(chain("one more", 1), blocks(chain("one more", 1)), tier=Tier.DEVICE, timeout=0.2)
        await ended(daemon, starts=1)
        lost.unlink()
        await asyncio.to_thread(daemon.await_ready)
        stats = await client.stats()
        assert (stats.epoch > 1, stats.problems) == (True, ())
        assert (await cache.match(ON_GPU)).blocks == 0
        assert_bytes(ON_HOST, await cache.get(ON_HOST, tier=Tier.HOST))
        assert_bytes(ON_DISK, await cache.get(ON_DISK, tier=Tier.DEVICE))
        await cache.put(ON_GPU[:1], blocks(ON_GPU[:1]), tier=Tier.DEVICE)
        assert_bytes(ON_GPU[:1], await cache.get(ON_GPU[:1], tier=Tier.DEVICE))
    made = [call["call"] for call in calls(short_dir, daemon.pid)]
    assert "cuMemCreate" in made and "cuMemImportFromShareableHandle" not in made, "the device's memory is fresh"
    assert "Traceback" not in daemon.log


async def test_nobody_gets_wrong_bytes_or_wrong_events(daemon, lost):
    """Copies between all tiers are under way when it happens."""
    async with await patient(daemon.address) as client, Mirror(client, ["c"]) as mirror:
        cache = await client.open_cache("c", SPEC)
        chains = [chain(f"traffic {number}", 3) for number in range(12)]
        over = asyncio.Event()

        async def use(number):
            turn = number
            while not over.is_set():
                turn += 5
                keys, tier = chains[turn % len(chains)], (Tier.DEVICE, Tier.HOST)[turn % 2]
                with suppress(KvtierError):
                    await cache.put(keys, blocks(keys), tier=tier, timeout=PATIENCE_S)
                    found = await cache.get(keys, tier=tier, timeout=PATIENCE_S)
                    assert_bytes(keys[: len(found)], found)

        users = [asyncio.create_task(use(number)) for number in range(4)]
        await eventually(client.stats, lambda stats: stats.last_event_id > 200)
        lose(lost)
        await ended(daemon, starts=0)
        lost.unlink()
        await asyncio.to_thread(daemon.await_ready)
        begun = (await client.stats()).last_event_id
        await eventually(client.stats, lambda stats: stats.last_event_id > begun + 50)
        over.set()
        async with asyncio.timeout(3 * PATIENCE_S):
            await asyncio.gather(*users)
        stats = await client.stats()
        async with asyncio.timeout(PATIENCE_S):
            await mirror.synced(Cursor(stats.epoch, stats.last_event_id))
        listed = {block.key async for block in cache.blocks()}
        for keys in chains:
            stored = next((number for number, key in enumerate(keys) if key not in listed), len(keys))
            assert mirror.longest_prefix(keys) == stored
            assert_bytes(keys[:stored], await cache.get(keys))
