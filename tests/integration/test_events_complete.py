"""Every type and cause of event, over every tier and edge that can have it, each driven by hand on a real daemon.

After every step the books that are kept by events alone say the same as the daemon's own listing, of residency and of
priority and in both directions, and no event has said anything that was so before.
"""

import asyncio
import os
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise, permutations
from typing import Final, TypeVar

import pytest

from kvtier import BlockResult, CacheOptions, Cause, EventType, Hint, Retention, WritePolicy
from kvtier.abi.words import TIERS
from kvtier.explanation import WHY_GONE
from tests.integration.blocks import SLOT_BYTES, SPEC, blocks, chain, put_chain, sizes
from tests.integration.books import Books, moved
from tests.integration.conftest import own_daemon
from tests.integration.stored import stored_in
from tests.integration.supervised import SupervisedDaemon
from tests.integration.test_disk_faults import flip_a_bit, limit_files, slab
from tests.integration.waiting import PATIENCE_S, eventually, patient

DEVICE, HOST, DISK = TIERS
SLOTS: Final = {"device": 24, "host": 24, "disk": 48}
SMALL: Final = sizes(device=6, host=6, disk=12)

Test = TypeVar("Test", bound=Callable[..., object])

NOT_DRIVEN: Final = {Cause.REMOTE: "nothing is beyond the host here: tests/remote/test_tier.py drives it"}
"""Causes that nothing says, and why."""

_driven: Final[dict[Cause, set[EventType]]] = {}


def drives(*said):
    """What a test asserts to have been told of."""
    for type, cause in said:
        _driven.setdefault(cause, set()).add(type)
    return lambda test: test


STORED, REMOVED, UPDATED = EventType.STORED, EventType.REMOVED, EventType.UPDATED
CREATED, CLEARED = EventType.CREATED, EventType.CLEARED
daemon = own_daemon(fresh=True, **SLOTS)


@pytest.fixture
async def books(client):
    async with Books(client) as books:
        yield books


@pytest.fixture
async def cache(client):
    return await client.open_cache("c", SPEC, budgets=SMALL)


@asynccontextmanager
async def kept(daemon):
    async with await patient(daemon.address) as client, Books(client) as books:
        yield client, books


async def put(cache, name, count=1, *, tier=DEVICE, priorities=35):
    keys = chain(f"{cache.name} {name}", count)
    assert set(await cache.put(keys, blocks(keys), tier=tier, priorities=priorities)) == {BlockResult.OK}
    return keys


async def insist(cache, name, count, *, tier, priorities):
    """Until all of it is stored: what is put in pieces may lose the first to the next where slots are few."""
    keys = chain(f"{cache.name} {name}", count)
    async with asyncio.timeout(PATIENCE_S):
        while BlockResult.PARENT_MISSING in await cache.put(keys, blocks(keys), tier=tier, priorities=priorities):
            pass


async def move(cache, keys, to):
    assert set(await cache.move(keys, to)) == {BlockResult.OK}


async def hold(cache, keys, tier):
    """Acquired, and let go of."""
    async with cache.acquire(keys, tier, min_blocks=len(keys)):
        pass


def is_(type, cause=None, *, before=0, after=0):
    """Which changes are of the type and cause, from and to residencies with at least these tiers."""

    def wanted(told):
        same = told.type is type and cause in (None, told.cause)
        return same and told.before & before == before and told.after & after == after

    return wanted


async def say(books, *said):
    """That each of these has been told of: type, cause, and tiers that the block was in before and is in after."""
    await books.causes(lambda told: True)
    for type, cause, before, after in said:
        assert any(is_(type, cause, before=before, after=after)(told) for told in books.told), (
            f"{type} {cause} {before} {after} is not in {sorted(books.told)}"
        )


@drives((CREATED, Cause.EXPLICIT), (STORED, Cause.COMMIT), (UPDATED, Cause.COMMIT))
async def test_what_a_commit_does(books, cache):
    await books.agree(cache)
    for tier in (DEVICE, HOST):
        keys = await put(cache, f"in {tier}", 2, tier=tier)
        await books.agree(cache)
        child = await put_chain(cache, "more", 1, parent=keys[-1], tier=tier, priorities=80)
        await books.agree(cache)
        assert await cache.put(child, blocks(child), parent=keys[-1], tier=tier) == [BlockResult.EXISTS]
        await books.agree(cache)
        await say(books, (STORED, Cause.COMMIT, 0, tier.bit), (UPDATED, Cause.COMMIT, tier.bit, tier.bit))
        await cache.drop(child)
    await say(books, (CREATED, Cause.EXPLICIT, 0, 0))


