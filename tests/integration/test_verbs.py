"""Every verb as an application uses it, through the client."""

import numpy as np
import pytest

from kvtier import BlockResult, InvalidArgument, LeaseError, Tier, TierFull, TooShort
from kvtier.abi.words import TIERS
from kvtier.errors import CallerError, ClientClosed
from tests import devices
from tests.integration.blocks import BLOCK_BYTES, SLOT_BYTES, SPEC, assert_bytes, blocks, chain, sizes
from tests.integration.seeing import cache_stats, tier_stats
from tests.integration.touching import bytes_in, write_into

OK = BlockResult.OK
KEYS = chain("verbs", 4)
DEVICE, HOST, DISK = (tier.bit for tier in TIERS)


async def put(cache, keys, tier=Tier.DEVICE):
    assert await cache.put(keys, blocks(keys), tier=tier) == [OK] * len(keys)


async def test_open_gives_a_cache_its_budgets_and_says_what_it_is(client, name):
    cache = await client.open_cache(name, SPEC, budgets=sizes(device=3, host=5, disk=7))
    assert cache.tiers == TIERS
    assert [cache.slots(tier) for tier in TIERS] == [3, 5, 7]
    (group,) = cache.info.groups
    assert {tier.slot_bytes for tier in group.tiers} == {SLOT_BYTES}
    assert (cache.info.spec, cache.info.fingerprint) == (SPEC, SPEC.fingerprint())
    assert cache.block_bytes == BLOCK_BYTES


async def test_close_gives_up_the_cache_and_keeps_it_warm(client, cache):
    await put(cache, KEYS)
    await cache.acquire(KEYS)
    await cache.close()
    assert (await cache_stats(client, cache.name)).blocks == 4
    assert (await tier_stats(client, cache.name, Tier.DEVICE)).held == 0
    with pytest.raises(CallerError, match="was closed"):
        await cache.match(KEYS)
    again = await client.open_cache(cache.name, SPEC)
    assert (again.info.cache_id, again.info.blocks, again.slots(Tier.HOST)) == (cache.info.cache_id, 4, 16)
    assert_bytes(KEYS, await again.get(KEYS))


async def test_opens_of_one_cache_close_one_by_one(client, cache):
    again = await client.open_cache(cache.name, SPEC)
    async with cache.reserve(1):
        await again.close()
        await again.close()
        with pytest.raises(ClientClosed):
            await again.match(KEYS)
        await put(cache, KEYS)
    assert (await cache.match(KEYS)).blocks == len(KEYS)
    await cache.close()
    with pytest.raises(ClientClosed):
        await cache.match(KEYS)


async def test_match_is_the_longest_stored_prefix(cache):
    nothing = await cache.match(KEYS)
    assert (nothing.blocks, nothing.residency) == (0, b"")
    await put(cache, KEYS[:3])
    found = await cache.match(KEYS)
    assert (found.blocks, found.residency) == (3, bytes([DEVICE] * 3))
    assert (await cache.match([KEYS[1]])).blocks == 1
    assert (await cache.match([KEYS[3], KEYS[0]])).blocks == 0
    assert found.as_of > nothing.as_of


async def test_locate_names_the_slots_that_hold_the_bytes(cache):
    await put(cache, KEYS[:1], Tier.DEVICE)
    await put(cache, chain("other", 1), Tier.HOST)
    on_device, in_host, nowhere = await cache.locate([KEYS[0], chain("other", 1)[0], KEYS[1]])
    assert (on_device.residency, in_host.residency, nowhere.residency) == (DEVICE, HOST, 0)
    assert on_device.device_slot is not None
    assert in_host.host_slot is not None
    assert (on_device.host_slot, in_host.device_slot, nowhere.device_slot, nowhere.host_slot) == (None,) * 4
    view = cache.arena.view(Tier.DEVICE, 0, on_device.device_slot, write=False)
    assert_bytes(KEYS[:1], [bytes_in(view)])
    slots = np.array([on_device.device_slot], dtype=np.intp)
    assert on_device.device_generation == cache.arena.generations(Tier.DEVICE, 0, slots)[0]


