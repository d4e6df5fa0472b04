"""What a router meets before its first event: an empty choice, options that others chose, and where blocks go."""

import subprocess
import sys

import pytest

from kvtier import CacheOptions, Cause, Event, EventType, Tier, WritePolicy
from kvtier.types import tiers_of
from tests.integration.blocks import SPEC, blocks, chain, opened_cache, put_chain, sizes
from tests.integration.waiting import PATIENCE_S, patient


def watch(daemon, *options):
    command = [sys.executable, "-m", "kvtier.cli", "watch", "--address", daemon.address, "--oldest", "--no-follow"]
    return subprocess.run([*command, *options], capture_output=True, text=True, timeout=PATIENCE_S, check=True)


async def test_a_watch_that_can_show_nothing_says_so(start_daemon, name):
    daemon = start_daemon(host=8)
    async with await patient(daemon.address) as client:
        await client.open_cache(name, SPEC, budgets=sizes(host=4))
    assert f"warning: there is no cache tpyo yet (there are: {name}" in watch(daemon, "--cache", "tpyo").stderr
    assert f"warning: there is no window group 7 in {name}" in watch(daemon, "--cache", name, "--group", "7").stderr
    assert watch(daemon, "--cache", name, "--group", "0").stderr == ""


async def test_the_daemon_s_defaults_are_those_of_new_caches(start_daemon, name):
    """Who routes sets them, not who opens caches."""
    daemon = start_daemon("--event-hash", "v1_block_key", "--keep-tokens", "--write-policy", "through", host=8)
    async with opened_cache(daemon.address, name, wait=PATIENCE_S, budgets=sizes(host=4)) as (client, cache):
        options = cache.info.options
        assert (options.event_hash, options.keep_tokens) == ("v1_block_key", True)
        assert options.write_policy is WritePolicy.THROUGH
        prompt = cache.prompt(range(SPEC.tokens_per_block))
        await cache.put(prompt.keys, blocks([prompt.keys]), prompt=prompt)
        async with client.watch(oldest=True, caches=[name], types=[EventType.STORED]) as watch:
            event = await anext(watch)
        assert isinstance(event, Event)
        assert event.event_hash == "v1_block_key" and len(event.packed_hashes) == 8
        assert [list(each.token_ids) for each in event.tokens] == [list(range(SPEC.tokens_per_block))]
        own = CacheOptions(event_hash="v2_sha256")
        other = await client.open_cache(f"{name}-own", SPEC, budgets=sizes(host=4), options=own)
        assert (other.info.options.event_hash, other.info.options.keep_tokens) == ("v2_sha256", True)


async def evictions(client, name):
    """Of a cache, after the last event so far."""
    asked = {"caches": [name], "causes": [Cause.CAPACITY]}
    async with client.watch(oldest=True, **asked, heartbeats=True, heartbeat_s=0.05) as on:
        return [item async for item in until_quiet(on)]


async def until_quiet(on):
    async for item in on:
        if isinstance(item, Event):
            yield item
        elif not on.lag:
            return


async def test_an_eviction_says_which_tier_was_left_though_nothing_was_copied(start_daemon, name):
    daemon = start_daemon(device=4, host=8, disk=64)
    first, second = chain("first", 4), chain("second", 4)
    async with opened_cache(daemon.address, name, wait=PATIENCE_S, budgets=sizes(host=4, disk=32)) as (client, cache):
        await cache.put(first, blocks(first), tier=Tier.HOST)
        assert all(result == 0 for result in await cache.move(first, Tier.DISK))
        await cache.get(first, tier=Tier.HOST)  # in both tiers now
        await cache.put(second, blocks(second), tier=Tier.HOST)
        left = [event for event in await evictions(client, name) if event.moved_to is None]
        assert {(event.moved_from, *tiers_of(where)) for event in left for where in event.residency} == {
            (Tier.HOST, Tier.DISK)
        }
        shown = watch(daemon, "--cache", name, "--cause", "capacity", "--tier", "host").stdout
        assert "left host, in disk" in shown


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DEVICE])
async def test_a_block_that_is_forgotten_says_where_it_was(start_daemon, name, tier):
    daemon = start_daemon(device=8, host=8)
    async with opened_cache(daemon.address, name, wait=PATIENCE_S, budgets=sizes(**{str(tier): 4})) as (client, cache):
        for number in range(2):
            await put_chain(cache, f"{number}", 4, tier=tier)
        gone = await evictions(client, name)
        assert {(event.type, event.moved_from, event.moved_to) for event in gone} == {(EventType.REMOVED, tier, None)}
        assert f"{tier} → gone" in watch(daemon, "--cache", name).stdout
        assert f'"moved_from":"{tier}"' in watch(daemon, "--cache", name, "-o", "json").stdout
