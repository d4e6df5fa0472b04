"""The gRPC server: kvtier's services, health and reflection on a private unix socket and, if asked for, a TCP port."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import grpc.aio
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import SERVICE_NAME as HEALTH_SERVICE
from grpc_health.v1.health import aio as health
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from grpc_reflection.v1alpha import reflection

from kvtier.v1 import admin_pb2, blocks_pb2, caches_pb2, events_pb2, transfer_pb2
from kvtierd.service.calls import Dispatcher, Pace, StreamVerb, UploadVerb, Verb
from kvtierd.tcp import TcpListener

MAX_MESSAGE_BYTES: Final = 64 << 20
MAX_CALLS: Final = 4096
"""At a time, watches included; more are answered RESOURCE_EXHAUSTED at once."""

_OPTIONS: Final[tuple[tuple[str, Any], ...]] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
    # A client may ask whether the connection lives while it has no call open, but not flood.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)

_CACHES: Final = caches_pb2.DESCRIPTOR.services_by_name["Caches"]
_BLOCKS: Final = blocks_pb2.DESCRIPTOR.services_by_name["Blocks"]
_EVENTS: Final = events_pb2.DESCRIPTOR.services_by_name["Events"]
_TRANSFER: Final = transfer_pb2.DESCRIPTOR.services_by_name["Transfer"]
_ADMIN: Final = admin_pb2.DESCRIPTOR.services_by_name["Admin"]


@dataclass(slots=True, frozen=True)
class Services:
    """The verbs of each service, by RPC name. ``watches``: the streams of Events; ``uploads`` and ``downloads``: of
    Transfer."""

    caches: Mapping[str, Verb]
    blocks: Mapping[str, Verb]
    watches: Mapping[str, StreamVerb]
    admin: Mapping[str, Verb]
    uploads: Mapping[str, UploadVerb]
    downloads: Mapping[str, StreamVerb]


class RpcServer:
    """Must be made, started and stopped on the loop that runs the verbs."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        services: Services,
        others: Mapping[str, grpc.GenericRpcHandler],
        pace: Pace,
    ) -> None:
        """``others``: services by full name that make their own handlers. ``pace``: of transfers that begin now."""
        self._server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=MAX_CALLS)
        self._health = health.HealthServicer()
        self._served: list[str] = []
        for descriptor, verbs in ((_CACHES, services.caches), (_BLOCKS, services.blocks), (_ADMIN, services.admin)):
            self._add(descriptor.full_name, dispatcher.handler(descriptor, verbs))
        self._add(_EVENTS.full_name, dispatcher.handler(_EVENTS, {}, services.watches))
        self._add(_TRANSFER.full_name, dispatcher.handler(_TRANSFER, {}, services.downloads, services.uploads, pace))
        for name, handler in others.items():
            self._add(name, handler)
        add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection([*self._served, HEALTH_SERVICE, reflection.SERVICE_NAME], self._server)

    def _add(self, service: str, handler: grpc.GenericRpcHandler) -> None:
        self._server.add_generic_rpc_handlers((handler,))
        self._served.append(service)

    def bind(self, path: str) -> None:
        """Raises RuntimeError where the socket cannot be made."""
        self._server.add_insecure_port(f"unix:{path}")

    def listen(self, listener: TcpListener) -> int:
        """The port. Raises :class:`TierConfigError` for TLS files of no use, RuntimeError where it cannot listen."""
        credentials = listener.credentials()
        if credentials is None:
            return self._server.add_insecure_port(listener.target)
        return self._server.add_secure_port(listener.target, credentials)

    async def start(self) -> None:
        await self._server.start()
        for name in ("", *self._served):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def announce_stop(self) -> None:
        """Health says NOT_SERVING from now on."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        """No new calls; those open get ``grace_s`` to end. Watches not ended before take all of it."""
        await self._server.stop(grace_s)
