"""Counts of calls by method, code and time, and of refusals by reason, over gRPC and the attach socket."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from google.protobuf.message import Message

from kvtierd.service.errors import CallRefused
from kvtierd.service.sessions import ClientSession

Metadata = Iterable[tuple[str, str | bytes]] | None

BOUNDS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10.0)
"""Upper ends of the buckets; the last bucket has no end."""


@dataclass(slots=True)
class Times:
    """``buckets``: calls by duration. ``seconds``: sum of the durations."""

    buckets: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.buckets[bisect_left(BOUNDS_S, seconds)] += 1
        self.seconds += seconds


class CountedCall:
    """An open call. ``code``: gRPC's name of its code; an unanswered call was cancelled. ``reason``: of a refusal.
    ``session``, ``request``: None until they are known."""

    def __init__(self, call_counts: CallCounts) -> None:
        self._call_counts: Final = call_counts
        self.code, self.reason = "CANCELLED", ""
        self.session: ClientSession | None = None
        self.request: Message | None = None

    def answered(self, reply: Message) -> Message:
        self.code = "OK"
        return reply

    def refused(self, refusal: CallRefused) -> CallRefused:
        self.code, self.reason = refusal.code.name, refusal.detail.reason
        self._call_counts.refusals[self.reason] += 1
        return refusal


class CallCounts:
    """The counts. Loop thread only. Only the daemon's own methods have counts: a client cannot add a name."""

    def __init__(self) -> None:
        self.calls: Final[Counter[tuple[str, str]]] = Counter()
        self.times: Final[dict[str, Times]] = {}
        """Durations of calls with a single answer, by method."""
        self.refusals: Final[Counter[str]] = Counter()
        self.hints: Final[Counter[tuple[str, str]]] = Counter()

    @contextmanager
    def call(self, method: str, metadata: Metadata = (), *, timed: bool = True) -> Iterator[CountedCall]:
        """Counts a call around the body. ``metadata``: for spans. ``timed``: False for a stream, whose client decides
        how long it lasts."""
        call, start = CountedCall(self), time.perf_counter()
        try:
            yield call
        finally:
            self.calls[method, call.code] += 1
            if timed:
                self.times.setdefault(method, Times()).add(time.perf_counter() - start)
