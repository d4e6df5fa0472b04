"""The second start of an engine: its new cache takes over the budgets of idle variants, or gets other settings."""

import asyncio
import logging
from dataclasses import replace

import pytest

from kvtier import CacheOptions, TierFull, WritePolicy, connect
from kvtier.connectors.store import Store
from kvtier.engine import EngineOptions, Mover, Planner
from kvtier.errors import InvalidArgument, NotFound
from kvtier.types import TIERS
from tests.engine.toy import PLAIN, Worker
from tests.integration.blocks import SLOT_BYTES, SPEC, assert_bytes, blocks, chain, sizes
from tests.integration.test_cli import kvtier
from tests.integration.waiting import PATIENCE_S, eventually, patient

_, HOST, DISK = TIERS
BACK, THROUGH = CacheOptions(write_policy=WritePolicy.BACK), CacheOptions(write_policy=WritePolicy.THROUGH)


def variant(version, model="toy"):
    return replace(SPEC, model=model, identity={"engine": f"engine {version}"})


async def started(client, version, *, stored=0, **slots):
    """Opens the cache of a version, stores blocks in it and closes it."""
    cache = await client.open_cache(f"v{version}", variant(version), budgets=sizes(**slots) or None, options=THROUGH)
    await cache.put(keys := chain(cache.name, stored), blocks(keys), tier=HOST)
    had = {tier: cache.slots(tier) for tier in cache.tiers}
    await cache.close()
    return had


async def names(client):
    return {cache.name for cache in await client.caches()}


async def test_every_variant_of_an_engine_gets_memory_and_status_says_from_whom(start_fresh):
    daemon = start_fresh("--default-budget", "25%", host=16, disk=32)
    async with await patient(daemon.address) as client:
        had = [await started(client, version, stored=1) for version in range(9)]
        assert had == [{HOST: 4, DISK: 8}] * 9
        assert await names(client) == {"v5", "v6", "v7", "v8"}
        assert (await client.stats()).notes[0].startswith("cache v4 took over the budgets of v0, an idle cache")
        assert not (await client.stats()).problems
    assert "note: cache v8 took over the budgets of v4" in kvtier("status", "--address", daemon.address).stdout


async def test_an_empty_variant_gives_way_first_then_the_one_closed_longest_ago(start_fresh):
    daemon = start_fresh(host=12, disk=12)
    async with await patient(daemon.address) as client:
        for version, stored in ((1, 1), (2, 1), (3, 0), (1, 0)):
            await started(client, version, stored=stored, host=4, disk=4)
        for version, stored, left in (
            (4, 1, {"v1", "v2", "v4"}),
            (5, 0, {"v1", "v4", "v5"}),
            (6, 0, {"v1", "v4", "v6"}),
        ):
            await started(client, version, stored=stored, host=4, disk=4)
            assert await names(client) == left


@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_takeovers_and_the_order_of_openings_outlive_the_daemon(start_fresh, end):
    daemon = start_fresh(host=8, disk=8)
    async with await patient(daemon.address) as client:
        for version in (1, 2, 3, 2):  # 3 takes over from 1
            await started(client, version, stored=1, host=4, disk=4)
        await eventually(lambda: names(client), lambda found: found == {"v2", "v3"})
        getattr(daemon, end)()
        daemon.start()
        with pytest.raises(TierFull):  # the users of v2 and v3 may come back
            await started(client, 4, host=4, disk=4)

        async def retried():
            try:
                return await started(client, 4, stored=1, host=4, disk=4)
            except TierFull:
                return None

        assert await eventually(retried, bool) == {HOST: 4, DISK: 4}
        assert await names(client) == {"v2", "v4"}
        cache = await client.open_cache("v2")
        assert_bytes(chain("v2", 1), await cache.get(chain("v2", 1)))


