"""``kvtier watch --format trtllm``: what a router that follows TensorRT-LLM reads of a real daemon."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

from kvtier import CacheOptions, SnapshotSlice, Tier, connect, event_hashes
from tests.integration.blocks import SPEC, blocks, sizes

NAME = "llama"
STEP = SPEC.tokens_per_block
IDS = list(range(1000, 1000 + 3 * STEP))
NAMED = CacheOptions(event_hash="v1_block_key", keep_tokens=True)


def hashes():
    packed = event_hashes("v1_block_key", IDS, STEP)
    return [int.from_bytes(packed[start : start + 8], "big") for start in range(0, len(packed), 8)]


def watched(daemon, *arguments):
    command = [sys.executable, "-m", "kvtier.cli", "watch", "--address", daemon.address, "--format", "trtllm"]
    done = subprocess.run([*command, *arguments], check=True, capture_output=True, text=True, timeout=60)
    return [json.loads(line) for line in done.stdout.splitlines()]


async def first_slice(watch):
    async for item in watch:
        if isinstance(item, SnapshotSlice):
            return item
    raise AssertionError("the watch ended")


async def opened(client):
    cache = await client.open_cache(NAME, SPEC, budgets=sizes(device=8, host=8, disk=8), options=NAMED)
    return cache, cache.prompt(IDS)


async def test_a_life_in_their_words(start_daemon):
    daemon = start_daemon(device=8, host=8, disk=8)
    async with await connect(daemon.address) as client:
        cache, prompt = await opened(client)
        await cache.put(prompt.keys, blocks([prompt.keys[:32]] * 3), prompt=prompt)
        await cache.move(prompt.keys, Tier.HOST)
        await cache.drop(prompt.keys[:32])
        count = (await client.stats()).last_event_id
        events = await asyncio.to_thread(watched, daemon, "--cache", NAME, "--oldest", "--limit", str(count))
    envelope = {"window_size": 2**31 - 1, "hash_algo": "v1_block_key", "layer_group_id": 0}
    assert [{name: each[name] for name in envelope} for each in events] == [envelope] * len(events)
    assert [each["event_id"] for each in events] == list(range(len(events)))
    created, stored, *rest = [each["data"] for each in events]
    assert created == {"type": "created", "num_blocks_per_cache_level": [8, 8, 8]}
    assert stored == {
        "type": "stored",
        "parent_hash": None,
        "blocks": [
            {
                "type": "stored_block",
                "block_hash": number,
                "tokens": [
                    {"type": "unique_token", "token_id": token, "token_extra_id": 0}
                    for token in IDS[place * STEP : (place + 1) * STEP]
                ],
                "cache_level": 0,
                "priority": 35,
                "mm_keys": [],
            }
            for place, number in enumerate(hashes())
        ],
    }
    moves = [each for each in rest if each["type"] == "updated"]
    down = {"type": "event_diff", "new_value": 1, "old_value": 0}
    assert {each["block_hash"] for each in moves} == set(hashes())
    assert all((each["cache_level"], each["priority"]) == (down, None) for each in moves)
    removed = [each for each in rest if each["type"] == "removed"]
    assert [number for each in removed for number in each["block_hashes"]] == hashes()[::-1]
    assert len(moves) + len(removed) == len(rest)


async def test_hashes_and_tokens_outlive_the_daemon(start_daemon):
    daemon = start_daemon(device=8, host=8, disk=8)
    async with await connect(daemon.address) as client:
        cache, prompt = await opened(client)
        await cache.put(prompt.keys, blocks([prompt.keys[:32]] * 3), prompt=prompt)
        await cache.move(prompt.keys, Tier.DISK)
        await asyncio.to_thread(daemon.stop)
        await asyncio.to_thread(daemon.start)
        cache, prompt = await opened(client)
        async with client.watch(snapshot=True, caches=[NAME]) as watch:
            found = await first_slice(watch)
    assert found.event_hash == "v1_block_key"
    assert [int.from_bytes(found.packed_hashes[at : at + 8], "big") for at in (0, 8, 16)] == hashes()
    assert [token for block in found.tokens for token in block.token_ids] == IDS


def test_one_cache_is_asked_for(daemon):
    command = [sys.executable, "-m", "kvtier.cli", "watch", "--address", daemon.address, "--format", "trtllm"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "needs one --cache" in done.stderr
