"""The thread that carries events from the loop to the log.

The loop only puts a run's bytes, which the hub's ring holds as well, on a list. What waits there is bounded like the
ring: where the disk cannot follow, the oldest goes, and is a hole in the log. Nobody ever waits for the disk.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from kvtierd.event_log.backlog import Backlog
from kvtierd.event_log.runs import LoggedRun
from kvtierd.event_log.store import EventStore
from kvtierd.tiers.base import TierError

LINGER_S: Final = 0.1
"""Runs wait so long for company: a transaction costs a sync of the disk. A kill loses what came meanwhile."""
GROUP_BYTES: Final = 1 << 20
"""But not once there are so many bytes; a transaction takes about so much."""
LEAST_WAITING_BYTES: Final = 4 << 20
"""So much may wait for the disk however small the ring is, or each of its syncs would cost events."""
STUCK_S: Final = 5.0
"""A write that takes longer is named as a trouble."""
TIDY_S: Final = 60.0
"""How often a quiet log looks whether something has become too old."""
FIRST_RETRY_S: Final = 0.25
LAST_RETRY_S: Final = 10.0

_log = logging.getLogger(__name__)


class LogWriter:
    """Works from :meth:`start` to :meth:`finish`. Where it has no store its thread asks ``open_store`` for one."""

    def __init__(
        self, open_store: Callable[[], EventStore], store: EventStore | None, epoch_first: int, waiting_bytes: int
    ) -> None:
        """``epoch_first``: the first id of the epoch of the runs to come. ``waiting_bytes``: at most wait for the
        disk."""
        self.store = store
        self.failing: str | None = None
        """Why the last attempt failed, as long as none has worked since."""
        self.failures = 0
        self.lost = 0
        """Events of this life that will not be in the log."""
        self._open_store: Final = open_store
        self._epoch_firsts = [epoch_first]
        """Of the epochs of this life, in order."""
        self._waiting: Final = Backlog(waiting_bytes)
        self._under_way = 0
        """Up to this id the transaction takes that is being made."""
        self._began: float | None = None
        """When that was handed to the disk; None between transactions."""
        self._stopping = False
        self._changed: Final = threading.Condition()
        self._thread: Final = threading.Thread(target=self._work, name="kvtierd-event-log", daemon=True)

    @property
    def trouble(self) -> str | None:
        """Why nothing is logged at present: the last attempt failed, or the disk does not answer."""
        began = self._began
        if began is not None and (stuck_s := time.monotonic() - began) > STUCK_S:
            return f"the disk has not answered for {stuck_s:.0f} s"
        return self.failing

    def start(self) -> None:
        self._thread.start()

    def finish(self, timeout_s: float) -> bool:
        """Blocks until all that waits is logged, or has failed once more. False unless all of it is logged."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and not self._waiting

    def close(self) -> None:
        """After :meth:`finish`: closes the store, unless the thread still uses it."""
        if self.store is not None and not self._thread.is_alive():
            self.store.close()

    def offer(self, run: LoggedRun) -> None:
        """Takes a run, whose ids are above all before. Waits for no more than another thread's few instructions."""
        with self._changed:
            before = self._waiting.bytes
            for gone in self._waiting.append(run):
                if gone.last > self._under_way:
                    self.lost += gone.count
            if not before or before < GROUP_BYTES <= self._waiting.bytes:
                self._changed.notify()

    def begin_epoch(self, first: int) -> None:
        """Runs from this id on are of another epoch."""
        with self._changed:
            self._epoch_firsts.append(first)

    def waiting_above(self, cursor: int) -> LoggedRun | None:
        """Of what is not known to be in the log yet, the first run with an id above ``cursor``."""
        with self._changed:
            return self._waiting.above(cursor)

    def waiting_since(self, time_ns: int) -> int | None:
        """Of the same, the first id of an event at or after that time."""
        with self._changed:
            run = next((run for run in self._waiting if run.latest_ns >= time_ns), None)
        return None if run is None else run.first_at(time_ns)

    def note_failure(self, reason: str) -> None:
        self.failures += 1
        if self.failing is None:
            _log.warning("events cannot be logged; serving goes on why=%r", reason)
        self.failing = reason

    def _work(self) -> None:
        retry_s = FIRST_RETRY_S
        try:
            while True:
                stopping = self._wait()
                try:
                    self._log_some()
                    retry_s = FIRST_RETRY_S
                    if stopping and not self._waiting:
                        return
                except TierError as error:
                    self.note_failure(str(error))
                    if stopping:
                        return
                    with self._changed:
                        self._changed.wait_for(lambda: self._stopping, retry_s)
                    retry_s = min(2 * retry_s, LAST_RETRY_S)
        except Exception as error:  # noqa: BLE001  our bug: the daemon serves on, and says that its log does not
            _log.exception("the event log has stopped")
            self.note_failure(f"the log has stopped: {error}")

    def _wait(self) -> bool:
        """Until there is something to log, or nothing was for a while. Whether this is the end."""
        with self._changed:
            if self._changed.wait_for(lambda: self._waiting or self._stopping or self.failing, TIDY_S):
                self._changed.wait_for(lambda: self._waiting.bytes >= GROUP_BYTES or self._stopping, LINGER_S)
            return self._stopping

    def _log_some(self) -> None:
        """One transaction. Raises :class:`TierError`."""
        if self.store is None or self.store.dead:
            self.store = self._open_store()
            with self._changed:  # of a commit that failed at its very end it is not known whether it counts
                self._waiting.drop_up_to(self.store.extent.place.last)
        group = self._next_group(min(GROUP_BYTES, self.store.most_at_once))
        if group:
            self._log_group(self.store, group)
        else:
            while not self._pressed() and self.store.tidy():
                pass  # piece by piece
        if self.failing is not None:
            _log.warning("events are logged again lost=%d", self.lost)
            self.failing = None

    def _log_group(self, store: EventStore, group: list[LoggedRun]) -> None:
        self._began = time.monotonic()
        try:
            epoch_first = next(first for first in reversed(self._epoch_firsts) if first <= group[0].first)
            too_long = store.append(group, epoch_first)
        except BaseException:
            with self._changed:
                first = next((run.first for run in self._waiting), self._under_way + 1)
                self.lost += sum(run.count for run in group if run.last < first)
                self._under_way = 0
            raise
        finally:
            self._began = None
        with self._changed:
            self._waiting.drop_up_to(group[-1].last)
            self.lost += too_long
            self._under_way = 0

    def _next_group(self, max_bytes: int) -> list[LoggedRun]:
        """What the next transaction takes. It waits on, where readers find it, until that has committed."""
        group: list[LoggedRun] = []
        size = 0
        with self._changed:
            for run in self._waiting:
                size += run.size
                if group and (size > max_bytes or run.epoch != group[0].epoch):
                    break
                group.append(run)
            self._under_way = group[-1].last if group else 0
        return group

    def _pressed(self) -> bool:
        with self._changed:
            return bool(self._waiting) or self._stopping
