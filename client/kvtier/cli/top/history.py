"""The last minute: what was counted between one look at the daemon and the next.

Rates are differences of counters over differences of the daemon's own uptime, read with them: neither a slow answer nor
a clock that is set moves them. Where there is no difference to take (the first look, a restart, a cache that was not
there at the look before, a counter that went back) nothing is said, rather than nothing happened.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor
from typing import Final

from kvtier.cli.top.counters import Counters, total
from kvtier.stats import DaemonStats

WINDOW_S: Final = 60.0


@dataclass(slots=True, frozen=True)
class Span:
    """From ``start`` to ``end``, in seconds of the reader's monotonic clock: what was counted, by name of the cache.

    Without caches of which it is not known. ``events``: ids that were given out.
    """

    start: float
    end: float
    caches: Mapping[str, Counters]
    events: int

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(slots=True, frozen=True)
class Change:
    """What was counted in so many seconds, more than none. ``events`` are the daemon's, of all caches."""

    seconds: float
    counters: Counters
    events: int

    def rate(self, count: int) -> float:
        """A second."""
        return count / self.seconds


@dataclass(slots=True, frozen=True)
class Minute:
    """What is remembered at a moment. ``at``: of the last look; None before the first."""

    at: float | None = None
    spans: tuple[Span, ...] = ()

    def latest(self, cache: str | None = None) -> Change | None:
        """Between the last two looks, of one cache or of all; None where there is nothing to compare."""
        spans = self.spans[-1:]
        return _change(spans, cache) if spans and spans[0].end == self.at else None

    def whole(self, cache: str | None = None) -> Change | None:
        """Of all the time that is remembered: at most a minute, and what of a span reaches beyond it."""
        return _change(self.spans, cache)

    def series(self, columns: int, of: Callable[[Counters], float], cache: str | None = None) -> list[float | None]:
        """The minute in so many steps of equal length, oldest first: the rate in each, None where it is not known.

        Steps begin at multiples of their length, so that a line drawn of them shifts and does not shimmer; the last
        one is not over yet. What was counted in a span is spread evenly over it.
        """
        width = WINDOW_S / columns
        counted, known = [0.0] * columns, [0.0] * columns
        first = ceil((self.at or 0.0) / width) - columns
        for span in self.spans:
            if cache is not None and cache not in span.caches:
                continue
            rate = of(_of(span, cache)) / span.seconds
            for step in range(max(first, floor(span.start / width)), min(first + columns, floor(span.end / width) + 1)):
                part = min(span.end, (step + 1) * width) - max(span.start, step * width)
                if part > 0:
                    counted[step - first] += rate * part
                    known[step - first] += part
        return [amount / seconds if seconds else None for amount, seconds in zip(counted, known, strict=True)]


@dataclass(slots=True, frozen=True)
class _Look:
    life: tuple[int, int]
    at: float
    last_event: int
    caches: Mapping[str, tuple[int, Counters]]


class History:
    """Takes one look after the other, each with the moment at which it came, and remembers a minute."""

    def __init__(self) -> None:
        self._spans: deque[Span] = deque()
        self._last: _Look | None = None
        self._offset = 0.0
        """Of the reader's clock to the daemon's uptime: fixed for a life, so that spans follow on one another."""

    @property
    def minute(self) -> Minute:
        """As it is now."""
        return Minute(self._last.at, tuple(self._spans)) if self._last is not None else Minute()

    def add(self, stats: DaemonStats, received: float) -> None:
        """``received``: seconds of a monotonic clock. The same look twice is one."""
        life, before = (stats.boot, stats.pid), self._last
        uptime = stats.uptime_ns / 1e9
        if before is None or before.life != life:
            self._offset = received - uptime
        caches = {cache.name: (cache.cache_id, Counters.of(cache)) for cache in stats.caches}
        look = _Look(life, self._offset + uptime, stats.last_event_id, caches)
        if before is not None and before.life == life:
            if look.at <= before.at:
                return
            self._spans.append(_between(before, look))
        self._last = look
        while self._spans and self._spans[0].end <= look.at - WINDOW_S:
            self._spans.popleft()


def _between(before: _Look, look: _Look) -> Span:
    caches: dict[str, Counters] = {}
    for name, (number, counters) in look.caches.items():
        earlier = before.caches.get(name)
        if earlier is not None and earlier[0] == number and (risen := counters.since(earlier[1])) is not None:
            caches[name] = risen
    return Span(before.at, look.at, caches, max(0, look.last_event - before.last_event))


def _of(span: Span, cache: str | None) -> Counters:
    return total(span.caches.values()) if cache is None else span.caches[cache]


def _change(spans: Sequence[Span], cache: str | None) -> Change | None:
    known = [span for span in spans if cache is None or cache in span.caches]
    if not known:
        return None
    seconds = sum(span.seconds for span in known)
    return Change(seconds, total(_of(span, cache) for span in known), sum(span.events for span in known))
