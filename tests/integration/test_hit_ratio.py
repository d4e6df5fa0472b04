"""Queried and found blocks: whatever way an engine asks, each chain counts once, and all that shows it agrees."""

import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from kvtier import Cache, Client, Tier
from kvtier.engine import Layout, PageGroup, PlaneLayout
from kvtier.replay.runner import replay
from kvtier.replay.trace import read, replay_spec
from kvtier.types import CacheStats
from tests.engine.toy import TOKENS, engine, wait_until
from tests.integration.blocks import SPEC, blocks, chain, sizes
from tests.integration.scraping import LISTEN, scrape
from tests.integration.seeing import cache_stats
from tests.integration.test_cli import kvtier
from tests.integration.waiting import eventually, patient

TRACE = Path(__file__).parents[2] / "examples/traces/conversation-extract.jsonl"

Ask = Callable[[Cache, list[bytes]], Awaitable[int]]


async def _match_and_acquire(cache, keys):
    found = (await cache.match(keys)).blocks
    if found:
        async with cache.acquire(keys[:found], Tier.HOST) as lease:
            assert lease.blocks == found
    return found


async def _poll_and_get(cache, keys):
    """As a scheduler that asks anew in each step until there is room for the request."""
    found = {await cache.prefix_length(keys) for _ in range(3)}
    (length,) = found
    if length > 1:
        assert len(await cache.get(keys[: length - 1])) == length - 1  # the last one is computed anew
    return length


async def _acquire(cache, keys):
    async with cache.acquire(keys, Tier.HOST) as lease:
        return lease.blocks


async def _get(cache, keys):
    return len(await cache.get(keys))


async def _across(cache, keys):
    return len((await cache.across.get(keys))[0])


async def _match_and_acquire_across(cache, keys):
    found = (await cache.across.match(keys)).blocks
    async with cache.across.acquire(keys) as lease:
        assert lease.blocks == found
    return found


WAYS: list[Ask] = [_match_and_acquire, _poll_and_get, _acquire, _get, _across, _match_and_acquire_across]


def prompts(name: str) -> list[list[bytes]]:
    """Some come again, some share a beginning with an earlier one, and the first comes back when it is evicted."""
    system = chain(f"{name} system", 4)
    talks = [[*system, *chain(f"{name} talk {number}", 3 + number % 4)] for number in range(12)]
    return [talks[place] for number in range(12) for place in (number, number // 2, 0)]


async def counted(client, name: str, queried: int) -> CacheStats:
    return await eventually(lambda: cache_stats(client, name), lambda stats: stats.queried >= queried)


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "by-calls"])
@pytest.mark.parametrize("way", WAYS, ids=[way.__name__.strip("_") for way in WAYS])
async def test_each_chain_counts_once_whatever_way_it_is_asked_for(client, name, way, mapped):
    cache = await client.open_cache(name, SPEC, budgets=sizes(host=24), mapped=mapped)
    queried = found = 0
    for keys in prompts(name):
        there = await way(cache, keys)
        queried, found = queried + len(keys), found + there
        if rest := keys[there:]:
            await cache.put(rest, blocks(rest), parent=keys[there - 1] if there else None)
    assert 0 < found < queried
    stats = await counted(client, name, queried)
    assert (stats.queried, stats.found) == (queried, found)


async def test_a_lookup_of_what_was_stored_since_is_a_question_of_its_own(client, name):
    """Also where all of it has been evicted meanwhile, so that the answer is the same."""
    cache = await client.open_cache(name, SPEC, budgets=sizes(host=8))
    keys = chain(name, 4)
    for _ in range(3):
        assert await cache.prefix_length(keys) == 0
        async with cache.reserve(4, Tier.HOST) as lease:
            await lease.commit(keys)
        await cache.drop(keys)
    assert ((stats := await counted(client, name, 12)).queried, stats.found) == (12, 0)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_request_counts_once_whatever_the_number_of_ranks(daemon, ranks):
    layout = Layout(f"ranks{ranks}", TOKENS, (PageGroup((PlaneLayout("heads", 3000),)),), ranks=ranks)
    asked = [[seed] * (10 * TOKENS + 1) for seed in range(8)]
    with (
        engine(daemon.address, layout, host_bytes=2 << 20, disk_bytes=2 << 20) as toy,
        Client(daemon.address) as client,
    ):

        def counts() -> tuple[int, int]:
            (found,) = [each for each in client.stats().caches if each.name == toy.planner.leader.name]
            return found.queried, found.found

        for tokens in [*asked, asked[0], asked[0]]:
            toy.run(tokens)
            toy.settle()
        wait_until(lambda: counts()[0] >= 100)
        assert counts() == (100, 20)


async def test_replay_status_top_and_metrics_agree_with_a_script(start_fresh):
    """One run: a trace, then an engine of its own that looks up first."""
    daemon = start_fresh(*LISTEN, host=256, disk=512)
    requests = await read(TRACE, limit=60)
    async with await patient(daemon.address) as client:
        cache = await client.open_cache("trace", replay_spec(4096))
        report = await replay(client, cache, requests)
        queried, found = report.block_refs, sum(report.hits.values())
        for keys in prompts("script"):
            there = await _match_and_acquire(cache, keys)
            queried, found = queried + len(keys), found + there
            if rest := keys[there:]:
                empty = [np.zeros(4096, np.uint8)] * len(rest)
                await cache.put(rest, empty, tier=Tier.HOST, parent=keys[there - 1] if there else None)
        stats = await counted(client, "trace", queried)
        assert (stats.queried, stats.found) == (queried, found)
        seen = await scrape(daemon)
        ratio = seen.value("kvtier_found_blocks_total") / seen.value("kvtier_queried_blocks_total")
        assert abs(ratio - found / queried) <= 0.001
    for command in (["status"], ["top", "--once"]):
        shown = kvtier(*command, "--address", daemon.address).stdout
        assert re.search(rf"\b{found}\s+{found / queried:.1%}", shown), shown
    said = json.loads(kvtier("status", "--address", daemon.address, "-o", "json").stdout)["caches"][0]
    assert (said["queried"], said["found"]) == (queried, found)
