"""A real daemon's metrics: what they say, that they agree with everything else it says, and what Prometheus thinks."""

import asyncio
import os
import re
import socket
from pathlib import Path

import pytest

from kvtier import Hint, NotFound, Tier
from kvtier.abi.words import TIERS
from kvtierd.service.metrics import METRICS
from tests.integration.blocks import SLOT_BYTES, SPEC, blocks, chain, put_chain, sizes
from tests.integration.conftest import own_daemon
from tests.integration.daemon import DaemonProcess
from tests.integration.raw import attached
from tests.integration.scraping import LISTEN, Scrape, port_of, scrape
from tests.integration.seeing import cache_stats
from tests.integration.starting import refused
from tests.integration.waiting import eventually, patient

DOCS = Path(__file__).parents[2] / "docs"
SLOTS = {"device": 8, "host": 16, "disk": 32}
KEYS = chain("metrics", 6)
ANYBODY = '{"anonymous": true, "caches": ["*"], "verbs": ["read", "write"]}'
daemon = own_daemon(*LISTEN, fresh=True, **SLOTS)


@pytest.fixture(scope="module")
def seen(pool):
    """One scrape for all that only look at it: of a fresh daemon where :func:`traffic` was."""

    async def scraped():
        async with await patient(lent.address) as client:
            await (await traffic(client)).hint(Hint("return", keys=KEYS, for_s=1))
            with pytest.raises(NotFound):
                await client.remove_cache("none")
            return await scrape(lent)

    beyond = ("--tcp-insecure", "--peers", "localhost:1", "--remote", "memory:///")
    lent = pool.take(sizes(**SLOTS), (*LISTEN, *beyond), fresh=True)
    yield asyncio.run(scraped())
    pool.give_back(lent)


async def traffic(client):
    """Six blocks, four of which are found on disk and two on the device; three are asked for that are not stored."""
    cache = await client.open_cache("c", SPEC, budgets=sizes(**SLOTS))
    await cache.put(KEYS, blocks(KEYS))
    await cache.move(KEYS[2:], Tier.DISK)
    async with cache.acquire([*KEYS, *chain("absent", 3)], Tier.DEVICE):
        pass
    return cache


async def test_slots_are_those_of_the_statistics_and_sum_to_the_capacity(daemon, client):
    cache = await traffic(client)
    async with cache.reserve(2, Tier.HOST):
        seen = await scrape(daemon)
        for tier in (await cache_stats(client, "c")).tiers:
            slots = seen.values("kvtier_slots", cache="c", group="0", tier=str(tier.tier))
            assert sum(slots.values()) == tier.capacity == SLOTS[str(tier.tier)]
            assert slots["ready",] == tier.ready
            assert slots["blank",] == tier.blank
            assert seen.value("kvtier_held_slots", cache="c", tier=str(tier.tier)) == tier.held
        assert seen.value("kvtier_slot_bytes", cache="c") == SLOT_BYTES
        assert seen.value("kvtier_leases", cache="c", state="live") == 1


def test_hits_are_attributed_to_the_tier_of_the_match(seen):
    hits = {tier: seen.value("kvtier_hit_blocks_total", cache="c", tier=str(tier)) for tier in TIERS}
    assert hits == {Tier.DEVICE: 2, Tier.HOST: 0, Tier.DISK: 4}
    assert seen.value("kvtier_queried_blocks_total", cache="c") == 9
    assert seen.value("kvtier_found_blocks_total", cache="c") == 6
    assert seen.value("kvtier_stored_blocks_total", cache="c") == seen.value("kvtier_blocks", cache="c") == 6


def test_moves_are_counted_by_edge_and_timed(seen):
    down, up = {"from": "device", "to": "disk"}, {"from": "disk", "to": "device"}
    assert seen.value("kvtier_moved_blocks_total", **up) == 4
    assert seen.value("kvtier_moved_bytes_total", **up) == 4 * SLOT_BYTES
    # The two blocks above those that were moved go with them: a disk holds no block without its prefix.
    assert seen.value("kvtier_moved_blocks_total", **down) == 6
    assert seen.value("kvtier_failed_blocks_total") == 0
    assert seen.value("kvtier_move_copy_seconds_total", **up) > 0
    assert seen.values("kvtier_queued_blocks") and seen.value("kvtier_queued_blocks") == 0


async def test_sessions_watchers_and_events(daemon, client):
    await traffic(client)
    async with client.watch(heartbeats=True, heartbeat_s=0.02) as watch:
        await anext(watch)
        seen = await scrape(daemon)
        assert seen.value("kvtier_watchers") == 1
        assert seen.value("kvtier_watcher_lag_events") == 0
        (one,) = (await client.stats()).watcher_stats
        assert (one.session_id, one.pid, one.uid, one.lag) == (client.session_id, os.getpid(), os.getuid(), 0)
        assert seen.value("kvtier_events_total") == (await client.stats()).last_event_id
        assert seen.value("kvtier_events_total", type="stored", cause="commit") >= 1
    assert seen.value("kvtier_sessions", state="attached") == 1
    assert (seen.value("kvtier_problems"), seen.value("kvtier_epoch")) == (0, 1)


