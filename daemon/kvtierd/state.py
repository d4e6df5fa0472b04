"""Event ids that stay unique over restarts and crashes of the daemon."""

from __future__ import annotations

import logging
import secrets
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Self

from kvtierd.core.events import EventSequencer
from kvtierd.tiers.base import DamagedDirectory, ForeignDirectory
from kvtierd.tiers.disk import superblock

_log = logging.getLogger(__name__)


class DurableSequencer(EventSequencer):
    """Gives out ids up to the state directory's mark, which a thread moves ahead of need."""

    def __init__(self, state: StateDir) -> None:
        super().__init__(state.identity.last)
        self._state = state
        self._sure = self._last

    def _extend(self) -> None:
        state, half = self._state, self._state.reserved_ids // 2
        if state.mark <= self._last:
            # The thread is late or has failed. An id above the mark must not be given out, so the loop has to wait.
            state.reserve(self._last + state.reserved_ids)
        elif state.mark - half <= self._last:
            threading.Thread(target=self._reserve_ahead, name="kvtierd-ids", daemon=True).start()
        soon = min(state.mark, self._last + state.reserved_ids // 16)  # a failing disk is not asked again for every id
        self._sure = max(state.mark - half, soon)

    def _reserve_ahead(self) -> None:
        try:
            self._state.reserve(self._state.mark + self._state.reserved_ids)
        except Exception:  # noqa: BLE001  the reserve in _extend() meets the same error, and raises it
            _log.exception("cannot reserve event ids ahead")


RESERVED_IDS: Final = 1 << 20
"""Ids reserved at a time. When half of them are left, the next are reserved."""

LOCK: Final = "LOCK"
EVENT_LOG: Final = "events"
"""The event log's directory, which may exist without a state: :meth:`StateDir.begin` regards the ids in it."""
_KIND: Final = "state"
_NOT_FOREIGN: Final = frozenset(
    {LOCK, EVENT_LOG, f"{superblock.SUPERBLOCK}.new", f"{superblock.SUPERBLOCK}.old", "lost+found"}
)


@dataclass(slots=True, frozen=True)
class State:
    """The content of the superblock. ``boot`` rises with every start and is never below the start's epoch.

    ``epoch_first``: the epoch's first event id. ``last``: no id above it has been given out; exact if ``clean``, else a
    mark reserved ahead. ``history``: a random number that tells apart the ids of different state directories.
    """

    epoch: int
    boot: int
    epoch_first: int
    last: int
    clean: bool
    history: int


@dataclass(slots=True, frozen=True)
class Identity:
    """The daemon's present life, and how it began. ``unclean``: the life before did not end by a clean stop."""

    epoch: int
    boot: int
    epoch_first: int
    last: int
    unclean: bool
    history: int


class StateDir:
    """The state directory, held by this process alone. :meth:`reserve` may be called from any thread.

    ``identity`` is final after :meth:`begin`."""

    def __init__(self, path: Path, lock: superblock.DirectoryLock, identity: Identity) -> None:
        self.identity = identity
        self.reserved_ids = RESERVED_IDS
        self._path = path
        self._lock = lock
        self._mark = identity.last
        self._writing = threading.Lock()

    @classmethod
    def open(cls, path: Path) -> Self:
        """Takes the directory; :meth:`begin` then begins the life that ``identity`` describes. A new directory gets its
        superblock before any other file, so a killed first start leaves a directory that the next start accepts.

        Raises LockedDirectory, ForeignDirectory, DamagedDirectory, TierIOError.
        """
        with superblock.io_errors(f"cannot use the state directory {path}"):
            if path.is_dir():
                _read(path)  # refuse a foreign directory before the lock, which would leave a file there
            superblock.make_private_directory(path)
            lock = superblock.DirectoryLock.take(path / LOCK)
        try:
            before = _read(path)
            if before is None:
                # Of a new directory: no life has begun, and no id has been given out.
                before = State(epoch=1, boot=0, epoch_first=1, last=0, clean=True, history=secrets.randbits(63))
                _write(path, before)
            return cls(path, lock, _next_life(before))
        except BaseException:
            lock.release()
            raise

    def begin(self, logged_epoch: int = 0, logged_last: int = 0) -> None:
        """Begins this life: unless it is closed with a last id, it ends uncleanly. Raises TierIOError.

        ``logged_epoch``, ``logged_last``: the newest in the event log. If they are ahead of the state, an old state was
        restored: this life begins as after an unclean stop, above every id that may have been given out.
        """
        before = self.identity
        epoch_before = before.epoch - 1 if before.unclean else before.epoch
        if logged_epoch > epoch_before or logged_last > before.last:
            _log.warning(
                "the state is older than the event log: a new epoch begins state=%d:%d log=%d:%d",
                *(epoch_before, before.last, logged_epoch, logged_last),
            )
            last = max(before.last, logged_last + self.reserved_ids)
            epoch = max(epoch_before, logged_epoch) + 1
            self.identity = Identity(epoch, max(before.boot, epoch), last + 1, last, True, before.history)
            self._mark = last
        self.reserve(self.identity.last + self.reserved_ids)

    @property
    def mark(self) -> int:
        """The highest id that may be given out; until :meth:`begin`, the mark of the life before."""
        return self._mark

    def reserve(self, mark: int) -> None:
        """Raises the mark; durable when this returns. Blocks; raises TierIOError."""
        with self._writing:
            if mark > self._mark:
                self._store(mark)

    def close(self, last: int | None) -> None:
        """Releases the directory. ``last``: the last id given out, if the stop was clean."""
        with self._writing:
            if last is not None:
                self._store(last, clean=True)
            self._lock.release()

    def _store(self, last: int, *, clean: bool = False) -> None:
        life = self.identity
        _write(self._path, State(life.epoch, life.boot, life.epoch_first, last, clean, life.history))
        self._mark = last


def _next_life(before: State) -> Identity:
    epoch = before.epoch if before.clean else before.epoch + 1
    first = before.epoch_first if before.clean else before.last + 1
    return Identity(epoch, max(before.boot + 1, epoch), first, before.last, not before.clean, before.history)


def _read(path: Path) -> State | None:
    # Listed before the superblock is read: another daemon may be taking the directory meanwhile.
    others = sorted(entry.name for entry in path.iterdir() if entry.name not in _NOT_FOREIGN)
    content = superblock.read_superblock(path, _KIND)
    if content is None:
        # A fresh start beside files of an earlier life would give out its ids again.
        if others and superblock.SET_ASIDE not in others:
            raise ForeignDirectory(path, f"holds {', '.join(others[:3])} but no {superblock.SUPERBLOCK} of kvtier's")
        return None
    expected = {name: bool if name == "clean" else int for name in State.__dataclass_fields__}
    if {name: type(value) for name, value in content.items()} != expected:
        raise DamagedDirectory(path, f"its {superblock.SUPERBLOCK} lacks fields of a state")
    return State(**content)


def _write(path: Path, state: State) -> None:
    with superblock.io_errors(f"cannot write the state directory {path}"):
        superblock.write_superblock(path, _KIND, asdict(state))
