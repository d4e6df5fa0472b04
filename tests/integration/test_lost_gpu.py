"""A GPU that is lost, as NVIDIA's driver tells it: with real daemons on the fake of its bindings.

The daemon goes on without the device tiers of that GPU. A restart takes them back if it finds the GPU.
"""

import asyncio
import time
from contextlib import suppress
from typing import Final

import pytest

from kvtier import Cursor, KvtierError, Mirror, Tier, TierOffline
from kvtierd.tiers.cuda.pool import BEAT_S
from tests.integration.blocks import SPEC, assert_bytes, blocks, chain, sizes
from tests.integration.on_gpu import calls, supervised_gpu_daemon
from tests.integration.scraping import LISTEN, scrape
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
    with supervised_gpu_daemon(short_dir, tiers, LISTEN, gpu={"lost": str(lost)}) as process:
        yield process


async def named(client):
    """Returns the problems once they name the GPU, of which an idle daemon is told by nothing but its own question."""
    stats = await eventually(client.stats, lambda stats: any(" is lost" in problem for problem in stats.problems))
    return stats.problems


async def fill(cache):
    await cache.put(ON_DISK, blocks(ON_DISK), tier=Tier.HOST)
    await cache.move(ON_DISK, Tier.DISK)
    await cache.put(ON_HOST, blocks(ON_HOST), tier=Tier.HOST)
    await cache.put(ON_GPU, blocks(ON_GPU), tier=Tier.DEVICE)


async def assert_served(cache):
    """All that host and disk have."""
    assert_bytes(ON_HOST, await cache.get(ON_HOST, tier=Tier.HOST))
    assert_bytes(ON_DISK, await cache.get(ON_DISK, tier=Tier.HOST))
    assert (await cache.match(ON_GPU)).blocks == 0
    with pytest.raises(TierOffline):
        await cache.put(ON_GPU, blocks(ON_GPU), tier=Tier.DEVICE)


async def test_the_tier_goes_and_comes_back_with_a_restart_that_finds_the_gpu(daemon, lost, short_dir):
    """A restart that does not find it serves what host and disk have. In host memory nothing is lost by either."""
    async with await patient(daemon.address) as client:
        cache = await client.open_cache("c", SPEC, budgets=sizes(device=DEVICE, host=HOST - 1, disk=DISK))
        await fill(cache)
        pid = daemon.pid
        lose(lost)
        gpu, tier = await named(client)
        assert gpu.startswith("GPU GPU-") and ECC in gpu
        assert tier.startswith("cache c: the device tier is out of service until a restart: ") and ECC in tier
        await assert_served(cache)
        metrics = await scrape(daemon.plain)
        assert metrics.values("kvtier_tier_lost", cache="c") == {("device",): 1, ("host",): 0, ("disk",): 0}
        assert metrics.value("kvtier_problems") == 2
        assert (daemon.pid, (await client.stats()).pid) == (pid, pid), "nobody has died"

        await asyncio.to_thread(daemon.kill)
        assert len(await named(client)) == 2
        cache = await client.open_cache("c")
        assert cache.slots(Tier.DEVICE) == DEVICE
        await assert_served(cache)
        elsewhere = await client.open_cache("new", SPEC, budgets=sizes(host=1))
        assert elsewhere.info.device == ""
        with pytest.raises(TierOffline, match="is lost"):
            await client.open_cache("there", SPEC, budgets=sizes(device=1), device="cuda")

        lost.unlink()
        await asyncio.to_thread(daemon.upgrade)
        assert (await client.stats()).problems == ()
        cache = await client.open_cache("c")
        assert_bytes(ON_HOST, await cache.get(ON_HOST, tier=Tier.HOST))
        assert_bytes(ON_DISK, await cache.get(ON_DISK, tier=Tier.DEVICE))
        await cache.put(ON_GPU[:1], blocks(ON_GPU[:1]), tier=Tier.DEVICE)
        assert_bytes(ON_GPU[:1], await cache.get(ON_GPU[:1], tier=Tier.DEVICE))
    made = [call["call"] for call in calls(short_dir, daemon.pid)]
    assert "cuMemCreate" in made and "cuMemImportFromShareableHandle" not in made, "the device's memory is fresh"
    assert "Traceback" not in daemon.log, daemon.log[daemon.log.index("Traceback") - 300 :][:3000]


async def test_an_idle_daemon_notices_within_seconds(daemon, lost):
    """No cache is open, so that nothing else asks the device."""
    async with await patient(daemon.address) as client:
        assert (await client.stats()).problems == ()
        lose(lost)
        lost_at = time.monotonic()
        await named(client)
        assert time.monotonic() - lost_at < 2 + 2 * BEAT_S, "the promise is two seconds; the rest is the machine's"


async def test_nobody_gets_wrong_bytes_or_wrong_events(daemon, lost):
    """Copies between all tiers are under way when it happens, and go on between host and disk."""
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
        await named(client)
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
            assert_bytes(keys[:stored], await cache.get(keys, tier=Tier.HOST))
            assert not any(place.residency & Tier.DEVICE.bit for place in await cache.locate(keys))
    assert "Traceback" not in daemon.log, daemon.log[daemon.log.index("Traceback") - 300 :][:3000]
