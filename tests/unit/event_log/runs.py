"""Runs for the tests of the log."""

from kvtier.v1 import events_pb2
from kvtierd.event_log import EventRun
from kvtierd.event_log.segments import LogSegments

MB = 1 << 20


def run(first: int, last: int, *, epoch: int = 1, time_ns: int = 0, size: int = 40, private: int = 0) -> EventRun:
    """A run whose events are each of that time, with so many bytes of keys each, and of private bytes."""
    events = [events_pb2.Event(id=number, time_ns=time_ns, keys=bytes(size)) for number in range(first, last + 1)]
    for event in events if private else ():
        event.tokens.add(token_ids=bytes(private))
    return EventRun.of(epoch, first, last, events_pb2.WatchBatch(events=events), latest_ns=time_ns)


def ids(run: EventRun | None) -> list[int]:
    return [] if run is None else [event.id for event in events_pb2.WatchBatch.FromString(run.body).events]


def held(log: LogSegments, cursor: int = 0, max_bytes: int = 1) -> list[int]:
    """All ids above the cursor that the log tells, read piece by piece."""
    found: list[int] = []
    while (piece := log.read(cursor, max_bytes, 1024)) is not None:
        assert ids(piece) == list(range(piece.first, piece.last + 1))
        found += [number for number in ids(piece) if number > cursor]
        cursor = piece.last
    return found