async def test_reserve_fills_and_commits_a_chain_of_one_call(cache):
    async with cache.reserve(4, Tier.HOST) as lease:
        for index, data in enumerate(blocks(KEYS)):
            write_into(lease.view(index), data)
        assert await lease.commit(KEYS, priorities=[10, 20, 30, 40]) == [OK] * 4
        assert not lease.view(0)[0].flags.writeable
    assert_bytes(KEYS, await cache.get(KEYS, tier=Tier.HOST))
    listed = {block.key: block async for block in cache.blocks()}
    assert [listed[key].parent for key in KEYS] == [None, *KEYS[:-1]]
    # A parent is worth as much as its children.
    assert [listed[key].priority for key in KEYS] == [40] * 4


async def test_commit_answers_for_each_block(client, cache):
    await put(cache, KEYS[:2])
    orphan, other = chain("orphan", 2)
    async with cache.reserve(5) as lease:
        results = await lease.commit(
            [KEYS[0], KEYS[1], other, KEYS[2], KEYS[3]], parents=[None, None, orphan, KEYS[1], KEYS[2]]
        )
        assert results == [
            BlockResult.EXISTS,
            BlockResult.PARENT_CONFLICT,
            BlockResult.PARENT_MISSING,
            BlockResult.OK,
            BlockResult.OK,
        ]
        # The slot whose block existed went back; those of the refused two are still ours to fill.
        stats = await tier_stats(client, cache.name, Tier.DEVICE)
        assert (stats.blank, stats.ready) == (2, 4)
        assert await lease.commit([orphan, other], at=[1, 2]) == [OK, OK]
    assert [block.key async for block in cache.blocks()] == [*KEYS, orphan, other]


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
@pytest.mark.parametrize("stored_in", list(TIERS))
async def test_acquire_makes_a_chain_ready_wherever_it_was(cache, tier, stored_in):
    await put(cache, KEYS)
    if stored_in is not Tier.DEVICE:
        assert await cache.move(KEYS, stored_in) == [OK] * 4
    async with cache.acquire([*KEYS, *chain("more", 1)], tier, min_blocks=4) as lease:
        assert (lease.keys, lease.matched, lease.found_in) == (tuple(KEYS), 4, bytes([stored_in.bit] * 4))
        assert lease.unchanged()
        assert_bytes(KEYS, [bytes_in(lease.view(index)) for index in range(4)])
    # A promotion from the host frees the source; the disk keeps its copy; a look from below leaves the device's alone.
    promoted = (stored_in, tier) == (Tier.HOST, Tier.DEVICE)
    assert set((await cache.match(KEYS)).residency) == {tier.bit if promoted else tier.bit | stored_in.bit}


async def test_acquire_is_shortened_where_room_is_short_but_never_below_min_blocks(cache):
    keys = chain("long", 8)
    await put(cache, keys)
    assert await cache.move(keys, Tier.HOST) == [OK] * 8
    async with cache.reserve(5, Tier.DEVICE):
        async with cache.acquire(keys, Tier.DEVICE, min_blocks=3) as lease:
            assert (lease.blocks, lease.matched) == (3, 8)
        with pytest.raises(TierFull) as refused:
            await cache.acquire(keys, Tier.DEVICE, min_blocks=4)
        assert refused.value.tier is Tier.DEVICE
    with pytest.raises(TooShort) as short:
        await cache.acquire([*keys[:2], *KEYS], Tier.DEVICE, min_blocks=3)
    assert short.value.matched == 2


async def test_a_lease_of_nothing_is_released_as_any_other(cache):
    """Whoever acquires what there is of a chain need not look whether there was anything."""
    lease = await cache.acquire(KEYS)
    assert lease.blocks == 0
    with pytest.raises(LeaseError):
        lease.view(0)
    await lease.release()
    await put(cache, KEYS)
    lease = await cache.acquire(KEYS)
    await lease.release()
    with pytest.raises(LeaseError) as again:
        await lease.release()
    assert again.value.reason == "RELEASED"


