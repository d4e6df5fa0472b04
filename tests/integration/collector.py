"""An OpenTelemetry collector for tests: a gRPC server that takes traces as OTLP and keeps their spans."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.integration.waiting import PATIENCE_S


@dataclass(frozen=True)
class Seen:
    """A span as it came. ``failed``: its status is an error."""

    name: str
    trace: str
    id: str
    parent: str
    seconds: float
    failed: bool
    attributes: dict[str, Any]


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """``services``: names of those that have sent."""

    endpoint: str = ""
    services: set[str] = field(default_factory=set)
    spans: list[Seen] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def Export(self, request, context):
        with self._changed:
            for batch in request.resource_spans:
                self.services.add(values(batch.resource.attributes)["service.name"])
                self.spans += [seen(span) for scope in batch.scope_spans for span in scope.spans]
            self._changed.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait_for(self, wanted: Callable[[Seen], object], count: int = 1) -> list[Seen]:
        """As many spans as are wanted, or more, in the order in which they came."""

        def found() -> list[Seen]:
            return [span for span in self.spans if wanted(span)]

        with self._changed:
            assert self._changed.wait_for(lambda: len(found()) >= count, 3 * PATIENCE_S), self.spans
            return found()

    def call(self, verb: str, count: int = 1) -> list[Seen]:
        """Spans of calls of a method, such as ``Blocks.Match``."""
        return self.wait_for(lambda span: span.name == f"kvtier.v1.{verb}", count)


def values(attributes) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


def seen(span: Span) -> Seen:
    seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    failed = span.status.code == span.status.STATUS_CODE_ERROR
    ids = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
    return Seen(span.name, *ids, seconds, failed, values(span.attributes))


@contextmanager
def collecting(port: int = 0) -> Iterator[Collector]:
    """``port``: 0 = any that is free."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()