@drives((UPDATED, Cause.DEMAND), (UPDATED, Cause.PREFETCH), (UPDATED, Cause.EXPLICIT), (UPDATED, Cause.WRITE_THROUGH))
async def test_every_edge_up_and_down_by_call(books, cache):
    for src, dst in permutations(TIERS, 2):
        keys = await put(cache, f"from {src} to {dst}", 2)
        await move(cache, keys, src)
        await books.agree(cache)
        await move(cache, keys[1:], dst)
        await books.agree(cache)
        cause = Cause.PREFETCH if dst < src else Cause.EXPLICIT
        assert cause in await books.causes(moved(src, dst)), (src, dst)
        await cache.drop(keys[:1])
    for src, dst in ((HOST, DEVICE), (DISK, DEVICE), (DISK, HOST), (DEVICE, HOST)):
        keys = await put(cache, f"wanted from {src} in {dst}", 2)
        await move(cache, keys, src)
        await hold(cache, keys, dst)
        await books.agree(cache)
        assert Cause.DEMAND in await books.causes(moved(src, dst)), (src, dst)
        await cache.drop(keys[:1])
    keys = await put(cache, "takes its parent along", 2)
    await move(cache, keys[1:], DISK)
    await books.agree(cache)
    await say(books, (UPDATED, Cause.WRITE_THROUGH, DEVICE.bit, DEVICE.bit | DISK.bit))
    await hold(cache, keys, DEVICE)
    await move(cache, keys, DISK)  # which is there: only the copies above go
    await books.agree(cache)
    await say(books, (UPDATED, Cause.EXPLICIT, DEVICE.bit | DISK.bit, DISK.bit))


@drives((REMOVED, Cause.EXPLICIT), (REMOVED, Cause.ANCESTOR), (UPDATED, Cause.EXPLICIT), (UPDATED, Cause.EXPIRED))
async def test_drops_and_retention_in_every_tier(books, cache):
    for tier in TIERS:
        keys = await put(cache, f"in {tier}", 4)
        await move(cache, keys, tier)
        await cache.set_retention(keys[3:], 90)
        await books.agree(cache)
        await cache.set_retention(keys[3:], 90)  # as it is: nothing to tell
        await cache.set_retention(keys[:1], 50)  # its child has more: nothing to see
        await books.agree(cache)
        await cache.set_retention(keys[3:], 60, 0.01)
        expired = is_(UPDATED, Cause.EXPIRED, before=tier.bit, after=tier.bit)
        await eventually(lambda: books.causes(expired), bool)  # noqa: B023
        await books.agree(cache)
        await cache.pin(keys[2:3], tier)
        assert (await cache.drop(keys)).dropped == 1
        await cache.unpin(keys[2:3], tier)
        await books.agree(cache)
        await cache.drop(keys[1:2])
        await books.agree(cache)
        await say(
            books,
            (UPDATED, Cause.EXPLICIT, tier.bit, tier.bit),
            (REMOVED, Cause.EXPLICIT, tier.bit, 0),
            (REMOVED, Cause.ANCESTOR, tier.bit, 0),
        )
        await cache.drop(keys[:1])


@drives((REMOVED, Cause.RESET), (UPDATED, Cause.RESET))
async def test_a_reset_and_what_it_leaves(books, cache):
    for tier in TIERS:
        await move(cache, await put(cache, f"in {tier}", 2), tier)
    keys = await put(cache, "held", 1)
    await put_chain(cache, "important", 1, parent=keys[0], priorities=90)
    async with cache.acquire(keys):
        await cache.reset(force=True)
        await books.agree(cache)
    await cache.reset()
    await books.agree(cache)
    await say(books, *((REMOVED, Cause.RESET, tier.bit, 0) for tier in TIERS), (UPDATED, Cause.RESET, 1, 1))


@drives((UPDATED, Cause.CAPACITY), (REMOVED, Cause.CAPACITY))
@pytest.mark.parametrize("tiers", [(DEVICE, HOST, DISK), (DEVICE, DISK), (HOST, DISK), (DEVICE, HOST), (DEVICE,)])
async def test_room_is_made_in_every_tier(client, books, tiers):
    few = {str(tier): 4 for tier in tiers}
    cache = await client.open_cache("c", SPEC, budgets=sizes(**few))
    longest = 3 if len(tiers) > 1 else 1
    for number in range(4 * len(tiers) + 4):
        await insist(cache, str(number), 1 + number % longest, tier=tiers[0], priorities=35 + number % 2)
    await books.agree(cache)
    for src, dst in pairwise(tiers):
        assert Cause.CAPACITY in await books.causes(moved(src, dst)), (src, dst)
    await say(books, (REMOVED, Cause.CAPACITY, tiers[-1].bit, 0))
    if len(tiers) > 1:  # what is below as well goes without a copy
        keys = await put(cache, "twice", 1, tier=tiers[0])
        await move(cache, keys, tiers[1])
        await hold(cache, keys, tiers[0])
        for number in range(4):
            await put(cache, f"again {number}", 1, tier=tiers[0])
        await books.agree(cache)


