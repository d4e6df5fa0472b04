"""The life of a cache: opened by name, removed."""

import asyncio
import os
from pathlib import Path

import pytest

from kvtier import (
    BlockResult,
    CacheOptions,
    CacheSpec,
    CallerError,
    Cause,
    Event,
    EventType,
    KvtierError,
    NotFound,
    SpecMismatch,
    Tier,
    TierFull,
    WritePolicy,
)
from kvtier.abi.words import TIERS
from kvtierd.config import Config
from tests.integration.blocks import SLOT_BYTES, SPEC, assert_bytes, blocks, chain, opened_cache, put_chain, sizes
from tests.integration.conftest import own_daemon
from tests.integration.seeing import cache_stats, last_event
from tests.integration.test_directories import cache_dir
from tests.integration.waiting import PATIENCE_S, eventually, heard, patient

SLOTS = {"device": 8, "host": 16, "disk": 64}
KEYS = chain("kept", 6)
daemon = own_daemon(**SLOTS)


async def put(client, name, budgets=None):
    cache = await client.open_cache(name, SPEC, budgets=budgets)
    await cache.put(KEYS, blocks(KEYS))
    return cache


async def segments(daemon):
    """Names of the shared memory that the daemon maps; threads let go of it a moment after the last copy."""
    maps = await asyncio.to_thread(Path(f"/proc/{daemon.pid}/maps").read_text)
    return {word for word in maps.split() if word.startswith("/memfd:kvtier:")}


# -- by name -----------------------------------------------------------------------------------------------------------
async def test_a_cache_is_opened_by_its_name_alone_if_it_exists(client, other):
    with pytest.raises(NotFound) as missing:
        await client.open_cache("known")
    assert missing.value.reason == "UNKNOWN_CACHE"
    await put(other, "known", sizes(device=8, host=8, disk=16))
    cache = await client.open_cache("known")
    assert (cache.spec, cache.block_bytes) == (SPEC, SPEC.block_bytes(0))
    assert_bytes(KEYS, await cache.get(KEYS))


async def test_a_cache_opened_by_its_name_is_not_made_anew_by_a_restarted_daemon(start_daemon):
    daemon = start_daemon(host=8)
    async with await patient(daemon.address) as client, await patient(daemon.address) as owner:
        await owner.open_cache("known", SPEC)
        cache = await client.open_cache("known")
        await asyncio.to_thread(daemon.restart)
        await heard(client)
        with pytest.raises(NotFound):
            await cache.match(KEYS)
        other = CacheSpec.single("another", "uint8", tokens_per_block=16, layers=1, kv_heads=1, head_size=64)
        await owner.open_cache("known", other)
        with pytest.raises(SpecMismatch):
            await cache.match(KEYS)


# -- removed -----------------------------------------------------------------------------------------------------------
async def test_a_removed_cache_leaves_nothing_behind(daemon, client):
    cache = await put(client, "doomed")
    await cache.move(KEYS[:2], Tier.DISK)
    start = await last_event(client)
    await cache.close()
    expected = {tier: count * SLOT_BYTES for tier, count in zip(TIERS, SLOTS.values(), strict=True)}
    planned = await client.remove_cache("doomed", dry_run=True)
    assert (planned.blocks, dict(planned.freed)) == (len(KEYS), expected)
    assert [cache.name for cache in await client.caches()] == ["doomed"]
    assert await client.remove_cache("doomed") == planned
    assert await client.caches() == []
    assert not cache_dir(daemon, "doomed").exists()
    await eventually(lambda: segments(daemon), lambda mapped: not mapped)
    async for item in client.watch(since=start, types=[EventType.CLEARED]):
        assert isinstance(item, Event)
        assert (item.cache, item.cause) == ("doomed", Cause.EXPLICIT)
        break
    # Name and room are free again, also for something else.
    again = await client.open_cache("doomed", SPEC)
    assert [again.slots(tier) for tier in TIERS] == list(SLOTS.values())
    assert (await again.match(KEYS)).blocks == 0
    await again.close()
    await client.remove_cache("doomed")
    await asyncio.to_thread(daemon.restart)
    assert await client.caches() == []
    with pytest.raises(NotFound):
        await client.remove_cache("doomed")


async def test_a_cache_in_use_goes_by_force_and_only_once_its_leases_have_ended(client, other):
    cache = await put(client, "used")
    with pytest.raises(CallerError) as refused:
        await other.remove_cache("used")
    assert refused.value.reason == "CACHE_IN_USE"
    async with cache.acquire(KEYS):
        with pytest.raises(CallerError) as refused:
            await other.remove_cache("used", force=True)
        assert refused.value.reason == "LEASES_HELD"
    await other.remove_cache("used", force=True)
    with pytest.raises(NotFound):
        await cache.match(KEYS)
    assert await other.caches() == []


async def test_a_removal_that_a_crash_cut_short_is_finished(daemon, client):
    await (await put(client, "doomed")).move(KEYS, Tier.DISK)
    daemon.kill()
    cache_dir(daemon, "doomed").rename(cache_dir(daemon, ".gone-doomed"))
    daemon.start()
    assert os.listdir(daemon.disk_dir / "caches") == []
    assert await client.caches() == []


