"""A commit that ends its lease: one call less for who only stores."""

from __future__ import annotations

import asyncio

import pytest

from kvtier import BlockResult, Tier
from kvtier.errors import LeaseError
from tests.integration.blocks import SPEC, assert_bytes, blocks, chain, sizes


@pytest.fixture
async def cache(client, name):
    return await client.open_cache(name, SPEC, budgets=sizes(host=8))


async def test_a_commit_can_end_its_lease(client, cache):
    keys = chain("together", 3)
    await cache.put(keys[:1], blocks(keys[:1]))
    lease = await cache.reserve(5, Tier.HOST)
    for index, key in enumerate(keys):
        begin = 0
        whole = blocks([key])[0]
        for part in lease.view(index):
            part[:] = whole[begin : begin + part.size]
            begin += part.size
    assert await lease.commit(keys, release=True) == [BlockResult.EXISTS, BlockResult.OK, BlockResult.OK]

    assert lease.released
    assert await client.leases(cache=cache.name) == []
    with pytest.raises(LeaseError):
        lease.view(0)
    async with cache.reserve(5, Tier.HOST) as rest:
        assert len(rest) == 5, "its blank slots, and that of the block that was there, came back"
        assert_bytes(keys, await cache.get(keys))


async def test_it_ends_with_slots_that_stayed_blank_too(client, cache):
    parent, child = chain("orphan", 2)
    lease = await cache.reserve(1, Tier.HOST)
    assert await lease.commit([child], parent=parent, release=True) == [BlockResult.PARENT_MISSING]
    assert await client.leases(cache=cache.name) == []
    async with cache.reserve(8, Tier.HOST) as everything:
        assert len(everything) == 8


@pytest.mark.parametrize("cancelled", [False, True])
async def test_all_others_are_released_beside_one_that_has_not_answered(client, cache, cancelled):
    """Whichever of the two the daemon hears first."""
    keys = chain("others", 2)
    await cache.put(keys, blocks(keys))
    for turns in range(12):
        others = [await cache.acquire(keys) for _ in range(2)]
        lease = await cache.reserve(1, Tier.HOST)
        commit = asyncio.create_task(lease.commit(chain(f"mine {turns}", 1), release=True))
        for _ in range(turns):
            await asyncio.sleep(0)
        if cancelled:
            commit.cancel()
        await cache.release_all()
        await asyncio.wait([commit])
        assert all(each.released for each in (*others, lease))
        assert await client.leases(cache=cache.name) == []
        assert commit.cancelled() or commit.exception() is None or isinstance(commit.exception(), LeaseError)
