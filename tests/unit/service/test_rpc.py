"""Every verb over a real channel to a daemon: what it answers, what it refuses, that a refusal changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from kvtier.abi import attach
from kvtier.abi.attach import SESSION_METADATA_KEY, Welcome
from kvtier.abi.key_index import IndexReader
from kvtier.abi.layout import INDEXES_HERE, ArenaLayout
from kvtier.v1 import admin_pb2, blocks_pb2, caches_pb2, common_pb2, events_pb2, events_pb2_grpc
from kvtierd.service import validation, wire
from kvtierd.service.daemon import Daemon
from kvtierd.tiers.mapped import Chaos
from tests.forking import is_own_command
from tests.unit.service.relay import relay
from tests.unit.service.rig import (
    DEVICE,
    DISK,
    HOST,
    SLOT_BYTES,
    SPEC,
    AttachSocket,
    Client,
    attached,
    chain,
    channel_to,
    config,
    eventually,
    parents_of,
    refusal,
    running,
    sockets_below,
)

Code = grpc.StatusCode
HUGE32, HUGE64 = 2**32 - 1, 2**64 - 1
"""Negative numbers, as they arrive in unsigned fields."""

KEYS = chain(4)
PACKED = b"".join(KEYS)


@pytest.fixture
async def daemon(short_dir: Path) -> AsyncIterator[Daemon]:
    async with running(config(short_dir, device=8, host=16)) as daemon:
        yield daemon


@pytest.fixture
async def client(daemon: Daemon) -> AsyncIterator[Client]:
    async with attached(daemon) as client:
        yield client


async def state_of(client: Client) -> bytes:
    """All that a call could have changed."""
    stats: admin_pb2.StatsResponse = await client.call(client.admin.Stats, admin_pb2.StatsRequest())
    stats.ClearField("uptime_ns")
    stats.ClearField("event_log")  # written in its own time
    return stats.SerializeToString(deterministic=True)


# verbs


async def test_a_block_s_life(client: Client) -> None:
    blocks = client.blocks
    cache = await client.open()
    reserved = await client.reserve(cache, 4)
    commit = blocks_pb2.CommitRequest(
        cache_id=cache,
        lease_id=reserved.lease_id,
        slots=reserved.slots,
        keys=PACKED,
        parents=parents_of(KEYS),
        priorities=bytes([0, 35, 36, 100]),
    )
    done = await client.call(blocks.Commit, commit)
    assert done.results == bytes(4)
    matched = await client.call(blocks.Match, blocks_pb2.MatchRequest(cache_id=cache, keys=PACKED + b"?" * 32))
    assert (matched.blocks, matched.residency) == (4, bytes([1, 1, 1, 1]))
    assert matched.as_of_event == done.as_of_event
    await client.release(cache, reserved.lease_id)

    found = await client.call(blocks.Locate, blocks_pb2.LocateRequest(cache_id=cache, keys=PACKED))
    assert list(found.device_slots) == list(reserved.slots)
    assert [generation % 2 for generation in found.device_generations] == [0, 0, 0, 0]
    assert list(found.host_generations) == [0, 0, 0, 0]

    touched = await client.call(blocks.Touch, blocks_pb2.TouchRequest(cache_id=cache, keys=KEYS[3], misses=2))
    assert touched.as_of_event == found.as_of_event
    await client.call(blocks.Touch, blocks_pb2.TouchRequest(cache_id=cache, misses=1))

    acquired = await client.call(
        blocks.Acquire,
        blocks_pb2.AcquireRequest(cache_id=cache, tier=DEVICE, chains=[blocks_pb2.Chain(keys=PACKED + b"?" * 32)]),
    )
    (held,) = acquired.chains
    assert (held.matched, list(held.slots), held.found_in) == (4, list(reserved.slots), bytes([1, 1, 1, 1]))
    assert list(held.generations) == list(found.device_generations)
    await client.release(cache, held.lease_id)

    down = await client.call(blocks.Move, blocks_pb2.MoveRequest(cache_id=cache, to=HOST, keys=PACKED))
    assert down.results == bytes(4)
    listed = await client.call(blocks.List, blocks_pb2.ListBlocksRequest(cache_id=cache))
    assert (listed.keys, listed.parents, listed.next_page) == (PACKED, parents_of(KEYS), 0)
    assert listed.residency == bytes([2, 2, 2, 2])
    assert listed.priorities == bytes([100, 100, 100, 100]), "a parent is worth what its best child is"

    dropped = await client.call(blocks.Drop, blocks_pb2.DropRequest(cache_id=cache, keys=KEYS[1]))
    assert (dropped.results, dropped.dropped) == (b"\0", 3)
    matched = await client.call(blocks.Match, blocks_pb2.MatchRequest(cache_id=cache, keys=PACKED))
    assert matched.blocks == 1


@pytest.mark.skipif(not INDEXES_HERE, reason="no key index on this processor")
async def test_no_commit_is_answered_before_the_key_index_tells_of_it(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked at where its answer is handed to gRPC."""
    shown: list[int] = []
    keys = chain(16)

    unary = grpc.unary_unary_rpc_method_handler

    def looking(call: Any, *, response_serializer: Any, **others: Any) -> Any:
        def serialise(message: Any) -> bytes:
            shown.extend(reader.shown()[1] for reader in readers)
            return bytes(response_serializer(message))

        return unary(call, response_serializer=serialise, **others)

    readers: list[IndexReader] = []
    monkeypatch.setattr(grpc, "unary_unary_rpc_method_handler", looking)
    async with running(config(short_dir, device=16, host=16)) as daemon, attached(daemon) as client:
        cache = await client.open()
        reserved = await client.reserve(cache, 16)
        commit = blocks_pb2.CommitRequest(
            cache_id=cache,
            lease_id=reserved.lease_id,
            slots=reserved.slots,
            keys=b"".join(keys),
            parents=parents_of(keys),
        )
        arena = next(iter(daemon._catalog)).runtime.arena
        readers.append(IndexReader(ArenaLayout.read(arena.control, SPEC), arena.control))
        done = await client.call(client.blocks.Commit, commit)
        readers.clear()
        assert done.results == bytes(16)
        assert shown == [done.as_of_event.id]


