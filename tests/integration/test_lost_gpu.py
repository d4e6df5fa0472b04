"""A GPU that is lost, as NVIDIA's driver tells it: with real daemons on the fake of its bindings."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from kvtier import AsyncClient, BlockResult, DeviceLost, Mirror, Tier, TierFull, TierOffline, connect
from kvtier.abi import attach
from tests.integration.blocks import SPEC, assert_bytes, blocks, chain, sizes
from tests.integration.on_gpu import (
    calls,
    committed,
    device_generations,
    mapped,
    residency,
    supervised_gpu_daemon,
)
from tests.integration.raw import attached, close_all
from tests.integration.seeing import listed_without_device, stored_prefix
from tests.integration.supervised import SupervisedDaemon
from tests.integration.waiting import PATIENCE_S, eventually

DEVICE, HOST, DISK = 4, 8, 64
ON_GPU: Final = chain("on the GPU", DEVICE - 1)
ON_HOST: Final = chain("on the host", 3)
ECC: Final = "CUDA_ERROR_ECC_UNCORRECTABLE"


class Gpu:
    """What the fake is told by a file."""

    def __init__(self, home: Path) -> None:
        self.file = home / "lost"

    def lose(self) -> None:
        new = self.file.with_suffix(".new")
        new.write_text(ECC)
        new.rename(self.file)

    def mend(self) -> None:
        self.file.unlink()


@pytest.fixture
def gpu(short_dir: Path) -> Gpu:
    return Gpu(short_dir)


@pytest.fixture
def daemon(short_dir: Path, gpu: Gpu) -> Iterator[SupervisedDaemon]:
    process = supervised_gpu_daemon(short_dir, sizes(device=DEVICE, host=HOST, disk=DISK), gpu={"lost": str(gpu.file)})
    try:
        process.start()
        yield process
    finally:
        process.close()


async def lost(client: AsyncClient) -> None:
    await eventually(client.stats, lambda stats: stats.epoch > 1)


async def test_an_idle_gpu_is_found_lost_and_a_restart_brings_fresh_memory(
    daemon: SupervisedDaemon, gpu: Gpu, short_dir: Path
) -> None:
    async with await connect(daemon.address) as client:
        cache = await client.open_cache("c", SPEC)
        await cache.put(ON_HOST, blocks(ON_HOST), tier=Tier.HOST)
        async with attached(daemon.address) as raw:
            opened = await raw.open("c")
            await committed(raw, opened.cache_id, ON_GPU)
            said, fds = mapped(raw, opened.cache_id, write=True)
            generations = device_generations(fds[attach.CONTROL])
            assert attach.CUDA in said.fds
            assert sum(generations % 2) == DEVICE - len(ON_GPU)
            close_all(fds)
            gpu.lose()
            await lost(client)
            (problem,) = (await client.stats()).problems
            assert ECC in problem and "restart" in problem
            assert all(generations % 2)
            assert await residency(raw, opened.cache_id, [*ON_GPU, *ON_HOST]) == [0] * len(ON_GPU) + [2] * len(ON_HOST)
            said, fds = mapped(raw, opened.cache_id, write=True)
            assert ECC in said.unmapped[attach.DEVICE]
            close_all(fds)
        assert_bytes(ON_HOST, await cache.get(ON_HOST, tier=Tier.HOST))

        gpu.mend()
        await asyncio.to_thread(daemon.upgrade)
        stats = await eventually(client.stats, lambda stats: stats.boot == 2)
        assert (stats.epoch, stats.problems) == (2, ())
        again = await client.open_cache("c", SPEC)
        assert (await again.match(ON_GPU)).blocks == 0
        assert_bytes(ON_HOST, await again.get(ON_HOST, tier=Tier.HOST))
    made = [call["call"] for call in calls(short_dir, daemon.pid)]
    assert "cuMemCreate" in made and "cuMemImportFromShareableHandle" not in made
    assert await asyncio.to_thread(daemon.stop) == 0
    assert "Traceback" not in daemon.log


async def test_traffic_goes_on_the_events_stay_exact_and_a_restart_finds_what_host_and_disk_held(
    daemon: SupervisedDaemon, gpu: Gpu
) -> None:
    """Copies between all tiers are under way when it happens. Every call ends, well or with the loss."""
    async with await connect(daemon.address) as client, Mirror(client, ["c"]) as mirror:
        cache = await client.open_cache("c", SPEC)
        chains = [chain(f"traffic {number}", 3) for number in range(12)]
        over = asyncio.Event()
        refused: Counter[Tier] = Counter()

        async def use(number: int) -> None:
            turn = number
            while not over.is_set():
                turn += 5
                keys, tier = chains[turn % len(chains)], (Tier.DEVICE, Tier.HOST)[turn % 2]
                try:
                    await cache.put(keys, blocks(keys), tier=tier, timeout=PATIENCE_S)
                    found = await cache.get(keys, tier=tier, timeout=PATIENCE_S)
                    assert_bytes(keys[: len(found)], found)
                except DeviceLost:
                    refused[tier] += 1
                except (TierFull, TierOffline):  # a block's copy failed on the way to the host
                    pass

        users = [asyncio.create_task(use(number)) for number in range(4)]
        await eventually(client.stats, lambda stats: stats.last_event_id > 200)
        gpu.lose()
        await lost(client)
        told = (await client.stats()).last_event_id
        await eventually(client.stats, lambda stats: stats.last_event_id > told + 50)
        over.set()
        async with asyncio.timeout(3 * PATIENCE_S):
            await asyncio.gather(*users)
        assert set(refused) == {Tier.DEVICE}
        listed = await listed_without_device(client, cache, mirror, chains)
        prefixes = [stored_prefix(keys, listed) for keys in chains]
        assert any(prefixes)
        assert await cache.move(list(listed), Tier.DISK) == [BlockResult.OK] * len(listed)

        gpu.mend()
        await asyncio.to_thread(daemon.upgrade)
        await eventually(client.stats, lambda stats: stats.boot == 2)
        again = await client.open_cache("c", SPEC)
        for number, keys in enumerate(chains):
            assert (await again.match(keys)).blocks == prefixes[number]
            assert_bytes(keys[: prefixes[number]], await again.get(keys, tier=Tier.DEVICE))
    assert await asyncio.to_thread(daemon.stop) == 0
