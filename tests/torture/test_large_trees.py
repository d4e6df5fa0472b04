"""A long chain and a wide fan: calls on all their blocks are done in slices, and other clients are served."""

import asyncio
import time
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvtier import CacheOptions, CacheSpec, Tier, connect
from kvtier.v1 import blocks_pb2
from tests.integration.blocks import chain
from tests.integration.daemon import DaemonProcess
from tests.integration.raw import attached, channel_to
from tests.torture.runs import scaled

DEPTH = scaled(200_000, 20_000)
"""Blocks of the chain. Each commit under it uses the whole chain, so the time grows faster than the depth."""
WIDTH = scaled(150_000, 5_000)
"""Children of one parent."""
A_COMMIT, A_CALL = 1_024, 16_384
"""Maximum number of keys in a commit, and in another call."""
SPARE = 4 * A_COMMIT
ALONE_S = 2.0
LONGEST = 25
"""Limit of a callback in multiples of the CPU time of ``slow_callbacks``. Without slices each call exceeds it."""

SPEC = CacheSpec.single("large", "uint8", tokens_per_block=16, layers=1, kv_heads=1, head_size=256, kv_factor=1)
SLOT = SPEC.record_bytes(0)
DEEP = {Tier.HOST: (DEPTH + SPARE) * SLOT, Tier.DISK: A_COMMIT * SLOT}
WIDE = {Tier.HOST: (WIDTH + SPARE) * SLOT, Tier.DISK: 2 * WIDTH * SLOT}
SMALL = {Tier.HOST: A_COMMIT * SLOT, Tier.DISK: A_COMMIT * SLOT}

pytestmark = [pytest.mark.long, pytest.mark.limit(1800)]


async def test_what_one_client_does_to_a_large_tree_keeps_nobody_waiting(short_dir, found):
    sizes = {tier: DEEP[tier] + WIDE[tier] + SMALL[tier] for tier in DEEP}
    slow = short_dir / "slow"
    slow.touch()
    daemon = DaemonProcess(short_dir, sizes)
    daemon.program = ["tests.torture.slow_callbacks", str(slow)]
    daemon.start()
    try:
        async with bystander(daemon.address) as waited:
            await asyncio.sleep(ALONE_S)
            served = {"alone": waited()}
            began = time.monotonic_ns()
            async for verb in all_verbs(daemon.address):
                served[verb] = waited()
            work, *lines = slow.read_text().splitlines()
            callbacks = [tuple(map(int, line.split())) for line in lines]
    finally:
        daemon.kill()
    longest = max((took for ended, took in callbacks if ended > began), default=0)
    times = longest / int(work)
    found(
        f"a chain of {DEPTH:,} and a fan of {WIDTH:,} blocks, all of it stored, used, given priorities, evicted and "
        f"dropped in {(time.monotonic_ns() - began) / 1e9:.0f} s: the daemon's longest callback took "
        f"{longest / 1e6:.0f} ms of CPU, {times:.0f} times the work; another client's slowest match and health: "
        + ", ".join(f"{verb} {match * 1000:.0f} and {health * 1000:.0f} ms" for verb, (match, health) in served.items())
    )
    assert times <= LONGEST


@asynccontextmanager
async def bystander(address):
    """Asks for a match and for health over and over. Gives a function that returns, and resets, the slowest time of
    each in seconds."""
    worst = [0.0, 0.0]
    keys = chain("few", 64)

    async def timed(place, call):
        started = time.monotonic()
        answer = await call
        worst[place] = max(worst[place], time.monotonic() - started)
        return answer

    async def ask():
        stub: Any = health_pb2_grpc.HealthStub(channel)
        while True:
            answer = await timed(0, raw.call(raw.stubs.blocks.Match, request))
            assert answer.blocks == len(keys)
            await timed(1, stub.Check(health_pb2.HealthCheckRequest()))

    def waited():
        told = tuple(worst)
        worst[:] = 0.0, 0.0
        return told

    async with attached(address) as raw, channel_to(address) as channel:
        opened = await raw.open("bystander", SPEC, SMALL)
        await raw.store(opened.cache_id, Tier.HOST, keys)
        request = blocks_pb2.MatchRequest(cache_id=opened.cache_id, keys=b"".join(keys))
        asking = asyncio.create_task(ask())
        try:
            yield waited
            assert not asking.done(), asking
        finally:
            asking.cancel()
            with suppress(asyncio.CancelledError):
                await asking


async def all_verbs(address):
    """Makes all calls. Yields the name of each verb when it is done."""
    async with await connect(address, timeout=120) as client, attached(address) as raw:
        deep = await client.open_cache("deep", SPEC, budgets=DEEP)
        deep_id = (await raw.open("deep", SPEC)).cache_id
        keys = chain("deep", DEPTH)
        await commit(deep, keys, [None, *keys])
        yield "commit"
        await touch(raw, deep_id, keys)
        yield "touch"
        for priority in (90, 50):
            await deep.set_retention(keys[-1:], priority)
            await passed_on(deep, priority)
        for some in calls(keys):
            await deep.set_retention(some, 40)
        yield "priority"
        evicting = chain("evicting", 2 * SPARE)
        await commit(deep, evicting, [None, *evicting], priorities=90)
        yield "evict"
        await deep.move([keys[DEPTH // 2]], Tier.DISK)
        yield "move"
        await deep.drop(keys[:1], dry_run=True)
        yield "dry run"
        gone = await deep.drop(keys[:1])
        assert gone.dropped >= DEPTH - SPARE
        yield "drop"

        wide = await client.open_cache("wide", SPEC, budgets=WIDE, options=CacheOptions(eviction="lfuda"))
        wide_id = (await raw.open("wide", SPEC)).cache_id
        root, *leaves = chain("wide", 1 + WIDTH)
        for _ in range(2):  # lfuda keeps blocks longer that come back
            await commit(wide, [root, *leaves], [None, *[root] * WIDTH])
            yield "commit to a fan"
            await touch(raw, wide_id, leaves)
            await touch(raw, wide_id, leaves)
            yield "touch of a fan"
            for priority in (50, 40):
                for some in calls(leaves):
                    await wide.set_retention(some, priority)
            yield "priority of a fan"
            await wide.drop([root], dry_run=True)
            gone = await wide.drop([root])
            assert gone.dropped == 1 + WIDTH
            yield "drop of a fan"


async def commit(cache, keys, parents, **given):
    for first in range(0, len(keys), A_COMMIT):
        few = slice(first, min(first + A_COMMIT, len(keys)))
        async with cache.reserve(len(keys[few]), Tier.HOST) as lease:
            await lease.commit(keys[few], parents=parents[few], hold=False, **given)


async def touch(raw, cache_id, keys):
    for some in calls(keys):
        await raw.call(raw.stubs.blocks.Touch, blocks_pb2.TouchRequest(cache_id=cache_id, keys=b"".join(some)))


async def passed_on(cache, priority):
    """Waits until the first block of the cache has got the priority of the last."""
    while True:
        async for page in cache.pages(page_blocks=1):
            if page.blocks[0].priority == priority:
                return
            break


def calls(keys):
    return [keys[first : first + A_CALL] for first in range(0, len(keys), A_CALL)]
