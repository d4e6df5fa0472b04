"""Models whose blocks are not one pool of round numbers: their bytes through every tier, and what is said of them."""

import asyncio

import pytest

from kvtier import BlockResult, InvalidArgument, Tier
from tests.integration.blocks import chain, opened_cache
from tests.integration.models import MODELS, VSWA, assert_content, by_hand, content, groups_of
from tests.integration.touching import write_into
from tests.integration.waiting import PATIENCE_S, heard, patient

SLOTS = {"device": 7, "host": 8, "disk": 24}
KEYS = chain("models", 16)


@pytest.fixture(params=MODELS)
def spec(request):
    return MODELS[request.param]


async def fill(cache):
    blocks = content(cache.spec, cache.group, KEYS)
    assert await cache.put(KEYS, blocks, tier=Tier.DEVICE) == [BlockResult.OK] * len(KEYS)


def assert_prefix(spec, group, found):
    """All blocks of the chain, but for those that a sliding window has left."""
    window = spec.groups[group].window_tokens
    first = (len(KEYS) * spec.tokens_per_block - window) // spec.tokens_per_block if window else 0
    assert found[:first] == [None] * first
    assert_content(spec, group, KEYS[first:], found[first:])


async def test_bytes_are_right_through_every_tier_and_a_restart(start_for, spec):
    daemon = start_for(spec, **SLOTS)
    async with await patient(daemon.address) as client:
        cache = await client.open_cache("model", spec, budgets=by_hand(spec, **SLOTS))
        groups = [cache.in_group(group) for group in groups_of(spec)]
        for group in groups:
            await fill(group)
        # They fill more than device and host together; how many went where is the eviction's to say.
        for tier in (Tier.HOST, Tier.DEVICE):
            for group in groups:
                assert_prefix(spec, group.group, await group.get(KEYS, tier=tier))
        for group in groups:
            await group.move(KEYS, Tier.DISK)
        await asyncio.to_thread(daemon.restart)
        await heard(client)
        for group in groups:
            (span,) = (await group.match(KEYS)).groups
            assert set(span.residency) == {Tier.DISK.bit}
            assert_prefix(spec, group.group, await group.get(KEYS))
        assert not (await client.stats()).problems


async def test_views_are_the_pools_of_a_block(start_for, spec):
    """What an engine writes pool by pool is what it reads as one block."""
    daemon = start_for(spec, device=2)
    async with opened_cache(daemon.address, "model", spec=spec, wait=PATIENCE_S) as (_, cache):
        for group in (cache.in_group(group) for group in groups_of(spec)):
            (data,) = content(spec, group.group, KEYS[:1])
            async with group.reserve(1) as lease:
                parts = lease.view(0)
                assert [part.nbytes for part in parts] == [
                    spec.pool_bytes(group.group, pool) for pool in range(len(spec.groups[group.group].pools))
                ]
                write_into(parts, data)
                await lease.commit(KEYS[:1])
            assert_content(spec, group.group, KEYS[:1], await group.get(KEYS[:1]))


async def test_capacity_is_told_by_tier_and_group_in_blocks_tokens_and_bytes(start_for):
    daemon = start_for(VSWA, **SLOTS)
    async with await patient(daemon.address) as client:
        cache = await client.open_cache("model", VSWA, budgets=by_hand(VSWA, **SLOTS))
        assert [group.window_tokens for group in cache.info.groups] == [64, 0, 100]
        for group in groups_of(VSWA):
            for tier in cache.info.groups[group].tiers:
                slots = SLOTS[str(tier.tier)]
                assert (tier.slots, tier.slot_bytes) == (slots, VSWA.record_bytes(group))
                assert (tier.tokens, tier.bytes) == (slots * 16, slots * VSWA.record_bytes(group))
            assert cache.in_group(group).slots(Tier.HOST) == SLOTS["host"]


async def test_groups_of_a_cache_do_not_see_each_other_s_blocks(start_for):
    daemon = start_for(VSWA, device=8)
    async with opened_cache(daemon.address, "model", spec=VSWA, wait=PATIENCE_S) as (client, cache):
        second = cache.in_group(1)
        await second.put(KEYS[:2], content(VSWA, 1, KEYS[:2]))
        assert ((await cache.match(KEYS)).blocks, (await second.match(KEYS)).blocks) == (0, 2)
        assert [[row.key async for row in group.blocks()] for group in (cache, second)] == [[], KEYS[:2]]
        with pytest.raises(InvalidArgument, match="0 to 2"):
            cache.in_group(3)
        # They are one cache: closed once, with all that was leased through any of them.
        await second.reserve(1)
        await cache.close()
        assert (await client.stats()).caches[0].tiers[0].held == 0
