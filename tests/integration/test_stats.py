"""Numbers for those who look often: what is clean, and the clock of the counters."""

from kvtier import CacheOptions, Tier
from kvtier.types import WritePolicy
from tests.integration.blocks import SPEC, put_chain, sizes
from tests.integration.seeing import tier_stats
from tests.integration.waiting import eventually, patient


async def test_slots_are_clean_that_are_free_or_have_their_block_below_as_well(client, name):
    options = CacheOptions(write_policy=WritePolicy.THROUGH)
    cache = await client.open_cache(name, SPEC, budgets=sizes(device=8, host=4, disk=16), options=options)
    await put_chain(cache, name, 3)

    async def device():
        return await tier_stats(client, name, Tier.DEVICE)

    written = await eventually(device, lambda tier: tier.clean == 8)
    assert (written.free, written.ready) == (5, 3)
    disk = await tier_stats(client, name, Tier.DISK)
    assert (disk.clean, disk.free) == (13, 13), "below the disk there is nothing"


async def test_the_uptime_goes_on_and_begins_anew_with_the_daemon(start_daemon):
    daemon = start_daemon(host=4)
    async with await patient(daemon.address) as client:
        first, second = await client.stats(), await client.stats()
        assert 0 < first.uptime_ns < second.uptime_ns
        daemon.restart()
        again = await client.stats()
        assert (again.boot, again.uptime_ns > 0) == (first.boot + 1, True)
        assert again.start_time_ns > first.start_time_ns
