"""What someone sees who tries the client in a Python shell: representations, tracebacks, warnings, limits."""

import asyncio
import gc
import os
import re
import subprocess
import sys
import time
import traceback
import warnings
from typing import Any, cast

import numpy as np
import pytest

from kvtier import (
    CacheOptions,
    CallerError,
    Client,
    ClientClosed,
    InvalidArgument,
    LeaseLost,
    Retention,
    Scope,
    SpecMismatch,
    Tier,
    TierFull,
    chain_keys,
    connect,
)
from kvtier.types import BlockResult
from tests.integration.blocks import SPEC, assert_bytes, blocks, chain, opened_cache, put_chain, sizes
from tests.integration.conftest import own_cache, own_daemon
from tests.integration.seeing import tier_stats
from tests.integration.waiting import PATIENCE_S, eventually

OK = BlockResult.OK
LIMIT = 16_384
daemon = own_daemon(device=64, host=64, disk=64)
cache = own_cache(device=8, host=8)


async def test_every_object_says_what_it_is(client, cache):
    keys = await put_chain(cache, "shown", 2, tier=Tier.HOST)
    assert repr(client) == f"<client of {client.address}: session {client.session_id}, connected>"
    assert repr(cache) == f"<cache {cache.name}: group 0, 8 device slots, 8 host slots, mapped>"
    async with cache.reserve(2, tier=Tier.HOST) as lease:
        assert repr(lease) == f"<WriteLease {lease.id} of cache {cache.name}: 2 host slots, held>"
    assert repr(lease).endswith("released>")
    async with cache.across.acquire(keys) as across:
        assert repr(across) == f"<AcrossLease of cache {cache.name}: 2 blocks in 1 groups>"
    assert repr(cache.prompt(range(SPEC.tokens_per_block * 3))).endswith("3 blocks>")
    async with client.watch() as watch:
        assert repr(watch).startswith(f"<watch of {client.address}: at ")


def test_twins_say_the_same(daemon, name):
    with Client(daemon.address) as client:
        cache = client.open_cache(name, SPEC, budgets=sizes(host=8))
        assert (repr(client), repr(cache)) == (repr(client.inner), repr(cache.inner))
        with cache.reserve(1) as lease:
            assert repr(lease) == repr(lease.inner)
    assert repr(client).endswith("closed>")


async def test_a_refusal_shows_nothing_of_grpc(client, cache):
    """One traceback, which ends in kvtier's own error."""
    other = type(SPEC)(**{each: getattr(SPEC, each) for each in SPEC.__slots__} | {"model": "another"})
    refused = []
    for call, kind in (
        (lambda: client.open_cache(cache.name, other), SpecMismatch),
        (lambda: client.open_cache("else", SPEC, budgets=sizes(host=1000)), TierFull),
        (lambda: cache.prompt([-1]), InvalidArgument),
    ):
        with pytest.raises(kind) as error:
            await call()
        refused.append("".join(traceback.format_exception(error.value)))
    for shown in refused:
        assert shown.count("Traceback") == 1
        assert "AioRpcError" not in shown


async def test_a_forgotten_lease_warns_and_goes_back(client, cache):
    """At once, but for leases whose slots the caller has seen and may still use."""
    with pytest.warns(ResourceWarning) as warned:
        await cache.reserve(3, tier=Tier.HOST)
        seen = await cache.reserve(1, tier=Tier.HOST)
        view = seen.view(0)
        del seen
        around = [await cache.reserve(2, tier=Tier.HOST)]
        around.append(around)  # for the garbage collector
        del around
        gc.collect()
    assert [str(each.message).split(": ", 2)[2] for each in warned] == [f"{n} host slots, held>" for n in (3, 1, 2)]
    await eventually(lambda: tier_stats(client, cache.name, Tier.HOST), lambda stats: stats.blank == 1)
    view[0][:] = 1
    await cache.release_all()
    assert (await tier_stats(client, cache.name, Tier.HOST)).blank == 0


