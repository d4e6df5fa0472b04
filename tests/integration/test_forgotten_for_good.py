"""What an operator had forgotten does not come back from disk, however the daemon ends afterwards."""

from __future__ import annotations

import pytest

from kvtier import BlockResult, Tier, connect
from tests.integration.blocks import SPEC, blocks, chain

CHAINS = [chain(f"bad {number}", 16) for number in range(12)]


async def by_reset(cache):
    assert (await cache.reset()).dropped == sum(map(len, CHAINS))


async def by_drop(cache):
    for keys in CHAINS:
        assert (await cache.drop(keys[:1])).dropped == len(keys)


async def matches(client, name):
    cache = await client.open_cache(name, SPEC)
    return sum([(await cache.match(keys)).blocks for keys in CHAINS])


@pytest.mark.parametrize("forget", [by_reset, by_drop])
@pytest.mark.parametrize("settled", [True, False])
async def test_it_stays_forgotten_over_a_kill(start_daemon, forget, settled):
    """``settled``: all of it is on disk before; else some of it is still being written."""
    daemon = start_daemon(host=32, disk=256)
    async with await connect(daemon.address) as client:
        cache = await client.open_cache("c", SPEC)
        for keys in CHAINS:
            await cache.put(keys, blocks(keys))
            if settled:
                assert await cache.move(keys, Tier.DISK) == [BlockResult.OK] * len(keys)
        await forget(cache)
        daemon.kill()
    daemon.start()
    async with await connect(daemon.address) as client:
        assert await matches(client, "c") == 0
