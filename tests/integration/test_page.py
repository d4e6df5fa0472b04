"""The page of the metrics port: its numbers are the metrics', and a browser draws them."""

import asyncio
import json
import re
import subprocess

import pytest

from tests.integration.blocks import opened_cache, put_chain, sizes
from tests.integration.conftest import own_daemon
from tests.integration.scraping import LISTEN, asked, port_of, scrape
from tests.integration.test_directories import cache_dir
from tests.integration.waiting import PATIENCE_S

daemon = own_daemon(*LISTEN, fresh=True, host=8, disk=16)


async def test_its_numbers_are_the_metrics_and_name_no_key(daemon):
    async with opened_cache(daemon.address, "c", budgets=sizes(host=8, disk=16)) as (_, cache):
        keys = await put_chain(cache, "seen", 4)
        scraped = await scrape(daemon)
        _, text = await asyncio.to_thread(asked, daemon, "/status.json")
    found = json.loads(text)
    for name in ("blocks", "slots", "tier_bytes", "events_total", "stored_blocks_total"):
        values = {tuple(labels): value for *labels, value in found["metrics"][name]}
        assert sorted(values.values()) == sorted(scraped.values(f"kvtier_{name}").values())
    assert (found["problems"], found["idle_s"]) == ([], {"c": None})
    assert [each["leases"] for each in found["sessions"]] == [0]
    assert ("stored", "commit", "c", 4) in [
        tuple(map(each.get, ("type", "cause", "cache", "blocks"))) for each in found["events"]
    ]
    assert not [key for key in keys if key.hex()[:8] in text]


def test_a_key_of_the_configuration_takes_it_away(start_fresh):
    daemon = start_fresh(*LISTEN, "--no-metrics-page", host=8)
    assert [asked(daemon, path)[0] for path in ("/", "/status.json", "/metrics")] == [404, 404, 200]


def test_the_page_reads_nothing_but_the_metrics(daemon):
    status, page = asked(daemon, "/")
    assert status == 200
    assert re.findall(r"(?:src|href)=|https?:|@import|url\(", page) == []
    read = {*re.findall(r"sum\(\"(\w+)\"", page), *re.findall(r"now\.metrics\.(\w+)", page)}
    known = set(re.findall(r"^# TYPE kvtier_(\w+)", asked(daemon, "/metrics")[1], re.MULTILINE))
    assert {name for name in read if name not in known and f"{name}_total" not in known} == set()


def drawn(daemon, tmp_path):
    """The page in Debian's chromium after two looks at the daemon."""
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}")
    command = ["chromium", *options, "--virtual-time-budget=3000", "--dump-dom", f"http://127.0.0.1:{port_of(daemon)}/"]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout


@pytest.mark.long
async def test_a_browser_draws_a_quiet_and_a_failing_daemon(daemon, tmp_path):
    async with opened_cache(daemon.address, "c", budgets=sizes(host=8, disk=16)) as (_, cache):
        await put_chain(cache, "seen", 4)
        page = await asyncio.to_thread(drawn, daemon, tmp_path)
        for shown in ("✓ healthy", "<td>c</td><td>4</td>", "<td>stored</td><td>commit</td><td>4</td>", "none"):
            assert shown in page
    daemon.stop()
    (cache_dir(daemon, "c") / "index/data.mdb").unlink()
    daemon.start()
    page = await asyncio.to_thread(drawn, daemon, tmp_path)
    assert "✗ 1 problem" in page
    assert "cache c is left out" in page
