"""Who has how much of each tier: what a cache gets that does not say, and what is told of it."""

import asyncio
import json
import re

import pytest

from kvtier import Tier, TierFull, connect
from kvtier.types import TierBytes
from tests.integration.blocks import SLOT_BYTES, SPEC, sizes
from tests.integration.scraping import LISTEN, scrape
from tests.integration.test_cli import kvtier
from tests.integration.waiting import eventually, patient

QUARTER = ("--default-budget", "25%")


async def test_what_is_given_out_is_told_by_statistics_status_and_metrics(start_fresh):
    daemon = start_fresh(*QUARTER, *LISTEN, host=16, disk=32)
    shown = kvtier("status", "--address", daemon.address).stdout
    assert [line.split()[0] for line in shown.splitlines() if line.startswith(("host ", "disk "))] == ["host", "disk"]
    async with await patient(daemon.address) as client:
        await client.open_cache("engine", SPEC)
        await client.open_cache("other", SPEC, budgets=sizes(host=8))
        host, disk = (await client.stats()).tiers
        given = {"engine": 4 * SLOT_BYTES, "other": 8 * SLOT_BYTES}
        assert host == TierBytes(Tier.HOST, "", 16 * SLOT_BYTES, 4 * SLOT_BYTES, given)
        assert (disk.left, disk.given) == (24 * SLOT_BYTES, {"engine": 8 * SLOT_BYTES})
        seen = await scrape(daemon)
        assert seen.values("kvtier_tier_bytes", tier="host") == {
            ("", "given"): 12 * SLOT_BYTES,
            ("", "left"): 4 * SLOT_BYTES,
        }
        await client.remove_cache("other", force=True)
        assert (await client.stats()).tiers[0].given == {"engine": 4 * SLOT_BYTES}
    said = json.loads(kvtier("status", "--address", daemon.address, "-o", "json").stdout)
    assert [tier["given"] for tier in said["tiers"]] == [{"engine": 4 * SLOT_BYTES}, {"engine": 8 * SLOT_BYTES}]


async def test_a_refusal_says_who_has_what_and_is_logged_once(start_fresh):
    daemon = start_fresh(*QUARTER, host=16)
    async with await patient(daemon.address) as client:
        await client.open_cache("small", SPEC, budgets=sizes(host=2))
        await client.open_cache("large", SPEC, budgets=sizes(host=14))
        said = ""
        for _ in range(3):
            with pytest.raises(TierFull) as full:
                await client.open_cache("late", SPEC)
            said = str(full.value)
        assert "host tier: all 192.0 KiB are given out (large 168.0 KiB, small 24.0 KiB)" in said
        assert "`kvtier cache rm NAME`" in said and "budgets=" in said
        refused = [line for line in daemon.log.splitlines() if "a cache is refused" in line]
        assert len(refused) == 1 and "level=warning" in refused[0]
        await client.remove_cache("small", force=True)
        with pytest.raises(TierFull, match=r"24.0 KiB of 192.0 KiB are free .large 168.0 KiB"):
            await client.open_cache("late", SPEC, budgets=sizes(host=3))
        await eventually(lambda: daemon.log.count("a cache is refused"), lambda count: count == 2)


async def test_a_refusal_says_which_caches_nobody_has_open(start_fresh):
    """They were closed, or their client is gone, maybe with an earlier daemon."""
    daemon = start_fresh(host=16, disk=16)

    async def refusal(client):
        with pytest.raises(TierFull) as full:
            await client.open_cache("late", SPEC, budgets=sizes(host=16))
        return str(full.value)

    idle = r"idle for 0:00:\d\d"
    async with await patient(daemon.address) as client:
        await client.open_cache("used", SPEC, budgets=sizes(host=8, disk=8))
        closed = await client.open_cache("closed", SPEC, budgets=sizes(host=4, disk=4))
        await closed.close()
        async with await patient(daemon.address) as other:
            await other.open_cache("left", SPEC, budgets=sizes(host=2, disk=2))
        said = await refusal(client)
        assert re.search(f"used 96.0 KiB, closed 48.0 KiB {idle}, left 24.0 KiB {idle}[)]", said), said
    await asyncio.to_thread(daemon.restart)
    async with await patient(daemon.address) as client:
        await client.open_cache("closed")
        said = await refusal(client)
        assert re.search(f"used 96.0 KiB {idle}, closed 48.0 KiB, left 24.0 KiB {idle}[)]", said), said


async def test_a_refusal_names_no_cache_that_its_caller_may_not_read(start_fresh):
    rule = '{"anonymous": true, "caches": ["mine*"], "verbs": ["read", "write"]}'
    daemon = start_fresh("--listen-tcp", "127.0.0.1:0", "--tcp-insecure", "--allow", rule, host=16)
    async with await patient(daemon.address) as client, await connect(daemon.tcp_address, insecure=True) as stranger:
        await client.open_cache("secret", SPEC, budgets=sizes(host=12))
        await client.open_cache("mine", SPEC, budgets=sizes(host=4))
        with pytest.raises(TierFull) as full:
            await stranger.open_cache("mine-too", SPEC)
        assert "(mine 48.0 KiB, 1 other caches)" in str(full.value)
