"""The wire itself: every method of ``kvtier.v1`` by its raw stub, what answers strangers, and what a session proves."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvtier import Tier
from kvtier.abi import attach
from kvtier.arena import Arena
from kvtier.session import Stubs
from kvtier.types import ROOT_PARENT
from kvtier.v1 import (
    admin_pb2,
    blocks_pb2,
    caches_pb2,
    common_pb2,
    events_pb2,
    session_pb2,
    session_pb2_grpc,
    transfer_pb2,
)
from kvtier.wire import budgets_to_wire, spec_to_wire
from tests.integration.blocks import SLOT_BYTES, SPEC, assert_bytes, block, chain, sizes
from tests.integration.raw import AttachSocket, channel_to, close_all, refusal
from tests.integration.touching import bytes_in, write_into

Code = grpc.StatusCode
DEVICE, HOST, DISK = common_pb2.TIER_DEVICE, common_pb2.TIER_HOST, common_pb2.TIER_DISK
OK, EXISTS, MISSING = common_pb2.BLOCK_RESULT_OK, common_pb2.BLOCK_RESULT_EXISTS, common_pb2.BLOCK_RESULT_PARENT_MISSING
MODULES = (caches_pb2, blocks_pb2, events_pb2, admin_pb2, session_pb2, transfer_pb2)
SERVICES = {f"kvtier.v1.{name}" for name in ("Caches", "Blocks", "Events", "Admin", "Sessions", "Transfer")}
BEGINS_SESSIONS = "Sessions.Session"


@pytest.fixture
async def channel(daemon):
    async with channel_to(daemon.address) as channel:
        yield channel


async def test_a_block_from_open_to_close_by_hand(raw, name):
    caches, wire = raw.stubs.caches, raw.stubs.blocks
    budgets = budgets_to_wire(sizes(device=2, host=3, disk=4))
    opening = caches_pb2.OpenRequest(name=name, spec=spec_to_wire(SPEC), budgets=budgets, seq=1)
    opened: caches_pb2.OpenResponse = await raw.call(caches.Open, opening)
    cache = opened.cache_id
    assert opened.created
    assert opened.info.fingerprint == SPEC.fingerprint()
    assert [(t.tier, t.slots, t.slot_bytes) for t in opened.info.groups[0].tiers] == [
        (DEVICE, 2, SLOT_BYTES),
        (HOST, 3, SLOT_BYTES),
        (DISK, 4, SLOT_BYTES),
    ]
    assert not (await raw.open(name)).created
    # Opened twice it is closed twice: the first leaves it open.
    await raw.call(caches.Close, caches_pb2.CloseRequest(cache_id=cache))

    fds = raw.socket.map(cache, write=True)
    assert list(fds) == [attach.CONTROL, attach.HOST, attach.DEVICE]
    arena = Arena(fds, write=True, spec=SPEC)
    close_all(fds)

    keys = chain(name, 2)
    packed = b"".join(keys)
    reserved: blocks_pb2.ReserveResponse = await raw.call(
        wire.Reserve, blocks_pb2.ReserveRequest(cache_id=cache, tier=HOST, count=3, seq=2)
    )
    assert len(set(reserved.slots)) == 3
    odd = arena.generations(Tier.HOST, 0, np.array(reserved.slots))
    assert set(odd % 2) == {1}
    for slot, key in zip(reserved.slots, keys, strict=False):
        write_into(arena.view(Tier.HOST, 0, slot, write=True), block(key))
    commit = blocks_pb2.CommitRequest(
        cache_id=cache,
        lease_id=reserved.lease_id,
        slots=reserved.slots[:2],
        keys=packed,
        parents=ROOT_PARENT + keys[0],
        priorities=bytes([50, 60]),
        seq=3,
    )
    committed: blocks_pb2.CommitResponse = await raw.call(wire.Commit, commit)
    assert committed.results == bytes([OK, OK])
    third, stray = chain("third", 1)[0], chain("stray", 1)[0]
    late = blocks_pb2.CommitRequest(
        cache_id=cache, lease_id=reserved.lease_id, slots=reserved.slots[2:], keys=third, parents=stray
    )
    assert (await raw.call(wire.Commit, late)).results == bytes([MISSING])
    late.keys, late.parents = keys[0], ROOT_PARENT
    assert (await raw.call(wire.Commit, late)).results == bytes([EXISTS])

    found: blocks_pb2.MatchResponse = await raw.call(
        wire.Match, blocks_pb2.MatchRequest(cache_id=cache, keys=packed + third)
    )
    assert (found.blocks, found.residency) == (2, bytes([Tier.HOST.bit] * 2))
    assert found.as_of_event.epoch == raw.welcome.epoch
    placed: blocks_pb2.LocateResponse = await raw.call(
        wire.Locate, blocks_pb2.LocateRequest(cache_id=cache, keys=packed + third)
    )
    assert placed.residency == bytes([Tier.HOST.bit, Tier.HOST.bit, 0])
    assert list(placed.host_slots) == [*reserved.slots[:2], 0]
    assert list(placed.device_slots) == list(placed.device_generations) == [0, 0, 0]
    even = arena.generations(Tier.HOST, 0, np.array(reserved.slots[:2]))
    assert set(even % 2) == {0}
    assert list(placed.host_generations) == [*even, 0]

    await raw.call(wire.Release, blocks_pb2.ReleaseRequest(cache_id=cache, lease_ids=[reserved.lease_id], seq=4))
    acquired = await raw.acquire(cache, Tier.DEVICE, keys, [third])
    chain_found, chain_absent = acquired.chains
    assert (chain_found.matched, chain_found.found_in) == (2, bytes([Tier.HOST.bit] * 2))
    assert (chain_absent.lease_id, chain_absent.matched, chain_absent.refusal) == (0, 0, "")
    views = [arena.view(Tier.DEVICE, 0, slot, write=False) for slot in chain_found.slots]
    assert_bytes(keys, [bytes_in(view) for view in views])
    now = arena.generations(Tier.DEVICE, 0, np.array(chain_found.slots))
    assert list(chain_found.generations) == list(now)

    closing = caches_pb2.CloseRequest(cache_id=cache, seq=5)
    held = await raw.refusal(caches.Close, closing)
    assert (held.code, held.reason) == (Code.FAILED_PRECONDITION, "LEASES_HELD")
    await raw.call(wire.Release, blocks_pb2.ReleaseRequest(cache_id=cache, lease_ids=[chain_found.lease_id], seq=6))

    moved: blocks_pb2.MoveResponse = await raw.call(
        wire.Move, blocks_pb2.MoveRequest(cache_id=cache, to=DISK, keys=packed, seq=7)
    )
    assert moved.results == bytes([OK, OK])
    listed: blocks_pb2.ListBlocksResponse = await raw.call(
        wire.List, blocks_pb2.ListBlocksRequest(cache_id=cache, limit=1)
    )
    assert (listed.keys, listed.parents, listed.next_page != 0) == (keys[0], ROOT_PARENT, True)
    last: blocks_pb2.ListBlocksResponse = await raw.call(
        wire.List, blocks_pb2.ListBlocksRequest(cache_id=cache, page=listed.next_page)
    )
    assert (last.keys, last.parents, last.next_page) == (keys[1], keys[0], 0)
    assert (listed.residency, last.residency) == (bytes([Tier.DISK.bit]),) * 2
    assert (listed.priorities, last.priorities) == (bytes([60]), bytes([60]))
    dropped: blocks_pb2.DropResponse = await raw.call(
        wire.Drop, blocks_pb2.DropRequest(cache_id=cache, keys=keys[0] + third, seq=8)
    )
    assert (dropped.results, dropped.dropped) == (bytes([OK, common_pb2.BLOCK_RESULT_NOT_FOUND]), 2)

    stats: admin_pb2.StatsResponse = await raw.call(raw.stubs.admin.Stats, admin_pb2.StatsRequest())
    assert (stats.epoch, stats.boot, stats.pid) == (raw.welcome.epoch, raw.welcome.boot, raw.welcome.pid)
    assert stats.last_event_id >= dropped.as_of_event.id
    await raw.call(caches.Close, caches_pb2.CloseRequest(cache_id=cache, seq=9))
    unopened = await raw.refusal(wire.Match, blocks_pb2.MatchRequest(cache_id=cache, keys=packed))
    assert (unopened.code, unopened.reason) == (Code.FAILED_PRECONDITION, "CACHE_NOT_OPENED")
    listing: caches_pb2.ListCachesResponse = await raw.call(caches.List, caches_pb2.ListCachesRequest())
    assert [(one.blocks, one.sessions) for one in listing.caches if one.name == name] == [(0, 0)]


async def test_health_answers_a_stranger(channel):
    stub: Any = health_pb2_grpc.HealthStub(channel)
    for service in ("", *SERVICES):
        answer: health_pb2.HealthCheckResponse = await stub.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    unknown = await refusal(stub.Check(health_pb2.HealthCheckRequest(service="no.such.Service")))
    assert unknown.code is Code.NOT_FOUND


async def test_reflection_answers_a_stranger(channel):
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    async for answer in stub.ServerReflectionInfo(iter([request])):
        listed = {one.name for one in answer.list_services_response.service}
        assert listed == SERVICES | {"grpc.health.v1.Health", reflection_pb2.DESCRIPTOR.package + ".ServerReflection"}


def every_call(stubs):
    """All methods that want a session, each with a request that nothing is wrong with but who sends it."""
    caches, wire, admin = stubs.caches, stubs.blocks, stubs.admin
    acquire = blocks_pb2.AcquireRequest(cache_id=1, tier=HOST, chains=[blocks_pb2.Chain(keys=bytes(32))])
    header = transfer_pb2.PutHeader(commit=blocks_pb2.CommitRequest(cache_id=1, keys=bytes(32)), tier=HOST)
    return {
        "Caches.Open": (caches.Open, caches_pb2.OpenRequest(name="stranger", spec=spec_to_wire(SPEC))),
        "Caches.Close": (caches.Close, caches_pb2.CloseRequest(cache_id=1)),
        "Caches.List": (caches.List, caches_pb2.ListCachesRequest()),
        "Caches.Remove": (caches.Remove, caches_pb2.RemoveCacheRequest(name="stranger")),
        "Blocks.Match": (wire.Match, blocks_pb2.MatchRequest(cache_id=1, keys=bytes(32))),
        "Blocks.Locate": (wire.Locate, blocks_pb2.LocateRequest(cache_id=1, keys=bytes(32))),
        "Blocks.Checksums": (wire.Checksums, blocks_pb2.ChecksumsRequest(cache_id=1, keys=bytes(32))),
        "Blocks.Touch": (wire.Touch, blocks_pb2.TouchRequest(cache_id=1, keys=bytes(32))),
        "Blocks.Reserve": (wire.Reserve, blocks_pb2.ReserveRequest(cache_id=1, tier=HOST, count=1)),
        "Blocks.Commit": (wire.Commit, blocks_pb2.CommitRequest(cache_id=1, lease_id=1)),
        "Blocks.Acquire": (wire.Acquire, acquire),
        "Blocks.Release": (wire.Release, blocks_pb2.ReleaseRequest(cache_id=1, lease_ids=[1])),
        "Blocks.Move": (wire.Move, blocks_pb2.MoveRequest(cache_id=1, to=DISK, keys=bytes(32))),
        "Blocks.Drop": (wire.Drop, blocks_pb2.DropRequest(cache_id=1, keys=bytes(32))),
        "Blocks.SetRetention": (wire.SetRetention, blocks_pb2.SetRetentionRequest(cache_id=1, keys=bytes(32))),
        "Blocks.Pin": (wire.Pin, blocks_pb2.PinRequest(cache_id=1, keys=bytes(32))),
        "Blocks.Reset": (wire.Reset, blocks_pb2.ResetRequest(cache_id=1)),
        "Blocks.List": (wire.List, blocks_pb2.ListBlocksRequest(cache_id=1)),
        "Events.Watch": (stubs.events.Watch, events_pb2.WatchRequest()),
        "Admin.Explain": (admin.Explain, admin_pb2.ExplainRequest(key=bytes(32))),
        "Admin.Stats": (admin.Stats, admin_pb2.StatsRequest()),
        "Admin.Leases": (admin.Leases, admin_pb2.LeasesRequest()),
        "Admin.Kick": (admin.Kick, admin_pb2.KickRequest(session_id=1)),
        "Transfer.Put": (stubs.transfer.Put, [transfer_pb2.PutChunk(header=header)]),
        "Transfer.Get": (stubs.transfer.Get, transfer_pb2.GetRequest(acquire=acquire)),
    }


async def test_every_method_is_on_the_list(channel):
    services = [service for module in MODULES for service in module.DESCRIPTOR.services_by_name.values()]
    assert {service.full_name for service in services} == SERVICES
    methods = {f"{service.name}.{method}" for service in services for method in service.methods_by_name}
    assert methods == {BEGINS_SESSIONS, *every_call(Stubs.over(channel))}


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ((), "NO_SESSION"),
        (((attach.SESSION_METADATA_KEY, "0" * 32),), "UNKNOWN_SESSION"),
        (((attach.SESSION_METADATA_KEY, "nonsense"),), "UNKNOWN_SESSION"),
        (((attach.SESSION_METADATA_KEY, ""),), "UNKNOWN_SESSION"),
    ],
)
async def test_everything_else_wants_a_session(channel, metadata, reason):
    for method, (call, request) in every_call(Stubs.over(channel)).items():
        answer = call(request, metadata=metadata, timeout=10)
        fault = await refusal(
            answer.read() if isinstance(answer, grpc.aio.UnaryStreamCall | grpc.aio.StreamStreamCall) else answer
        )
        assert (method, fault.code, fault.reason) == (method, Code.UNAUTHENTICATED, reason)


async def test_over_a_unix_socket_sessions_begin_at_the_attach_socket(channel):
    stub: Any = session_pb2_grpc.SessionsStub(channel)
    stream = stub.Session(iter([session_pb2.SessionRequest(hello=session_pb2.Hello(version=1))]), timeout=10)
    fault = await refusal(stream.read())
    assert (fault.code, fault.reason) == (Code.FAILED_PRECONDITION, "LOCAL_CLIENT")


async def test_a_goodbye_ends_the_token(daemon, raw):
    with AttachSocket(daemon.address) as sock:
        welcome = sock.hello()
        assert isinstance(welcome, attach.Welcome)
        sock.send(attach.encode(attach.Bye()))
        assert sock.receive() == (b"", [])
    metadata = ((attach.SESSION_METADATA_KEY, welcome.token),)
    fault = await refusal(raw.stubs.admin.Stats(admin_pb2.StatsRequest(), metadata=metadata))
    assert (fault.code, fault.reason) == (Code.UNAUTHENTICATED, "UNKNOWN_SESSION")


async def test_sessions_have_tokens_and_numbers_of_their_own(daemon):
    with AttachSocket(daemon.address) as one, AttachSocket(daemon.address) as other:
        first, second = one.hello(), other.hello()
        assert isinstance(first, attach.Welcome)
        assert isinstance(second, attach.Welcome)
        assert first.token != second.token
        assert first.session_id != second.session_id
        assert (first.epoch, first.boot, first.pid) == (second.epoch, second.boot, daemon.pid)
        for sock in (one, other):
            sock.send(attach.encode(attach.Bye()))
            sock.receive()


async def test_a_cache_is_mapped_only_by_who_has_opened_it(daemon, raw, name):
    cache = (await raw.open(name, budgets=sizes(host=1))).cache_id
    with AttachSocket(daemon.address) as sock:
        sock.hello()
        for cache_id, reason in ((cache, "CACHE_NOT_OPENED"), (cache + 1000, "UNKNOWN_CACHE")):
            sock.send(attach.encode(attach.Map(cache_id, write=True)))
            data, fds = sock.receive()
            failure = attach.decode_mapped(data)
            assert isinstance(failure, attach.Failure)
            assert (failure.reason, fds) == (reason, [])
        sock.send(attach.encode(attach.Bye()))
        sock.receive()
