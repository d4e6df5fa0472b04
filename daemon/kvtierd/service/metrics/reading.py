"""All numbers at a moment, read on the loop: between the first and the last of a cache nothing happens to it."""

from __future__ import annotations

import asyncio
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Final

from kvtierd.core.ids import GroupId, Tier
from kvtierd.core.verbs import GroupCounts, ManagerStats
from kvtierd.event_log import EventLog, LogStatus
from kvtierd.mover.engine import Engine
from kvtierd.service.attach import DaemonIdentity
from kvtierd.service.catalog import Catalog
from kvtierd.service.entries import Cache
from kvtierd.service.hub import EventHub
from kvtierd.service.metrics import table
from kvtierd.service.metrics.counting import (
    Counts,
    Edge,
    GcPauses,
    Histogram,
    LoopProbe,
    MoveCounts,
    TimedSelector,
)
from kvtierd.service.metrics.table import Metric
from kvtierd.service.sessions import SessionRegistry

Sample = tuple[Metric, tuple[str, ...], float | Counts]
"""A metric, the values of its labels, and its value."""


@dataclass(slots=True, frozen=True)
class Counters:
    """What is counted as it happens. ``turns``: None where the loop has not our selector."""

    moves: MoveCounts
    probe: LoopProbe
    pauses: GcPauses
    turns: TimedSelector | None


@dataclass(slots=True, frozen=True)
class Subjects:
    """Whom to ask. ``lags``: of each watcher, the events that it has not been sent. ``problems``: what health shows.
    ``log``: None where there is none."""

    engine: Engine
    hub: EventHub
    catalog: Catalog
    sessions: SessionRegistry
    identity: DaemonIdentity
    lags: Callable[[], Sequence[int]]
    problems: Callable[[], Sequence[str]]
    log: EventLog | None


class Reading:
    def __init__(self, subjects: Subjects, counters: Counters) -> None:
        self._ask: Final = subjects
        self._counters: Final = counters

    async def take(self) -> list[Sample]:
        """Lets go of the loop between one cache and the next."""
        samples = [*self._daemon(), *self._traffic(), *self._loop()]
        for cache in list(self._ask.catalog):
            await asyncio.sleep(0)
            if self._ask.catalog.get(cache.id) is cache:  # it may have been removed meanwhile
                samples += _cache(cache, self._ask.engine.stats(cache.id))
        return samples

    def _daemon(self) -> Iterator[Sample]:
        ask = self._ask
        yield table.BUILD, (version("kvtier"), platform.python_version()), 1
        yield table.EPOCH, (), ask.identity.epoch
        yield table.BOOT, (), ask.identity.boot
        yield table.PROBLEMS, (), len(ask.problems())
        yield table.CACHES, (), sum(1 for _ in ask.catalog)
        attached = sum(session.attached for session in ask.sessions)
        yield table.SESSIONS, ("attached",), attached
        yield table.SESSIONS, ("detached",), sum(1 for _ in ask.sessions) - attached
        lags = ask.lags()
        yield table.WATCHERS, (), len(lags)
        yield table.LAG, (), max(lags, default=0)
        if ask.log is not None:
            yield from _logged(ask.log.status())

    def _traffic(self) -> Iterator[Sample]:
        for edge, blocks in self._ask.engine.queues().items():
            yield table.QUEUED, _edge(edge), blocks
        moves = self._counters.moves
        for metric, counts in (
            (table.MOVED, moves.blocks),
            (table.MOVED_BYTES, moves.bytes),
            (table.FAILED, moves.failed),
        ):
            for (edge, cause), value in counts.items():
                yield metric, (*_edge(edge), cause.name.lower()), value
        for metric, times in ((table.QUEUE_TIME, moves.queue), (table.COPY_TIME, moves.copy)):
            for edge, histogram in times.items():
                yield metric, _edge(edge), histogram.read()
        for (kind, cause), count in self._ask.hub.published.items():
            yield table.EVENTS, (kind.name.lower(), cause.name.lower()), count

    def _loop(self) -> Iterator[Sample]:
        counters = self._counters
        yield table.LATENESS, (), counters.probe.lateness.read()
        yield table.LOOP_CPU, (), counters.probe.cpu_seconds()
        yield table.TURN, (), (counters.turns.turns if counters.turns else Histogram(table.TURN_BUCKETS)).read()
        for generation, histogram in enumerate(counters.pauses.by_generation):
            yield table.GC_PAUSE, (str(generation),), histogram.read()


def _cache(cache: Cache, stats: ManagerStats) -> Iterator[Sample]:
    now = time.time_ns()
    yield table.WAITING, (cache.name,), stats.waiting
    yield table.LEASES, (cache.name, "live"), stats.leases - stats.orphaned_leases
    yield table.LEASES, (cache.name, "orphaned"), stats.orphaned_leases
    yield table.LOCKED, (cache.name,), 0 if cache.runtime.cuda is None else cache.runtime.cuda.locks.nbytes
    for edge, record in stats.edges.items():
        yield table.DEGRADED, (cache.name, *_edge(edge)), record.degraded_until > now
    for tier in stats.tiers:
        yield table.TIER_LOST, (cache.name, str(tier)), tier in stats.offline
    for group, counts in stats.groups.items():
        yield table.SLOT_BYTES, (cache.name, str(group)), cache.spec.record_bytes(group)
        yield from _group(cache.name, group, counts)


def _logged(status: LogStatus) -> Iterator[Sample]:
    yield table.LOG_BYTES, (), status.used_bytes
    yield table.LOG_AGE, (), status.oldest_age_ns / 1e9
    yield table.LOG_FAILURES, (), status.failures
    yield table.LOG_LOST, (), status.lost


def _group(name: str, group: GroupId, counts: GroupCounts) -> Iterator[Sample]:
    labels = (name, str(group))
    yield table.BLOCKS, labels, counts.blocks
    yield table.MISSES, labels, counts.misses
    yield table.STORED, labels, counts.stored
    yield table.REMOVED, labels, counts.removed
    for tier, count in counts.tiers.items():
        place = (*labels, str(tier))
        yield table.HITS, place, counts.hits.get(tier, 0)
        yield table.HELD, place, count.held
        yield table.PINNED, place, counts.pinned.get(tier, 0)
        for state, slots in count.states.items():
            yield table.SLOTS, (*place, state.name.lower()), slots


def _edge(edge: Edge | tuple[Tier, Tier]) -> tuple[str, str]:
    """A record of the disk that is deleted goes nowhere."""
    return str(edge[0]), "none" if edge[1] is None else str(edge[1])
