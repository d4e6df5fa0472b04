"""A flat group: keys without chains, each block stored, found, evicted and lost by itself."""

import pytest

from kvtier import BlockResult, CacheSpec, Mirror, PoolSpec, Tier, WindowGroupSpec, connect
from tests.integration.blocks import chain, opened_cache
from tests.integration.models import assert_content, by_hand, content

POOLS = (PoolSpec(1, 1, 72),)
FLAT = CacheSpec("flat", "uint8", 16, groups=(WindowGroupSpec(pools=POOLS, flat=True),))
BOTH = CacheSpec("both", "uint8", 16, groups=(WindowGroupSpec(pools=POOLS), WindowGroupSpec(pools=POOLS, flat=True)))
KEYS = chain("flat", 8)
OK = [BlockResult.OK]


@pytest.fixture
def daemon(start_for):
    return start_for(FLAT, device=16, host=16, disk=32)


@pytest.fixture(params=[True, False], ids=["mapped", "streamed"])
async def cache(client, request):
    return await client.open_cache("flat", FLAT, mapped=request.param)


async def test_a_block_needs_no_parent_and_has_none(cache):
    assert await cache.put(KEYS[4:6], content(FLAT, 0, KEYS[4:6]), parent=KEYS[3]) == OK * 2
    assert await cache.put(KEYS[5:7], content(FLAT, 0, KEYS[5:7])) == [BlockResult.EXISTS, BlockResult.OK]
    assert [(row.key, row.parent) async for row in cache.blocks()] == [(key, None) for key in KEYS[4:7]]


async def test_what_is_found_is_the_leading_run(cache, client):
    await cache.put(KEYS, content(FLAT, 0, KEYS))
    async with Mirror(client, ["flat"]) as mirror:
        for gone, length in ((None, 8), (KEYS[5], 5), (KEYS[2], 2), (KEYS[0], 0)):
            if gone is not None:
                assert (await cache.drop([gone])).dropped == 1
                await mirror.synced((await cache.match(KEYS)).as_of)
            match = await cache.match(KEYS)
            assert (match.blocks, len(match.residency)) == (length, length)
            assert await cache.prefix_length(KEYS) == mirror.longest_prefix(KEYS) == length
            assert (await cache.across.match(KEYS)).blocks == length
            assert_content(FLAT, 0, KEYS[:length], await cache.get(KEYS))
            assert_content(FLAT, 0, KEYS[:length], await cache.get(KEYS, verify=True))
            async with cache.acquire(KEYS) as lease:
                assert (lease.prefix_length, lease.keys) == (length, tuple(KEYS[:length]))
    assert_content(FLAT, 0, [KEYS[7], KEYS[1], KEYS[4]], await cache.get([KEYS[7], KEYS[1], KEYS[4]]))
    assert [place.residency > 0 for place in await cache.locate(KEYS)] == [False, True, False, *[True] * 2, False] + [
        True
    ] * 2


async def test_the_one_used_longest_ago_goes_alone(start_for):
    """A chain would keep what the used block stands on."""
    daemon = start_for(FLAT, host=8)
    async with opened_cache(daemon.address, "lru", spec=FLAT, budgets=by_hand(FLAT, host=8)) as (_, cache):
        for key in KEYS:
            await cache.put([key], content(FLAT, 0, [key]))
        assert len(await cache.get([KEYS[7], KEYS[3], KEYS[1]])) == 3
        more = chain("more", 5)
        await cache.put(more, content(FLAT, 0, more))
        assert {row.key async for row in cache.blocks()} == {KEYS[7], KEYS[3], KEYS[1], *more}


async def test_a_block_comes_back_from_the_disk_alone(start_for):
    daemon = start_for(FLAT, host=16, disk=16)
    async with opened_cache(daemon.address, "kept", spec=FLAT) as (_, cache):
        await cache.put(KEYS, content(FLAT, 0, KEYS))
        await cache.move(KEYS[5:6], Tier.DISK)
        assert [row.key async for row in cache.blocks() if row.residency & Tier.DISK.bit] == [KEYS[5]]
    daemon.crash()
    async with opened_cache(daemon.address, "kept", spec=FLAT) as (_, cache):
        assert_content(FLAT, 0, KEYS[5:6], await cache.get(KEYS[5:]))


async def test_across_a_flat_group_has_the_leading_run(start_for):
    daemon = start_for(BOTH, host=16)
    async with await connect(daemon.address) as client:
        for mapped in (True, False):
            cache = await client.open_cache("both", BOTH, mapped=mapped)
            await cache.across.put(KEYS, {group: content(BOTH, group, KEYS) for group in (0, 1)})
            await cache.in_group(1).drop([KEYS[5]])
            match = await cache.across.match(KEYS)
            assert (match.blocks, [len(span.residency) for span in match.groups]) == (5, [5, 5])
            found = await cache.across.get(KEYS)
            for group in (0, 1):
                assert_content(BOTH, group, KEYS[:5], found[group])
            async with cache.across.acquire(KEYS) as lease:
                assert [len(part) for part in lease.groups] == [5, 5]
