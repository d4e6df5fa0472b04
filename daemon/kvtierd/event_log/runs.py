"""A run of events as the log keeps it, and its record: a head that says where it belongs, a checksum, the bytes.

A record's key is the run's first id, 8 bytes, most significant first. The head has a checksum of its own, so that a
search by time reads heads alone.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import lmdb
import xxhash

from kvtier.v1 import events_pb2

_VERSION: Final = 1
_FIELDS: Final = struct.Struct("<BBHIIIQQQQQ16s")
"""Version, flags, 0, sizes of body and private body, 0, last id, epoch, latest time in it and so far, stamp, digest."""
_CHECK: Final = struct.Struct("<Q")
HEAD_BYTES: Final = _FIELDS.size + _CHECK.size
_PRIVATE: Final = 1
_KEYLESS: Final = 2
_KEY: Final = struct.Struct(">Q")


@dataclass(slots=True, frozen=True)
class LoggedRun:
    """Ids [first, last] of one epoch, all of them. ``body``: a serialised ``WatchBatch`` with just these events.

    ``private``: the same with token ids; the same object where there are none. ``latest_ns``: of the events' times.
    ``keyless``: whether there may be events in it that carry no keys.
    """

    epoch: int
    first: int
    last: int
    latest_ns: int
    body: bytes
    private: bytes
    keyless: bool = True

    @property
    def count(self) -> int:
        return self.last - self.first + 1

    @property
    def size(self) -> int:
        return len(self.body) + (len(self.private) if self.private is not self.body else 0)

    def first_at(self, time_ns: int) -> int | None:
        """The first id with an event at or after that time."""
        events = events_pb2.WatchBatch.FromString(self.body).events
        return next((event.id for event in events if event.time_ns >= time_ns), None)


@dataclass(slots=True, frozen=True)
class Head:
    """``latest_ns``: of the run's events; ``so_far_ns``: of all events up to here, so it never falls. ``stamp``: when
    it was logged, by the log's clock. ``digest``: of what follows the head."""

    last: int
    epoch: int
    latest_ns: int
    so_far_ns: int
    stamp: int
    body_bytes: int
    private_bytes: int | None
    keyless: bool
    digest: bytes


def key_of(first: int) -> bytes:
    return _KEY.pack(first)


def id_of(key: bytes | memoryview) -> int:
    """Raises :class:`lmdb.CorruptedError` for what was never a key."""
    if len(key) != _KEY.size:
        raise lmdb.CorruptedError(f"a key of {len(key)} bytes, not {_KEY.size}")
    first: int = _KEY.unpack(key)[0]
    return first


def joined(runs: Sequence[LoggedRun]) -> LoggedRun:
    """One run of several that follow each other in one epoch: protobuf messages concatenate."""
    if len(runs) == 1:
        return runs[0]
    body = b"".join(run.body for run in runs)
    private = any(run.private is not run.body for run in runs)
    return LoggedRun(
        runs[0].epoch,
        runs[0].first,
        runs[-1].last,
        max(run.latest_ns for run in runs),
        body,
        b"".join(run.private for run in runs) if private else body,
        any(run.keyless for run in runs),
    )


def encode(run: LoggedRun, so_far_ns: int, stamp: int) -> bytes:
    """The record. ``so_far_ns``: the latest time of this run and all before it. ``stamp``: the log's clock."""
    private = run.private is not run.body
    digest = xxhash.xxh3_128(run.body)
    if private:
        digest.update(run.private)
    fields = _FIELDS.pack(
        _VERSION,
        _PRIVATE * private | _KEYLESS * run.keyless,
        0,
        len(run.body),
        len(run.private) if private else 0,
        0,
        run.last,
        run.epoch,
        run.latest_ns,
        so_far_ns,
        stamp,
        digest.digest(),
    )
    return b"".join((fields, _check(run.first, fields), run.body, run.private if private else b""))


def decode_head(first: int, record: bytes | memoryview) -> Head | None:
    """None for one that is damaged, or of a version that this daemon does not know."""
    fields = bytes(record[: _FIELDS.size])
    if len(fields) < _FIELDS.size or record[_FIELDS.size : HEAD_BYTES] != _check(first, fields):
        return None
    version, flags, _, body, private, _, last, epoch, latest_ns, so_far_ns, stamp, digest = _FIELDS.unpack(fields)
    if version != _VERSION or last < first:
        return None
    private_bytes = private if flags & _PRIVATE else None
    return Head(last, epoch, latest_ns, so_far_ns, stamp, body, private_bytes, bool(flags & _KEYLESS), digest)


def decode(first: int, record: bytes | memoryview) -> LoggedRun | None:
    """The run, None for a record that is damaged."""
    head = decode_head(first, record)
    if head is None or len(record) != HEAD_BYTES + head.body_bytes + (head.private_bytes or 0):
        return None
    if xxhash.xxh3_128_digest(record[HEAD_BYTES:]) != head.digest:
        return None
    end = HEAD_BYTES + head.body_bytes
    body = bytes(record[HEAD_BYTES:end])
    private = body if head.private_bytes is None else bytes(record[end:])
    return LoggedRun(head.epoch, first, head.last, head.latest_ns, body, private, head.keyless)


def _check(first: int, fields: bytes) -> bytes:
    return _CHECK.pack(xxhash.xxh3_64_intdigest(_KEY.pack(first) + fields))