async def test_a_variant_in_use_and_other_families_keep_their_budgets(start_fresh):
    daemon = start_fresh(host=12, disk=12)
    async with await patient(daemon.address) as client, await patient(daemon.address) as engine:
        used = await engine.open_cache("v1", variant(1), budgets=sizes(host=4, disk=4))
        for name, spec in (("model", variant(1, "other")), ("plain", SPEC)):
            await (await client.open_cache(name, spec, budgets=sizes(host=4, disk=4))).close()
        with pytest.raises(TierFull):
            await started(client, 2, host=4, disk=4)
        await used.put(chain("x", 1), blocks(chain("x", 1)), tier=HOST)
        await used.pin(chain("x", 1), HOST)
        await used.close()
        with pytest.raises(TierFull):
            await started(client, 2, host=4, disk=4)
        reopened = await client.open_cache("v1")
        await reopened.unpin(chain("x", 1), HOST)
        await reopened.close()
        with pytest.raises(TierFull):  # not even with all of v1
            await started(client, 2, host=5, disk=4)
        assert await names(client) == {"v1", "model", "plain"}
        assert await started(client, 2, host=4, disk=4) == {HOST: 4, DISK: 4}
        assert await names(client) == {"v2", "model", "plain"}


async def test_variants_that_open_at_once_neither_share_nor_wait_for_each_other(start_fresh):
    daemon = start_fresh(host=8, disk=8)
    async with await patient(daemon.address) as client, await patient(daemon.address) as other:
        for version in (1, 2):
            await started(client, version, stored=1, host=4, disk=4)

        def opened(host, *versions):
            return asyncio.gather(
                *(
                    each.open_cache(f"v{version}", variant(version), budgets=sizes(host=host, disk=4))
                    for each, version in zip((client, other), versions, strict=True)
                ),
                return_exceptions=True,
            )

        both = await opened(4, 3, 4)
        assert await names(client) == {"v3", "v4"}
        assert [type(each) for each in await opened(4, 5, 6)] == [TierFull, TierFull]
        for cache in both:
            await cache.close()
        async with asyncio.timeout(PATIENCE_S):  # each could have its budgets from the other
            found = await opened(8, 3, 4)
        open_now = [each for each in found if not isinstance(each, NotFound | TierFull)]
        assert open_now and {each.name for each in open_now} <= await names(client)
        assert all(each.slots(HOST) in (4, 8) for each in open_now)


async def test_nobody_takes_over_a_cache_that_he_may_not_write(start_fresh):
    rule = '{"anonymous": true, "caches": ["mine*"], "verbs": ["read", "write"]}'
    daemon = start_fresh("--listen-tcp", "127.0.0.1:0", "--tcp-insecure", "--allow", rule, host=8)
    async with await patient(daemon.address) as client, await connect(daemon.tcp_address, insecure=True) as stranger:
        await started(client, 1, host=8)
        with pytest.raises(TierFull):
            await stranger.open_cache("mine", variant(2), budgets=sizes(host=8))
        assert await names(client) == {"v1"}


@pytest.mark.parametrize(
    "slots", [{"host": 8, "disk": 16}, {"host": 2, "disk": 8}, {"host": 4, "disk": 6}, {"host": 12, "disk": 4}]
)
async def test_an_idle_cache_gets_other_budgets_and_keeps_its_blocks_on_disk(start_fresh, slots):
    daemon = start_fresh(host=12, disk=16)
    keys = chain("v1", 4)
    async with await patient(daemon.address) as client:
        await started(client, 1, stored=4, host=4, disk=8)
        await eventually(
            client.stats, lambda stats: sum(edge.blocks for cache in stats.caches for edge in cache.edges) == 4
        )
        await started(client, 2, host=4, disk=4)  # idle, and in the way
        assert await started(client, 1, **slots) == {HOST: slots["host"], DISK: slots["disk"]}
        for restart in (False, True):
            if restart:
                daemon.restart()
            cache = await client.open_cache("v1")
            assert (cache.slots(HOST), cache.slots(DISK)) == tuple(slots.values())
            assert_bytes(keys, await cache.get(keys))
            await cache.close()
        tiers = {tier.tier: tier.given["v1"] for tier in (await client.stats()).tiers}
        assert tiers == sizes(**slots)


