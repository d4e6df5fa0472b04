"""The event loop's side of the log: takes runs, returns past events, and reports the log's status.

A thread writes the runs. Waiting runs are bounded: if the disk cannot follow, the log loses the oldest runs. The loop
never waits for the disk.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, TypeVar

from kvtierd.event_log.run import EventRun
from kvtierd.event_log.segments import LogSegments
from kvtierd.tiers.disk.superblock import io_errors

LEAST_WAITING_BYTES: Final = 4 << 20
LINGER_S: Final = 0.1
"""Time that runs wait for further runs, since each write costs a sync of the disk. A kill loses the waiting runs."""
RETRY_S: Final = 1.0
_GROUP_BYTES: Final = 1 << 20

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class LogStatus:
    """``oldest``, ``newest``: first and last id in the log; 0 = none. ``lost``: number of events since the daemon's
    start that the log has lost. ``failing``: why the log cannot be written at present, or None."""

    max_bytes: int
    used_bytes: int
    oldest: int
    newest: int
    oldest_age_ns: int
    failures: int
    lost: int
    failing: str | None


class EventLog:
    """The event log, from :meth:`open` to :meth:`close`. Loop thread only, except for the writing thread."""

    def __init__(self, segments: LogSegments, waiting_bytes: int) -> None:
        self._segments: Final = segments
        self._waiting_bytes: Final = waiting_bytes
        self._epoch_first = 0
        self._changed: Final = threading.Condition()
        self._waiting: Final[deque[EventRun]] = deque()
        self._size = 0
        self._writing = 0
        """Number of waiting runs that are being written."""
        self._stopping = False
        self._failures = self._lost = 0
        self._failing: str | None = None
        self._thread: Final = threading.Thread(target=self._run, name="kvtierd-log", daemon=True)

    @classmethod
    def open(cls, path: Path, max_bytes: int, waiting_bytes: int) -> Self:
        """Opens a log. ``path``: the log's own directory, made if missing. ``waiting_bytes``: limit of runs that wait
        for the disk. Raises TierIOError."""
        with io_errors(f"cannot use the event log {path}"):
            return cls(LogSegments(path, max_bytes), waiting_bytes)

    @property
    def known(self) -> tuple[int, int]:
        """The newest epoch and the last id in the log; 0 = none."""
        files = self._segments.files
        return files[-1].epoch if files else 0, self._segments.last

    def start(self, epoch_first: int) -> None:
        """``epoch_first``: the first id of the epoch of all runs to come."""
        self._epoch_first = epoch_first
        self._thread.start()

    def offer(self, run: EventRun) -> int:
        """Takes the next run. Returns the last id up to which all events are in the log or lost to the log."""
        with self._changed:
            self._waiting.append(run)
            self._size += run.size
            while self._size > self._waiting_bytes and len(self._waiting) > self._writing + 1:
                self._lost += len(self._waiting[self._writing])
                self._size -= self._waiting[self._writing].size
                del self._waiting[self._writing]
            self._changed.notify()
            return self._waiting[0].first - 1

    @property
    def oldest(self) -> int | None:
        """The first id in the log; None if it is empty."""
        files = self._segments.files
        return files[0].first if files else None

    @property
    def compacted(self) -> tuple[int, int]:
        """The last id that was deleted for size (0 = none), and the latest time of an event up to this id."""
        files = self._segments.files
        return (files[0].before, files[0].before_ns) if files else (0, 0)

    @property
    def epochs(self) -> list[tuple[int, int]]:
        """First id and number of each epoch with events in the log, in order."""
        return sorted({(each.epoch_first, each.epoch) for each in self._segments.files})

    async def after(self, cursor: int, max_bytes: int, max_events: int) -> EventRun | None:
        """See :meth:`LogSegments.read`. None also if the log cannot be read."""
        return await self._read(lambda: self._segments.read(cursor, max_bytes, max_events))

    async def since(self, time_ns: int) -> int | None:
        """See :meth:`LogSegments.since`. None also if the log cannot be read."""
        return await self._read(lambda: self._segments.since(time_ns))

    def status(self) -> LogStatus:
        files = self._segments.files
        return LogStatus(
            max_bytes=self._segments.max_bytes,
            used_bytes=self._segments.used_bytes,
            oldest=self.oldest or 0,
            newest=self._segments.last,
            oldest_age_ns=max(0, time.time_ns() - files[0].began_ns) if files else 0,
            failures=self._failures,
            lost=self._lost,
            failing=self._failing,
        )

    async def finish(self, timeout_s: float) -> None:
        """Writes the waiting runs and ends the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join, timeout_s)
        if self._waiting:
            _log.warning("the last events are not in the log why=%r", self._failing or "the disk is slow")

    def close(self) -> None:
        """Closes the files, unless the thread still uses them."""
        if not self._thread.is_alive():
            self._segments.close()

    async def _read(self, what: Callable[[], T | None]) -> T | None:
        try:
            return await asyncio.to_thread(what)
        except OSError as error:
            _log.warning("the event log cannot be read why=%r", str(error))
            return None

    def _run(self) -> None:
        """Writes runs until the log stops, in the thread."""
        while group := self._next_group():
            try:
                self._segments.append(group, self._epoch_first)
            except Exception as error:  # noqa: BLE001  a disk fault or a bug: logged and retried
                self._note_failure(str(error))
            else:
                self._note_written(group)

    def _next_group(self) -> list[EventRun]:
        """Returns the runs of the next write. Empty if the log stops and no run waits, or the log fails."""
        with self._changed:
            if self._failing is not None:
                self._changed.wait_for(lambda: self._stopping, RETRY_S)
                if self._stopping:
                    return []
            self._changed.wait_for(lambda: self._waiting or self._stopping)
            self._changed.wait_for(lambda: self._size >= _GROUP_BYTES or self._stopping, LINGER_S)
            group: list[EventRun] = []
            size = 0
            for run in self._waiting:
                size += run.size
                if group and size > _GROUP_BYTES:
                    break
                group.append(run)
            self._writing = len(group)
            return group

    def _note_written(self, group: list[EventRun]) -> None:
        with self._changed:
            for run in group:
                self._waiting.popleft()
                self._size -= run.size
            self._writing = 0
        if self._failing is not None:
            _log.warning("events are logged again lost=%d", self._lost)
            self._failing = None

    def _note_failure(self, reason: str) -> None:
        if self._failing is None:
            _log.warning("events cannot be logged why=%r", reason)
        with self._changed:
            self._writing = 0
        self._failures, self._failing = self._failures + 1, reason
