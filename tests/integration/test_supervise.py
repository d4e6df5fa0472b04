"""What survives the daemon: memory tiers, and the slots that live processes may still touch."""

import asyncio
import os
import select
import signal
from itertools import compress
from pathlib import Path

import pytest

from kvtier import BlockResult, CacheOptions, LeaseLost, Retention, Tier, TierFull, TokenRange, WritePolicy
from tests.integration.actors import Actor
from tests.integration.blocks import SPEC, assert_bytes, blocks, chain, opened_cache, put_chain, sizes
from tests.integration.books import Books
from tests.integration.models import VSWA, assert_content, by_hand, content, groups_of
from tests.integration.seeing import cache_stats
from tests.integration.supervised import SupervisedDaemon
from tests.integration.waiting import PATIENCE_S, eventually, heard, patient

HOST = 16
TOKENS = SPEC.tokens_per_block


@pytest.fixture
def daemon(short_dir):
    """Without a disk tier: nothing but memory could bring anything back."""
    with SupervisedDaemon(short_dir, sizes(host=HOST)) as process:
        yield process
    assert "Traceback" not in process.log


async def stored(client, name, length):
    cache = await client.open_cache("c", SPEC)
    keys = chain(name, length)
    assert await cache.put(keys, blocks(keys), tier=Tier.HOST) == [BlockResult.OK] * length
    return cache, keys


async def retained(client, key):
    """A block's own priority, how long it has it in milliseconds, and until when."""
    (block,) = (await client.explain(key, past=False)).blocks
    return block.own_priority, block.duration_ms, block.deadline_ns


async def orphaned(client):
    tiers = (await cache_stats(client, "c")).tiers
    return next(tier.orphaned for tier in tiers if tier.tier is Tier.HOST)


@pytest.mark.parametrize(("end", "epochs"), [(SupervisedDaemon.kill, 1), (SupervisedDaemon.upgrade, 0)])
async def test_blocks_in_memory_survive_where_they_are(daemon, end, epochs):
    """And so do the cache's options, whoever opens it then."""
    options = CacheOptions(write_policy=WritePolicy.SELECTIVE, eviction="lfuda", checksum="commit")
    async with await patient(daemon.address) as client:
        await client.open_cache("c", SPEC, options=options)
        cache, keys = await stored(client, "kept", 10)
        before = await client.stats()
        places = await cache.locate(keys)
        for _ in range(2):
            await asyncio.to_thread(end, daemon)
            assert await cache.locate(keys) == places, "not a byte has moved, nor a generation changed"
            assert_bytes(keys, await cache.get(keys))
        now = await client.stats()
        assert (now.epoch, now.boot) == (before.epoch + 2 * epochs, before.boot + 2)
        async with await patient(daemon.address) as other:
            assert (await other.open_cache("c")).info.options == options


@pytest.mark.parametrize("end", ["kill", "upgrade"])
async def test_a_retention_given_after_the_commit_survives(daemon, end):
    """By ``set_retention``, and by an acquire, whose clock starts at the release; and events say the same."""
    async with await patient(daemon.address) as client:
        cache, keys = await stored(client, "kept", 4)
        await cache.set_retention(keys[1:2], 80, 3600.0)
        retention = Retention((TokenRange(2 * TOKENS, 3 * TOKENS, 70, 1800.0),))
        async with cache.acquire(keys, tier=Tier.HOST, retention=retention):
            pass
        before = [await retained(client, key) for key in keys]
        assert [priority for priority, _, _ in before] == [35, 80, 70, 35]
        assert [deadline > 0 for _, _, deadline in before] == [False, True, True, False]
        await asyncio.to_thread(daemon.kill if end == "kill" else daemon.upgrade)
        assert [await retained(client, key) for key in keys] == before
        async with Books(client) as books:
            await books.agree(cache)


async def test_a_block_can_be_found_on_host_and_disk(short_dir):
    with SupervisedDaemon(short_dir, sizes(host=HOST, disk=64)) as daemon:
        async with await patient(daemon.address) as client:
            cache, keys = await stored(client, "both", 4)
            await cache.move(keys, Tier.DISK)
            async with cache.acquire(keys, tier=Tier.HOST):
                pass
            alone = await put_chain(cache, "host alone", 3, tier=Tier.HOST)
            await asyncio.to_thread(daemon.kill)
            await heard(client)
            assert {place.residency for place in await cache.locate(keys)} == {Tier.HOST.bit | Tier.DISK.bit}
            assert {place.residency for place in await cache.locate(alone)} == {Tier.HOST.bit}
            assert_bytes([*keys, *alone], [*await cache.get(keys), *await cache.get(alone)])


