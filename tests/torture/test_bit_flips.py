"""Flips bits in every file of the state and disk directories. The result is a miss, a cache left out or a refused start
with a reason, and never a wrong byte, or wrong tokens or hashes in an event."""

import asyncio
import random
import subprocess
from collections import Counter

import pytest

from kvtier import BlockResult, CacheOptions, CallerError, Cursor, Event, EventType, Tier, connect
from kvtier.wire import split_keys
from tests.integration.blocks import SPEC, assert_bytes, blocks, sizes
from tests.integration.starting import environment
from tests.integration.test_crash import SEED
from tests.integration.waiting import PATIENCE_S
from tests.torture.flips import bring_back, files_in, flip, keep
from tests.torture.runs import scaled

SLOTS = {"device": 16, "host": 32, "disk": 128}
EACH = sizes(device=8, host=16, disk=64)
NAMES = ("left", "right")
CHAINS, LENGTH = 4, 12
STARTS = scaled(160, 12)
"""Number of starts, each after flips in the next file."""

pytestmark = [pytest.mark.long, pytest.mark.limit(1800)]


async def test_no_flipped_bit_is_told(start_fresh, short_dir, found):
    rng, sums = random.Random(SEED), Counter[str]()
    daemon = start_fresh(**SLOTS)
    async with await connect(daemon.address) as client:
        truth = {name: await fill(client, name) for name in NAMES}
    daemon.stop()
    keep(daemon.home, short_dir)
    files = files_in(daemon.home)
    assert len(files) >= 10, files
    for number in range(STARTS):
        bring_back(daemon.home, short_dir)
        file, bits = files[number % len(files)], rng.choice((1, 5))
        flip(daemon.home / file, bits, rng)
        sums["bits"] += bits
        if said := await asyncio.to_thread(start, daemon):
            sums["refused"] += 1
            assert file.parts[0] in said and file.name.split(".")[0] in said, (file, said)
            continue
        try:
            await look(daemon.address, truth, sums)
        except BaseException:
            print(f"of {file}, start {number}:\n{daemon.log}")
            raise
        daemon.kill()
    found(
        f"flipped {sums['bits']} bits in {len(files)} files, {STARTS} starts: {STARTS - sums['refused']} served, "
        f"{sums['refused']} refused with a reason, {sums['left out']} caches left out; 0 wrong of {sums['blocks']:,} "
        f"blocks read and of {sums['told']:,} told, {sums['misses']} misses"
    )
    bring_back(daemon.home, short_dir)
    daemon.start()


async def fill(client, name):
    """Stores chains on disk, with tokens and hashes in their events. Returns the expected event of each block by
    key."""
    options = CacheOptions(event_hash="v2_sha256", keep_tokens=True)
    cache = await client.open_cache(name, SPEC, budgets=EACH, options=options)
    for number in range(CHAINS):
        prompt = cache.prompt(range(number << 16, (number << 16) + LENGTH * SPEC.tokens_per_block))
        keys = split_keys(prompt.keys)
        await cache.put(keys, blocks(keys), prompt=prompt)
        assert set(await cache.move(keys, Tier.DISK)) == {BlockResult.OK}
    truth = {key: said async for key, said in told(client, name)}
    assert len(truth) == CHAINS * LENGTH
    await cache.close()
    return truth


async def told(client, name):
    """Yields key, and tokens, hash and parent, of each block in each ``stored`` event of a cache."""
    stats = await client.stats()
    end = Cursor(stats.epoch, stats.last_event_id)
    async with asyncio.timeout(PATIENCE_S), client.watch(oldest=True, heartbeats=True, heartbeat_s=0.02) as watch:
        while watch.cursor is None or watch.cursor < end:
            event = await anext(watch)
            if isinstance(event, Event) and event.cache == name and event.type is EventType.STORED:
                hashes, parents = event.hashes, split_keys(event.packed_parents)
                for each in zip(event.keys, zip(event.tokens, hashes, parents, strict=True), strict=True):
                    yield each


async def look(address, truth, sums):
    """Reads and checks all remaining blocks and events."""
    async with await connect(address) as client:
        for name, known in truth.items():
            async for key, said in told(client, name):
                assert said == known[key], f"{name}: wrong of {key.hex()}: {said}"
                sums["told"] += 1
            try:
                cache = await client.open_cache(name)
            except CallerError as error:
                assert error.reason in {"DAMAGED_CACHE", "NOT_FOUND"}, error
                sums["left out"] += 1
                continue
            keys = list(known)
            for start in range(0, len(keys), LENGTH):
                some = keys[start : start + LENGTH]
                blocks_read = await cache.get(some)
                assert_bytes(some[: len(blocks_read)], blocks_read)
                sums["blocks"] += len(blocks_read)
                sums["misses"] += LENGTH - len(blocks_read)


def start(daemon):
    """Starts the daemon. Returns the reason why it does not start; empty if it serves."""
    try:
        daemon.start()
    except AssertionError:
        ended = subprocess.run(
            daemon.command(), env=environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert ended.returncode == 1, ended
        return "\n".join(line for line in ended.stderr.splitlines() if line.startswith("kvtierd: ")) or "nothing"
    return ""
