"""Kills and upgrades under load: clients that write, read and hold all the time, and look at every byte."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvtier import Cursor, Tier, connect
from tests.integration.blocks import SPEC, sizes
from tests.integration.load import Load
from tests.integration.seeing import cache_stats
from tests.integration.supervised import SupervisedDaemon
from tests.integration.test_crash import SEED
from tests.integration.waiting import eventually
from tests.integration.witness import Witness

SIZES = sizes(device=24, host=32, disk=64)


@pytest.fixture(autouse=True)
def _say_seed():
    print(f"KVTIER_SEED={SEED}")


async def end_again_and_again(home, times, seed):
    rng = random.Random(seed)
    daemon = SupervisedDaemon(home, SIZES, ["--chaos-seed", str(rng.randrange(1 << 32))])
    daemon.start()
    try:
        async with await connect(daemon.address, timeout=20) as client:
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
        assert await asyncio.to_thread(daemon.stop) == 0
        assert "Traceback" not in daemon.log
    finally:
        daemon.close()


async def test_six_ends_under_load(short_dir):
    await end_again_and_again(short_dir, 6, SEED)


@pytest.mark.long
@pytest.mark.parametrize("number", range(1, 7))
async def test_more_ends_under_load(short_dir, number):
    """Not more ends a run: the supervisor pauses twice as long after each kill."""
    await end_again_and_again(short_dir, 7, SEED + number)
