"""Retention, pins and resets through a real daemon: what clients ask, and what watchers hear."""

import asyncio

import pytest

from kvtier import BlockResult, Cause, EventType, InvalidArgument, Retention, Tier, TokenRange
from kvtier.errors import StillHeld
from kvtier.events import Event
from kvtier.wire import split_keys
from tests.integration.blocks import SPEC, assert_bytes, blocks, chain, opened_cache

OK = BlockResult.OK
KEYS = chain("retention", 4)
TOKENS = SPEC.tokens_per_block


async def priorities(cache):
    return {block.key: block.priority async for block in cache.blocks()}


async def first(client, cache, cause):
    """The first event of this cause in the cache, of those that the daemon still has."""
    async with asyncio.timeout(20):
        async with client.watch(oldest=True, causes=[cause], caches=[cache.name]) as watch:
            async for each in watch:
                if isinstance(each, Event):
                    return each
    raise AssertionError("unreachable")


async def test_ranges_of_tokens_give_blocks_their_priorities(cache):
    retention = Retention((TokenRange(0, TOKENS + 1, 80), TokenRange(2 * TOKENS, None, 50)), prompt_tokens=3 * TOKENS)
    assert await cache.put(KEYS, blocks(KEYS), retention=retention) == [OK] * 4
    assert list((await priorities(cache)).values()) == [80, 80, 50, 35]


async def test_a_priority_expires_and_says_so(client, cache):
    retention = Retention((TokenRange(0, None, 80, 0.01),))
    await cache.put(KEYS[:2], blocks(KEYS[:2]), retention=retention)
    event = await first(client, cache, Cause.EXPIRED)
    assert event.type is EventType.UPDATED
    assert set(split_keys(event.packed_keys)) == set(KEYS[:2])
    assert set(event.priorities) == {35}


async def test_an_acquire_brings_a_retention_for_what_it_finds(cache):
    await cache.put(KEYS[:3], blocks(KEYS[:3]), priorities=20)
    async with cache.acquire(KEYS, retention=Retention((TokenRange(TOKENS, 2 * TOKENS, 90),))) as lease:
        assert lease.blocks == 3
    assert list((await priorities(cache)).values()) == [90, 90, 20]


async def test_retention_of_stored_blocks_changes(cache):
    await cache.put(KEYS[:2], blocks(KEYS[:2]))
    results = await cache.set_retention(KEYS[:3], [10, 60, 5], [None, 3600, None])
    assert results == [OK, OK, BlockResult.NOT_FOUND]
    assert list((await priorities(cache)).values()) == [60, 60]
    with pytest.raises(InvalidArgument) as caught:
        await cache.set_retention(KEYS[:2], [10])
    assert caught.value.field == "priorities"


async def test_what_is_pinned_stays_and_is_listed(cache):
    await cache.put(KEYS, blocks(KEYS))
    assert await cache.pin(KEYS[:2], Tier.DEVICE) == [OK, OK]
    assert await cache.pin(KEYS[:1], Tier.HOST) == [BlockResult.NOT_READY]
    async with cache.reserve(6, Tier.DEVICE):
        assert_bytes(KEYS, await cache.get(KEYS, tier=Tier.HOST))
        where = [place.residency for place in await cache.locate(KEYS)]
        assert all(residency & Tier.DEVICE.bit for residency in where[:2])
        assert not any(residency & Tier.DEVICE.bit for residency in where[2:])
    assert [block.pinned async for block in cache.blocks()] == [1, 1, 0, 0]
    assert (await cache.drop(KEYS[:1])).results == [BlockResult.HELD]
    assert await cache.unpin(KEYS[:2], Tier.DEVICE) == [OK, OK]
    assert await cache.unpin(KEYS[:1], Tier.DEVICE) == [BlockResult.NOT_PINNED]
    assert (await cache.drop(KEYS[:1])).dropped == 4


async def test_no_more_than_its_share_of_a_tier_is_pinned(cache):
    keys = chain("many", 8)
    for start in (0, 4):
        parent = keys[start - 1] if start else None
        await cache.put(keys[start : start + 4], blocks(keys[start : start + 4]), parent=parent)
    assert await cache.pin(keys, Tier.DEVICE) == [OK] * 4 + [BlockResult.OVER_CAP] * 4
    await cache.unpin(keys[:4], Tier.DEVICE)


async def test_a_dry_run_says_and_does_not(cache):
    await cache.put(KEYS, blocks(KEYS))
    assert (await cache.drop(KEYS[1:2], dry_run=True)).dropped == 3
    assert await cache.move([*KEYS[:1], chain("nowhere", 1)[0]], Tier.HOST, dry_run=True) == [OK, BlockResult.NOT_FOUND]
    assert (await cache.reset(dry_run=True)).dropped == 4
    assert (await cache.match(KEYS)).residency == bytes([Tier.DEVICE.bit] * 4)


async def test_a_reset_forgets_everything(client, cache):
    await cache.put(KEYS, blocks(KEYS))
    await cache.move(KEYS[:2], Tier.DISK)
    report = await cache.reset()
    assert (report.dropped, report.kept) == (4, 0)
    assert (await cache.match(KEYS)).blocks == 0
    event = await first(client, cache, Cause.RESET)
    assert (event.type, split_keys(event.packed_keys)) == (EventType.REMOVED, KEYS[::-1])
    assert await cache.put(KEYS, blocks(KEYS)) == [OK] * 4


async def test_a_reset_is_refused_with_the_holders(cache):
    await cache.put(KEYS, blocks(KEYS))
    async with cache.acquire(KEYS[:2]):
        with pytest.raises(StillHeld) as caught:
            await cache.reset()
        assert [holder.slots for holder in caught.value.holders] == [2]
        assert (await cache.match(KEYS)).blocks == 4
        report = await cache.reset(force=True)
        assert (report.dropped, report.kept) == (2, 2)
    assert (await cache.match(KEYS)).blocks == 2


async def test_a_retention_outlives_the_daemon(start_daemon):
    """And what was changed after a block got to disk does, too."""
    daemon = start_daemon(device=4, host=8, disk=16)
    async with opened_cache(daemon.address, "kept") as (_, cache):
        await cache.put(KEYS, blocks(KEYS), priorities=[70, 60, 50, 40])
        await cache.move(KEYS, Tier.DISK)
        await cache.set_retention(KEYS[3:], [90], [3600.0])
    daemon.restart()
    async with opened_cache(daemon.address, "kept") as (_, cache):
        assert list((await priorities(cache)).values()) == [90, 90, 90, 90]
        await cache.drop(KEYS[3:])
        assert list((await priorities(cache)).values()) == [70, 60, 50]
