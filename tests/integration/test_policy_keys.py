"""Policy out of the configuration: what caches have that do not choose themselves."""

from __future__ import annotations

from kvtier import Tier, connect
from kvtierd.config import load
from kvtierd.core.ids import Tier as DaemonTier
from tests.integration.blocks import SPEC, blocks, chain
from tests.integration.waiting import eventually


def test_keys_become_a_policy():
    said = {"demotion_threshold": 101, "clean_fraction": 0.2}
    policy = load(None, {"host_bytes": 4096, "write_policy": "selective", **said}).policy
    assert policy.threshold(DaemonTier.HOST, DaemonTier.DISK) == 101
    assert (policy.write_policy, policy.clean_low, policy.clean_high) == ("selective", 0.1, 0.2)


async def test_a_cache_is_written_through_where_the_daemon_says_so(start_daemon):
    daemon = start_daemon("--write-policy", "through", host=8, disk=16)
    async with await connect(daemon.address) as client:
        cache = await client.open_cache("c", SPEC)
        keys = chain("through", 3)
        await cache.put(keys, blocks(keys), tier=Tier.HOST)
        both = Tier.HOST.bit | Tier.DISK.bit
        await eventually(lambda: cache.locate(keys), lambda places: {place.residency for place in places} == {both})


async def test_a_threshold_keeps_blocks_from_going_down(start_daemon):
    daemon = start_daemon("--demotion-threshold", "101", host=4, disk=16)
    async with await connect(daemon.address) as client:
        cache = await client.open_cache("c", SPEC)
        for name in ("a", "b"):
            await cache.put(chain(name, 4), blocks(chain(name, 4)), tier=Tier.HOST)
        assert (await cache.match(chain("a", 4))).blocks == 0
