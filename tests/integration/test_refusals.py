"""What is well formed and cannot be: full tiers, other specifications, budgets that are not left; and what the client
itself refuses to send."""

import os
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from kvtier import (
    BlockResult,
    Cache,
    DeadlineExceeded,
    InvalidArgument,
    PoolSpec,
    SpecMismatch,
    Tier,
    WindowGroupSpec,
    connect,
)
from kvtier.v1 import blocks_pb2, caches_pb2
from kvtier.wire import budgets_to_wire, spec_to_wire, tier_to_wire
from tests.integration.blocks import SPEC, assert_bytes, blocks, chain, sizes
from tests.integration.seeing import state, state_seen_by, tier_stats
from tests.integration.stuck import stuck_disk
from tests.integration.waiting import eventually

Code = grpc.StatusCode
KEYS = chain("stored", 3)
NEW = chain("new", 2)
PACKED, PACKED_NEW = b"".join(KEYS), b"".join(NEW)


async def test_a_chain_is_refused_alone_where_room_or_blocks_are_short(raw, name):
    cache = (await raw.open(name, budgets=sizes(device=3, host=4))).cache_id
    stored = await raw.reserve(cache, Tier.HOST, 3)
    await raw.commit(cache, stored, KEYS)
    await raw.reserve(cache, Tier.DEVICE, 2)
    request = blocks_pb2.AcquireRequest(
        cache_id=cache,
        tier=tier_to_wire(Tier.DEVICE),
        chains=[blocks_pb2.Chain(keys=PACKED, min_blocks=2), blocks_pb2.Chain(keys=PACKED_NEW, min_blocks=1)],
    )
    full, short = (await raw.call(raw.stubs.blocks.Acquire, request)).chains
    assert (len(full.groups), full.matched, full.refusal) == (0, 3, "TIER_FULL")
    assert full.detail.tier == tier_to_wire(Tier.DEVICE)
    assert [(holder.pid, holder.slots) for holder in full.detail.holders] == [(os.getpid(), 2)]
    assert (len(short.groups), short.matched, short.refusal) == (0, 0, "TOO_SHORT")


def with_pools(*pools):
    return replace(SPEC, groups=(WindowGroupSpec(pools=pools),))


OTHER_SPECS = [
    ("spec.model", replace(SPEC, model="another model")),
    ("spec.dtype", replace(SPEC, dtype="int8")),
    ("spec.tokens_per_block", replace(SPEC, tokens_per_block=32)),
    ("spec.rank", replace(SPEC, rank=1, world_size=2)),
    ("spec.groups", with_pools(PoolSpec(1, 1, 72))),
    ("spec.groups", with_pools(*(replace(pool, dtype="int8") for pool in SPEC.groups[0].pools))),
]


@pytest.mark.parametrize(("field", "other"), OTHER_SPECS)
async def test_another_spec_than_the_caches_is_refused(raw, client, name, field, other):
    await raw.open(name, budgets=sizes(host=1))
    before = await state(raw)
    fault = await raw.refusal(raw.stubs.caches.Open, caches_pb2.OpenRequest(name=name, spec=spec_to_wire(other)))
    assert (fault.code, fault.reason, fault.detail.field) == (Code.INVALID_ARGUMENT, "SPEC_MISMATCH", field)
    assert fault.detail.value
    assert fault.detail.limit
    assert await state(raw) == before
    with pytest.raises(SpecMismatch):
        await client.open_cache(name, other)


async def test_other_budgets_than_the_caches_are_refused(raw, name):
    await raw.open(name, budgets=sizes(device=2, host=4))
    before = await state(raw)
    for asked in (sizes(device=3), sizes(disk=1)):
        request = caches_pb2.OpenRequest(name=name, spec=spec_to_wire(SPEC), budgets=budgets_to_wire(asked))
        fault = await raw.refusal(raw.stubs.caches.Open, request)
        assert fault.code is Code.INVALID_ARGUMENT
        assert fault.detail.field.startswith("budgets")
    assert await state(raw) == before
    await raw.open(name, budgets=sizes(device=2, host=4))
    await raw.open(name)


async def test_a_cache_whose_leases_are_held_is_not_closed(raw, name):
    cache = (await raw.open(name, budgets=sizes(host=4))).cache_id
    await raw.reserve(cache, Tier.HOST, 1)
    before = await state(raw)
    fault = await raw.refusal(raw.stubs.caches.Close, caches_pb2.CloseRequest(cache_id=cache))
    assert (fault.code, fault.reason, fault.detail.field) == (Code.FAILED_PRECONDITION, "LEASES_HELD", "cache_id")
    assert await state(raw) == before


# -- through the client ------------------------------------------------------------------------------------------------


@pytest.fixture
async def cache(client, name):
    return await client.open_cache(name, SPEC, budgets=sizes(device=2, host=4))