def test_a_thread_forgets_a_lease(daemon, name):
    with Client(daemon.address) as client:
        cache = client.open_cache(name, SPEC, budgets=sizes(host=8))
        cache.put(keys := chain(name, 2), blocks(keys))
        with pytest.warns(ResourceWarning):
            for take in (lambda: cache.reserve(3), lambda: cache.acquire(keys), lambda: cache.across.acquire(keys)):
                take()
        with cache.reserve(6, timeout=PATIENCE_S):  # the client waits for its own releases
            pass
        assert not client.leases()


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "streamed"])
async def test_a_get_waits_for_slots_that_others_hold_and_names_them(client, name, mapped):
    cache, keys = await client.open_cache(name, SPEC, budgets=sizes(host=4, disk=8)), chain(name, 2)
    reader = await client.open_cache(name, mapped=mapped)
    await cache.put(keys, blocks(keys))
    await cache.move(keys, "disk")
    async with cache.reserve(3), cache.reserve(1):
        for get in (reader.get, reader.across.get):
            began = time.monotonic()
            with pytest.raises(TierFull, match=rf"; held by pid {os.getpid()} .* \(4 slots\)"):
                await get(keys, timeout=1.5)
            assert time.monotonic() - began >= 1.4
        waiting = asyncio.create_task(reader.get(keys, timeout=PATIENCE_S))
        await eventually(lambda: reader.reads.calls, lambda calls: calls >= 3)
    assert_bytes(keys, await waiting)


async def test_leases_that_are_over_do_not_warn(daemon, name):
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        async with opened_cache(daemon.address, name, budgets=sizes(host=8)) as (client, cache):
            held = await cache.reserve(2)
            released = await cache.reserve(2)
            await released.release()
            del released
            gc.collect()
        del held, cache, client
        gc.collect()


async def test_a_prompt_knows_what_comes_before_the_middle_of_its_chain(client, name):
    cache = await client.open_cache(name, SPEC, budgets=sizes(host=16), options=CacheOptions(keep_tokens=True))
    prompt = cache.prompt(range(SPEC.tokens_per_block * 4))
    keys = [prompt.keys[at : at + 32] for at in range(0, len(prompt.keys), 32)]
    assert await cache.put(keys[2:], blocks(keys[2:]), prompt=prompt) == [BlockResult.PARENT_MISSING] * 2
    assert await cache.put(keys[:2], blocks(keys[:2]), prompt=prompt) == [OK, OK]
    async with cache.reserve(2) as lease:
        assert await lease.commit(keys[2:], prompt=prompt) == [OK, OK]
    assert await cache.put(keys, blocks(keys), prompt=prompt) == [BlockResult.EXISTS] * 4
    assert [block.parent async for block in cache.blocks()] == [None, *keys[:3]]


async def test_a_block_put_as_a_root_is_found_with_the_chain_that_it_belongs_to(cache):
    """Keys say nothing of what is before them: without a parent it begins a chain. It is not lost."""
    keys = chain("middle", 4)
    assert await cache.put(keys[2:], blocks(keys[2:])) == [OK, OK]
    assert (await cache.match(keys)).blocks == 0
    assert await cache.put(keys, blocks(keys)) == [OK, OK, BlockResult.PARENT_CONFLICT, BlockResult.EXISTS]
    assert (await cache.match(keys)).blocks == 4
    assert_bytes(keys, await cache.get(keys))


@pytest.mark.parametrize("verb", ["prefix_length", "match", "acquire", "get", "put", "probe", "move"])
async def test_every_verb_takes_as_many_keys_and_no_more(cache, verb):
    many = chain("many", LIMIT + 1)
    further = {"put": (np.zeros((1, 1)),), "move": (Tier.HOST,)}.get(verb, ())
    with pytest.raises(InvalidArgument, match=f"keys = {LIMIT + 1} keys: must be at most {LIMIT} keys"):
        await getattr(cache, verb)(many, *further)
    if verb not in ("put", "acquire"):
        await getattr(cache, verb)(many[:LIMIT], *further)


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "streamed"])
async def test_strided_arrays_are_filled_in_place(client, cache, mapped):
    """An engine's own layout, a block the third axis: as torch's views are."""
    keys = await put_chain(cache, "strided", 3)
    half = cache.block_bytes // 2
    kv = np.zeros((2, 8, half), np.uint8)
    table = [5, 0, 6]
    views = [kv[:, at] for at in table]
    reader = await client.open_cache(cache.name, mapped=mapped)
    found = await reader.get(keys, views)
    assert all(one is view for one, view in zip(found, views, strict=True))
    assert_bytes(keys, [kv[:, at].reshape(-1) for at in table])
    assert not kv[:, [1, 2, 3, 4, 7]].any()
    whole = np.zeros((half, 2, 3), np.uint8).T  # one array, its blocks along the first axis
    await reader.get(keys, whole)
    assert_bytes(keys, [whole[at].reshape(-1) for at in range(3)])


