"""Runs and clocks for the tests of the log."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvtier.v1 import events_pb2
from kvtierd.event_log.clock import Clocks
from kvtierd.event_log.runs import LoggedRun
from kvtierd.event_log.store import EventStore

MB = 1 << 20
DAY_NS = 86_400 * 10**9
BOOT = b"b" * 16


@dataclass
class FakeTime:
    """``boot_ns`` and ``wall_ns`` are what a test says that they are."""

    boot_ns: int = 10**9
    wall_ns: int = 1_700_000_000 * 10**9
    boot_id: bytes = BOOT

    @property
    def clocks(self) -> Clocks:
        return Clocks(lambda: self.boot_ns, lambda: self.wall_ns, self.boot_id)

    def pass_(self, ns: int) -> None:
        self.boot_ns += ns
        self.wall_ns += ns


def run(first: int, last: int, *, epoch: int = 1, time_ns: int = 0, size: int = 40, private: int = 0) -> LoggedRun:
    """A run whose events are each of that time, with so many bytes of keys each, and of private bytes."""
    events = [events_pb2.Event(id=number, time_ns=time_ns, keys=bytes(size)) for number in range(first, last + 1)]
    body = events_pb2.WatchBatch(events=events).SerializeToString()
    if not private:
        return LoggedRun(epoch, first, last, time_ns, body, body)
    for event in events:
        event.tokens.add(token_ids=bytes(private))
    return LoggedRun(epoch, first, last, time_ns, body, events_pb2.WatchBatch(events=events).SerializeToString())


def opened(
    path: Path, time: FakeTime | None = None, *, max_bytes: int = 4 * MB, age_ns: int = 7 * DAY_NS
) -> EventStore:
    path.mkdir(exist_ok=True)
    return EventStore(path, max_bytes, age_ns, (time or FakeTime()).clocks)


def ids(run: LoggedRun | None) -> list[int]:
    return [] if run is None else [event.id for event in events_pb2.WatchBatch.FromString(run.body).events]


def held(store: EventStore, cursor: int = 0, piece: int = 1) -> list[int]:
    """All ids above the cursor that the store tells, read piece by piece."""
    found: list[int] = []
    while (piece_ := store.after(cursor, piece)) is not None:
        assert ids(piece_) == list(range(piece_.first, piece_.last + 1))
        found += [number for number in ids(piece_) if number > cursor]
        cursor = piece_.last
    return found