CLIENT_CASES: dict[str, tuple[Callable[[Cache], Any], str]] = {
    "reserve none": (lambda cache: cache.reserve(0), "count"),
    "reserve more than there is": (lambda cache: cache.reserve(5, Tier.HOST), "count"),
    "reserve in a tier that is not there": (lambda cache: cache.reserve(1, Tier.DISK), "tier"),
    "wait not at all": (lambda cache: cache.reserve(1, timeout=0), "timeout"),
    "wait for ever": (lambda cache: cache.match(KEYS, timeout=float("inf")), "timeout"),
    "a short key": (lambda cache: cache.match([b"short"]), "keys[0]"),
    "a key twice": (lambda cache: cache.match([KEYS[0], KEYS[0]]), "keys[1]"),
    "half a packed key": (lambda cache: cache.match(PACKED[:40]), "keys"),
    "fewer blocks than keys": (lambda cache: cache.put(KEYS, blocks(KEYS[:2])), "blocks"),
    "a block of another size": (lambda cache: cache.put(KEYS[:1], [blocks(KEYS[:1])[0][:-1]]), "blocks[0]"),
    "a priority of -1": (lambda cache: cache.put(KEYS[:1], blocks(KEYS[:1]), priorities=[-1]), "priorities[0]"),
    "more min_blocks than keys": (lambda cache: cache.acquire(KEYS, min_blocks=4), "min_blocks"),
    "a move to a tier that is not there": (lambda cache: cache.move(KEYS, Tier.DISK), "to"),
}


@pytest.mark.parametrize("case", CLIENT_CASES.values(), ids=list(CLIENT_CASES))
async def test_refused_through_the_client(client, cache, case):
    call, field = case
    before = await state_seen_by(client)
    with pytest.raises(InvalidArgument) as refused:
        await call(cache)
    assert refused.value.field == field
    assert refused.value.limit
    assert await state_seen_by(client) == before
    assert (await tier_stats(client, cache.name, Tier.HOST)).free == 4


# -- deadlines ---------------------------------------------------------------------------------------------------------


async def test_a_wait_ends_at_its_deadline_with_nothing_held(daemon, client, raw, name):
    """Room is made by writing to the disk, which hangs."""
    cache = await client.open_cache(name, SPEC, budgets=sizes(device=4, disk=64))
    cache_id = (await raw.open(name)).cache_id
    keys, others = chain(name, 4), chain(f"{name} others", 2)
    await cache.put(keys, blocks(keys))
    await cache.move(keys[2:], Tier.DISK)
    with stuck_disk(daemon, name):
        await cache.put(others, blocks(others))
        wanted = {"cache_id": cache_id, "tier": tier_to_wire(Tier.DEVICE), "timeout_ns": 10**8}
        chains = [blocks_pb2.Chain(keys=b"".join(keys), min_blocks=least) for least in (2, 3)]
        fetch = blocks_pb2.AcquireRequest(chains=chains, **wanted)
        ready, short = (await raw.call(raw.stubs.blocks.Acquire, fetch)).chains
        assert (ready.matched, ready.refusal, len(ready.groups[0].slots)) == (4, "", 2)
        assert (short.matched, short.refusal, len(short.groups)) == (4, "DEADLINE", 0)
        release = blocks_pb2.ReleaseRequest(cache_id=cache_id, lease_ids=[ready.groups[0].lease_id])
        await raw.call(raw.stubs.blocks.Release, release)
        fault = await raw.refusal(raw.stubs.blocks.Reserve, blocks_pb2.ReserveRequest(count=4, **wanted))
        assert (fault.code, fault.reason, fault.detail.wanted) == (Code.DEADLINE_EXCEEDED, "DEADLINE", 4)
        with pytest.raises(DeadlineExceeded):
            await cache.acquire(keys, min_blocks=3, timeout=0.1)
    await eventually(lambda: tier_stats(client, name, Tier.DEVICE), lambda stats: not (stats.held or stats.filling))
    assert_bytes(keys, await cache.get(keys))


async def test_tiers_and_sizes_may_be_given_by_name(daemon, name):
    untyped: Callable[[Any], Any] = lambda value: value  # noqa: E731
    async with connect(daemon.address) as client:
        cache = await client.open_cache(name, SPEC, budgets={"host": "1MiB", "disk": "2MiB"})
        assert (cache.slots("host") + 1) * SPEC.record_bytes(0) > 1 << 20 >= cache.slots("host") * SPEC.record_bytes(0)
        assert await cache.put(KEYS, blocks(KEYS), tier="host") == [BlockResult.OK] * len(KEYS)
        assert set(await cache.move(KEYS, "disk")) == {BlockResult.OK}
        for call, wrong in (
            (lambda: cache.move(KEYS, "rom"), "to = rom: must be device or host or disk"),
            (lambda: cache.move(KEYS, untyped(7)), "to = 7: must be device or host or disk"),
            (lambda: client.open_cache("x", SPEC, budgets={"host": "64M"}), "64MiB"),
            (
                lambda: client.open_cache("x", SPEC, budgets={"host": untyped(1.5)}),
                "budgets[host] = 1.5: must be bytes",
            ),
        ):
            with pytest.raises(InvalidArgument, match=re.escape(wrong)):
                await call()