async def test_all_window_groups_survive_a_kill(short_dir):
    """With different slots and bytes in each, and blocks in both tiers of memory; without a disk."""
    slots = {"device": 12, "host": 16}
    with SupervisedDaemon(short_dir, {tier: sum(shares) for tier, shares in by_hand(VSWA, **slots).items()}) as daemon:
        async with await patient(daemon.address) as client:
            cache = await client.open_cache("vswa", VSWA, budgets=by_hand(VSWA, **slots))
            groups = [cache.in_group(group) for group in groups_of(VSWA)]
            keys = {group.group: chain(f"group {group.group}", 20) for group in groups}
            for group in groups:
                await group.put(keys[group.group], content(VSWA, group.group, keys[group.group]))
            shared = chain("across", 6)
            held = {group: shared[6 - count :] for group, count in {0: 4, 1: 6, 2: 6}.items()}
            await cache.across.put(shared, {group: content(VSWA, group, held[group]) for group in held})
            before = {group.group: await group.locate([*keys[group.group], *held[group.group]]) for group in groups}
            tiers = {place.residency for places in before.values() for place in places}
            assert tiers >= {Tier.DEVICE.bit, Tier.HOST.bit}
            for _ in range(2):
                await asyncio.to_thread(daemon.kill)
                for group in groups:
                    everything = [*keys[group.group], *held[group.group]]
                    assert [place.residency for place in await group.locate(everything)] == [
                        place.residency for place in before[group.group]
                    ]
                assert (await cache.across.match(shared)).blocks == 6
            for group in groups:
                stored = [place.residency > 0 for place in before[group.group][: len(keys[group.group])]]
                for key in [*compress(keys[group.group], stored), *held[group.group]]:
                    assert_content(
                        VSWA, group.group, [key], await group.get([key])
                    )  # by itself: no window leaves it out


@pytest.mark.parametrize("end", ["releases", "dies"])
async def test_slots_that_a_live_process_writes_are_nobody_elses_until_it_lets_go(daemon, end):
    async with opened_cache(daemon.address, "c", wait=PATIENCE_S) as (watching, cache):
        async with await patient(daemon.address) as writer:
            with Actor("hold", address=daemon.address, cache="c", reserve={"HOST": 2}, acquire={}) as actor:
                slots = set(actor.says()["slots"]["HOST"])
                own = await writer.open_cache("c", SPEC)
                lease = await own.reserve(3, tier=Tier.HOST)
                view = lease.view(0)[0]
                await asyncio.to_thread(daemon.kill)
                assert await eventually(lambda: orphaned(watching), lambda count: count == 5)
                view[:] = 7  # it does not know yet, and may: these bytes are nobody's
                with pytest.raises(TierFull):
                    await cache.reserve(HOST - 4, tier=Tier.HOST, timeout=PATIENCE_S)
                async with cache.reserve(HOST - 5, tier=Tier.HOST) as others:
                    assert not set(others.slots) & (slots | set(lease.slots))
                await writer.stats()  # attached anew: it knows that the lease is lost, and still holds it
                with pytest.raises(LeaseLost):
                    lease.view(0)
                assert await orphaned(watching) == 5
                await lease.release()
                await eventually(lambda: orphaned(watching), lambda count: count == 2)
                if end == "dies":
                    actor.kill()
        await eventually(lambda: orphaned(watching), lambda count: count == 0)
        async with cache.reserve(HOST, tier=Tier.HOST) as everything:
            assert len(everything) == HOST


async def test_blocks_that_a_live_process_reads_stay_where_they_are(daemon):
    async with await patient(daemon.address) as client:
        cache, keys = await stored(client, "read", 4)
        acquire = {"HOST": ["read", 4]}
        with Actor("hold", address=daemon.address, cache="c", reserve={}, acquire=acquire) as reader:
            reader.says()
            await asyncio.to_thread(daemon.kill)
            assert [place.host_slot for place in await cache.locate(keys)] == [0, 1, 2, 3]
            with pytest.raises(TierFull):
                await cache.reserve(HOST - 3, tier=Tier.HOST, timeout=PATIENCE_S)
            reader.kill()

            async def reserved():
                try:
                    async with cache.reserve(HOST, tier=Tier.HOST):
                        return True
                except TierFull:
                    return False

            await eventually(reserved, bool)


def children(pid):
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


async def test_a_reload_that_is_asked_for_while_the_daemon_starts_is_done_when_it_can(daemon):
    """It takes some tenths of a second until a daemon has its own way with the signal."""
    os.kill(daemon.pid, signal.SIGKILL)
    (starting,) = await eventually(lambda: children(daemon.supervisor) - {daemon.pid}, bool)
    os.kill(daemon.supervisor, signal.SIGHUP)
    await asyncio.to_thread(daemon.await_ready)
    assert daemon.pid == starting, "the signal ended it"
    await eventually(lambda: daemon.log, lambda log: "configuration reloaded" in log)


def test_a_daemon_does_not_outlive_its_supervisor(short_dir):
    """Another supervisor could not start one, and nobody would start this one again."""
    daemon = SupervisedDaemon(short_dir, sizes(host=HOST))
    daemon.start()
    try:
        pidfd = os.pidfd_open(daemon.pid)
        os.kill(daemon.supervisor, signal.SIGKILL)
        readable, _, _ = select.select([pidfd], [], [], PATIENCE_S)
        os.close(pidfd)
        assert readable
        assert not any(path.exists() for path in daemon.plain.sockets), "it stopped cleanly"
    finally:
        daemon.close()
