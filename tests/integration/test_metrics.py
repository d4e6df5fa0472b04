"""A real daemon's metrics: what they say, that they agree with everything else it says, and what Prometheus thinks."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier import AsyncClient, Cache, Tier, connect
from kvtierd.service.metrics.table import METRICS, PROCESS_METRICS, Kind, reference
from tests.integration.blocks import SLOT_BYTES, SPEC, blocks, chain, sizes
from tests.integration.daemon import DaemonProcess, StartDaemon
from tests.integration.promlint import lint
from tests.integration.raw import attached
from tests.integration.scraping import LISTEN, Scrape, port_of, scrape, text_of
from tests.integration.seeing import cache_stats
from tests.integration.starting import refused
from tests.integration.waiting import eventually

DOCS = Path(__file__).parents[2] / "docs"
SLOTS = {"device": 8, "host": 16, "disk": 32}
KEYS = chain("metrics", 6)
PROMTOOL = os.environ.get("KVTIER_PROMTOOL") or shutil.which("promtool")


@pytest.fixture
def daemon(start_daemon: StartDaemon) -> DaemonProcess:
    return start_daemon(*LISTEN, **SLOTS)


@pytest.fixture(scope="module")
def seen() -> Iterator[Scrape]:
    """One scrape for all that only look at it: of a daemon where :func:`traffic` was."""
    home = Path(tempfile.mkdtemp(prefix="kv-"))
    daemon = DaemonProcess(home, sizes(**SLOTS), LISTEN)
    try:
        daemon.start()
        yield asyncio.run(scrape_after_traffic(daemon))
        daemon.stop()
    finally:
        shutil.rmtree(home)


async def scrape_after_traffic(daemon: DaemonProcess) -> Scrape:
    async with await connect(daemon.address) as client:
        await traffic(client)
        return await scrape(daemon)


async def traffic(client: AsyncClient) -> Cache:
    """Six blocks, four of which are found on disk and two on the device; three are asked for that are not stored."""
    cache = await client.open_cache("c", SPEC, budgets=sizes(**SLOTS))
    await cache.put(KEYS, blocks(KEYS))
    await cache.move(KEYS[2:], Tier.DISK)
    async with cache.acquire([*KEYS, *chain("absent", 3)], Tier.DEVICE):
        pass
    return cache


@pytest.fixture
async def client(daemon: DaemonProcess) -> AsyncIterator[AsyncClient]:
    async with await connect(daemon.address) as client:
        yield client


async def test_slots_are_those_of_the_statistics_and_sum_to_the_capacity(
    daemon: DaemonProcess, client: AsyncClient
) -> None:
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


def test_hits_are_attributed_to_the_tier_of_the_match(seen: Scrape) -> None:
    hits = {tier: seen.value("kvtier_hit_blocks_total", cache="c", tier=str(tier)) for tier in Tier}
    assert hits == {Tier.DEVICE: 2, Tier.HOST: 0, Tier.DISK: 4}
    assert seen.value("kvtier_missed_blocks_total", cache="c") == 3
    assert seen.value("kvtier_stored_blocks_total", cache="c") == seen.value("kvtier_blocks", cache="c") == 6


def test_moves_are_counted_by_edge_and_cause_and_timed(seen: Scrape) -> None:
    down, up = {"from": "device", "to": "disk"}, {"from": "disk", "to": "device"}
    assert seen.value("kvtier_moved_blocks_total", **up, cause="demand") == 4
    assert seen.value("kvtier_moved_bytes_total", **up, cause="demand") == 4 * SPEC.block_bytes(0)
    # The two blocks above those that were moved go with them: a disk holds no block without its prefix.
    assert seen.value("kvtier_moved_blocks_total", **down, cause="explicit") == 4
    assert seen.value("kvtier_moved_blocks_total", **down, cause="write_through") == 2
    assert seen.value("kvtier_failed_blocks_total") == 0
    for name in ("kvtier_move_queue_seconds", "kvtier_move_copy_seconds"):
        assert seen.value(f"{name}_count", **up) >= 1
        assert seen.value(f"{name}_bucket", **up, le="+Inf") == seen.value(f"{name}_count", **up)
    assert seen.value("kvtier_move_copy_seconds_sum", **up) > 0
    assert seen.values("kvtier_queued_blocks") and seen.value("kvtier_queued_blocks") == 0


async def test_sessions_watchers_and_events(daemon: DaemonProcess, client: AsyncClient) -> None:
    await traffic(client)
    async with client.watch(heartbeats=True, heartbeat_s=0.02) as watch:
        await anext(watch)
        seen = await scrape(daemon)
        assert seen.value("kvtier_watchers") == 1
        assert seen.value("kvtier_watcher_lag_events") == 0
        assert seen.value("kvtier_events_total") == (await client.stats()).last_event_id
        assert seen.value("kvtier_events_total", type="stored", cause="commit") >= 1
    assert seen.value("kvtier_sessions", state="attached") == 1
    assert (seen.value("kvtier_problems"), seen.value("kvtier_epoch"), seen.value("kvtier_boot")) == (0, 1, 1)


async def test_orphaned_leases_are_told_from_live_ones(daemon: DaemonProcess, client: AsyncClient) -> None:
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
        assert seen.value("kvtier_sessions", state="detached") == 1


async def test_the_loop_is_timed(daemon: DaemonProcess, client: AsyncClient) -> None:
    first = await eventually(lambda: scrape(daemon), lambda seen: seen.value("kvtier_loop_lateness_seconds_count") >= 2)
    second = await scrape(daemon)
    for name in ("kvtier_loop_turn_seconds_count", "kvtier_loop_cpu_seconds_total"):
        assert 0 < first.value(name) < second.value(name)
    assert set(second.values("kvtier_gc_pause_seconds_count")) == {("0",), ("1",), ("2",)}


def test_every_metric_is_told_with_its_labels(seen: Scrape) -> None:
    for metric in METRICS:
        family = seen.families[metric.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (str(metric.kind), metric.help)
        assert family.samples, f"{metric.name} has no sample"
        own = {"le"} if metric.kind is Kind.HISTOGRAM else set()
        assert all(set(sample.labels) - own == set(metric.labels) for sample in family.samples), metric.name
    assert set(seen.families) == {m.name.removesuffix("_total") for m in METRICS} | {
        name.removesuffix("_total") for name in PROCESS_METRICS
    }


def test_the_metrics_keep_to_the_conventions(seen: Scrape) -> None:
    assert lint(seen.families.values()) == []


@pytest.mark.long  # because promtool is no part of the set-up; its rules are kept by the test before
def test_promtool_has_nothing_to_say(seen: Scrape) -> None:
    assert PROMTOOL is not None, "promtool is not installed, and KVTIER_PROMTOOL does not name it"
    command = [PROMTOOL, "check", "metrics"]
    done = subprocess.run(command, input=seen.text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.long
def test_prometheus_understands_every_query_of_the_dashboard(tmp_path: Path) -> None:
    assert PROMTOOL is not None, "promtool is not installed, and KVTIER_PROMTOOL does not name it"
    asked = list(queries(json.loads((DOCS / "grafana-dashboard.json").read_text()), ("expr",)))
    rules = [
        {"record": f"asked:{number}", "expr": query.replace("$__rate_interval", "5m")}
        for number, query in enumerate(asked)
    ]
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = subprocess.run([PROMTOOL, "check", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"SUCCESS: {len(asked)} rules found" in done.stdout


def test_the_dashboard_asks_for_what_there_is(seen: Scrape) -> None:
    labels = {
        sample.name: set().union(*(other.labels for other in family.samples if other.name == sample.name))
        for family in seen.families.values()
        for sample in family.samples
    }
    asked = list(queries(json.loads((DOCS / "grafana-dashboard.json").read_text())))
    assert len(asked) > 30
    for query in asked:
        names = re.findall(r"\b(?:kvtier|process)_\w+", query)
        assert names, query
        unknown = [name for name in names if name not in labels]
        assert not unknown, f"{query}: there is no {unknown}"
        known = {"instance", "job"}.union(*(labels[name] for name in names))
        wanted = labels_in(query)
        assert wanted <= known, f"{query}: {sorted(wanted - known)} are no labels of {names}"
    shown = {re.sub("_(bucket|sum|count)$", "", name) for query in asked for name in re.findall(r"kvtier_\w+", query)}
    assert shown == {metric.name for metric in METRICS}, "every metric has its place on the dashboard"


def queries(node: Any, named: tuple[str, ...] = ("expr", "query")) -> Iterator[str]:
    """All expressions, and the queries of the variables, of a dashboard."""
    match node:
        case dict():
            for key, value in node.items():
                if key in named and isinstance(value, str) and "_" in value:
                    yield value
                else:
                    yield from queries(value, named)
        case list():
            for value in node:
                yield from queries(value, named)


def labels_in(query: str) -> set[str]:
    """Of its selectors, of its grouping and matching clauses, and of label_values()."""
    selectors = re.findall(r"\{([^}]*)\}", query)
    matched = {name for selector in selectors for name in re.findall(r"(\w+)\s*[=!]~?=?\s*\"", selector)}
    grouped = {
        name.strip() for clause in re.findall(r"\b(?:by|on|without)\s*\(([^)]*)\)", query) for name in clause.split(",")
    }
    listed = set(re.findall(r"label_values\([^,]*,\s*(\w+)\)", query))
    return matched | grouped | listed


def test_the_documentation_lists_every_metric() -> None:
    """Where this fails: python -c "from kvtierd.service.metrics.table import reference; print(reference())" """
    assert reference() in (DOCS / "observability.md").read_text()


def test_nothing_listens_unless_asked(start_daemon: StartDaemon) -> None:
    assert "serving metrics" not in start_daemon(host=4).log


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--metrics-listen", "nowhere"), "host:port"),
    ],
)
def test_an_address_that_must_not_be_is_refused(tmp_path: Path, flags: tuple[str, ...], says: str) -> None:
    daemon = DaemonProcess(tmp_path, sizes(host=4))
    assert says in refused(daemon, *flags, status=2)


def test_a_public_address_can_be_asked_for(start_daemon: StartDaemon) -> None:
    daemon = start_daemon("--metrics-listen", "0.0.0.0:0", host=4)
    assert "kvtier_build_info" in text_of(daemon)


def test_an_address_that_is_taken_stops_the_start(start_daemon: StartDaemon, short_dir: Path) -> None:
    first = start_daemon(*LISTEN, host=4)
    second = DaemonProcess(short_dir, sizes(host=4))
    says = refused(second, "--metrics-listen", f"127.0.0.1:{port_of(first)}", status=2)
    assert "command line: --metrics-listen = " in says and "in use" in says


async def test_a_client_that_says_nothing_holds_up_neither_the_daemon_nor_its_stop(
    daemon: DaemonProcess, client: AsyncClient
) -> None:
    with socket.create_connection(("127.0.0.1", port_of(daemon))):
        cache = await client.open_cache("c", SPEC)
        assert (await cache.match(KEYS)).blocks == 0
        assert isinstance(await scrape(daemon), Scrape)  # after the silent one has been given up