@pytest.mark.parametrize("way", ["mapped", "streamed"])
async def test_bytes_are_stored_and_bytearrays_filled(client, cache, way):
    keys = chain("bytes", 2)
    here = cache if way == "mapped" else await client.open_cache(cache.name, mapped=False)
    assert await here.put(keys, [block.tobytes() for block in blocks(keys)], tier=Tier.HOST) == [OK] * 2
    out = [bytearray(cache.block_bytes) for _ in keys]
    assert await here.get(keys, out) == out
    assert_bytes(keys, [np.frombuffer(block, np.uint8) for block in out])


async def test_what_is_no_block_is_named(cache):
    keys = chain("none", 2)
    (array, _), size = blocks(keys), cache.block_bytes
    for blocks_of_two, says in (
        ([array, None], r"blocks\[1\] = NoneType: must be an array, a tensor or bytes"),
        ([array, [1, 2]], r"blocks\[1\] = list: must be an array, a tensor or bytes"),
        ([array, b"short"], rf"blocks\[1\] = 5 bytes: must be {size} bytes"),
    ):
        with pytest.raises(InvalidArgument, match=says):
            await cache.put(keys, blocks_of_two, tier=Tier.HOST)
    with pytest.raises(InvalidArgument, match=r"out\[0\] = .*: must be writable"):
        await cache.get(keys, [bytes(size)] * 2)


async def test_a_lease_lost_is_no_lease_forgotten(daemon, client, cache):
    lease = await cache.reserve(1, tier=Tier.HOST)
    daemon.crash()
    while client.session_id and cache.session_number == lease.binding.session:
        await client.caches(timeout=10)
    with pytest.raises(LeaseLost):
        lease.require_live()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        del lease
        gc.collect()


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("before", [0, 6])
async def test_a_chain_longer_than_its_tier_is_stored_as_far_as_it_fits(client, name, mapped, before):
    """Its later blocks do not take the slots of its earlier ones."""
    other, keys = await client.open_cache(name, SPEC, budgets=sizes(host=8)), chain("long", 25)
    cache = await client.open_cache(name, mapped=mapped)
    await cache.put(keys[:before], blocks(keys[:before]))
    async with other.reserve(1):
        with pytest.raises(TierFull, match="held by pid"):
            await cache.put(keys, blocks(keys))
        assert_bytes(keys[:7], await cache.get(keys))
    results = await cache.put(keys, blocks(keys))
    assert [result is BlockResult.NO_ROOM for result in results] == 8 * [False] + 17 * [True]
    assert_bytes(keys[:8], await cache.get(keys))


def test_a_thread_begins_a_verb_and_looks_later(daemon, name):
    keys = chain("later", 4)
    with Client(daemon.address) as client:
        cache = client.open_cache(name, SPEC, budgets=sizes(host=8))
        assert client.submit(lambda: cache.inner.put(keys, blocks(keys))).result(PATIENCE_S) == 4 * [OK]
        assert_bytes(keys, client.submit(lambda: cache.inner.get(keys)).result(PATIENCE_S))
        refused = client.submit(lambda: cache.inner.reserve(9).__aenter__())
        assert isinstance(refused.exception(PATIENCE_S), InvalidArgument)
        waiting, left = (client.submit(lambda: asyncio.sleep(2 * PATIENCE_S)) for _ in range(2))
        assert not waiting.done() and waiting.cancel() and waiting.cancelled()
    assert left.cancelled()
    with pytest.raises(ClientClosed):
        client.submit(lambda: cache.inner.get(keys))


KEYS = chain("wrong", 2)
WRONG = {
    "to = 7: must be device or host or disk": lambda cache, _: cache.move(KEYS, 7),
    "timeout = '5': must be above 0 and at most 3600 seconds, as a number": lambda cache, _: cache.get(
        KEYS, timeout="5"
    ),
    "keys[0] = str: must be bytes": lambda cache, _: cache.match("abc"),
    "count = 2.5: must be 1 or more, as a whole number": lambda cache, _: cache.reserve(2.5),
    "count = '4': must be 1 or more": lambda cache, _: cache.reserve("4"),
    "retention = 5: must be of type Retention": lambda cache, _: cache.acquire(KEYS, retention=5),
    "prompt = 'x': must be of type Prompt": lambda cache, _: cache.put(KEYS, blocks(KEYS), prompt="x"),
    "blocks = None: must be of type Sized": lambda cache, _: cache.put(KEYS, None),
    "dry_run = 'yes': must be True or False": lambda cache, _: cache.drop(KEYS, dry_run="yes"),
    "repeats = -1: must be 0 to 2^64 - 1": lambda cache, _: cache.reset(repeats=-1),
    "token_ids = abc: must be one-dimensional": lambda cache, _: cache.prompt("abc"),
    "ticket = 5: must be of type LeaseTicket": lambda cache, _: cache.join(5),
    "name = 5: must be text": lambda _, client: client.open_cache(5),
    "spec = 'x': must be of type CacheSpec": lambda _, client: client.open_cache("x", "x"),
    "budgets = 5: must be of type Mapping": lambda _, client: client.open_cache("x", SPEC, budgets=5),
    "budgets[host] = True: must be": lambda _, client: client.open_cache("x", SPEC, budgets={"host": True}),
    "options = {}: must be of type CacheOptions": lambda _, client: client.open_cache("x", SPEC, options={}),
    "options.thresholds = host: must be": lambda _, client: client.open_cache(
        "x", SPEC, options=CacheOptions(thresholds=cast(Any, {"host": 5}))
    ),
    "types = stored: must be a list": lambda _, client: client.watch(types="stored"),
    "since = 5: must be of type Cursor": lambda _, client: client.watch(since=5),
    "session_id = '4': must be 1 to 2^64 - 1": lambda _, client: client.kick("4"),
}


