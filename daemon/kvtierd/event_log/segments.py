"""The files of the log: records of runs, appended to the newest file; the oldest files are deleted for size.

A file has events of one epoch, from one life of the daemon. So a write that a kill cut short is at the end of a file
that gets no more writes. A file is read up to a damaged record; the ids from there on are missing.
"""

from __future__ import annotations

import logging
import os
import struct
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from kvtierd.event_log.run import HEAD_BYTES, EventRun, Head, checked, decode_head, encode, joined
from kvtierd.tiers.disk.superblock import NotAFile, make_private_directory, open_file, refuse_link, sync_directory

_HEADER: Final = struct.Struct("<8sQQQQQQ")
_HEADER_BYTES: Final = len(checked(bytes(_HEADER.size)))
_MAGIC: Final = b"kvtevts1"
_SUFFIX: Final = ".events"
_PARTS: Final = 16
"""Number of parts in which the log is deleted."""
_LEAST_SEGMENT: Final = 64 << 10
_MOST_SEGMENTS: Final = 256
"""Limit of files: each start of the daemon begins a file."""
_MOST_PLACES: Final = 256

_log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Segment:
    """A file of the log.

    ``first``: the first id in the file. ``epoch_first``: the first id of its epoch. ``before``: the last id in the log
    before this file, 0 = none. ``before_ns``: the latest time of an event up to ``before``. ``began_ns``: creation
    time. ``size``: of the readable part.
    """

    path: Path
    first: int
    epoch: int
    epoch_first: int
    before: int
    before_ns: int
    began_ns: int
    size: int

    def header(self) -> bytes:
        fields = (self.first, self.epoch, self.epoch_first, self.before, self.before_ns, self.began_ns)
        return checked(_HEADER.pack(_MAGIC, *fields))


