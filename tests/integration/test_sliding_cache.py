"""A cache whose only group slides: every verb goes by the window, as those over all groups and a mirror do."""

import numpy as np
import pytest

from kvtier import BlockResult, CacheSpec, PoolSpec, Tier, TierFull, WindowGroupSpec
from tests.integration.blocks import chain, opened_cache
from tests.integration.models import assert_content, content
from tests.integration.seeing import tier_stats
from tests.integration.touching import write_into
from tests.integration.waiting import PATIENCE_S, patient

SLIDING = CacheSpec("sliding", "uint8", 16, groups=(WindowGroupSpec(100, (PoolSpec(1, 1, 72), PoolSpec(2, 1, 72))),))
"""A window of seven blocks, of whose first it needs four tokens."""

KEYS = chain("sliding", 11)
FIRST = 4
"""The first block that a prefix of eleven needs."""
MORE = [*KEYS, *chain("more", 2)]
SLOTS = {"device": 16, "host": 16, "disk": 32}


@pytest.fixture
def daemon(start_for):
    return start_for(SLIDING, **SLOTS)


@pytest.fixture
async def mapped(client):
    """The first blocks of a long sequence are gone."""
    cache = await client.open_cache("sliding", SLIDING)
    assert await cache.put(KEYS, content(SLIDING, 0, KEYS), tier=Tier.HOST) == [BlockResult.OK] * 11
    assert (await cache.drop(KEYS[:FIRST])).dropped == FIRST
    return cache


@pytest.fixture(params=[True, False], ids=["mapped", "streamed"])
async def cache(client, mapped, request):
    return mapped if request.param else await client.open_cache("sliding", SLIDING, mapped=False)


def assert_window(found):
    """Of a prefix of eleven, the blocks that it needs; None before."""
    assert found[:FIRST] == [None] * FIRST
    assert_content(SLIDING, 0, KEYS[FIRST:], found[FIRST:])


async def test_a_chain_longer_than_the_tier_comes_as_its_window(start_for):
    """The daemon is asked for the whole chain: a piece of it would have a window of its own."""
    daemon = start_for(SLIDING, host=8, disk=64)
    async with opened_cache(daemon.address, "long", spec=SLIDING, wait=PATIENCE_S) as (_, cache):
        keys = chain("long", 40)
        await cache.put(keys, content(SLIDING, 0, keys))
        await cache.move(keys, Tier.DISK)
        found = await cache.get(keys)
        assert found[:33] == [None] * 33
        assert_content(SLIDING, 0, keys[33:], found[33:])
        await cache.move(keys, Tier.DISK)
        async with cache.reserve(2):
            shorter = await cache.get(keys)  # the window does not fit: the longest prefix that does
            assert_content(SLIDING, 0, keys[:6], shorter)
            await cache.drop(keys[:4])
            with pytest.raises(TierFull):
                await cache.get(keys)


async def test_reads_are_counted_as_over_all_groups(client, mapped):
    other = await client.open_cache("sliding", SLIDING)
    await mapped.get(MORE)
    await other.across.get(MORE)
    for cache in (mapped, other):
        assert (cache.reads.hits, cache.reads.misses, cache.reads.calls) == (7, 2, 0)
    await mapped.get(KEYS[:9])
    assert (mapped.reads.hits, mapped.reads.misses, mapped.reads.calls) == (7, 11, 0)


@pytest.mark.parametrize("times", [1, 2])
async def test_a_block_whose_slot_is_given_away_under_the_copy_takes_the_window_with_it(mapped, monkeypatch, times):
    """The generation of the fourth block changes: the copy is made again, or else the daemon answers for all of it."""
    honest, lies = mapped.arena.generations, times

    def lying(tier, group, slots):
        nonlocal lies
        lies -= 1
        return honest(tier, group, slots) + np.uint64(2) * (np.arange(len(slots)) == (3 if lies >= 0 else -1))

    monkeypatch.setattr(mapped.arena, "generations", lying)
    assert_window(await mapped.get(MORE))
    reads = mapped.reads
    assert (reads.hits, reads.misses, reads.reuses, reads.calls) == ((7, 2, 1, 0) if times == 1 else (0, 0, 2, 1))


async def test_holders_slide_along_together(client, daemon):
    """What the window of a chain has left is held by nobody who wrote it, whoever commits."""
    cache = await client.open_cache("sliding", SLIDING)
    keys = chain("slides", 12)
    async with await patient(daemon.address) as other, cache.reserve(12, Tier.HOST) as lease:
        theirs = await other.open_cache("sliding", SLIDING)
        async with theirs.join(lease.ticket()) as joined:
            for index, part in enumerate(content(SLIDING, 0, keys)):
                write_into(lease.view(index), part)
            assert await lease.commit(keys[:6]) == [BlockResult.OK] * 6
            assert await joined.commit(keys[6:], at=range(6, 12), parent=keys[5]) == [BlockResult.OK] * 6
            await lease.release()
            assert (await tier_stats(client, "sliding", Tier.HOST)).held == 7
    assert (await tier_stats(client, "sliding", Tier.HOST)).held == 0