async def test_a_wrong_argument_is_named_with_its_limit(client, cache):
    for says, call in WRONG.items():
        with pytest.raises(InvalidArgument, match="^" + re.escape(says)):
            await call(cache, client)
    for field, make in {
        "token_ids": lambda: chain_keys(cast(Any, "abc"), 32),
        "scope": lambda: chain_keys([1], 1, cast(Any, "tenant-a")),
        "scope.lora_id": lambda: Scope(cast(Any, "tenant-a")),
        "spec": lambda: SPEC.from_dict({}),
    }.items():
        with pytest.raises(InvalidArgument) as refused:
            make()
        assert refused.value.field == field
    with pytest.raises(InvalidArgument, match="decode_priority = 'high': must be 0 to 100"):
        Retention(decode_priority=cast(Any, "high"))


def test_a_thread_is_told_the_same(daemon, name):
    with Client(daemon.address) as client:
        cache = client.open_cache(name, SPEC, budgets=sizes(host=8))
        for says, call in WRONG.items():
            with pytest.raises(InvalidArgument, match="^" + re.escape(says)):
                call(cache, client)


QUIET = {
    "another client outlives one that watches": """
with kvtier.Client(address) as other, other.watch(heartbeats=True, heartbeat_s=0.05) as beats:
    for _ in range(10):
        client = kvtier.Client(address)
        next(iter(client.watch(heartbeats=True, heartbeat_s=0.05)))
        client.close()
        next(beats)
""",
    "a thread watches at the end": """
client = kvtier.Client(address)
watch, begun = client.watch(heartbeats=True, heartbeat_s=0.05), threading.Event()
threading.Thread(target=lambda: [begun.set() for _ in watch], daemon=True).start()
begun.wait()
""",
    "calls are cancelled with their loop": """
async def main():
    client = await kvtier.connect(address)
    caches = [await client.open_cache("quiet", mapped=mapped) for mapped in (True, False)]
    async def work(cache):
        while True:
            async with cache.acquire(keys):
                await cache.get(keys)
            await client.stats()
    kept = [asyncio.create_task(work(cache)) for cache in caches * 2]
    await asyncio.sleep(0.3)
    sys.exit(0)
asyncio.run(main())
""",
    "a watch is cancelled with its loop": """
async def main():
    client = await kvtier.connect(address)
    async for _ in client.watch(heartbeats=True, heartbeat_s=0.05):
        break
asyncio.run(main())
""",
}


@pytest.mark.parametrize("program", QUIET.values(), ids=list(QUIET))
def test_an_ending_client_prints_nothing(daemon, program):
    with Client(daemon.address) as client:
        client.open_cache("quiet", SPEC, budgets=sizes(host=8)).put(KEYS, blocks(KEYS))
    begin = (
        "import asyncio, sys, threading, kvtier\naddress, *keys = sys.argv[1:]\nkeys = list(map(bytes.fromhex, keys))\n"
    )
    command = [sys.executable, "-c", begin + program, daemon.address, *(key.hex() for key in KEYS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_asynchronous_connect_names_the_ways_in(daemon):
    with pytest.raises(CallerError, match=r"async with.*kvtier\.Client"), connect(daemon.address):
        pass


async def test_a_duration_in_words_is_named_whole(cache):
    with pytest.raises(InvalidArgument, match=r"durations_s = '10m': .* as a number"):
        await cache.set_retention(chain("kept", 1), 50, durations_s="10m")
