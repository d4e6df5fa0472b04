"""Two processes on one cache: what one has stored the other reads, and what one holds the other cannot have."""

import asyncio
import os

from kvtier import BlockResult, Tier, TierFull, connect
from tests.integration.blocks import SPEC, assert_bytes, blocks, chain, opened_cache, put_chain
from tests.integration.scraping import LISTEN, scrape
from tests.integration.seeing import cache_stats
from tests.integration.waiting import eventually

OK, EXISTS = BlockResult.OK, BlockResult.EXISTS
MOST_TURNS = 40


async def test_who_asks_first_is_served_first(start_daemon):
    """The first wants all slots but one, the second one: it could be served as soon as one demotion is through.

    Leases are numbered as they are granted, which is judged here: two answers may overtake each other on their ways.
    """
    daemon = start_daemon("--chaos-seed", "1", device=1024, disk=8192)
    async with await connect(daemon.address) as one, await connect(daemon.address) as two:
        mine, theirs = await one.open_cache("queue", SPEC), await two.open_cache("queue", SPEC)
        waited = 0
        for turn in range(5):
            keys = chain(f"turn {turn}", 1024)
            assert await mine.put(keys, blocks(keys)) == [OK] * 1024
            granted: dict[str, int] = {}

            async def ask(cache, count, who, granted=granted):
                async with cache.reserve(count, Tier.DEVICE) as lease:
                    granted[who] = lease.id

            first = asyncio.create_task(ask(mine, 1023, "first"))
            stats = await eventually(
                lambda: cache_stats(two, "queue"),
                lambda stats, granted=granted: stats.waiting or granted,  # type: ignore[misc]
            )
            waited += stats.waiting
            await asyncio.gather(first, ask(theirs, 1, "second"))
            assert granted["first"] < granted["second"], f"turn {turn}"
        assert waited, "nobody ever had to wait: this showed nothing"


async def test_puts_one_after_the_other_lease_their_slots_ahead(start_fresh):
    """A put takes a single call then. The slots are in nobody's way, and go back when no more puts come."""
    daemon = start_fresh(*LISTEN, host=128)
    async with await connect(daemon.address) as one, await connect(daemon.address) as two:
        mine, theirs = await one.open_cache("ahead", SPEC), await two.open_cache("ahead", SPEC)
        for turn in range(100):
            await put_chain(mine, f"turn {turn}", 2)
        seen = await scrape(daemon)
        assert seen.value("kvtier_calls_total", method="kvtier.v1.Blocks.Commit") == 100
        assert seen.value("kvtier_calls_total", method="kvtier.v1.Blocks.Reserve") < 10  # a slow machine keeps none
        async with theirs.reserve(128, timeout=30):
            pass  # all slots: the ones leased ahead have come back
        assert not await one.leases()
        await put_chain(mine, "last", 2)
        await theirs.reset()
        await mine.close()
        await eventually(one.leases, lambda leases: not leases)


async def test_many_writers_of_few_slots_all_get_through(start_daemon):
    """Six clients on four device slots: refusals are the order of the day, wrong bytes and stuck slots are not."""
    daemon = start_daemon("--chaos-seed", "2", device=4, host=6, disk=512)
    refusals = 0
    stored: set[bytes] = set()

    async def insist(step):
        nonlocal refusals
        while True:
            try:
                return await step()
            except TierFull as full:
                assert {holder.pid for holder in full.holders} <= {os.getpid()}
                refusals += 1

    async def work(index):
        async with opened_cache(daemon.address, "busy") as (_, cache):
            turn = 0
            while turn < 3 or (turn < MOST_TURNS and not refusals):  # on a slow machine they may miss each other
                keys = chain(f"writer {index % 4} turn {turn}", 3)
                turn += 1
                stored.update(keys)
                await insist(lambda keys=keys: cache.put(keys, blocks(keys)))
                assert_bytes(keys, await insist(lambda keys=keys: cache.get(keys)))

    await asyncio.gather(*map(work, range(6)))
    assert refusals, "there was no contention: this showed nothing"
    async with await connect(daemon.address) as client:
        stats = await eventually(
            lambda: cache_stats(client, "busy"),
            lambda stats: not any(tier.filling or tier.retiring for tier in stats.tiers),
        )
        assert [(tier.held, tier.blank) for tier in stats.tiers] == [(0, 0)] * 3
        assert stats.blocks == len(stored)
