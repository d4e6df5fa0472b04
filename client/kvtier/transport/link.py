"""An attached session, and the stubs and metadata of its calls."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Self, cast

import grpc.aio

from kvtier.abi import attach as protocol
from kvtier.transport import Connection
from kvtier.v1 import (
    admin_pb2_grpc,
    blocks_pb2_grpc,
    caches_pb2_grpc,
    events_pb2_grpc,
    session_pb2,
    transfer_pb2_grpc,
)


@dataclass(slots=True, frozen=True)
class Stubs:
    """The daemon's services over one channel."""

    admin: admin_pb2_grpc.AdminAsyncStub
    blocks: blocks_pb2_grpc.BlocksAsyncStub
    caches: caches_pb2_grpc.CachesAsyncStub
    events: events_pb2_grpc.EventsAsyncStub
    transfer: transfer_pb2_grpc.TransferAsyncStub

    @classmethod
    def over(cls, channel: Any) -> Self:
        return cls(
            admin=cast("admin_pb2_grpc.AdminAsyncStub", admin_pb2_grpc.AdminStub(channel)),
            blocks=cast("blocks_pb2_grpc.BlocksAsyncStub", blocks_pb2_grpc.BlocksStub(channel)),
            caches=cast("caches_pb2_grpc.CachesAsyncStub", caches_pb2_grpc.CachesStub(channel)),
            events=cast("events_pb2_grpc.EventsAsyncStub", events_pb2_grpc.EventsStub(channel)),
            transfer=cast("transfer_pb2_grpc.TransferAsyncStub", transfer_pb2_grpc.TransferStub(channel)),
        )


@dataclass(slots=True, frozen=True)
class Link:
    """An attached session and its channel. ``session`` rises when the daemon has forgotten the last session."""

    session: int
    welcome: session_pb2.Welcome
    attach: Connection
    channel: grpc.aio.Channel
    stubs: Stubs

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of each call in the session."""
        return ((protocol.SESSION_METADATA_KEY, self.welcome.token), *_trace())


def _trace() -> tuple[tuple[str, str], ...]:
    """The caller's OpenTelemetry span. A caller with a span has imported the library, so this module need not."""
    current = getattr(sys.modules.get("opentelemetry.trace"), "get_current_span", None)
    if current is None or not (span := current().get_span_context()).is_valid:
        return ()
    return ((protocol.TRACE_METADATA_KEY, f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"),)