async def test_a_cache_in_use_keeps_its_settings_and_one_line_says_why(start_fresh, caplog):
    daemon = start_fresh(host=12, disk=16)
    async with await patient(daemon.address) as client, await patient(daemon.address) as other:
        used = await other.open_cache("v1", variant(1), budgets=sizes(host=4, disk=8), options=THROUGH)
        cache = await client.open_cache("v1", variant(1), budgets=sizes(host=8, disk=8), options=BACK)
        assert (cache.slots(HOST), cache.info.options.write_policy) == (4, WritePolicy.THROUGH)
        said = [line for line in caplog.messages if "keeps its former budgets and write policy" in line]
        assert len(said) == 1 and said[0].endswith("a session has it open, or blocks are held")
        await used.close()
        await cache.close()
        caplog.clear()
        cache = await client.open_cache("v1", variant(1), budgets=sizes(host=13, disk=8))
        assert cache.slots(HOST) == 4 and "the host tier has too few bytes left" in caplog.text
        await cache.close()
        cache = await client.open_cache("v1", variant(1), budgets=sizes(host=4, disk=8), options=BACK)
        assert cache.info.options.write_policy is WritePolicy.BACK
        await cache.close()
        with pytest.raises(InvalidArgument, match="1 to "):
            await client.open_cache("v1", variant(1), budgets={HOST: 100})


LAYOUT = replace(PLAIN, identity={"engine": "toy 1"})
PAGE = LAYOUT.spec.record_bytes(0)


def planner(daemon, host):
    return Planner.open(LAYOUT, EngineOptions.of({"address": daemon.address, "host_bytes": int(host * PAGE)}))


async def test_an_engine_tries_a_full_tier_again_and_two_lines_tell_of_it(start_fresh, caplog):
    daemon = start_fresh(host=64)
    async with await patient(daemon.address) as client:
        await client.open_cache("full", SPEC, budgets=sizes(host=64))
        engine = planner(daemon, 8)
        store = Store(EngineOptions.of({"address": daemon.address, "host_bytes": 8 * SLOT_BYTES}), variant(7))
        try:
            assert not engine.leader.answers
            await client.remove_cache("full", force=True)
            await eventually(lambda: caplog.text.count("is back"), lambda count: count == 2)
            assert engine.leader.answers and store._connection.connected
            for name in (engine.leader.name, store.name):
                said = [text for text in caplog.messages if name in text and ("without" in text or "is back" in text)]
                assert "runs without kvtier's cache" in said[0]
                assert "host tier" in said[0] and said[0].endswith("tries again in the background")
                assert said[1:] == [f"kvtier's cache {name} is back"]
            caplog.clear()
            daemon.kill()
            await eventually(
                lambda: caplog.text.count("the daemon does not answer, so nothing is stored"), lambda n: n == 2
            )
            daemon.start()
            await eventually(lambda: caplog.text.count("is back"), lambda count: count == 2)
        finally:
            engine.close()
            store.close()


async def test_a_worker_that_starts_first_does_not_keep_the_old_budgets(start_fresh):
    daemon = start_fresh(host=64, disk=64)
    planner(daemon, 8).close()
    options = EngineOptions.of({"address": daemon.address})
    worker = Worker(LAYOUT, options, 0, 4, Mover)
    engine = None
    try:
        engine = planner(daemon, 16)
        assert engine.leader._cache is not None and engine.leader._cache.slots(HOST) == 16
        worker.mover.open(PATIENCE_S)
        assert worker.mover._opened().slots(HOST) == 16
    finally:
        worker.mover.close()
        if engine is not None:
            engine.close()


def test_a_budget_below_a_block_is_one_line_and_no_wait(start_daemon, caplog):
    daemon = start_daemon(host=64)
    engine = planner(daemon, 0.5)
    try:
        said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(said) == 1 and "budgets[host]" in said[0] and said[0].endswith("kvtier does not try again")
    finally:
        engine.close()
