"""The wire itself: every method of ``kvtier.v1`` by its raw stub, what answers strangers, and what a session proves."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvtier.abi import attach
from kvtier.session import Stubs
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
from kvtier.wire import spec_to_wire
from tests.integration.blocks import SPEC, sizes
from tests.integration.raw import AttachSocket, channel_to, refusal

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
