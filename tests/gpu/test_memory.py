"""Memory that is short: on the device for everybody, in all tiers for a working set; and host memory that is locked."""

import asyncio
from contextlib import ExitStack, contextmanager
from typing import Final

import pytest

from kvtier import BlockResult, KvtierError, Tier, connect
from kvtier.abi.cuda.errors import CudaOutOfMemory
from tests import devices
from tests.gpu.kernels import kernels
from tests.gpu.racing import SIZES, SLOT_BYTES, SPEC, content, wrong_words
from tests.integration.actors import Actor
from tests.integration.daemon import DaemonProcess
from tests.integration.seeing import cache_stats
from tests.integration.starting import refused
from tests.integration.torture_blocks import CHAIN_BLOCKS, chain
from tests.integration.waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.gpu

OK: Final = BlockResult.OK
_MORE_THAN_THERE_IS: Final = 1 << 42
_ANOTHER_BYTES: Final = 1 << 30
_LEFT_BYTES: Final = 32 << 20
"""What stays free: the driver itself wants some for what maps memory of the host, and no context fits in it."""
_LAST_BYTES: Final = 4 << 20


@contextmanager
def daemon_with(home, *flags, device=0, host=0, disk=0):
    slots = {Tier.DEVICE: device, Tier.HOST: host, Tier.DISK: disk}
    with DaemonProcess(home, {tier: count * SLOT_BYTES for tier, count in slots.items() if count}, flags) as process:
        yield process


@contextmanager
def everything_else(driver):
    """Takes the memory of the device that is free, but for a little; how much."""
    with ExitStack() as undo:
        left = driver.alloc(_LEFT_BYTES)
        taken, step = 0, 1 << 36
        while step >= _LAST_BYTES:
            try:
                address = driver.alloc(step)
            except CudaOutOfMemory:
                step //= 2
            else:
                undo.callback(driver.free, address)
                taken += step
        driver.free(left)
        yield taken


async def store(cache, numbers):
    for number in numbers:
        keys = chain(number)
        assert await cache.put(keys, [content(key) for key in keys]) == [OK] * len(keys)


async def assert_right(cache, numbers, tier):
    for number in numbers:
        keys = chain(number)
        found = await cache.get(keys, tier=tier)
        assert len(found) == len(keys)
        wrong = [index for index, key in enumerate(keys) if wrong_words(key, found[index])]
        assert not wrong, f"wrong bytes in blocks {wrong} of chain {number}"


def test_a_pool_larger_than_the_device_is_refused_by_name(short_dir):
    said = refused(DaemonProcess(short_dir, {Tier.DEVICE: _MORE_THAN_THERE_IS}), status=2)
    assert "--device = " in said
    assert str(_MORE_THAN_THERE_IS) in said


@pytest.mark.skipif(devices.ON_FAKE, reason="each process of the fake has memory of its own")
async def test_a_daemon_goes_on_when_others_take_all_memory_of_its_device(short_dir, device, tell):
    """What it has it keeps; a cache that wants more is refused; who comes without room for CUDA is served, too."""
    sizes = SIZES | {Tier.DEVICE: SIZES[Tier.DEVICE] + _ANOTHER_BYTES}
    with DaemonProcess(short_dir, sizes) as daemon:
        async with await connect(daemon.address) as client:
            cache = await client.open_cache("race", SPEC, budgets=SIZES)
            await store(cache, range(4))
            with everything_else(device) as taken:
                tell.append(f"{taken >> 20} MiB taken, {device.memory()[0] >> 20} MiB free")
                with pytest.raises(KvtierError) as short:
                    await client.open_cache("another", SPEC, budgets={Tier.DEVICE: _ANOTHER_BYTES})
                assert short.value.reason == "NO_MEMORY", short.value
                with Actor("fetch", module="tests.gpu.players", address=daemon.address, chains=[0, 1]) as late:
                    got = await asyncio.to_thread(late.says, 3 * PATIENCE_S)
                tell.append(f"a process that comes then: {got}")
                assert (got["blocks"], got["wrong"]) == (2 * CHAIN_BLOCKS, 0)
                await store(cache, range(4, 8))
                await assert_right(cache, range(8), Tier.DEVICE)
            await assert_right(cache, range(8), Tier.DEVICE)
            await client.open_cache("another", SPEC, budgets={Tier.DEVICE: _ANOTHER_BYTES})
            assert (await client.stats()).problems == ()


async def test_a_working_set_larger_than_device_and_host(short_dir, device, tell):
    """Five times what the device holds and more than it and the host together: all of it comes back, to kernels."""
    chains = 16 if devices.ON_FAKE else 40
    at = kernels(device, 0)
    with daemon_with(short_dir, device=12, host=24, disk=CHAIN_BLOCKS * (chains + 4)) as daemon:
        async with await connect(daemon.address) as client:
            cache, stream = await client.open_cache("race", SPEC), at.stream()
            await store(cache, range(chains))
            for number in [*range(chains), *range(chains)]:
                lease = await cache.acquire(chain(number), Tier.DEVICE, min_blocks=CHAIN_BLOCKS)
                checks = [at.check(lease.view(index), key, stream) for index, key in enumerate(lease.keys)]
                await lease.release(stream=stream)
                assert sum(wrong() for wrong in checks) == 0, f"chain {number}"
            stats = await cache_stats(client, "race")
    assert (stats.blocks, stats.removed) == (chains * CHAIN_BLOCKS, 0)
    tell.append(", ".join(f"{edge.edge} {edge.blocks}" for edge in stats.edges))


async def test_a_host_tier_is_page_locked_in_the_background(short_dir, tell):
    """Chunk after chunk, while blocks swap through parts of it that are locked and parts that are not yet."""
    nbytes = (256 << 20) if devices.ON_FAKE else (6 << 30)
    with daemon_with(short_dir, device=12, host=nbytes // SLOT_BYTES) as daemon:
        async with await connect(daemon.address) as client:
            cache = await client.open_cache("race", SPEC)
            began = asyncio.get_running_loop().time()
            rounds = 0

            async def work():
                nonlocal rounds
                await swap(client, cache)
                rounds += 1
                return daemon.log

            await eventually(work, lambda log: "host memory is page-locked" in log, within=9 * PATIENCE_S)
            took = asyncio.get_running_loop().time() - began
            await swap(client, cache)
            tell.append(f"{nbytes >> 20} MiB within {took:.1f} s, {rounds} rounds of swaps meanwhile")
            assert (await client.stats()).problems == ()


async def swap(client, cache):
    """Stores twice what the device holds, and reads it back there."""
    await store(cache, range(4))
    await assert_right(cache, range(4), Tier.DEVICE)
    for number in range(4):
        await cache.drop(chain(number)[:1])
