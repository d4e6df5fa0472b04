"""Metrics for Prometheus, and probes. On a scrape the loop reads numbers that the daemon keeps anyway.

Imported only by a daemon that serves metrics.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from wsgiref.simple_server import WSGIRequestHandler
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, GCCollector, Histogram, ProcessCollector, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from kvtierd.core.ids import GroupId
from kvtierd.core.transfers import GroupCounts, ManagerStats
from kvtierd.event_log import EventLog
from kvtierd.mover.engine import Engine
from kvtierd.service import page
from kvtierd.service.attach import DaemonIdentity
from kvtierd.service.cache import ServedCache
from kvtierd.service.call_counts import BOUNDS_S, CallCounts
from kvtierd.service.catalog import Catalog
from kvtierd.service.hub import EventHub
from kvtierd.service.remote.tier import RemoteTier
from kvtierd.service.sessions import ClientSession, SessionRegistry
from kvtierd.tiers.base import TierConfigError

if TYPE_CHECKING:
    from kvtierd.fleet.peers import Fleet

READ_S: Final = 5.0
"""Seconds that a scrape or a probe waits for the loop before it fails."""
STALLED_S: Final = 30.0
"""Seconds that a mover's thread may be in a call before ``/healthz`` fails."""
MAX_CONNECTIONS: Final = 16
_PROBE_S: Final = 0.1
_LATENESS_BUCKETS: Final = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 0.1, 0.5, 2.5)
_TEXT: Final = [("Content-Type", "text/plain; charset=utf-8")]
_GROUP: Final = ("cache", "group")
_PLACE: Final = ("cache", "group", "tier")
_EDGE: Final = ("cache", "from", "to")

METRICS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "kvtier_build_info": ("Version of the daemon, always 1", ("version", "python")),
    "kvtier_epoch": ("Epoch of the event stream", ()),
    "kvtier_problems": ("Problems that kvtier status names, 0 on a healthy daemon", ()),
    "kvtier_sessions": ("Client processes, attached or orphaned by a connection that broke", ("state",)),
    "kvtier_calls_total": ("Calls and streams that have ended, by what gRPC calls the outcome", ("method", "code")),
    "kvtier_refusals_total": ("Refused calls by the reason in the error's detail", ("reason",)),
    "kvtier_hints_total": ("Hints by action and outcome", ("action", "outcome")),
    "kvtier_disk_free_bytes": ("Bytes free on the file system of the disk tier", ()),
    "kvtier_tier_bytes": (
        "Bytes by state, given to caches or left, which sum to the size",
        ("tier", "device", "state"),
    ),
    "kvtier_missing_bytes": ("Bytes that a cache was promised and a smaller tier lacks", ("cache", "tier")),
    "kvtier_slots": ("Slots by state, which sum to the capacity", (*_PLACE, "state")),
    "kvtier_held_slots": ("Slots under a lease or pinned", _PLACE),
    "kvtier_slot_bytes": ("Size of a slot, the same in every tier", _GROUP),
    "kvtier_page_locked_bytes": ("Bytes of the host tier that are page-locked for the GPU", ("cache",)),
    "kvtier_tier_lost": ("1 while a cache does without a tier that failed", ("cache", "tier")),
    "kvtier_blocks": ("Blocks that can be found by their key", _GROUP),
    "kvtier_hit_blocks_total": ("Blocks acquired or read, by the fastest tier they were in", _PLACE),
    "kvtier_queried_blocks_total": ("Blocks of chains that were asked for, each chain once", _GROUP),
    "kvtier_found_blocks_total": ("Blocks of those that were stored", _GROUP),
    "kvtier_shadow_missed_blocks_total": (
        "Blocks stored that a policy of eviction would have missed, estimated from a sample of the keys",
        (*_GROUP, "policy"),
    ),
    "kvtier_stored_blocks_total": ("Blocks that were committed", _GROUP),
    "kvtier_removed_blocks_total": ("Blocks that left the last tier", _GROUP),
    "kvtier_waiting_requests": ("Calls that wait for room in a tier", ("cache",)),
    "kvtier_leases": ("Leases, live or orphaned by a connection that broke", ("cache", "state")),
    "kvtier_queued_blocks": ("Blocks that are planned on an edge and not done", ("from", "to")),
    "kvtier_moved_blocks_total": ("Blocks copied along an edge", _EDGE),
    "kvtier_moved_bytes_total": ("Bytes of the slots copied along an edge", _EDGE),
    "kvtier_failed_blocks_total": ("Blocks whose copy failed or proved corrupt", _EDGE),
    "kvtier_move_queue_seconds_total": ("Time from plan to start, summed over the blocks of moves", _EDGE),
    "kvtier_move_copy_seconds_total": ("Time from start to end, summed over the blocks of moves", _EDGE),
    "kvtier_events_total": ("Events by type and cause", ("type", "cause")),
    "kvtier_watchers": ("Streams of events that are open", ()),
    "kvtier_watcher_lag_events": ("Events that the slowest watcher has not been sent yet", ()),
    "kvtier_peer_exact": ("1 while every event of a peer arrives", ("peer",)),
    "kvtier_peer_blocks": ("Blocks that a peer has of the caches here", ("peer",)),
    "kvtier_remote_up": ("1 while the remote store is used, 0 while it is left alone", ()),
    "kvtier_remote_operations_total": ("Calls of the store; refused ones were not made", ("operation", "outcome")),
    "kvtier_remote_bytes_total": ("Bytes of objects that went to the store, or came from it", ("operation",)),
    "kvtier_remote_seconds_total": ("Time in calls of the store, summed", ("operation",)),
    "kvtier_remote_blocks_total": ("Blocks for the store, from it or from peers, by what became of them", ("outcome",)),
    "kvtier_remote_unwritten_blocks": ("Blocks that the store is to have and lacks, by reason", ("reason",)),
    "kvtier_event_log_bytes": ("Bytes that past events take on disk", ()),
    "kvtier_event_log_lost_events_total": ("Events that will never be in the log", ()),
}
"""Help and labels of every metric except the histograms."""

