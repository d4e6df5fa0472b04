"""A window that keeps the first tokens of a sequence: every verb wants those blocks besides the window's."""

import numpy as np
import pytest

from kvtier import BlockResult, CacheSpec, LeaseError, Mirror, Planes, PoolSpec, Tier, TooShort, WindowGroupSpec
from tests.integration.blocks import chain, opened_cache
from tests.integration.models import assert_content, by_hand, content
from tests.integration.seeing import tier_stats
from tests.integration.waiting import PATIENCE_S

POOLS = (PoolSpec(1, 1, 72),)
SPEC = CacheSpec(
    "sinks", "uint8", 16, groups=(WindowGroupSpec(60, POOLS, sink_tokens=20), WindowGroupSpec(0, (PoolSpec(1, 2, 40),)))
)
"""Two sinks and a window of four blocks, beside a full group."""
SINKS, FIRST, LENGTH = 2, 7, 11
KEYS = chain("sinks", LENGTH)
NEEDED = [*KEYS[:SINKS], *KEYS[FIRST:]]
MORE = [*KEYS, *chain("more", 2)]
WINDOW = 0


@pytest.fixture
def daemon(start_for):
    return start_for(SPEC, device=16, host=16, disk=32)


@pytest.fixture
async def mapped(client):
    """What lies between the sinks and the window is gone."""
    cache = await client.open_cache("sinks", SPEC)
    await cache.across.put(KEYS, {group: content(SPEC, group, KEYS) for group in (0, 1)}, tier=Tier.HOST)
    assert (await cache.drop(KEYS[SINKS:FIRST])).dropped == FIRST - SINKS
    return cache


@pytest.fixture(params=[True, False], ids=["mapped", "streamed"])
async def cache(client, mapped, request):
    return mapped if request.param else await client.open_cache("sinks", SPEC, mapped=False)


def assert_needed(found):
    assert found[SINKS:FIRST] == [None] * (FIRST - SINKS)
    assert_content(SPEC, WINDOW, NEEDED, [*found[:SINKS], *found[FIRST:]])


async def test_all_lookups_want_the_sinks_and_the_window(cache, client):
    async with Mirror(client, ["sinks"]) as mirror:
        for missing, length in ((None, LENGTH), (KEYS[1], 1), (KEYS[0], 0)):
            if missing is not None:
                await cache.drop([missing])
                await mirror.synced((await cache.match(MORE)).as_of)
            assert (await cache.match(MORE)).blocks == await cache.prefix_length(MORE) == length
            across = await cache.across.match(MORE)
            assert across.blocks == mirror.longest_prefix(MORE) == length
            assert across.groups == mirror.match(MORE).groups
            if missing is None:
                span = across.groups[WINDOW]
                assert (span.sink_blocks, span.first_block, len(span.residency)) == (SINKS, FIRST, 6)


async def test_a_lease_holds_the_sinks_and_the_window(cache, client):
    async with cache.acquire(MORE, Tier.DEVICE, min_blocks=LENGTH) as lease:
        assert (lease.needed, lease.blocks) == ((SINKS, FIRST, LENGTH), 6)
        assert (lease.keys, lease.matched) == (tuple(NEEDED), LENGTH)
        await lease.give_back([2, 3])
        assert (await tier_stats(client, cache.name, Tier.DEVICE)).held == 4
        if cache.mapped:
            held = [index for index in range(6) if index not in (2, 3)]
            assert_content(SPEC, WINDOW, [NEEDED[i] for i in held], [np.concatenate(lease.view(i)) for i in held])
            assert lease.unchanged()
            with pytest.raises(LeaseError):
                lease.view(2)
    async with cache.across.acquire(MORE, Tier.DEVICE) as across:
        assert [len(part) for part in across.groups] == [6, LENGTH]
        assert across.groups[WINDOW].keys == tuple(NEEDED)
    with pytest.raises(TooShort) as refused:
        await cache.acquire(MORE, min_blocks=LENGTH + 1)
    assert refused.value.matched == LENGTH
    async with cache.acquire_many([MORE, KEYS[:6], KEYS]) as leases:
        assert [each.prefix_length for each in leases] == [LENGTH, SINKS, LENGTH]
    async with cache.acquire(KEYS[:1]) as short:
        assert (short.prefix_length, short.blocks, short.keys) == (1, 1, (KEYS[0],))


@pytest.mark.parametrize("below", [Tier.DEVICE, Tier.HOST, Tier.DISK])
async def test_a_get_copies_the_sinks_and_the_window_out_of_any_tier(cache, below):
    for group in (0, 1):
        await cache.in_group(group).move(KEYS, below)
    assert_needed(await cache.get(MORE))
    assert_needed(await cache.get(MORE, verify=True))
    out = np.full((13, SPEC.block_bytes(WINDOW)), 0xEE, np.uint8)
    assert_needed(await cache.get(MORE, out))
    assert_content(SPEC, WINDOW, NEEDED, [*out[:SINKS], *out[FIRST:LENGTH]])
    assert (out[SINKS:FIRST] == 0xEE).all() and (out[LENGTH:] == 0xEE).all()
    found = await cache.across.get(MORE, verify=True)
    assert_needed(found[WINDOW])
    assert_content(SPEC, 1, KEYS, found[1])
    out[:] = 0xEE
    assert_needed((await cache.across.get(MORE, {WINDOW: out}))[WINDOW])
    assert_content(SPEC, WINDOW, NEEDED, [*out[:SINKS], *out[FIRST:LENGTH]])
    assert (out[SINKS:FIRST] == 0xEE).all()


async def test_a_get_fills_the_pages_of_the_sinks_and_the_window(cache):
    memory = np.zeros((20, SPEC.block_bytes(WINDOW)), np.uint8)
    pages = np.arange(19, 19 - len(MORE), -1)
    found = await cache.get(MORE, Planes([memory])[pages])
    assert found == [*pages[:SINKS], *[None] * (FIRST - SINKS), *pages[FIRST:LENGTH]]
    assert_content(SPEC, WINDOW, NEEDED, [memory[page] for page in found if page is not None])


async def test_a_use_of_the_window_is_one_of_the_sinks(start_for):
    """The host tier is full of other blocks: those go that no sequence in use needs."""
    daemon = start_for(SPEC, host=8)
    budgets = by_hand(SPEC, host=8)
    async with opened_cache(daemon.address, "used", spec=SPEC, wait=PATIENCE_S, budgets=budgets) as (_, cache):
        await cache.put(KEYS[:SINKS], content(SPEC, WINDOW, KEYS[:SINKS]))
        await cache.put(KEYS[FIRST:], content(SPEC, WINDOW, KEYS[FIRST:]), parent=KEYS[FIRST - 1])
        for number in range(4):
            assert_needed(await cache.get(KEYS))
            others = chain(f"others {number}", 2)
            assert await cache.put(others, content(SPEC, WINDOW, others)) == [BlockResult.OK] * 2


async def test_a_writer_keeps_the_sinks_of_what_it_writes(client, daemon):
    cache = await client.open_cache("sinks", SPEC, budgets=by_hand(SPEC, host=12))
    async with cache.reserve(LENGTH, Tier.HOST) as lease:
        await lease.commit(KEYS)
        assert (await tier_stats(client, "sinks", Tier.HOST)).held == 6
        for key, held in zip(KEYS, [True] * SINKS + [False] * (FIRST - SINKS) + [True] * 4, strict=True):
            assert bool((await cache.drop([key])).dropped) != held
