"""Every metric that the daemon has of its own: what docs/observability.md and the exposition say of it.

Names and units are as Prometheus has them: base units, ``_total`` for what only rises. A name stands for one thing for
ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Kind(StrEnum):
    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(slots=True, frozen=True)
class Metric:
    """``name``: as it is scraped, so a counter's ends in ``_total``. ``help``: one sentence without a full stop."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


COPY_BUCKETS: Final = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Seconds: from one small block between memories to a batch on a disk that hardly answers."""
TURN_BUCKETS: Final = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 0.1, 0.5, 2.5)
"""Seconds: a turn of the loop is to stay under a millisecond."""

EDGE: Final = ("from", "to")
PLACE: Final = ("cache", "group", "tier")

BUILD = Metric("kvtier_build_info", Kind.GAUGE, "Version of the daemon, always 1", ("version", "python"))
EPOCH = Metric(
    "kvtier_epoch",
    Kind.GAUGE,
    "Epoch of the event stream, which rises after an unclean stop and after the loss of a device",
)
BOOT = Metric("kvtier_boot", Kind.GAUGE, "How many times the daemon has been started on its state directory")
PROBLEMS = Metric("kvtier_problems", Kind.GAUGE, "Problems that kvtier status names, 0 on a healthy daemon")

CACHES = Metric("kvtier_caches", Kind.GAUGE, "Caches")
SLOTS = Metric("kvtier_slots", Kind.GAUGE, "Slots by state, which sum to the capacity", (*PLACE, "state"))
HELD = Metric("kvtier_held_slots", Kind.GAUGE, "Slots under a lease or pinned", PLACE)
PINNED = Metric("kvtier_pinned_slots", Kind.GAUGE, "Slots whose block is pinned there", PLACE)
SLOT_BYTES = Metric("kvtier_slot_bytes", Kind.GAUGE, "Size of a slot, the same in every tier", ("cache", "group"))
BLOCKS = Metric("kvtier_blocks", Kind.GAUGE, "Blocks that can be found by their key", ("cache", "group"))
HITS = Metric(
    "kvtier_hit_blocks_total",
    Kind.COUNTER,
    "Blocks acquired, or read without a call, by the fastest tier they were in at the moment of the match",
    PLACE,
)
MISSES = Metric(
    "kvtier_missed_blocks_total",
    Kind.COUNTER,
    "Blocks that acquires and reads asked for and that were not stored",
    ("cache", "group"),
)
STORED = Metric("kvtier_stored_blocks_total", Kind.COUNTER, "Blocks that were committed", ("cache", "group"))
REMOVED = Metric("kvtier_removed_blocks_total", Kind.COUNTER, "Blocks that left the last tier", ("cache", "group"))
LOCKED = Metric(
    "kvtier_page_locked_bytes", Kind.GAUGE, "Bytes of the host tier that are page-locked for the GPU", ("cache",)
)
WAITING = Metric("kvtier_waiting_requests", Kind.GAUGE, "Calls that wait for room in a tier", ("cache",))
LEASES = Metric("kvtier_leases", Kind.GAUGE, "Leases, live or orphaned by a connection that broke", ("cache", "state"))
DEGRADED = Metric(
    "kvtier_edge_degraded", Kind.GAUGE, "1 while a cache does without an edge that failed", ("cache", *EDGE)
)
TIER_LOST = Metric(
    "kvtier_tier_lost",
    Kind.GAUGE,
    "1 while a cache does without a tier that failed or whose device is lost",
    ("cache", "tier"),
)

QUEUED = Metric("kvtier_queued_blocks", Kind.GAUGE, "Blocks that are planned on an edge and not done", EDGE)
MOVED = Metric("kvtier_moved_blocks_total", Kind.COUNTER, "Blocks copied along an edge", (*EDGE, "cause"))
MOVED_BYTES = Metric("kvtier_moved_bytes_total", Kind.COUNTER, "Bytes copied along an edge", (*EDGE, "cause"))
FAILED = Metric(
    "kvtier_failed_blocks_total", Kind.COUNTER, "Blocks whose copy failed or proved corrupt", (*EDGE, "cause")
)
QUEUE_TIME = Metric(
    "kvtier_move_queue_seconds", Kind.HISTOGRAM, "From the plan of a move to the start of its first copy", EDGE
)
COPY_TIME = Metric("kvtier_move_copy_seconds", Kind.HISTOGRAM, "How long the copies of a move took", EDGE)

SESSIONS = Metric("kvtier_sessions", Kind.GAUGE, "Client processes, attached or with a broken connection", ("state",))
EVENTS = Metric("kvtier_events_total", Kind.COUNTER, "Events by type and cause", ("type", "cause"))
WATCHERS = Metric("kvtier_watchers", Kind.GAUGE, "Streams of events that are open")
LAG = Metric("kvtier_watcher_lag_events", Kind.GAUGE, "Events that the slowest watcher has not been sent yet")

LOG_BYTES = Metric("kvtier_event_log_bytes", Kind.GAUGE, "Bytes that past events take in the log on disk")
LOG_AGE = Metric("kvtier_event_log_oldest_age_seconds", Kind.GAUGE, "How long ago the oldest event in it was logged")
LOG_FAILURES = Metric("kvtier_event_log_failures_total", Kind.COUNTER, "Attempts to write to the log that failed")
LOG_LOST = Metric("kvtier_event_log_lost_events_total", Kind.COUNTER, "Events that will never be in the log")

LATENESS = Metric(
    "kvtier_loop_lateness_seconds", Kind.HISTOGRAM, "How much later than asked a timer of the event loop fires"
)
TURN = Metric("kvtier_loop_turn_seconds", Kind.HISTOGRAM, "Time from one wait of the event loop to the next")
LOOP_CPU = Metric("kvtier_loop_cpu_seconds_total", Kind.COUNTER, "Processor time of the event loop's thread")
GC_PAUSE = Metric(
    "kvtier_gc_pause_seconds", Kind.HISTOGRAM, "How long garbage collections held everything up", ("generation",)
)

METRICS: Final[tuple[Metric, ...]] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""All of them, in the order in which they stand here."""

PROCESS_METRICS: Final = {
    "process_cpu_seconds_total": "Processor time of the whole process",
    "process_resident_memory_bytes": "Resident memory, the arenas included",
    "process_virtual_memory_bytes": "Virtual memory",
    "process_start_time_seconds": "When the process started, since the epoch of Unix",
    "process_open_fds": "Open file descriptors",
    "process_max_fds": "Most file descriptors that may be open",
}
"""Those that prometheus_client's ProcessCollector adds."""


def reference() -> str:
    """The table of docs/observability.md."""
    rows = [(f"`{m.name}`", str(m.kind), ", ".join(f"`{label}`" for label in m.labels), m.help) for m in METRICS]
    rows += [
        (f"`{name}`", "counter" if name.endswith("_total") else "gauge", "", text)
        for name, text in PROCESS_METRICS.items()
    ]
    head = ("| metric | kind | labels | what |", "| --- | --- | --- | --- |")
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"
