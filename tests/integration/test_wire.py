"""The wire itself: what answers strangers, that every other method wants a session, and what a session proves."""

from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from kvtier.abi import attach
from kvtier.v1 import admin_pb2, blocks_pb2, caches_pb2, events_pb2, session_pb2, session_pb2_grpc, transfer_pb2
from tests import packets
from tests.integration.blocks import sizes
from tests.integration.raw import AttachSocket, channel_to, refusal

Code = grpc.StatusCode
MODULES = (caches_pb2, blocks_pb2, events_pb2, admin_pb2, session_pb2, transfer_pb2)
SERVICES = {f"kvtier.v1.{name}" for name in ("Caches", "Blocks", "Events", "Admin", "Sessions", "Transfer")}


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


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_answers_a_stranger(channel, version):
    """Both versions, each of which tells of both, and of what Go and Java generators want to know."""
    both = {f"grpc.reflection.{each}.ServerReflection" for each in ("v1", "v1alpha")}
    ask: Any = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    symbols = [*SERVICES, *both]
    requests = [reflection_pb2.ServerReflectionRequest(list_services="")]
    requests += [reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol) for symbol in symbols]
    answers = [answer async for answer in ask(iter(requests))]
    listed = {one.name for one in answers[0].list_services_response.service}
    assert listed == SERVICES | both | {"grpc.health.v1.Health"}
    for symbol, answer in zip(symbols, answers[1:], strict=True):
        file = FileDescriptorProto.FromString(answer.file_descriptor_response.file_descriptor_proto[0])
        assert symbol in {f"{file.package}.{service.name}" for service in file.service}
        if symbol in SERVICES:
            options = file.options
            assert (options.go_package, options.java_package) == ("kvtier/v1;kvtierv1", "kvtier.v1")


SHAPES = {
    (False, False): "unary_unary",
    (False, True): "unary_stream",
    (True, False): "stream_unary",
    (True, True): "stream_stream",
}


async def asked(channel, method, metadata):
    """What an empty request, or an open stream, is refused with: of a message unsent gRPC tells an error of its own."""
    shape = SHAPES[method.client_streaming, method.server_streaming]
    call = getattr(channel, shape)(f"/{method.containing_service.full_name}/{method.name}")
    answer = call(*([] if method.client_streaming else [b""]), metadata=metadata, timeout=10)
    return await refusal(answer.read() if method.server_streaming else answer)


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
    services = [service for module in MODULES for service in module.DESCRIPTOR.services_by_name.values()]
    assert {service.full_name for service in services} == SERVICES
    for method in [method for service in services for method in service.methods if method.name != "Session"]:
        fault = await asked(channel, method, metadata)
        assert (method.full_name, fault.code, fault.reason) == (method.full_name, Code.UNAUTHENTICATED, reason)


async def test_over_a_unix_socket_sessions_begin_at_the_attach_socket(channel):
    stub: Any = session_pb2_grpc.SessionsStub(channel)
    fault = await refusal(stub.Session(timeout=10).read())
    assert (fault.code, fault.reason) == (Code.FAILED_PRECONDITION, "LOCAL_CLIENT")


async def test_a_goodbye_ends_the_token(daemon, raw):
    with AttachSocket(daemon.address) as sock:
        welcome = sock.hello()
        assert isinstance(welcome, session_pb2.Welcome)
        sock.bye()
    metadata = ((attach.SESSION_METADATA_KEY, welcome.token),)
    fault = await refusal(raw.stubs.admin.Stats(admin_pb2.StatsRequest(), metadata=metadata))
    assert (fault.code, fault.reason) == (Code.UNAUTHENTICATED, "UNKNOWN_SESSION")


async def test_a_cache_is_mapped_only_by_who_has_opened_it(daemon, raw, name):
    cache = (await raw.open(name, budgets=sizes(host=1))).cache_id
    with AttachSocket(daemon.address) as sock:
        sock.hello()
        for cache_id, reason in ((cache, "CACHE_NOT_OPENED"), (cache + 1000, "UNKNOWN_CACHE")):
            sock.send(packets.map_cache(cache_id, write=True))
            data, fds = sock.receive()
            failure = packets.reply(data)
            assert isinstance(failure, session_pb2.AttachFailure)
            assert (failure.reason, fds) == (reason, [])
        sock.bye()