async def test_a_put_never_takes_the_room_of_its_parent(client, name):
    """Nor of a part of its chain that it finds stored, though nothing else was used so long ago."""
    cache = await client.open_cache(name, SPEC, budgets=sizes(host=4))
    keys, later = chain("parent", 4), chain("later", 2)
    for first in (2, 0):
        await cache.reset()
        await cache.put(keys[:2], blocks(keys[:2]))
        await cache.put(later, blocks(later))
        parent = keys[1] if first else None
        results = await cache.put(keys[first:], blocks(keys[first:]), parent=parent)
        assert results == [BlockResult.EXISTS] * (2 - first) + [OK] * 2
        assert_bytes(keys, await cache.get(keys))


async def test_a_put_copies_only_what_is_missing(client, name):
    """It needs no slots for the rest, and looks at none of its bytes."""
    cache = await client.open_cache(name, SPEC, budgets=sizes(host=6))
    keys, other = chain("grows", 5), chain("other", 3)
    await cache.put(keys[:2], blocks(keys[:2]))
    async with cache.acquire(keys[:2], min_blocks=2), cache.reserve(1):
        rows = [*blocks(other[:2]), *blocks(keys[2:])]
        assert await cache.put(keys, rows) == [BlockResult.EXISTS] * 2 + [OK] * 3
        assert await cache.put(keys[1:], rows[1:], parent=keys[0]) == [BlockResult.EXISTS] * 4
        assert_bytes(keys, await cache.get(keys))
    assert [listed.parent async for listed in cache.blocks()] == [None, *keys[:-1]]
    with pytest.raises(InvalidArgument, match="parent"):
        await cache.put(keys, rows, parent=b"short")


async def test_what_a_put_found_stored_counts_as_used(client, name):
    cache = await client.open_cache(name, SPEC, budgets=sizes(host=6))
    old, new = chain("old", 3), chain("new", 3)
    for keys in (old, new, old):
        await cache.put(keys, blocks(keys))
    async with cache.reserve(3):
        assert (await cache.prefix_length(old), await cache.prefix_length(new)) == (3, 0)


async def test_drop_takes_what_is_below_and_spares_what_is_held(client, cache):
    twig = chain("twig", 1)
    await put(cache, KEYS)
    await cache.put(twig, blocks(twig), parent=KEYS[1])
    async with cache.acquire(KEYS):
        held = await cache.drop([KEYS[0], twig[0], *chain("absent", 1)])
        assert held.results == [BlockResult.HELD, OK, BlockResult.NOT_FOUND]
        assert held.dropped == 1
    assert (await cache.match(KEYS)).blocks == 4
    dropped = await cache.drop([KEYS[1]])
    assert (dropped.results, dropped.dropped) == ([OK], 3)
    assert (await cache.match(KEYS)).blocks == 1
    assert (await cache_stats(client, cache.name)).removed == 4


async def test_listing_comes_in_pages_of_one_moment(cache):
    keys = chain("listed", 8)
    await put(cache, keys, Tier.HOST)
    pages = [page async for page in cache.pages(page_blocks=3)]
    assert [len(page.blocks) for page in pages] == [3, 3, 2]
    assert len({page.as_of for page in pages}) == 1
    listed = [block for page in pages for block in page.blocks]
    assert [block.key for block in listed] == keys
    assert [block.parent for block in listed] == [None, *keys[:-1]]
    assert {(block.residency, block.priority) for block in listed} == {(HOST, 35)}


async def test_a_reader_maps_nothing_writable(client, cache):
    await put(cache, KEYS)
    reader = await client.open_cache(cache.name, SPEC, write=False)
    assert_bytes(KEYS, await reader.get(KEYS))
    assert not reader.arena.writable
    with pytest.raises(InvalidArgument, match="write"):
        await reader.reserve(1)
    # A GPU's memory cannot be mapped to be read alone, so it is not mapped at all.
    with pytest.raises(CallerError if devices.ON_CUDA else ValueError, match="read-only"):
        reader.arena.view(Tier.DEVICE, 0, 0, write=True)[0][:] = 1
