"""OpenTelemetry spans of calls and moves. Imported only by a daemon that sends them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Final

from opentelemetry.exporter.otlp.proto.grpc.exporter import logger as otlp_log
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.trace import SpanKind, StatusCode, use_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from kvtier.abi.key_index import KEY_BYTES
from kvtierd.core.ids import CacheId
from kvtierd.core.outcome import Move, MoveResult
from kvtierd.mover.engine import Engine
from kvtierd.mover.runtime import CacheRuntime
from kvtierd.service.cache import ServedCache
from kvtierd.service.call_counts import CallCounts, CountedCall, Metadata
from kvtierd.service.calls import NEEDS
from kvtierd.service.catalog import Catalog
from kvtierd.service.errors import shown

FLUSH_S: Final = 2.0
"""Seconds that a stop waits for the collector to take the last spans."""
FAULTS: Final = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
"""Codes that make a server's span an error by OpenTelemetry's rules; other codes are errors of the client."""
_CLIENTS: Final = TraceContextTextMapPropagator()

_log = logging.getLogger(__name__)


class _Exporter(OTLPSpanExporter):
    """Warns once while the collector is away."""

    away = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        self.away = self.away and result is not SpanExportResult.SUCCESS
        return result

    def tell(self, record: logging.LogRecord) -> bool:
        """A filter that replaces the library's log records for each batch."""
        if record.levelno >= logging.ERROR and not self.away:
            self.away = True
            _log.warning("traces are lost until the collector takes them: %s", record.getMessage())
        return False


class Spans(CallCounts):
    """Makes a span of each call and of each move. A move's span is a child of the span of the call that planned it."""

    def __init__(self, endpoint: str) -> None:
        """Starts the SDK's thread, which sends the spans. ``OTEL_*`` in the environment configure the rest."""
        super().__init__()
        own = Resource.create({"service.name": "kvtierd", "service.version": version("kvtier")})
        self._exporter: Final = _Exporter(endpoint)
        self._provider: Final = TracerProvider(None, own.merge(OTELResourceDetector().detect()), False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer: Final = self._provider.get_tracer("kvtierd")
        self._cache: Callable[[CacheId], ServedCache | None] = lambda _: None
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)  # it warns of every span without room in its queue
        otlp_log.addFilter(self._exporter.tell)

    def watch(self, engine: Engine, catalog: Catalog) -> None:
        self._cache = catalog.get
        engine.trace_moves(self._move)

    async def close(self) -> None:
        """Sends the remaining spans, unless the collector is away."""
        flushing = asyncio.create_task(asyncio.to_thread(self._provider.force_flush))
        await asyncio.wait([flushing], timeout=0 if self._exporter.away else FLUSH_S)
        self._exporter.shutdown()  # ends a running export
        await flushing
        await asyncio.to_thread(self._provider.shutdown)

    @contextmanager
    def call(self, method: str, metadata: Metadata = (), *, timed: bool = True) -> Iterator[CountedCall]:
        span = self._tracer.start_span(method, _CLIENTS.extract(dict(metadata or ())), SpanKind.SERVER)
        as_is = use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False)
        with super().call(method, timed=timed) as call, as_is:
            try:
                yield call
            finally:
                if span.is_recording():
                    span.set_attributes(dict(self._about(method, call)))
                if call.code in FAULTS:
                    span.set_status(StatusCode.ERROR, call.reason)

    def _about(self, method: str, call: CountedCall) -> Iterator[tuple[str, AttributeValue]]:
        yield "rpc.method", method
        yield "rpc.response.status_code", call.code
        if call.reason:
            yield "kvtier.reason", call.reason
        if call.session is not None:
            yield "kvtier.client.pid", call.session.peer.pid
            yield "kvtier.client.identity", str(call.session.peer.identity)
        if call.request is None:
            return
        within = NEEDS[method].within
        request = call.request if within is None else getattr(call.request, within)
        cache = self._cache(CacheId(getattr(request, "cache_id", 0)))
        if name := getattr(request, "name", "" if cache is None else cache.name):
            yield "kvtier.cache", shown(name)
        chains = getattr(request, "chains", None) or [request]
        keys = sum(len(getattr(chain, "keys", b"")) for chain in chains) // KEY_BYTES
        if blocks := keys or getattr(request, "count", 0):
            yield "kvtier.blocks", blocks

    def _move(self, runtime: CacheRuntime, move: Move) -> Callable[[MoveResult], None]:
        src, dst, blocks = str(move.src), str(move.dst).lower(), len(move.items)
        nbytes = 0 if move.dst is None else blocks * runtime.spec.record_bytes(move.group)
        span = self._tracer.start_span(f"move {src} to {dst}")
        span.set_attributes({"kvtier.cache": runtime.name, "kvtier.blocks": blocks, "kvtier.bytes": nbytes})
        span.set_attributes({"kvtier.from": src, "kvtier.to": dst, "kvtier.cause": move.cause.name.lower()})

        def ended(result: MoveResult) -> None:
            failed = len(result.failed) + len(result.corrupt)
            span.set_attributes({"kvtier.failed_blocks": failed, "kvtier.queue_seconds": result.queue_ns / 1e9})
            span.set_status(StatusCode.ERROR if failed else StatusCode.UNSET)
            span.end()

        return ended