class LogSegments:
    """All files of a log. One thread appends; any thread reads, from a snapshot of the list of files."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Reads the headers of all files, and the heads in the last file. Raises OSError."""
        refuse_link(path)
        make_private_directory(path)
        self.max_bytes: Final = max_bytes
        self._segment_bytes: Final = max(max_bytes // _PARTS, _LEAST_SEGMENT)
        self._path: Final = path
        self.files: tuple[Segment, ...] = tuple(filter(None, map(_opened, sorted(path.glob(f"*{_SUFFIX}")))))
        self.last, self._latest_ns = 0, 0
        """The last id in the log, and the latest time of an event up to this id."""
        if self.files:
            self.last, self._latest_ns = self.files[-1].before, self.files[-1].before_ns
            for head, _ in _heads(self.files[-1]):
                self.last, self._latest_ns = head.last, max(self._latest_ns, head.latest_ns)
        self._fd: int | None = None
        """Descriptor of the last file, if this life of the daemon made the file."""
        self._places: dict[int, tuple[Path, int]] = {}
        """File and offset of the record after an id, for ids at which a reader stopped."""

    @property
    def used_bytes(self) -> int:
        return sum(each.size for each in self.files)

    def append(self, runs: Sequence[EventRun], epoch_first: int) -> None:
        """Adds runs of one epoch, with ids above all before. Durable when this returns. Raises OSError if no run was
        added."""
        data = b"".join(map(encode, runs))
        whole = self._fd is not None and self.files[-1].size + len(data) > self._segment_bytes
        if self._fd is None or whole or self.files[-1].epoch != runs[0].epoch:
            self._begin(runs[0], epoch_first)
        assert self._fd is not None
        active = self.files[-1]
        try:
            self._make_room(len(data))
            _write(self._fd, data, active.size)
            os.fdatasync(self._fd)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._fd, active.size)
            self.close()
            raise
        self.last, self._latest_ns = runs[-1].last, max(self._latest_ns, *(run.latest_ns for run in runs))
        self.files = (*self.files[:-1], replace(active, size=active.size + len(data)))

    def read(self, cursor: int, max_bytes: int, max_events: int) -> EventRun | None:
        """Returns the oldest events above ``cursor``, without a gap: at most ``max_bytes`` and ``max_events``, but at
        least a record. The first ids may be at or below the cursor. None if there are no events. Raises OSError."""
        files = self.files
        for segment in files[max(0, bisect_right(files, cursor + 1, key=lambda each: each.first) - 1) :]:
            found: list[EventRun] = []
            size = events = at = 0
            for run, end in self._runs(segment, cursor):
                size, events = size + run.size, events + len(run)
                if found and (run.first != found[-1].last + 1 or size > max_bytes or events > max_events):
                    break
                found.append(run)
                at = end
            if found:
                if len(self._places) >= _MOST_PLACES:
                    self._places.clear()
                self._places[found[-1].last] = segment.path, at
                return joined(found)
        return None

    def since(self, time_ns: int) -> int | None:
        """The first id of an event at or after ``time_ns``, even if the clock was set back; None if all events are
        earlier. Raises OSError."""
        files = self.files
        for index, segment in enumerate(files):
            until_ns = files[index + 1].before_ns if index + 1 < len(files) else self._latest_ns
            for head, payload in _heads(segment) if until_ns >= time_ns else ():
                if head.latest_ns >= time_ns and (run := head.run(segment.epoch, payload())) is not None:
                    return run.first_at(time_ns)
        return None

    def close(self) -> None:
        """Closes the last file. The next run begins another file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _begin(self, run: EventRun, epoch_first: int) -> None:
        self.close()
        path = self._path / f"{run.first:020}{_SUFFIX}"
        before, before_ns = self.last, self._latest_ns
        began = Segment(path, run.first, run.epoch, epoch_first, before, before_ns, time.time_ns(), _HEADER_BYTES)
        fd = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            _write(fd, began.header(), 0)
            sync_directory(self._path)
        except OSError:
            os.close(fd)
            raise
        # an earlier file of the same name has no record: its first write failed
        self.files = (*(each for each in self.files if each.path != path), began)
        self._fd = fd

    def _make_room(self, incoming: int) -> None:
        """Deletes the oldest files to make room for ``incoming`` bytes."""
        while len(self.files) > 1 and (self.used_bytes + incoming > self.max_bytes or len(self.files) > _MOST_SEGMENTS):
            self.files[0].path.unlink(missing_ok=True)
            self.files = self.files[1:]

    def _runs(self, segment: Segment, cursor: int) -> Iterator[tuple[EventRun, int]]:
        """Yields runs with an id above ``cursor``, each with the offset of its end."""
        path, start = self._places.get(cursor, (segment.path, _HEADER_BYTES))
        offset = start if path == segment.path else _HEADER_BYTES
        for head, payload in _heads(segment, offset):
            offset += HEAD_BYTES + head.payload_bytes
            if head.last > cursor:
                run = head.run(segment.epoch, payload())
                if run is None:
                    return
                yield run, offset


def _opened(path: Path) -> Segment | None:
    """Opens a file of the log. None if the path is no file, or if the file's header is damaged; then the file is
    deleted."""
    try:
        with open(open_file(path, os.O_RDONLY), "rb") as file:
            data = file.read(_HEADER_BYTES)
            size = os.fstat(file.fileno()).st_size
    except NotAFile as error:
        _log.warning("left out of the event log: %s", error.strerror)
        return None
    if len(data) == _HEADER_BYTES:
        _, first, epoch, epoch_first, before, before_ns, began_ns = _HEADER.unpack_from(data)
        segment = Segment(path, first, epoch, epoch_first, before, before_ns, began_ns, size)
        if segment.header() == data:
            return segment
    _log.warning("a damaged file of the event log is deleted path=%s", path)
    path.unlink()
    return None


def _heads(segment: Segment, offset: int = _HEADER_BYTES) -> Iterator[tuple[Head, Callable[[], bytes]]]:
    """Yields sound heads in order, each with a function that reads its payload. Yields nothing for a deleted file."""
    with suppress(FileNotFoundError), open(open_file(segment.path, os.O_RDONLY), "rb") as file:
        while offset + HEAD_BYTES <= segment.size:
            file.seek(offset)
            head = decode_head(file.read(HEAD_BYTES))
            if head is None:
                return
            yield head, partial(file.read, head.payload_bytes)
            offset += HEAD_BYTES + head.payload_bytes


def _write(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