T = TypeVar("T")
Sample = tuple[str, tuple[str, ...], float]

_log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Subjects:
    """The parts of the daemon that a scrape reads.

    ``watching``: session and unsent events of each watcher. ``problems``: as in health. ``phase``: of the daemon's
    life. ``log``: None without an event log. ``fleet``: None without peers. ``remote``: None without a remote store and
    peers. ``disk``: the directory of the disk tier; None without a disk tier. ``page``: whether ``/`` is served.
    """

    engine: Engine
    hub: EventHub
    catalog: Catalog
    sessions: SessionRegistry
    identity: DaemonIdentity
    watching: Callable[[], Sequence[tuple[ClientSession, int]]]
    problems: Callable[[], Sequence[str]]
    phase: Callable[[], str]
    log: EventLog | None
    fleet: Fleet | None
    remote: RemoteTier | None
    call_counts: CallCounts
    disk: Path | None
    page: bool


class _Handler(WSGIRequestHandler):
    timeout = 5
    """Seconds that a peer may be silent."""

    def log_message(self, format: str, *args: Any) -> None:
        """Logs no requests."""


class _Server(ThreadingWSGIServer):
    """A thread per connection, at most :data:`MAX_CONNECTIONS`: the oldest connection gives way."""

    request_queue_size = 128

    def __init__(self, host: str, port: int) -> None:
        self._open: dict[Any, None] = {}
        self._lock: Final = threading.Lock()
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = found[0][0]
        super().__init__((str(found[0][4][0]), port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with suppress(OSError):  # the connection has just ended
                    oldest.shutdown(socket.SHUT_RDWR)
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs a failed scrape, or the end of a connection that was silent or gave way."""
        _log.info("a connection for metrics ended error=%r", str(sys.exception()))


class Metrics(Collector):
    """Serves metrics over HTTP until :meth:`stop`. Made and stopped on the loop; scrapes run in threads."""

    def __init__(self, host: str, port: int, subjects: Subjects) -> None:
        """Raises :class:`TierConfigError` if the address is unavailable. ``port``: 0 = any free port."""
        self._ask: Final = subjects
        self._loop: Final = asyncio.get_running_loop()
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        GCCollector(registry=registry)
        registry.register(self)
        self._lateness: Final = Histogram(
            "kvtier_loop_lateness_seconds",
            "How much later than asked a timer of the event loop fires",
            buckets=_LATENESS_BUCKETS,
            registry=registry,
        )
        try:
            self._server = _Server(host, port)
        except OSError as error:
            raise TierConfigError("metrics_listen", f"{host}:{port}", f"cannot listen there: {error}") from error
        self._server.set_app(partial(self._answer, make_wsgi_app(registry)))
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()
        self._probe = self._next_probe()
        _log.info("serving metrics address=%s port=%d", host, self._server.server_port)

    async def stop(self) -> None:
        self._probe.cancel()
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()

    def _answer(
        self, metrics: WSGIApplication, environ: WSGIEnvironment, start_response: StartResponse
    ) -> Iterable[bytes]:
        """Answers a request, in its thread."""
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        status, headers, body = "404 Not Found", _TEXT, b"/metrics, /healthz and /readyz are served here\n"
        if method not in ("GET", "HEAD"):
            status, headers, body = "405 Method Not Allowed", [*_TEXT, ("Allow", "GET, HEAD")], b""
        elif path == "/metrics":
            said: list[Any] = []
            body = b"".join(metrics(environ | {"REQUEST_METHOD": "GET"}, lambda *begun: said.append(begun)))  # type: ignore[arg-type]
            ((status, headers),) = said
        elif path in page.KINDS and self._ask.page:
            status, headers = "200 OK", [("Content-Type", page.KINDS[path]), *page.HEADERS]
            body = page.HTML.read_bytes() if path == "/" else self._on_the_loop(self._status())
        elif path in ("/healthz", "/readyz"):
            fault = self._fault(path)
            status, body = "503 Service Unavailable" if fault else "200 OK", f"{fault or 'ok'}\n".encode()
        start_response(status, [*headers, ("Content-Length", str(len(body)))])
        return [body] if method == "GET" else []

    def _fault(self, path: str) -> str:
        """The reason why a probe fails; empty = it passes."""
        try:
            phase, stalled_s = self._on_the_loop(self._state())
        except TimeoutError:
            return f"the event loop has not answered for {READ_S:.0f} s"
        if path == "/readyz":
            return "" if phase == "serving" else phase
        return f"a mover's thread has been in one call for {stalled_s:.0f} s" if stalled_s > STALLED_S else ""

    async def _state(self) -> tuple[str, float]:
        return self._ask.phase(), self._ask.engine.stalled_s()

    def describe(self) -> list[Metric]:
        return [*_families().values(), _call_seconds(CallCounts())]

    def collect(self) -> list[Metric]:
        """Collects the metrics of a scrape, in its thread. Raises TimeoutError if the loop does not answer."""
        free = None if self._ask.disk is None else _free_bytes(self._ask.disk)
        return self._on_the_loop(self._read(free))

    def _on_the_loop(self, read: Coroutine[Any, Any, T]) -> T:
        """Waits in a server's thread. Raises TimeoutError if the loop does not answer."""
        reading = asyncio.run_coroutine_threadsafe(read, self._loop)
        try:
            return reading.result(READ_S)
        finally:
            reading.cancel()

    async def _status(self) -> bytes:
        ask = self._ask
        events = ask.hub.latest()
        return page.status(self._samples(), ask.problems(), ask.engine, ask.catalog, ask.sessions, events)

    async def _read(self, disk_free: int | None) -> list[Metric]:
        families = _families()
        if disk_free is not None:
            families["kvtier_disk_free_bytes"].add_metric((), disk_free)
        for name, labels, value in self._samples():
            families[name].add_metric(labels, value)
        return [*families.values(), _call_seconds(self._ask.call_counts)]

    def _next_probe(self) -> asyncio.TimerHandle:
        due = self._loop.time() + _PROBE_S
        return self._loop.call_at(due, self._fire, due)

    def _fire(self, due: float) -> None:
        self._lateness.observe(max(0.0, self._loop.time() - due))
        self._probe = self._next_probe()

    def _samples(self) -> Iterator[Sample]:
        ask = self._ask
        yield "kvtier_build_info", (version("kvtier"), platform.python_version()), 1
        yield "kvtier_epoch", (), ask.identity.epoch
        yield "kvtier_problems", (), len(ask.problems())
        attached = sum(session.attached for session in ask.sessions)
        yield "kvtier_sessions", ("attached",), attached
        yield "kvtier_sessions", ("orphaned",), sum(1 for _ in ask.sessions) - attached
        for key, count in ask.call_counts.calls.items():
            yield "kvtier_calls_total", key, count
        for reason, count in ask.call_counts.refusals.items():
            yield "kvtier_refusals_total", (reason,), count
        for hint, count in ask.call_counts.hints.items():
            yield "kvtier_hints_total", hint, count
        for account in ask.catalog.accounts:
            place = str(account.tier), account.device
            yield "kvtier_tier_bytes", (*place, "given"), account.size - account.left
            yield "kvtier_tier_bytes", (*place, "left"), account.left
        for (src, dst), blocks in ask.engine.queues().items():
            yield "kvtier_queued_blocks", (str(src), str(dst or "none")), blocks
        for (kind, cause), count in ask.hub.published.items():
            yield "kvtier_events_total", (kind.name.lower(), cause.name.lower()), count
        lags = [lag for _, lag in ask.watching()]
        yield "kvtier_watchers", (), len(lags)
        yield "kvtier_watcher_lag_events", (), max(lags, default=0)
        for peer in () if ask.fleet is None else ask.fleet.peers:
            yield "kvtier_peer_exact", (peer.address,), peer.status == "exact"
            yield "kvtier_peer_blocks", (peer.address,), peer.blocks
        if ask.log is not None:
            status = ask.log.status()
            yield "kvtier_event_log_bytes", (), status.used_bytes
            yield "kvtier_event_log_lost_events_total", (), status.lost
        if ask.remote is not None:
            yield from _of_remote(ask.remote)
        for name, tier, nbytes in ask.catalog.missing():
            yield "kvtier_missing_bytes", (name, str(tier)), nbytes
        for cache in ask.catalog:
            yield from _of_cache(cache, ask.engine.manager(cache.id).stats())


def _families() -> dict[str, GaugeMetricFamily | CounterMetricFamily]:
    return {
        name: (CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily)(name, text, labels=labels)
        for name, (text, labels) in METRICS.items()
    }


def _call_seconds(call_counts: CallCounts) -> HistogramMetricFamily:
    family = HistogramMetricFamily(
        "kvtier_call_seconds", "Time from a call to its answer, of methods with one answer", labels=("method",)
    )
    for method, times in call_counts.times.items():
        bounds = zip((*map(str, BOUNDS_S), "+Inf"), accumulate(times.buckets), strict=True)
        family.add_metric((method,), list(bounds), times.seconds)
    return family


def _free_bytes(disk: Path) -> int | None:
    """Free bytes of the file system; None = unknown. Blocks as long as the disk does."""
    try:
        status = os.statvfs(disk)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def _of_remote(remote: RemoteTier) -> Iterator[Sample]:
    if remote.url:
        yield "kvtier_remote_up", (), remote.problem is None
    for operation, counts in remote.operations.items():
        yield "kvtier_remote_operations_total", (operation, "ok"), counts.calls - counts.failures
        yield "kvtier_remote_operations_total", (operation, "failed"), counts.failures
        yield "kvtier_remote_operations_total", (operation, "refused"), counts.refused
        yield "kvtier_remote_bytes_total", (operation,), counts.nbytes
        yield "kvtier_remote_seconds_total", (operation,), counts.seconds
    for outcome, blocks in remote.blocks.items():
        yield "kvtier_remote_blocks_total", (outcome.replace(" ", "_"),), blocks
    for reason, blocks in remote.unwritten.items():
        yield "kvtier_remote_unwritten_blocks", (reason.replace(" ", "_"),), blocks


def _of_cache(cache: ServedCache, stats: ManagerStats) -> Iterator[Sample]:
    name = cache.name
    yield "kvtier_waiting_requests", (name,), stats.waiting
    yield "kvtier_leases", (name, "live"), stats.leases - stats.orphaned_leases
    yield "kvtier_leases", (name, "orphaned"), stats.orphaned_leases
    yield "kvtier_page_locked_bytes", (name,), 0 if cache.runtime.cuda is None else cache.runtime.cuda.locks.nbytes
    for tier in stats.tiers:
        yield "kvtier_tier_lost", (name, str(tier)), tier in stats.lost
    for (src, dst), edge in stats.edges.items():
        labels = (name, str(src), str(dst))
        yield "kvtier_moved_blocks_total", labels, edge.blocks
        yield "kvtier_moved_bytes_total", labels, edge.bytes
        yield "kvtier_failed_blocks_total", labels, edge.failures
        yield "kvtier_move_queue_seconds_total", labels, edge.queue_ns / 1e9
        yield "kvtier_move_copy_seconds_total", labels, edge.copy_ns / 1e9
    for group, counts in stats.groups.items():
        yield "kvtier_slot_bytes", (name, str(group)), cache.spec.record_bytes(group)
        yield from _of_group(name, group, counts)


def _of_group(name: str, group: GroupId, counts: GroupCounts) -> Iterator[Sample]:
    labels = (name, str(group))
    yield "kvtier_blocks", labels, counts.blocks
    yield "kvtier_queried_blocks_total", labels, counts.queried
    yield "kvtier_found_blocks_total", labels, counts.found
    yield "kvtier_stored_blocks_total", labels, counts.stored
    yield "kvtier_removed_blocks_total", labels, counts.removed
    for policy, misses in counts.shadow_misses.items():
        yield "kvtier_shadow_missed_blocks_total", (*labels, policy), misses
    for tier, count in counts.tiers.items():
        place = (*labels, str(tier))
        yield "kvtier_hit_blocks_total", place, counts.hits.get(tier, 0)
        yield "kvtier_held_slots", place, count.held
        for state, slots in count.states.items():
            yield "kvtier_slots", (*place, state.name.lower()), slots
