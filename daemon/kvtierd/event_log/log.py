"""The log as the loop sees it: takes what is handed over, is asked for what was, and says how it is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, TypeVar

from kvtierd.event_log.clock import Clocks
from kvtierd.event_log.directory import history_of, note_history, open_store
from kvtierd.event_log.runs import LoggedRun
from kvtierd.event_log.store import EventStore, Extent
from kvtierd.event_log.writer import LogWriter
from kvtierd.tiers.base import TierError

_T = TypeVar("_T")

_log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class LogStatus:
    """``newest``: the last id that is in the log; ``oldest``: the first; 0 = none. ``lost``: events of this life that
    never will be. ``failing``: why it does not work at present, or None."""

    max_bytes: int
    used_bytes: int
    oldest: int
    newest: int
    oldest_age_ns: int
    failures: int
    lost: int
    failing: str | None


class EventLog:
    """Opened before the daemon's life begins, since what is logged was given out; :meth:`begin` then tells the life.

    Reads take turns in one thread, a piece each: whoever catches up waits for the others' pieces, and nobody else does.
    """

    def __init__(self, path: Path, max_bytes: int, max_age_ns: int, clocks: Clocks, history: int) -> None:
        self._path: Final = path
        self._max_bytes: Final = max_bytes
        self._max_age_ns: Final = max_age_ns
        self._clocks: Final = clocks
        self._history = history
        self._store: EventStore | None = None
        self._heeded = False
        """Its ids were known before the present life gave out any, or are the present life's."""
        self._fault: str | None = None
        self._writer: LogWriter | None = None
        self._reads: Final = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvtierd-past")

    @classmethod
    def open(
        cls, path: Path, max_bytes: int, max_age_ns: int, clocks: Clocks | None = None, *, history: int = 0
    ) -> Self:
        """``path``: a directory of its own, made if it is missing. ``max_bytes``: of its file. ``history``: that of the
        state, 0 = it has none yet; a log of another is set aside. One that cannot be opened is tried again later: see
        :meth:`status`."""
        log = cls(path, max_bytes, max_age_ns, clocks or Clocks.of_system(), history)
        try:
            log._store = open_store(path, max_bytes, max_age_ns, log._clocks, lambda store: log._of_another())
            log._history = history or history_of(path)
            log._heeded = True
        except TierError as error:
            log._fault = str(error)
        return log

    @property
    def known(self) -> tuple[int, int, int]:
        """The newest epoch and the last id of which the log has seen anything, and their history; zeros where it has
        seen nothing."""
        if self._store is None:
            return 0, 0, 0
        return self._store.last_epoch, self._store.extent.place.last, self._history

    def begin(self, epoch: int, epoch_first: int, last: int, waiting_bytes: int, *, history: int = 0) -> None:
        """A life whose ids are above ``last``, of ``history``. ``waiting_bytes``: of events, may wait for the disk."""
        self._history = history

        def unfit(store: EventStore) -> str | None:
            if (other := self._of_another()) is not None:
                return other
            if (damage := self._damage_met()) is not None:
                return damage
            ahead = store.extent.place.last > last or store.last_epoch > epoch
            return "it knows of ids that the present life may give out again" if ahead and not self._heeded else None

        def reopen() -> EventStore:
            store = open_store(self._path, self._max_bytes, self._max_age_ns, self._clocks, unfit)
            try:
                note_history(self._path, history)
            except TierError:
                store.close()
                raise
            self._heeded = True
            return store

        if self._store is not None:
            try:
                note_history(self._path, history)
            except TierError as error:
                self._store.close()
                self._store, self._fault = None, str(error)

        self._writer = LogWriter(reopen, self._store, epoch_first, waiting_bytes)
        if self._fault is not None:
            self._writer.note_failure(self._fault)
        self._writer.start()

    def _damage_met(self) -> str | None:
        """Once for each store: what is set aside for it is not what is opened next."""
        before = self._living.store
        if before is None or before.damage is None:
            return None
        damage, before.damage = before.damage, None
        return f"it is damaged: {damage}"

    def _of_another(self) -> str | None:
        theirs = history_of(self._path)
        return "its events are of another history" if self._history and theirs not in (0, self._history) else None

    def offer(self, run: LoggedRun) -> None:
        """The next run, to be logged soon."""
        self._living.offer(run)

    def begin_epoch(self, first: int) -> None:
        """Runs from this id on are of another epoch."""
        self._living.begin_epoch(first)

    @property
    def extent(self) -> Extent | None:
        """None while it cannot be opened."""
        store = self._store if self._writer is None else self._writer.store
        return None if store is None else store.extent

    def waiting_above(self, cursor: int) -> LoggedRun | None:
        """See :meth:`LogWriter.waiting_above`. To be asked before :meth:`after`: what waits no more is in the log."""
        return self._living.waiting_above(cursor)

    def waiting_since(self, time_ns: int) -> int | None:
        """See :meth:`LogWriter.waiting_since`. To be asked before :meth:`since`."""
        return self._living.waiting_since(time_ns)

    async def after(self, cursor: int, max_bytes: int) -> LoggedRun | None:
        """See :meth:`EventStore.after`; None also where it cannot be read."""
        return await self._read(lambda store: store.after(cursor, max_bytes))

    async def since(self, time_ns: int) -> int | None:
        """See :meth:`EventStore.since`; None also where it cannot be read."""
        return await self._read(lambda store: store.since(time_ns))

    def status(self) -> LogStatus:
        writer = self._living
        store = writer.store
        extent = None if store is None else store.extent
        return LogStatus(
            max_bytes=self._max_bytes,
            used_bytes=0 if extent is None else extent.used_bytes,
            oldest=0 if extent is None else extent.oldest or 0,
            newest=0 if extent is None or extent.oldest is None else extent.place.last,
            oldest_age_ns=0 if store is None else store.oldest_age_ns,
            failures=writer.failures,
            lost=writer.lost,
            failing=writer.trouble,
        )

    async def flush(self, timeout_s: float) -> bool:
        """Logs what waits, and takes no more. False if that is not done in time, or failed."""
        done = await asyncio.to_thread(self._living.finish, timeout_s)
        if not done:
            _log.warning("the last events are not in the log why=%r", self._living.trouble or "the disk is slow")
        return done

    def close(self) -> None:
        """Lets go of it, unless a thread still uses it: then the end of the process does."""
        self._reads.shutdown(wait=False, cancel_futures=True)
        if self._writer is not None:
            self._writer.close()
        elif self._store is not None:
            self._store.close()

    @property
    def _living(self) -> LogWriter:
        if self._writer is None:
            raise RuntimeError("the log has not begun")
        return self._writer

    async def _read(self, what: Callable[[EventStore], _T | None]) -> _T | None:
        store = self._living.store
        if store is None or store.dead:
            return None
        try:
            return await asyncio.get_running_loop().run_in_executor(self._reads, what, store)
        except TierError as error:
            _log.warning("the event log cannot be read why=%r", str(error))
            return None
