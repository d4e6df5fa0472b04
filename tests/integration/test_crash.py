"""The daemon is killed while clients work: what was on disk is there, and no byte is ever wrong."""

import asyncio
import os
import random
import signal

import pytest

from kvtier import Cursor, Tier
from tests.integration.blocks import SPEC, assert_bytes, opened_cache, put_chain, sizes
from tests.integration.load import Load
from tests.integration.seeing import cache_stats
from tests.integration.starting import cut_short
from tests.integration.supervised import SupervisedDaemon
from tests.integration.trial import kill_under_load
from tests.integration.waiting import PATIENCE_S, eventually, patient
from tests.integration.witness import Witness

SEED = int(os.environ.get("KVTIER_SEED") or (1 if os.environ.get("CI") else random.SystemRandom().getrandbits(32)))
"""Printed with every failure; in CI always the same, so that a red run there is about the change."""


@pytest.fixture(autouse=True)
def _say_seed():
    print(f"KVTIER_SEED={SEED}")


async def test_kills_under_load(start_fresh):
    print(await kill_under_load(start_fresh, 4, SEED))


async def test_kills_while_it_starts(start_daemon):
    """Whatever a start was at when it died, the next one finds all blocks, and ids above all that came before."""
    rng = random.Random(SEED)
    daemon = start_daemon(device=8, host=8, disk=64)
    async with opened_cache(daemon.address, "c", wait=PATIENCE_S) as (client, cache):
        keys = await put_chain(cache, "survivor", 40)
        await cache.move(keys, Tier.DISK)
        before = await client.stats()
        daemon.kill()
        for _ in range(8):
            await asyncio.to_thread(cut_short, daemon, rng.uniform(0.05, 0.6), signal.SIGKILL)
        await asyncio.to_thread(daemon.start)
        after = await client.stats()
        assert before.epoch < after.epoch <= before.epoch + 9
        assert after.last_event_id > before.last_event_id
        assert_bytes(keys, await cache.get(keys))


async def test_kills_while_caches_are_made(start_daemon):
    """A cache whose making was cut short is made whole by the client's next attempt; its room is not lost."""
    rng = random.Random(SEED)
    each = sizes(device=2, host=4, disk=16)
    count = 8
    daemon = start_daemon(device=2 * count, host=4 * count, disk=16 * count)
    async with await patient(daemon.address) as client:
        for number in range(count):
            opening = asyncio.create_task(client.open_cache(f"c{number}", SPEC, budgets=each))
            await asyncio.sleep(rng.uniform(0, 0.03))
            await asyncio.to_thread(daemon.crash)
            cache = await opening
            keys = await put_chain(cache, f"c{number}", 8)
            assert_bytes(keys, await cache.get(keys))
        assert [cache.name for cache in await client.caches()] == [f"c{number}" for number in range(count)]


SIZES = sizes(device=24, host=32, disk=64)


async def end_again_and_again(home, times, seed):
    rng = random.Random(seed)
    with SupervisedDaemon(home, SIZES, ["--chaos-seed", str(rng.randrange(1 << 32))]) as daemon:
        async with await patient(daemon.address, timeout=20) as client:
            cache = await client.open_cache("c", SPEC)
            load = Load(daemon.address, "c", chains=24, workers=3, seed=rng.randrange(1 << 32))
            kills = 0
            async with Witness(client) as witness, load:
                for _ in range(times):
                    await witness.more(rng.randint(1, 300))
                    end = rng.choice((daemon.kill, daemon.kill, daemon.upgrade))
                    kills += end == daemon.kill
                    await asyncio.to_thread(end)
                    stats = await client.stats()
                    assert stats.pid == daemon.pid
                    await witness.reach(Cursor(stats.epoch, stats.last_event_id))
                    load.check()
                await load.stop()
                await witness.assert_agrees(cache)
                assert len(witness.gaps) == kills
            # All that live processes might still have touched is back, since none of them does.
            counts = await eventually(
                lambda: cache_stats(client, "c"), lambda counts: not any(t.orphaned or t.held for t in counts.tiers)
            )
            adopted = daemon.log.count("memory adopted cache=c")
            assert adopted == times, f"adopted {adopted} times of {times}\n{daemon.log}"
            assert sum(tier.capacity for tier in counts.tiers if tier.tier is not Tier.DISK) == 56
            line = f"0 wrong of {load.done['blocks']:,} blocks read, memory adopted {adopted} times"
    assert "Traceback" not in daemon.log
    return f"killed {kills} and upgraded {times - kills} times under a supervisor: {line}"


async def test_six_ends_under_load(short_dir):
    print(await end_again_and_again(short_dir, 6, SEED))
