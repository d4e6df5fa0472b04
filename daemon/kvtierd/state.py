"""Event ids that stay unique over restarts and crashes of the daemon."""

from __future__ import annotations

import logging
import secrets
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, Self

from kvtierd.tiers.base import DamagedDirectory, ForeignDirectory
from kvtierd.tiers.disk import superblock

_log = logging.getLogger(__name__)

LIFE_IDS: Final = 1 << 44
"""Ids reserved for a life before it begins: five years of 100,000 events a second. After a crash, the next life begins
above them, so that nothing is written while ids are given out."""

LOCK: Final = "LOCK"
EVENT_LOG: Final = "events"
"""The event log's directory, which may exist without a state: :meth:`StateDir.begin` regards the ids in it."""
_KIND: Final = "state"
_NOT_FOREIGN: Final = frozenset(
    {LOCK, EVENT_LOG, f"{superblock.SUPERBLOCK}.new", f"{superblock.SUPERBLOCK}.old", "lost+found"}
)


@dataclass(slots=True, frozen=True)
class Identity:
    """A life of the daemon. ``boot`` rises with every start and is never below the start's epoch.

    ``epoch_first``: the epoch's first event id. ``last``: no id above it was given out before. ``history``: a random
    number that tells apart the ids of different state directories. ``clean``: the life before ended by a clean stop. In
    the superblock, ``clean`` and ``last`` tell of the life itself, and ``last`` is the last reserved id if it did not.
    """

    epoch: int
    boot: int
    epoch_first: int
    last: int
    clean: bool
    history: int

    @property
    def unclean(self) -> bool:
        return not self.clean

    def next(self) -> Identity:
        """The life after this one, as the superblock tells it."""
        epoch, first = (self.epoch + 1, self.last + 1) if self.unclean else (self.epoch, self.epoch_first)
        return replace(self, epoch=epoch, boot=max(self.boot + 1, epoch), epoch_first=first)


class StateDir:
    """The state directory, held by this process alone. ``identity`` is final after :meth:`begin`."""

    def __init__(self, path: Path, lock: superblock.DirectoryLock, identity: Identity) -> None:
        self.identity = identity
        self._path = path
        self._lock = lock

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
                before = Identity(1, boot=0, epoch_first=1, last=0, clean=True, history=secrets.randbits(63))
                _write(path, before)
            return cls(path, lock, before.next())
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
            last = max(before.last, logged_last + LIFE_IDS)
            epoch = max(epoch_before, logged_epoch) + 1
            self.identity = Identity(epoch, max(before.boot, epoch), last + 1, last, False, before.history)
        _write(self._path, replace(self.identity, last=self.identity.last + LIFE_IDS, clean=False))

    def close(self, last: int | None) -> None:
        """Releases the directory. ``last``: the last id given out, if the stop was clean."""
        if last is not None:
            _write(self._path, replace(self.identity, last=last, clean=True))
        self._lock.release()


def _read(path: Path) -> Identity | None:
    # Listed before the superblock is read: another daemon may be taking the directory meanwhile.
    others = sorted(entry.name for entry in path.iterdir() if entry.name not in _NOT_FOREIGN)
    content = superblock.read_superblock(path, _KIND)
    if content is None:
        # A fresh start beside files of an earlier life would give out its ids again.
        if others and superblock.SET_ASIDE not in others:
            raise ForeignDirectory(path, f"holds {', '.join(others[:3])} but no {superblock.SUPERBLOCK} of kvtier's")
        return None
    expected = {name: bool if name == "clean" else int for name in Identity.__dataclass_fields__}
    if {name: type(value) for name, value in content.items()} != expected:
        raise DamagedDirectory(path, f"its {superblock.SUPERBLOCK} lacks fields of a state")
    return Identity(**content)


def _write(path: Path, life: Identity) -> None:
    with superblock.io_errors(f"cannot write the state directory {path}"):
        superblock.write_superblock(path, _KIND, asdict(life))
