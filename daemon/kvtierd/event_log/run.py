"""Runs: consecutive events of one epoch, serialised once, and the record of a run in the log.

The bytes of a run are a ``WatchBatch`` with nothing but events. Protobuf messages concatenate, so runs join by
concatenation, and a watcher gets its own small header followed by the runs' bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Self

import xxhash

from kvtier.v1 import events_pb2

_FIELDS: Final = struct.Struct("<QQQIIQ")
"""First and last id, latest time, sizes of body and private body, checksum of the bytes after the head."""
_CHECK: Final = struct.Struct("<Q")
HEAD_BYTES: Final = _FIELDS.size + _CHECK.size


@dataclass(slots=True, frozen=True)
class EventRun:
    """All events with the ids [first, last] of an epoch.

    ``body``: a serialised ``WatchBatch`` with just these events. ``private``: the same with token ids; the same object
    if there are none. ``latest_ns``: the latest time of these events.
    """

    epoch: int
    first: int
    last: int
    body: bytes
    private: bytes
    latest_ns: int = 0

    @classmethod
    def of(cls, epoch: int, first: int, last: int, batch: events_pb2.WatchBatch, *, latest_ns: int = 0) -> Self:
        """Makes a run of a batch with token ids. Clears the token ids in the batch."""
        private = batch.SerializeToString()
        body = batch.SerializeToString() if without_tokens(batch.events) else private
        return cls(epoch, first, last, body, private, latest_ns)

    def __len__(self) -> int:
        return self.last - self.first + 1

    @property
    def size(self) -> int:
        return len(self.body) + (len(self.private) if self.private is not self.body else 0)

    def after(self, cursor: int) -> EventRun:
        """The rest of the run above ``cursor``."""
        if self.first > cursor:
            return self
        events = events_pb2.WatchBatch.FromString(self.private).events
        rest = events_pb2.WatchBatch(events=[event for event in events if event.id > cursor])
        return EventRun.of(self.epoch, cursor + 1, self.last, rest, latest_ns=self.latest_ns)

    def first_at(self, time_ns: int) -> int:
        """The first id with an event at or after ``time_ns``. The run must have an event that late."""
        events = events_pb2.WatchBatch.FromString(self.body).events
        return next(event.id for event in events if event.time_ns >= time_ns)


def joined(runs: Sequence[EventRun]) -> EventRun:
    """Joins runs that follow each other in one epoch."""
    if len(runs) == 1:
        return runs[0]
    body = b"".join(run.body for run in runs)
    private = b"".join(run.private for run in runs) if any(run.private is not run.body for run in runs) else body
    latest_ns = max(run.latest_ns for run in runs)
    return EventRun(runs[0].epoch, runs[0].first, runs[-1].last, body, private, latest_ns)


def without_tokens(events: Iterable[events_pb2.Event], may_see: Callable[[str], bool] = lambda cache: False) -> bool:
    """Clears the token ids of caches whose tokens may not be seen. Returns whether there were any."""
    private = [event for event in events if event.tokens and not may_see(event.cache)]
    for event in private:
        event.ClearField("tokens")
    return bool(private)


@dataclass(slots=True, frozen=True)
class Head:
    """The head of a record. ``body_bytes``, ``private_bytes``: sizes of the two bodies that follow it."""

    first: int
    last: int
    latest_ns: int
    body_bytes: int
    private_bytes: int
    digest: int

    @property
    def payload_bytes(self) -> int:
        return self.body_bytes + self.private_bytes

    def run(self, epoch: int, payload: bytes) -> EventRun | None:
        """The run of the record; None if its payload is damaged."""
        if len(payload) != self.payload_bytes or xxhash.xxh3_64_intdigest(payload) != self.digest:
            return None
        body = payload[: self.body_bytes]
        private = payload[self.body_bytes :] or body
        return EventRun(epoch, self.first, self.last, body, private, self.latest_ns)


def checked(fields: bytes) -> bytes:
    """The fields, followed by their checksum."""
    return fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields))


def encode(run: EventRun) -> bytes:
    """Returns the record: head, body, and the private body if it differs."""
    private = b"" if run.private is run.body else run.private
    payload = run.body + private
    digest = xxhash.xxh3_64_intdigest(payload)
    fields = _FIELDS.pack(run.first, run.last, run.latest_ns, len(run.body), len(private), digest)
    return checked(fields) + payload


def decode_head(data: bytes) -> Head | None:
    """Decodes a head. None for bytes that are no head, or a damaged head."""
    fields = data[: _FIELDS.size]
    return Head(*_FIELDS.unpack(fields)) if data == checked(fields) else None