async def test_a_removal_that_failed_gives_the_budgets_back_once_it_succeeds(daemon, client):
    cache = await put(client, "stuck")
    budgets = {tier.tier: tier.capacity for tier in (await cache_stats(client, "stuck")).tiers}
    await cache.close()
    in_the_way = cache_dir(daemon, ".gone-stuck")
    in_the_way.touch()
    with pytest.raises(KvtierError):
        await client.remove_cache("stuck")
    in_the_way.unlink()
    removal = await client.remove_cache("stuck", force=True)
    assert removal.freed[Tier.HOST] == SLOTS["host"] * SLOT_BYTES
    await put(client, "next")
    assert {tier.tier: tier.capacity for tier in (await cache_stats(client, "next")).tiers} == budgets


async def test_options_of_a_cache_in_memory_alone_outlive_its_daemon(start_daemon):
    """Whoever opens it first, who need not have chosen them."""
    options = CacheOptions(WritePolicy.THROUGH, "lfuda", event_hash="v2_sha256", keep_tokens=True, checksum="commit")
    defaults = CacheOptions(write_policy=WritePolicy.BACK, eviction="learned", checksum="disk")
    other = CacheSpec.single("other", "uint8", tokens_per_block=16, layers=1, kv_heads=1, head_size=64)
    daemon = start_daemon(device=2, host=4)
    async with await patient(daemon.address) as chooser, await patient(daemon.address) as client:
        mine = await chooser.open_cache("c", SPEC, options=options)
        await asyncio.to_thread(daemon.restart)
        theirs = await client.open_cache("c", SPEC)
        assert theirs.info.options == options
        assert (await mine.match(chain("any", 1))).blocks == 0, "its own options are refused"
        # They went with the cache when it was removed, and were never those of another specification.
        await chooser.remove_cache("c", force=True)
        assert (await client.open_cache("c", SPEC)).info.options == defaults
        await chooser.remove_cache("c", force=True)
        await chooser.open_cache("c", SPEC, options=options)
        await asyncio.to_thread(daemon.restart)
        assert (await client.open_cache("c", other)).info.options == defaults


async def refused(cache, count, tier=Tier.HOST):
    with pytest.raises(TierFull) as refusal:
        async with cache.reserve(count, tier=tier):
            raise AssertionError("granted")
    return refusal.value


async def test_one_session_holds_so_many_slots_blank_and_no_more(start_daemon):
    daemon = start_daemon("--max-reserved-fraction", "0.5", device=8, host=8)
    async with await patient(daemon.address) as first, await patient(daemon.address) as second:
        cache, theirs = [await each.open_cache("shared", SPEC) for each in (first, second)]
        async with cache.reserve(3, tier=Tier.HOST) as lease:
            error = await refused(cache, 2)
            assert (error.reason, error.tier, error.wanted, error.free) == ("OVER_CAP", Tier.HOST, 2, 1)
            assert [(holder.session_id, holder.slots) for holder in error.holders] == [(first.session_id, 3)]
            assert "max_reserved_fraction" in str(error)
            async with cache.reserve(1, tier=Tier.HOST):
                assert (await refused(cache, 1)).free == 0
            # Each tier has its own, and so has each session.
            async with cache.reserve(4, tier=Tier.DEVICE), theirs.reserve(4, tier=Tier.HOST):
                pass
            # What is committed is not blank any more.
            keys = chain("committed", 3)
            assert await lease.commit(keys) == [BlockResult.OK] * 3
            async with cache.reserve(4, tier=Tier.HOST):
                pass


async def test_a_writer_with_all_that_it_may_have_leaves_a_way_for_reads_from_disk(start_daemon):
    share, slots = Config.model_fields["max_reserved_fraction"].default, 40
    daemon = start_daemon("--max-reserved-fraction", str(share), host=slots, disk=slots)
    async with await patient(daemon.address) as greedy, await patient(daemon.address) as reader:
        cache, theirs = [await each.open_cache("shared", SPEC) for each in (greedy, reader)]
        keys = await put_chain(cache, "on disk", 4)
        await cache.move(keys, Tier.DISK)
        async with cache.reserve(int(share * slots), tier=Tier.HOST):
            assert_bytes(keys, await theirs.get(keys, timeout=5))
            assert (await refused(cache, 1)).reason == "OVER_CAP"


async def test_streams_count_like_any_other_reservation_and_lease(start_daemon):
    daemon = start_daemon("--max-reserved-fraction", "0.5", host=8)
    async with opened_cache(daemon.address, "shared", wait=PATIENCE_S) as (client, cache):
        keys = chain("streamed", 4)
        streamed = await client.open_cache("shared", mapped=False)
        async with cache.reserve(1, tier=Tier.HOST):
            with pytest.raises(TierFull, match="max_reserved_fraction") as over:
                await streamed.put(keys, blocks(keys), tier=Tier.HOST)
            assert (over.value.reason, over.value.free) == ("OVER_CAP", 3)
        assert await streamed.put(keys, blocks(keys), tier=Tier.HOST) == [BlockResult.OK] * 4
