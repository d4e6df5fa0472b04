"""The pool of a GPU is mapped by every process that may write its cache, and outlives each of them."""

import asyncio
import time
from typing import Any, Final

import pytest

from kvtier import BlockResult, Tier, TierFull, connect
from tests import devices
from tests.gpu.kernels import kernels
from tests.gpu.racing import SLOT_BYTES, SPEC
from tests.integration.actors import Actor
from tests.integration.daemon import DaemonProcess
from tests.integration.seeing import tier_stats
from tests.integration.torture_blocks import CHAIN_BLOCKS, chain
from tests.integration.waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.gpu

SLOTS: Final = 12
OK: Final = BlockResult.OK
_SPOILS_S: Final = 2.0 if devices.ON_FAKE else 6.0
"""How long the kernels of the one that is killed would go on."""


@pytest.fixture
def daemon(short_dir):
    with DaemonProcess(short_dir, {Tier.DEVICE: SLOTS * SLOT_BYTES, Tier.HOST: SLOTS * SLOT_BYTES}) as process:
        yield process


@pytest.fixture
async def client(daemon):
    async with await connect(daemon.address) as client:
        yield client


@pytest.fixture
async def cache(client):
    return await client.open_cache("race", SPEC)


async def write(cache, at, number):
    """Has kernels write a whole chain into reserved slots."""
    keys, stream = chain(number), at.stream()
    lease = await cache.reserve(len(keys), Tier.DEVICE)
    for index, key in enumerate(keys):
        at.write(lease.view(index), key, stream)
    assert await lease.commit(keys, release=True, stream=stream) == [OK] * len(keys)


async def wrong_words(cache, at, number):
    """As kernels see them that read the chain on the device."""
    stream = at.stream()
    lease = await cache.acquire(chain(number), Tier.DEVICE, min_blocks=CHAIN_BLOCKS)
    checks = [at.check(lease.view(index), key, stream) for index, key in enumerate(lease.keys)]
    await lease.release(stream=stream)
    return sum(wrong() for wrong in checks)


async def test_one_process_reads_on_the_device_what_another_wrote_there(daemon, cache, device):
    at = kernels(device, 0)
    await write(cache, at, 0)
    await write(cache, at, 1)
    with Actor("check", module="tests.gpu.players", address=daemon.address, chains=[0, 1]) as reader:
        assert await asyncio.to_thread(reader.says, 3 * PATIENCE_S) == {"blocks": 2 * CHAIN_BLOCKS, "wrong": 0}


async def test_a_slot_of_a_process_killed_in_a_kernel_is_nobodys_until_it_is_gone(daemon, client, cache, device):
    """Its kernels spoil the slots until the last moment. Whoever gets them afterwards, keeps its bytes."""
    at = kernels(device, 0)
    await write(cache, at, 0)
    script: dict[str, Any] = {"address": daemon.address, "slots": SLOTS - CHAIN_BLOCKS, "seconds": _SPOILS_S}
    with Actor("scribble", module="tests.gpu.players", **script) as doomed:
        theirs = set((await asyncio.to_thread(doomed.says, 3 * PATIENCE_S))["slots"])
        over = time.monotonic() + _SPOILS_S
        with pytest.raises(TierFull) as full:
            await cache.reserve(SLOTS, Tier.DEVICE)
        assert [(holder.pid, holder.slots) for holder in full.value.holders] == [(doomed.pid, len(theirs))]
        doomed.kill()
        await eventually(
            lambda: tier_stats(client, "race", Tier.DEVICE), lambda now: (now.held, now.orphaned) == (0, 0)
        )
        await write(cache, at, 1)
        placed = {place.device_slot for place in await cache.locate(chain(1))}
        assert placed == theirs, "the slots of the dead are in use again"
        looks = 0
        while time.monotonic() < over or not looks:
            assert await wrong_words(cache, at, 0) == 0
            assert await wrong_words(cache, at, 1) == 0
            looks += 1