async def test_orphaned_leases_are_told_from_live_ones(daemon, client):
    await client.open_cache("c", SPEC)
    async with attached(daemon.address) as raw:
        opened = await raw.open("c")
        await raw.reserve(opened.cache_id, Tier.HOST, 2)
        raw.detach()

        seen = await eventually(
            lambda: scrape(daemon), lambda seen: seen.value("kvtier_leases", cache="c", state="orphaned") == 1
        )
        assert seen.value("kvtier_leases", cache="c", state="live") == 0
        assert seen.value("kvtier_slots", state="orphaned") == 2
        assert seen.value("kvtier_sessions", state="orphaned") == 1


@pytest.mark.parametrize("local", [True, False], ids=["attach-socket", "grpc"])
async def test_calls_are_counted_whichever_way_they_come(start_fresh, local):
    daemon = start_fresh(*LISTEN, "--listen-tcp", "127.0.0.1:0", "--tcp-insecure", "--allow", ANYBODY, host=4)
    async with await patient(daemon.address if local else daemon.tcp_address, insecure=not local) as client:
        cache = await client.open_cache("c", SPEC, budgets=sizes(host=4), mapped=local)
        for _ in range(3):
            await cache.match(chain("absent", 2), remote=True)  # by a call
        for _ in range(2):
            with pytest.raises(NotFound):
                await client.open_cache("other")
        seen = await scrape(daemon)
    calls = {
        method: seen.values("kvtier_calls_total", method=f"kvtier.v1.{method}")
        for method in ("Blocks.Match", "Caches.Open")
    }
    assert calls == {"Blocks.Match": {("OK",): 3}, "Caches.Open": {("OK",): 1, ("NOT_FOUND",): 2}}
    assert seen.value("kvtier_refusals_total", reason="UNKNOWN_CACHE") == 2
    for method, count in (("Blocks.Match", 3), ("Caches.Open", 3)):
        buckets = seen.values("kvtier_call_seconds_bucket", method=f"kvtier.v1.{method}")
        assert buckets["+Inf",] == seen.value("kvtier_call_seconds_count", method=f"kvtier.v1.{method}") == count
        assert list(buckets.values()) == sorted(buckets.values())
        assert seen.value("kvtier_call_seconds_sum", method=f"kvtier.v1.{method}") > 0


async def test_free_bytes_are_those_of_the_disk_tier_s_file_system(daemon):
    status = os.statvfs(daemon.disk_dir)
    free = (await scrape(daemon)).value("kvtier_disk_free_bytes")
    assert 0 < free <= status.f_blocks * status.f_frsize


async def test_the_loop_is_timed(daemon):
    await eventually(lambda: scrape(daemon), lambda seen: seen.value("kvtier_loop_lateness_seconds_count") >= 2)


def test_every_metric_is_told_and_documented(seen):
    page = (DOCS / "operations.md").read_text()
    for name, (_, labels) in METRICS.items():
        family = seen.families[name.removesuffix("_total")]
        assert family.samples, f"{name} has no sample"
        assert all(set(sample.labels) == set(labels) for sample in family.samples), name
        assert f"| `{name}` |" in page
    assert "kvtier_loop_lateness_seconds" in page and "kvtier_call_seconds" in page


@pytest.mark.parametrize(
    ("file", "query"), [("docs/grafana-dashboard.json", r'"expr": "(.*)"'), ("deploy/alerts.yml", "expr: (.*)")]
)
def test_dashboard_and_alert_rules_ask_for_what_there_is(seen, file, query):
    asked = re.findall(query, (DOCS.parent / file).read_text())
    assert len(asked) > 5
    names = {sample.name for family in seen.families.values() for sample in family.samples}
    for each in asked:
        assert set(re.findall(r"\b(?:kvtier|process)_\w+", each)) <= names, each


def test_nothing_listens_unless_asked(start_fresh):
    assert "serving metrics" not in start_fresh(host=4).log


def test_an_address_that_is_taken_stops_the_start(start_fresh, short_dir):
    first = start_fresh(*LISTEN, host=4)
    second = DaemonProcess(short_dir, sizes(host=4))
    says = refused(second, "--metrics-listen", f"127.0.0.1:{port_of(first)}", status=2)
    assert "command line: --metrics-listen = " in says and "in use" in says


async def test_a_client_that_says_nothing_holds_up_neither_the_daemon_nor_its_stop(daemon, client):
    with socket.create_connection(("127.0.0.1", port_of(daemon))):
        cache = await client.open_cache("c", SPEC)
        assert (await cache.match(KEYS)).blocks == 0
        assert isinstance(await scrape(daemon), Scrape)  # after the silent one has been given up


async def test_hints_are_counted_by_action_and_outcome(daemon, client):
    cache = await client.open_cache("c", SPEC, budgets=sizes(host=4))
    keys = await put_chain(cache, "hinted", 2)
    await cache.hint(Hint("end", keys=keys), Hint("retain", keys=chain("absent", 1)))
    await cache.hint(Hint("end", keys=keys))
    await cache.hint(Hint("explode", keys=keys), Hint("boom", keys=keys))
    seen = await scrape(daemon)
    assert {action: seen.values("kvtier_hints_total", action=action) for action in ("end", "retain", "unknown")} == {
        "end": {("accepted",): 2},
        "retain": {("missing",): 1},
        "unknown": {("rejected",): 2},
    }