@drives((UPDATED, Cause.WRITE_THROUGH))
@pytest.mark.parametrize("policy", [WritePolicy.THROUGH, WritePolicy.SELECTIVE])
async def test_what_is_written_down_by_policy(client, books, policy):
    cache = await client.open_cache("c", SPEC, budgets=SMALL, options=CacheOptions(write_policy=policy))
    for tier in (DEVICE, HOST):
        keys = await put(cache, f"in {tier}", 2, tier=tier)
        await hold(cache, keys, tier)
        await eventually(lambda: books.causes(moved(tier, DISK)), bool)  # noqa: B023
        await books.agree(cache)
        assert await books.causes(moved(tier, DISK)) == {Cause.WRITE_THROUGH}


@drives((UPDATED, Cause.WATERMARK))
async def test_slots_are_kept_clean(start_fresh):
    async with kept(start_fresh(**SLOTS)) as (client, books):
        for name, below in (("with-host", HOST), ("without-host", DISK)):
            budgets = sizes(device=8, host=8) if below is HOST else sizes(device=8, disk=8)
            cache = await client.open_cache(name, SPEC, budgets=budgets)
            for number in range(8):
                await put(cache, str(number))
            await eventually(lambda: books.causes(moved(DEVICE, below)), bool)  # noqa: B023
            await books.agree(cache)
            assert await books.causes(moved(DEVICE, below)) == {Cause.WATERMARK}


@drives((REMOVED, Cause.CORRUPT), (REMOVED, Cause.ANCESTOR))
async def test_bytes_that_are_not_what_they_were(daemon, books, cache):
    keys = await put(cache, "rots", 4)
    await move(cache, keys, DISK)
    await hold(cache, keys[:1], DEVICE)
    flip_a_bit(daemon, keys[1])
    assert len(await cache.get(keys)) == 1
    await books.agree(cache)
    await say(books, (REMOVED, Cause.CORRUPT, DISK.bit, 0), (REMOVED, Cause.ANCESTOR, DISK.bit, 0))


@drives((REMOVED, Cause.IO_ERROR), (UPDATED, Cause.IO_ERROR), (REMOVED, Cause.ANCESTOR))
async def test_a_disk_that_is_given_up(start_fresh):
    daemon = start_fresh("--tier-grace-seconds", "0.2", **SLOTS)
    async with kept(daemon) as (client, books):
        cache = await client.open_cache("c", SPEC)
        both = await put(cache, "above as well", 2)
        await move(cache, both, DISK)
        await hold(cache, both, DEVICE)
        only = await put(cache, "only there", 4)
        await move(cache, only, DISK)
        await put_chain(cache, "under it, in memory", 1, parent=both[-1])
        await books.agree(cache)
        limit_files(daemon, SLOT_BYTES)
        os.truncate(slab(daemon), 0)
        assert await cache.get(only) == []
        await eventually(client.stats, lambda stats: any("out of service" in each for each in stats.problems))
        await books.agree(cache)
        await say(
            books, (REMOVED, Cause.IO_ERROR, DISK.bit, 0), (UPDATED, Cause.IO_ERROR, DEVICE.bit | DISK.bit, DEVICE.bit)
        )
        limit_files(daemon)
        await eventually(client.stats, lambda stats: not stats.problems)
        await move(cache, await put(cache, "again", 2), DISK)
        await books.agree(cache)


@drives((CLEARED, Cause.QUOTA))
async def test_a_cache_of_the_family_takes_over(start_fresh):
    daemon = start_fresh(**SLOTS)
    async with kept(daemon) as (client, books):
        old = await client.open_cache("old", replace(SPEC, identity={"engine": "toy 1"}))
        await put(old, "unreachable soon", 4)
        await old.close()
        new = await client.open_cache("new", replace(SPEC, identity={"engine": "toy 2"}))
        await put(new, "anything", 2)
        await books.agree(new)
        await say(books, (CLEARED, Cause.QUOTA, 0, 0))


