"""The daemon's own memory follows what it has, not what it had."""

import asyncio
import time

import pytest

from kvtier import Tier
from tests.integration.blocks import SPEC, assert_bytes, chain, put_chain, sizes
from tests.integration.raw import attached
from tests.integration.seeing import memory
from tests.integration.waiting import eventually, patient
from tests.mappings import resident_bytes

A_CALL = 1024
"""Blocks."""
ROUNDS, WARM = 20, 5
GROWTH = 2 << 20
SLOTS = 4
A_CACHE = 200_000
SOON_S = 5.0
"""And half of what making them takes."""


@pytest.mark.parametrize("calls", [4, pytest.param(20, marks=pytest.mark.long)])
async def test_the_memory_of_removed_caches_comes_back(start_fresh, calls):
    daemon = start_fresh("--event-ring-bytes", str(256 << 10), host=calls * A_CALL)
    used = []
    async with await patient(daemon.address) as client, attached(daemon.address) as raw:
        for turn in range(ROUNDS):
            cache = (await raw.open("removed")).cache_id
            for part in range(calls):
                await raw.store(cache, Tier.HOST, chain(f"{turn}/{part}", A_CALL))
            assert (await client.remove_cache("removed", force=True)).blocks == calls * A_CALL
            used.append(memory(daemon))
    print("MB after each round:", *(f"{each / 1e6:.1f}" for each in used))
    assert used[-1] - used[WARM - 1] < GROWTH


@pytest.mark.parametrize("caches", [40, pytest.param(1000, marks=pytest.mark.long)])
async def test_a_small_cache_takes_little_memory_and_is_soon_there_after_a_crash(start_fresh, caches):
    """Nor does making them: the daemon is killed, and reads them all before the last can be used."""
    daemon = start_fresh(host=caches * SLOTS, disk=caches * SLOTS)
    names = [f"{number:04}" for number in range(caches)]
    async with await patient(daemon.address) as client:
        for name in names[:WARM]:
            await fill(client, name)
        before, began = memory(daemon), time.monotonic()
        for name in names[WARM:]:
            await fill(client, name)
        each = (memory(daemon) - before) / (caches - WARM)
        made = time.monotonic() - began
    daemon.kill()
    began = time.monotonic()
    await asyncio.to_thread(daemon.start)
    async with await patient(daemon.address) as client:
        cache = await client.open_cache(names[-1])
        usable = time.monotonic() - began
        assert_bytes(chain(names[-1], 1), await cache.get(chain(names[-1], 1)))
    print(f"{each / 1e3:.0f} kB a cache; made in {made:.1f} s; the last can be used {usable:.1f} s after a crash")
    assert each < A_CACHE
    assert usable < max(made / 2, SOON_S)


@pytest.mark.parametrize("write", [True, False])
async def test_a_client_has_every_page_of_a_cache_mapped_before_it_touches_one(start_fresh, write):
    daemon = start_fresh(host=A_CALL)
    async with await patient(daemon.address) as owner, await patient(daemon.address) as client:
        await owner.open_cache("whole", SPEC, mapped=False)
        cache = await client.open_cache("whole", write=write)
        nbytes = cache.slots(Tier.HOST) * SPEC.record_bytes(0)
        await eventually(lambda: resident_bytes("kvtier:whole:host"), lambda resident: resident >= nbytes)


async def fill(client, name):
    cache = await client.open_cache(name, SPEC, budgets=sizes(host=SLOTS, disk=SLOTS))
    keys = await put_chain(cache, name, 1)
    await cache.move(keys, Tier.DISK)
    await cache.close()