async def test_conflicts_are_answered_block_by_block(client: Client) -> None:
    cache = await client.open()
    await client.put(cache, KEYS[:2])
    reserved = await client.reserve(cache, 3)
    commit = blocks_pb2.CommitRequest(
        cache_id=cache,
        lease_id=reserved.lease_id,
        slots=reserved.slots,
        keys=KEYS[0] + KEYS[1] + KEYS[3],
        parents=wire.ROOT_PARENT + wire.ROOT_PARENT + KEYS[2],
    )
    done = await client.call(client.blocks.Commit, commit)
    assert list(done.results) == [
        common_pb2.BLOCK_RESULT_EXISTS,
        common_pb2.BLOCK_RESULT_PARENT_CONFLICT,
        common_pb2.BLOCK_RESULT_PARENT_MISSING,
    ]
    moved = await client.call(
        client.blocks.Move, blocks_pb2.MoveRequest(cache_id=cache, to=HOST, keys=KEYS[0] + KEYS[3])
    )
    assert list(moved.results) == [common_pb2.BLOCK_RESULT_OK, common_pb2.BLOCK_RESULT_NOT_FOUND]


async def test_listings_come_in_pages(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtierd.service.servicers.blocks.PAGE_ROWS", 3)
    cache = await client.open()
    keys = chain(8)
    await client.put(cache, keys)
    got, page = [], 0
    for limit in (0, 2, HUGE32):
        request = blocks_pb2.ListBlocksRequest(cache_id=cache, page=page, limit=limit)
        listed = await client.call(client.blocks.List, request)
        got.append(listed.keys)
        page = listed.next_page
    assert [len(keys) // 32 for keys in got] == [3, 2, 3]
    assert b"".join(got) == b"".join(keys)
    assert page == 0


async def test_an_acquire_that_is_too_short_is_refused_in_its_own_chain(client: Client) -> None:
    cache = await client.open()
    await client.put(cache, KEYS[:2])
    request = blocks_pb2.AcquireRequest(
        cache_id=cache,
        tier=DEVICE,
        chains=[
            blocks_pb2.Chain(keys=PACKED, min_blocks=3),
            blocks_pb2.Chain(keys=PACKED),
            blocks_pb2.Chain(keys=KEYS[3]),
        ],
    )
    short, whole, nothing = (await client.call(client.blocks.Acquire, request)).chains
    assert (short.refusal, short.matched, short.lease_id) == ("TOO_SHORT", 2, 0)
    assert (whole.refusal, whole.matched, len(whole.slots)) == ("", 2, 2)
    assert (nothing.refusal, nothing.lease_id, nothing.matched) == ("", 0, 0)


async def test_caches_are_opened_once_and_shared(daemon: Daemon, client: Client) -> None:
    request = caches_pb2.OpenRequest(name="cache", spec=wire.spec(SPEC))
    first = await client.call(client.caches.Open, request)
    async with attached(daemon) as other:
        second = await other.call(other.caches.Open, request)
        assert (first.created, second.created) == (True, False)
        assert first.cache_id == second.cache_id
        assert second.info.sessions == 2
        (group,) = second.info.groups
        assert [(tier.tier, tier.slots, tier.slot_bytes) for tier in group.tiers] == [
            (DEVICE, 8, SLOT_BYTES),
            (HOST, 16, SLOT_BYTES),
        ]
        assert second.info.fingerprint == SPEC.fingerprint()
        listed = await other.call(other.caches.List, caches_pb2.ListCachesRequest())
        assert list(listed.caches) == [second.info]


async def test_a_cache_closes_only_without_leases(client: Client) -> None:
    cache = await client.open()
    lease = (await client.reserve(cache, 1)).lease_id
    close = caches_pb2.CloseRequest(cache_id=cache)
    code, detail = await client.refusal(client.caches.Close, close)
    assert (code, detail.reason) == (Code.FAILED_PRECONDITION, "LEASES_HELD")
    await client.release(cache, lease)
    await client.call(client.caches.Close, close)
    code, detail = await client.refusal(client.blocks.Match, blocks_pb2.MatchRequest(cache_id=cache, keys=PACKED))
    assert (code, detail.reason) == (Code.FAILED_PRECONDITION, "CACHE_NOT_OPENED")
    assert await client.open() == cache


async def test_budgets_are_shares_of_the_tiers(client: Client) -> None:
    one = await client.open("one", {DEVICE: 6 * SLOT_BYTES, HOST: 1 * SLOT_BYTES})
    assert one
    spec = wire.spec(SPEC)
    too_much = caches_pb2.OpenRequest(
        name="two", spec=spec, budgets=[caches_pb2.TierBudget(tier=DEVICE, bytes=3 * SLOT_BYTES)]
    )
    code, detail = await client.refusal(client.caches.Open, too_much)
    assert (code, detail.reason, detail.tier) == (Code.RESOURCE_EXHAUSTED, "TIER_FULL", DEVICE)
    assert (detail.wanted, detail.free) == (3, 2)
    rest = await client.call(client.caches.Open, caches_pb2.OpenRequest(name="two", spec=spec))
    assert [(tier.tier, tier.slots) for tier in rest.info.groups[0].tiers] == [(DEVICE, 2), (HOST, 15)]
    code, detail = await client.refusal(client.caches.Open, caches_pb2.OpenRequest(name="three", spec=spec))
    assert (code, detail.reason) == (Code.RESOURCE_EXHAUSTED, "TIER_FULL")


async def test_an_open_that_its_caller_gave_up_is_finished_all_the_same(client: Client) -> None:
    request = caches_pb2.OpenRequest(name="cache", spec=wire.spec(SPEC), seq=1)
    call = client.caches.Open(request, metadata=client.metadata)
    await asyncio.sleep(0.002)
    call.cancel()
    again = await client.call(client.caches.Open, request)
    assert [tier.slots for tier in again.info.groups[0].tiers] == [8, 16]
    listed = await client.call(client.caches.List, caches_pb2.ListCachesRequest())
    assert [cache.name for cache in listed.caches] == ["cache"]
    await client.put(again.cache_id, KEYS)


# refusals


def spec_with(**changes: Any) -> caches_pb2.CacheSpec:
    spec = wire.spec(SPEC)
    for name, value in changes.items():
        setattr(spec, name, value)
    return spec


def pools(*shapes: tuple[int, int, int]) -> list[caches_pb2.PoolSpec]:
    return [caches_pb2.PoolSpec(layers=a, kv_heads=b, head_size=c, kv_factor=2) for a, b, c in shapes]


def groups(*sets: list[caches_pb2.PoolSpec], window: int = 0) -> caches_pb2.CacheSpec:
    return caches_pb2.CacheSpec(
        model="m",
        dtype="uint8",
        tokens_per_block=16,
        world_size=1,
        groups=[caches_pb2.WindowGroupSpec(window_tokens=window, pools=each) for each in sets],
    )


def budget(tier: int, size: int) -> caches_pb2.TierBudget:
    return caches_pb2.TierBudget(tier=tier, bytes=size)  # type: ignore[arg-type]


BAD_OPENS: list[tuple[dict[str, Any], Code, str]] = [
    ({"name": ""}, Code.INVALID_ARGUMENT, "name"),
    ({"name": "../etc"}, Code.INVALID_ARGUMENT, "name"),
    ({"name": "x" * 129}, Code.INVALID_ARGUMENT, "name"),
    ({"spec": caches_pb2.CacheSpec()}, Code.INVALID_ARGUMENT, "spec.model"),
    ({"spec": spec_with(model="m" * 1000)}, Code.INVALID_ARGUMENT, "spec.model"),
    ({"spec": spec_with(dtype="int4")}, Code.INVALID_ARGUMENT, "spec.dtype"),
    ({"spec": spec_with(tokens_per_block=0)}, Code.INVALID_ARGUMENT, "spec.tokens_per_block"),
    ({"spec": spec_with(tokens_per_block=HUGE32)}, Code.INVALID_ARGUMENT, "spec.tokens_per_block"),
    ({"spec": spec_with(world_size=0)}, Code.INVALID_ARGUMENT, "spec.world_size"),
    ({"spec": spec_with(rank=1)}, Code.INVALID_ARGUMENT, "spec.rank"),
    ({"spec": groups()}, Code.INVALID_ARGUMENT, "spec.groups"),
    ({"spec": groups(pools((1, 1, 1)), pools((1, 1, 1)))}, Code.INVALID_ARGUMENT, "spec.groups[1].window_tokens"),
    ({"spec": groups(pools((1, 1, 1)), window=HUGE32)}, Code.INVALID_ARGUMENT, "spec.groups[0].window_tokens"),
    ({"spec": groups([])}, Code.INVALID_ARGUMENT, "spec.groups[0].pools"),
    ({"spec": groups(pools((0, 1, 1)))}, Code.INVALID_ARGUMENT, "spec.groups[0].pools[0].layers"),
    ({"spec": groups(pools((1, HUGE32, 1)))}, Code.INVALID_ARGUMENT, "spec.groups[0].pools[0].kv_heads"),
    ({"spec": groups(pools((4096, 4096, 65536)))}, Code.INVALID_ARGUMENT, "spec.groups[0]"),
    ({"budgets": [budget(0, 1 << 20)]}, Code.INVALID_ARGUMENT, "budgets[0].tier"),
    ({"budgets": [budget(9, 1 << 20)]}, Code.INVALID_ARGUMENT, "budgets[0].tier"),
    ({"budgets": [budget(DISK, 1 << 20)]}, Code.INVALID_ARGUMENT, "budgets[0].tier"),
    ({"budgets": [budget(HOST, SLOT_BYTES)] * 2}, Code.INVALID_ARGUMENT, "budgets[1].tier"),
    ({"budgets": [budget(HOST, 0)]}, Code.INVALID_ARGUMENT, "budgets[host]"),
    ({"budgets": [budget(HOST, SLOT_BYTES - 1)]}, Code.INVALID_ARGUMENT, "budgets[host]"),
    ({"budgets": [budget(HOST, HUGE64)]}, Code.RESOURCE_EXHAUSTED, ""),
]


@pytest.mark.parametrize(("changes", "code", "field"), BAD_OPENS)
async def test_what_cannot_be_opened_is_not(
    client: Client, changes: dict[str, Any], code: grpc.StatusCode, field: str
) -> None:
    before = await state_of(client)
    values: dict[str, Any] = {"name": "cache", "spec": wire.spec(SPEC)} | changes
    request = caches_pb2.OpenRequest(**values)
    got, detail = await client.refusal(client.caches.Open, request)
    assert (got, detail.field) == (code, field)
    assert await state_of(client) == before
    assert await client.open(), "and the budget is still there"


@pytest.mark.parametrize(
    ("changes", "reason", "field"),
    [
        ({"spec": spec_with(model="other")}, "SPEC_MISMATCH", "spec.model"),
        ({"spec": spec_with(tokens_per_block=32)}, "SPEC_MISMATCH", "spec.tokens_per_block"),
        ({"spec": groups(pools((2, 1, 128)))}, "SPEC_MISMATCH", "spec.model"),
        ({"budgets": [budget(HOST, SLOT_BYTES)]}, "BUDGET_MISMATCH", "budgets[host]"),
    ],
)
async def test_a_cache_is_not_opened_as_another(
    client: Client, changes: dict[str, Any], reason: str, field: str
) -> None:
    await client.open()
    values: dict[str, Any] = {"name": "cache", "spec": wire.spec(SPEC)} | changes
    request = caches_pb2.OpenRequest(**values)
    code, detail = await client.refusal(client.caches.Open, request)
    assert (code, detail.reason, detail.field) == (Code.INVALID_ARGUMENT, reason, field)


def many(count: int) -> bytes:
    return b"".join(index.to_bytes(32, "big") for index in range(1, count + 1))


def chains(*messages: tuple[bytes, int]) -> list[blocks_pb2.Chain]:
    return [blocks_pb2.Chain(keys=keys, min_blocks=least) for keys, least in messages]


COMMIT = {"keys": KEYS[2] + KEYS[3], "parents": KEYS[1] + KEYS[2]}

KEYED = ("Match", "Locate", "Checksums", "Touch", "Drop")

BAD_CALLS: list[tuple[str, dict[str, Any], str]] = [
    *((verb, {"keys": keys}, "keys") for verb in KEYED for keys in (b"", b"x", PACKED[:-1])),
    *((verb, {"keys": PACKED + KEYS[0]}, "keys[4]") for verb in KEYED),
    *((verb, {"keys": many(validation.MAX_KEYS + 1)}, "keys") for verb in KEYED),
    *((verb, {"group": group}, "group") for verb in (*KEYED, "List") for group in (1, HUGE32)),
    ("Move", {"to": HOST, "keys": b""}, "keys"),
    ("Move", {"to": HOST, "keys": KEYS[0] * 2}, "keys[1]"),
    ("Move", {"to": 0, "keys": PACKED}, "to"),
    ("Move", {"to": DISK, "keys": PACKED}, "to"),
    ("Move", {"to": HOST, "keys": PACKED, "timeout_ns": HUGE64}, "timeout_ns"),
    ("Reserve", {"tier": DEVICE, "count": 0}, "count"),
    ("Reserve", {"tier": DEVICE, "count": 9}, "count"),
    ("Reserve", {"tier": DEVICE, "count": HUGE32}, "count"),
    ("Reserve", {"tier": HOST, "count": 17}, "count"),
    ("Reserve", {"tier": DISK, "count": 1}, "tier"),
    ("Reserve", {"tier": 0, "count": 1}, "tier"),
    ("Reserve", {"tier": 77, "count": 1}, "tier"),
    ("Reserve", {"tier": DEVICE, "count": 1, "group": 1}, "group"),
    ("Reserve", {"tier": DEVICE, "count": 1, "timeout_ns": HUGE64}, "timeout_ns"),
    ("Acquire", {"tier": DEVICE, "chains": []}, "chains"),
    ("Acquire", {"tier": DEVICE, "chains": chains((b"", 0))}, "chains[0].keys"),
    ("Acquire", {"tier": DEVICE, "chains": chains((PACKED, 0), (b"x", 0))}, "chains[1].keys"),
    ("Acquire", {"tier": DEVICE, "chains": chains((PACKED, 5))}, "chains[0].min_blocks"),
    ("Acquire", {"tier": DEVICE, "chains": chains((PACKED + KEYS[3], 0))}, "chains[0].keys[4]"),
    ("Acquire", {"tier": DEVICE, "chains": chains(*[(KEYS[0], 0)] * 1025)}, "chains"),
    ("Acquire", {"tier": DEVICE, "chains": chains((many(validation.MAX_KEYS), 0), (KEYS[0], 0))}, "chains[1].keys"),
    ("Acquire", {"tier": DISK, "chains": chains((PACKED, 0))}, "tier"),
    ("Release", {"lease_ids": []}, "lease_ids"),
    ("Release", {"lease_ids": [1], "first_blocks": [0, 0]}, "first_blocks"),
    ("Release", {"lease_ids": [1, 1]}, "lease_ids"),
    ("Commit", COMMIT | {"slots": []}, "slots"),
    ("Commit", COMMIT | {"slots": [2]}, "slots"),
    ("Commit", COMMIT | {"slots": [2, 2]}, "slots"),
    ("Commit", COMMIT | {"slots": [2, 99]}, "slots"),
    ("Commit", COMMIT | {"slots": [2, HUGE32]}, "slots"),
    ("Commit", COMMIT | {"keys": b"", "slots": []}, "keys"),
    ("Commit", COMMIT | {"keys": KEYS[2] * 2}, "keys[1]"),
    ("Commit", COMMIT | {"parents": b""}, "parents"),
    ("Commit", COMMIT | {"parents": KEYS[1]}, "parents"),
    ("Commit", COMMIT | {"parents": KEYS[2] * 2}, "parents[0]"),
    ("Commit", COMMIT | {"priorities": b"\x01"}, "priorities"),
    ("Commit", COMMIT | {"priorities": b"\x01\x65"}, "priorities[1]"),
]


@pytest.fixture
async def busy(daemon: Daemon, client: Client) -> AsyncIterator[tuple[Client, int, blocks_pb2.ReserveResponse]]:
    """A cache with two blocks and a lease on two blank slots."""
    cache = await client.open()
    await client.put(cache, KEYS[:2])
    yield client, cache, await client.reserve(cache, 2)


async def test_malformed_calls_are_refused_whole(busy: tuple[Client, int, blocks_pb2.ReserveResponse]) -> None:
    client, cache, reserved = busy
    before = await state_of(client)
    for verb, fields, field in BAD_CALLS:
        values = {"cache_id": cache} | fields
        if verb == "Commit":
            values = {"lease_id": reserved.lease_id, "slots": reserved.slots} | values
        if verb == "Release":
            values["lease_ids"] = [reserved.lease_id * lease for lease in fields["lease_ids"]]
        method = getattr(client.blocks, verb)
        request_type = blocks_pb2.ListBlocksRequest if verb == "List" else getattr(blocks_pb2, f"{verb}Request")
        code, detail = await client.refusal(method, request_type(**values))
        assert (code, detail.field, detail.reason) == (Code.INVALID_ARGUMENT, field, "BAD_ARGUMENT"), (verb, fields)
        assert detail.limit, (verb, fields)
        assert detail.value, (verb, fields)
        assert await state_of(client) == before, (verb, fields)


async def test_leases_of_others_and_leases_that_ended(
    daemon: Daemon, busy: tuple[Client, int, blocks_pb2.ReserveResponse]
) -> None:
    client, cache, reserved = busy
    before = await state_of(client)
    async with attached(daemon) as stranger:
        await stranger.open()
        foreign = blocks_pb2.ReleaseRequest(cache_id=cache, lease_ids=[reserved.lease_id])
        code, detail = await stranger.refusal(stranger.blocks.Release, foreign)
        assert (code, detail.reason) == (Code.PERMISSION_DENIED, "FOREIGN_LEASE")
        commit = blocks_pb2.CommitRequest(
            cache_id=cache, lease_id=reserved.lease_id, slots=reserved.slots[:1], keys=KEYS[2], parents=KEYS[1]
        )
        code, detail = await stranger.refusal(stranger.blocks.Commit, commit)
        assert (code, detail.reason) == (Code.PERMISSION_DENIED, "FOREIGN_LEASE")
    await eventually(lambda: len(list(daemon._sessions)) == 2)
    assert (await state_of(client)).startswith(before[:40])

    own = blocks_pb2.ReleaseRequest(cache_id=cache, lease_ids=[reserved.lease_id])
    half_bad = blocks_pb2.ReleaseRequest(cache_id=cache, lease_ids=[reserved.lease_id, 999])
    code, detail = await client.refusal(client.blocks.Release, half_bad)
    assert (code, detail.reason) == (Code.NOT_FOUND, "UNKNOWN_LEASE")
    await client.call(client.blocks.Release, own)
    code, detail = await client.refusal(client.blocks.Release, own)
    assert (code, detail.reason) == (Code.NOT_FOUND, "UNKNOWN_LEASE")


async def test_a_full_tier_says_who_holds_it(daemon: Daemon, client: Client) -> None:
    cache = await client.open()
    await client.reserve(cache, 6)
    async with attached(daemon) as other:
        await other.open()
        request = blocks_pb2.ReserveRequest(cache_id=cache, tier=DEVICE, count=4)
        code, detail = await other.refusal(other.blocks.Reserve, request)
    assert (code, detail.reason, detail.tier) == (Code.RESOURCE_EXHAUSTED, "TIER_FULL", DEVICE)
    assert (detail.wanted, detail.free) == (4, 2)
    (holder,) = detail.holders
    assert (holder.session_id, holder.slots) == (client.welcome.session_id, 6)
    assert is_own_command(holder.command)


async def test_a_cache_that_is_not_there_or_not_opened(daemon: Daemon, client: Client) -> None:
    cache = await client.open()
    async with attached(daemon) as other:
        for wanted, code, reason in (
            (cache, Code.FAILED_PRECONDITION, "CACHE_NOT_OPENED"),
            (cache + 1, Code.NOT_FOUND, "UNKNOWN_CACHE"),
            (HUGE64, Code.NOT_FOUND, "UNKNOWN_CACHE"),
        ):
            calls: list[tuple[Any, Any]] = [
                (other.blocks.Match, blocks_pb2.MatchRequest(cache_id=wanted, keys=PACKED)),
                (other.blocks.Reserve, blocks_pb2.ReserveRequest(cache_id=wanted, tier=DEVICE, count=1)),
                (other.blocks.Release, blocks_pb2.ReleaseRequest(cache_id=wanted, lease_ids=[1])),
                (other.blocks.List, blocks_pb2.ListBlocksRequest(cache_id=wanted)),
                (other.caches.Close, caches_pb2.CloseRequest(cache_id=wanted)),
            ]
            for method, request in calls:
                got, detail = await other.refusal(method, request)
                assert (got, detail.reason) == (code, reason)


@pytest.mark.parametrize("metadata", [(), ((SESSION_METADATA_KEY, "0" * 32),), ((SESSION_METADATA_KEY, ""),)])
async def test_without_a_session_nothing_is_answered(
    daemon: Daemon, client: Client, metadata: tuple[tuple[str, str], ...]
) -> None:
    cache = await client.open()
    calls: list[tuple[Any, Any]] = [
        (client.blocks.Match, blocks_pb2.MatchRequest(cache_id=cache, keys=PACKED)),
        (client.blocks.Reserve, blocks_pb2.ReserveRequest(cache_id=cache, tier=DEVICE, count=1)),
        (client.caches.List, caches_pb2.ListCachesRequest()),
        (client.admin.Stats, admin_pb2.StatsRequest()),
    ]
    for method, request in calls:
        code, _ = await refusal(method(request, metadata=metadata))
        assert code is Code.UNAUTHENTICATED
    watch = client.events.Watch(events_pb2.WatchRequest(), metadata=metadata)
    code, _ = await refusal(anext(aiter(watch)))
    assert code is Code.UNAUTHENTICATED


async def test_bytes_that_are_no_message_are_refused(daemon: Daemon, client: Client) -> None:
    method: Any = client.channel.unary_unary("/kvtier.v1.Blocks/Match")
    code, detail = await refusal(method(b"\xff\xff\xff", metadata=client.metadata))
    assert (code, detail.field) == (Code.INVALID_ARGUMENT, "request")


async def test_an_unknown_method_is_unimplemented(daemon: Daemon, client: Client) -> None:
    method: Any = client.channel.unary_unary("/kvtier.v1.Blocks/Format")
    code, _ = await refusal(method(b"", metadata=client.metadata))
    assert code is Code.UNIMPLEMENTED


async def test_our_own_bug_is_internal_and_logged(
    daemon: Daemon, client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = await client.open()

    def broken(*_: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(daemon._engine, "manager", broken)
    code, detail = await client.refusal(client.blocks.Match, blocks_pb2.MatchRequest(cache_id=cache, keys=PACKED))
    assert (code, detail.reason) == (Code.INTERNAL, "INTERNAL")
    assert "planted" in caplog.text


# repeated and cancelled calls


async def test_a_repeated_call_is_answered_not_repeated(client: Client) -> None:
    cache = await client.open()
    reserved = [await client.reserve(cache, 3, seq=7) for _ in range(3)]
    assert reserved[0] == reserved[1] == reserved[2]
    release = blocks_pb2.ReleaseRequest(cache_id=cache, lease_ids=[reserved[0].lease_id], seq=8)
    for _ in range(2):
        await client.call(client.blocks.Release, release)
    without = blocks_pb2.ReleaseRequest(cache_id=cache, lease_ids=[reserved[0].lease_id])
    code, _ = await client.refusal(client.blocks.Release, without)
    assert code is Code.NOT_FOUND


async def test_a_number_belongs_to_one_call_of_one_session(daemon: Daemon, client: Client) -> None:
    cache = await client.open()
    await client.reserve(cache, 1, seq=7)
    another = blocks_pb2.ReserveRequest(cache_id=cache, tier=DEVICE, count=2, seq=7)
    code, detail = await client.refusal(client.blocks.Reserve, another)
    assert (code, detail.field) == (Code.INVALID_ARGUMENT, "seq")
    drop = blocks_pb2.DropRequest(cache_id=cache, keys=PACKED, seq=7)
    code, detail = await client.refusal(client.blocks.Drop, drop)
    assert (code, detail.field) == (Code.INVALID_ARGUMENT, "seq")
    async with attached(daemon) as other:
        await other.open()
        assert len((await other.reserve(cache, 2, seq=7)).slots) == 2


@pytest.fixture
async def slow(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    """On a daemon whose copies take up to half a second, so that calls wait for room."""
    monkeypatch.setattr("kvtierd.service.daemon.Chaos", lambda seed: Chaos(seed, max_delay_s=0.5))
    async with running(config(short_dir, chaos_seed=2)) as daemon, attached(daemon) as client:
        yield client


async def cache_stats(client: Client) -> admin_pb2.CacheStats:
    stats = await client.call(client.admin.Stats, admin_pb2.StatsRequest())
    (cache,) = stats.caches
    assert isinstance(cache, admin_pb2.CacheStats)
    return cache


async def until(client: Client, condition: Callable[[admin_pb2.CacheStats], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition(await cache_stats(client)):
            pass


def nothing_held(cache: admin_pb2.CacheStats) -> bool:
    return not (cache.waiting or any(tier.held or tier.filling or tier.retiring for tier in cache.tiers))


@pytest.mark.parametrize("seq", [0, 5])
async def test_a_call_cancelled_while_it_waits_leaves_nothing_held(slow: Client, seq: int) -> None:
    cache = await slow.open()
    await slow.put(cache, chain(8))
    request = blocks_pb2.ReserveRequest(cache_id=cache, tier=DEVICE, count=8, seq=seq)
    call = slow.blocks.Reserve(request, metadata=slow.metadata)
    await until(slow, lambda stats: stats.waiting == 1)
    assert call.cancel()
    await until(slow, nothing_held)


async def test_a_repeat_joins_the_call_that_still_waits(slow: Client) -> None:
    cache = await slow.open()
    await slow.put(cache, chain(8))
    request = blocks_pb2.ReserveRequest(cache_id=cache, tier=DEVICE, count=8, seq=5)
    first = slow.blocks.Reserve(request, metadata=slow.metadata)
    await until(slow, lambda stats: stats.waiting == 1)
    second = slow.blocks.Reserve(request, metadata=slow.metadata)
    assert (await cache_stats(slow)).waiting == 1
    assert first.cancel()
    granted = await second
    await slow.release(cache, granted.lease_id)
    await until(slow, nothing_held)


async def test_a_caller_who_missed_the_answer_asks_again_and_gets_it(short_dir: Path) -> None:
    async with running(config(short_dir, chaos_seed=3)) as daemon, attached(daemon) as client:
        cache = await client.open()
        for seq in range(1, 30):
            await client.put(cache, chain(8, seed=seq))
            request = blocks_pb2.ReserveRequest(cache_id=cache, tier=DEVICE, count=8, seq=seq)
            call = client.blocks.Reserve(request, metadata=client.metadata)
            await asyncio.sleep(seq / 5000)
            call.cancel()  # while it waits, as it is granted, or when the answer is on its way
            granted = await client.call(client.blocks.Reserve, request)
            await client.release(cache, granted.lease_id)
            await until(client, nothing_held)


async def test_an_acquire_whose_session_broke_off_is_refused_whole_and_may_be_repeated(slow: Client) -> None:
    cache = await slow.open()
    chosen = [chain(4, seed=seed) for seed in range(3)]
    for keys in chosen:
        await slow.put(cache, keys)
    here, below = chosen[2], chosen[0]
    request = blocks_pb2.AcquireRequest(
        cache_id=cache, tier=DEVICE, chains=chains((b"".join(here), 0), (b"".join(below), 0)), seq=1
    )
    waiting = asyncio.create_task(slow.refusal(slow.blocks.Acquire, request))
    await until(slow, lambda stats: stats.tiers[0].held > 0)
    slow.socket.close()
    assert (await waiting)[0] is Code.CANCELLED
    slow.socket = await AttachSocket.connect(slow.address)
    assert isinstance(await slow.socket.hello(slow.welcome.token), Welcome)
    await until(slow, nothing_held)
    again = await slow.call(slow.blocks.Acquire, request)
    assert [held.matched for held in again.chains] == [4, 4]
    await slow.release(cache, *[held.lease_id for held in again.chains])


async def test_a_call_that_may_not_wait_longer_is_told_so(slow: Client) -> None:
    cache = await slow.open()
    await slow.put(cache, chain(8))
    request = blocks_pb2.ReserveRequest(cache_id=cache, tier=DEVICE, count=8, timeout_ns=10**6)
    code, detail = await slow.refusal(slow.blocks.Reserve, request)
    assert (code, detail.reason, detail.wanted) == (Code.DEADLINE_EXCEEDED, "DEADLINE", 8)
    await until(slow, nothing_held)


# health, reflection, stopping


async def test_health_and_reflection_need_no_session(daemon: Daemon) -> None:
    async with channel_to(daemon) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        for name in ("", "kvtier.v1.Blocks", "kvtier.v1.Events"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflection: Any = ServerReflectionStub(channel)  # type: ignore[arg-type]  # the stubs know no grpc.aio
        stream = reflection.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        listed = {service.name for service in (await anext(aiter(stream))).list_services_response.service}
        assert {"kvtier.v1.Blocks", "kvtier.v1.Caches", "kvtier.v1.Events", "kvtier.v1.Admin"} <= listed


async def test_a_stop_that_was_not_clean_is_remembered_as_such(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = await Daemon.start(config(short_dir))
    shutdown = daemon._engine.shutdown

    async def abandoning(deadline_s: float) -> bool:
        await shutdown(deadline_s)
        return False

    monkeypatch.setattr(daemon._engine, "shutdown", abandoning)
    assert not await daemon.stop()
    async with running(config(short_dir)) as again, attached(again) as client:
        assert client.welcome.epoch == 2


async def _read_on(watch: AsyncIterator[events_pb2.WatchBatch]) -> None:
    async for _ in watch:
        pass


async def test_a_stop_ends_watches_and_refuses_what_comes_after(short_dir: Path) -> None:
    daemon = await Daemon.start(config(short_dir))
    async with attached(daemon) as client:
        cache = await client.open()
        watch = aiter(client.events.Watch(events_pb2.WatchRequest(oldest=True), metadata=client.metadata))
        assert (await anext(watch)).first_id == 1
        reading = asyncio.create_task(refusal(_read_on(watch)))
        started = asyncio.get_running_loop().time()
        assert await daemon.stop()
        assert asyncio.get_running_loop().time() - started < 1.5, "no watch held it up"
        code, detail = await reading
        assert (code, detail.reason) == (Code.UNAVAILABLE, "SHUTTING_DOWN")
        code, _ = await client.refusal(client.blocks.Match, blocks_pb2.MatchRequest(cache_id=cache, keys=PACKED))
        assert code is Code.UNAVAILABLE
    assert sorted(path.name for path in (short_dir / "run").iterdir()) == ["kvtierd.lock"]


async def test_a_stop_says_the_last_words_of_every_call_before_it_takes_leave_of_their_connection(
    short_dir: Path,
) -> None:
    daemon = await Daemon.start(config(short_dir))
    rpc_socket = attach.socket_path(daemon.address, attach.RPC_SOCKET)
    async with attached(daemon) as client, relay(short_dir / "relay.sock", rpc_socket) as through:
        async with grpc.aio.insecure_channel(through.address) as channel:
            events: Any = events_pb2_grpc.EventsStub(channel)
            watches = [aiter(events.Watch(events_pb2.WatchRequest(), metadata=client.metadata)) for _ in range(20)]
            for watch in watches:
                await anext(watch)
            reading = [asyncio.create_task(refusal(_read_on(watch))) for watch in watches]
            assert not through.last_words()
            assert await daemon.stop()
            assert {detail.reason for _, detail in await asyncio.gather(*reading)} == {"SHUTTING_DOWN"}
        # A client that answers to the farewell has read what came before it; after it, the connection may be gone.
        assert len(through.last_words()) == len(watches)
        assert max(through.last_words()) < min(through.farewells())


async def test_a_daemon_that_is_stopped_at_once_leaves_no_socket(short_dir: Path) -> None:
    daemon = await Daemon.start(config(short_dir))
    assert await daemon.stop()
    assert sockets_below(short_dir) == []