@drives((CLEARED, Cause.SHUTDOWN), (CREATED, Cause.RECOVERED), (STORED, Cause.RECOVERED), (CLEARED, Cause.LOST))
@pytest.mark.parametrize("cause", [Cause.SHUTDOWN, Cause.LOST])
async def test_a_restart(daemon, client, books, cause):
    cache = await client.open_cache("on-disk", SPEC, budgets=SMALL)
    memory = await client.open_cache("in-memory", SPEC, budgets=sizes(device=4, host=4))
    await move(cache, await put(cache, "kept", 2), DISK)
    raised = await put(cache, "raised", 2)
    await cache.set_retention(raised[1:], 80)
    await move(cache, raised, DISK)
    await put(cache, "not kept", 2)
    await put(memory, "not kept", 2)
    await books.agree(cache, memory)
    await asyncio.to_thread(daemon.kill if cause is Cause.LOST else daemon.stop)
    recorded = len(stored_in(daemon.disk_dir / "caches" / "on-disk"))
    await asyncio.to_thread(daemon.start)
    await books.agree(cache)
    assert not books.has("in-memory")
    assert bool(books.gaps) is (cause is Cause.LOST)
    await say(
        books, (CLEARED, cause, DEVICE.bit, 0), (CREATED, Cause.RECOVERED, 0, 0), (STORED, Cause.RECOVERED, 0, DISK.bit)
    )
    assert sum(n for told, n in books.told.items() if told.cause is Cause.RECOVERED and told.type is STORED) == recorded


@drives((STORED, Cause.RECOVERED), (UPDATED, Cause.RECOVERED))
@pytest.mark.parametrize("cause", [Cause.SHUTDOWN, Cause.LOST])
async def test_memory_that_is_taken_over(short_dir, cause):
    with SupervisedDaemon(short_dir, sizes(device=8, host=8, disk=16)) as daemon:
        async with await patient(daemon.address) as client, Books(client) as books:
            cache = await client.open_cache("c", SPEC)
            for tier in (DEVICE, HOST):
                (parent,) = await put(cache, f"in {tier}", tier=tier)
                await put_chain(cache, f"raises it in {tier}", 1, parent=parent, tier=tier, priorities=80)
            await move(cache, await put(cache, "on disk", 2), DISK)
            await books.agree(cache)
            before = sum(1 for _ in [block async for block in cache.blocks()])
            await asyncio.to_thread(daemon.kill if cause is Cause.LOST else daemon.upgrade)
            await books.agree(cache)
            assert sum(1 for _ in [block async for block in cache.blocks()]) == before
            recovered = ((STORED, Cause.RECOVERED, 0, tier.bit) for tier in TIERS)
            raised = ((UPDATED, Cause.RECOVERED, tier.bit, tier.bit) for tier in (DEVICE, HOST))
            await say(books, (CLEARED, cause, HOST.bit, 0), *recovered, *raised)


@drives((UPDATED, Cause.HINT))
async def test_a_hint(books, cache):
    keys = chain("hinted", 2)
    await cache.put(keys, blocks(keys), tier=HOST, retention=Retention(conversation="c"))
    for action, src, dst in ("demote", HOST, DISK), ("prefetch", DISK, DEVICE):
        await cache.hint(Hint(action, "c", tier=dst))
        assert await eventually(lambda: books.causes(moved(src, dst)), bool) == {Cause.HINT}  # noqa: B023
    for hint in Hint("retain", "c", priority=20), Hint("retain", keys=keys, priority=10), Hint("end", "c"):
        before = sum(books.told.values())
        await cache.hint(hint)
        await books.agree(cache)
        assert sum(books.told.values()) > before, hint
    assert await books.causes(is_(UPDATED, before=DEVICE.bit, after=DEVICE.bit)) == {Cause.HINT}


@drives((CLEARED, Cause.EXPLICIT))
async def test_a_cache_is_removed(client, books, cache):
    await put(cache, "removed", 2)
    await cache.close()
    await client.remove_cache("c")
    await say(books, (CLEARED, Cause.EXPLICIT, 0, 0))
    assert not books.has("c")


def test_every_cause_is_driven_or_has_a_reason_not_to_be():
    assert set(_driven) | set(NOT_DRIVEN) == set(Cause)
    assert not set(_driven) & set(NOT_DRIVEN)


def test_every_cause_that_takes_a_block_away_has_words():
    assert {cause for cause, said in _driven.items() if said & {REMOVED, CLEARED}} == set(WHY_GONE)
