"""The transactional truth of a store: an LMDB environment with the place of every block on disk.

A block without a record here is not stored, even if a slab holds its bytes. A single thread at a time may call.
"""

from __future__ import annotations

import errno
import faulthandler
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import lmdb

from kvtierd.core.ids import KEY_BYTES, GroupId, Key, SlotId
from kvtierd.tiers.base import DamagedDirectory, TierIOError
from kvtierd.tiers.disk import superblock
from kvtierd.tiers.disk.records import HEAD_BYTES, restated, sequence_key, slot_key

if TYPE_CHECKING:
    from lmdb import _Database
from kvtierd.core.ids import Traits

ENGINE: Final = 0
"""LMDB 0.9, never the library's default: LMDB 0.9 and 1.0 cannot read each other's files."""

DAMAGE: Final = (lmdb.InvalidError, lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.VersionMismatchError)
"""LMDB's errors at a damaged page."""
DATA: Final = "data.mdb"
_LOCK: Final = "lock.mdb"
OPEN: Final = "OPEN"
"""The file beside LMDB's that exists while a process has the environment open."""
_MOST_CRASHES: Final = 3
_TRACE: Final = b"Fatal Python error"
_opening: Final = threading.Lock()
MOST_INLINE: Final = 1990
"""Longest value that LMDB keeps inside a page."""
_BYTES_PER_SLOT: Final = 1024
_SPARE_BYTES: Final = 256
_COPIES: Final = 3
_PAGE: Final = 4096
_PAGE_HEADER: Final = 16
_NODE_OVERHEAD: Final = 48
_BASE_BYTES: Final = 8 << 20
_TOUCH_OVERHEAD: Final = 24
_log = logging.getLogger(__name__)


def index_bytes(slots: int, label_bytes: int = 0) -> int:
    """The map size for ``slots`` records of all groups together, with labels of ``label_bytes``.

    Random keys leave pages about two thirds full, and a value over half a page has pages of its own. A transaction may
    rewrite every record, and LMDB does not reuse pages freed by the last two transactions: hence three copies.
    """
    copies = _COPIES * _bytes_in_pages(HEAD_BYTES + label_bytes)
    return _BASE_BYTES + slots * max(_BYTES_PER_SLOT, copies + _SPARE_BYTES)


def _bytes_in_pages(value: int) -> int:
    """Bytes of a record in pages that are two thirds full."""
    if value > MOST_INLINE:
        return (value + _PAGE_HEADER + _PAGE - 1) // _PAGE * _PAGE + _NODE_OVERHEAD
    return _PAGE // max(1, (_PAGE - _PAGE_HEADER) * 2 // 3 // (value + _NODE_OVERHEAD))


@contextmanager
def opening(path: Path) -> Iterator[bool]:
    """Counts the crashes of this process while the LMDB environment at ``path`` is opened.

    LMDB has no checksums of its pages and aborts at a damaged page. Python's faulthandler then leaves a trace in the
    file OPEN; a kill leaves none.

    Yields: whether the last process has not closed the environment. The caller must then run :func:`read_pages`.
    Raises: :class:`DamagedDirectory` after three crashes in a row, :class:`TierIOError`.
    """
    marker = path / OPEN
    with ExitStack() as opened:
        opened.enter_context(_opening)
        with superblock.io_errors(f"cannot open {path}"):
            unclean = marker.exists()
            crashes = _content(marker).count(_TRACE) if unclean else 0
            if crashes >= _MOST_CRASHES:
                raise DamagedDirectory(path, f"LMDB has ended {crashes} processes that opened it: see {marker}")
            try:
                fd = superblock.open_file(marker, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            except OSError as error:  # a full disk has no room for a new file
                _log.warning("crashes are not counted path=%s why=%r", path, str(error))
                fd = os.open(os.devnull, os.O_WRONLY)
        opened.callback(os.close, fd)
        if not faulthandler.is_enabled():
            faulthandler.enable(fd)
            opened.callback(faulthandler.disable)
        try:
            yield unclean
        finally:
            with suppress(OSError):
                os.ftruncate(fd, 0)


def _content(marker: Path) -> bytes:
    with open(superblock.open_file(marker, os.O_RDONLY), "rb") as file:
        return file.read()


def read_pages(env: lmdb.Environment) -> None:
    """Reads every page, so that a damaged page ends this process while :func:`opening` counts. Raises lmdb.Error."""
    with env.begin() as txn:
        names = [bytes(name) for name, _ in txn.cursor()]
    for name in names:
        with env.begin(db=env.open_db(name, create=False)) as txn:
            for _ in txn.cursor():
                pass
    # A cursor does not see the list of free pages, which a commit reads; a copy does.
    with open(os.devnull, "wb") as nowhere, suppress(lmdb.IncompatibleError):  # pages without a reference
        env.copyfd(nowhere.fileno(), compact=True)


@dataclass(slots=True, frozen=True)
class StoredGroup:
    """The content of the index for a group, not decoded."""

    keys: Sequence[Key]
    records: Sequence[bytes]
    touches: Sequence[bytes]
    quarantined: frozenset[SlotId]


@dataclass(slots=True)
class _GroupDatabases:
    """The databases of a group. ``quarantined``: the slots in the database ``quarantine``."""

    records: _Database
    touches: _Database
    quarantine: _Database
    quarantined: set[SlotId] = field(default_factory=set)
    next_touch: int = 0
    touch_bytes: int = 0

    @classmethod
    def open(cls, env: lmdb.Environment, group: GroupId) -> Self:
        def database(name: str) -> _Database:
            return env.open_db(f"{name}-{group}".encode())

        opened = cls(database("records"), database("touches"), database("quarantine"))
        with env.begin() as txn:
            opened.quarantined.update(_slots(txn, opened.quarantine))
        return opened


class Index:
    def __init__(
        self, path: Path, groups: Sequence[GroupId], map_bytes: int, *, read_all: bool = False, durable: bool = False
    ) -> None:
        self._path = path
        self._durable = durable
        self._map_bytes = map_bytes
        self._ids = tuple(groups)
        self._env, self._groups = self._open(read_all=read_all)

    @classmethod
    def create(cls, path: Path, groups: Sequence[GroupId], map_bytes: int) -> None:
        """Makes an empty index and allocates its whole file, so that no later transaction finds the disk full. Raises
        :class:`TierIOError`."""
        with superblock.io_errors(f"cannot create {path}"), _lmdb_errors(f"cannot create {path}"):
            path.mkdir(superblock.PRIVATE_DIR)
            (path / DATA).touch(superblock.PRIVATE_FILE)
            (path / _LOCK).touch(superblock.PRIVATE_FILE)
            index = cls(path, groups, map_bytes)
            index.close()
            superblock.allocate(path / DATA, map_bytes)
            superblock.sync_directory(path)

    @classmethod
    def open(cls, path: Path, groups: Sequence[GroupId], map_bytes: int, *, durable: bool = False) -> Self:
        """Opens an index. Raises :class:`DamagedDirectory` for a file that is missing, short, damaged or not LMDB's,
        :class:`TierIOError`.

        A short file is refused here: LMDB reads through a mapping, and a read past the end of the file is a SIGBUS.
        """
        data = path / DATA
        with superblock.io_errors(f"cannot open {path}"):
            for each in (path, data, path / _LOCK, path / OPEN):  # LMDB itself opens through links
                superblock.refuse_link(each)
        if not data.is_file() or data.stat().st_size < map_bytes:
            raise DamagedDirectory(path, f"{DATA} is missing or shorter than {map_bytes} bytes")
        try:
            with opening(path) as unclean:
                index = cls(path, groups, map_bytes, read_all=unclean, durable=durable)
        except DAMAGE as error:
            raise DamagedDirectory(path, str(error)) from error
        except lmdb.Error as error:
            raise _tier_error(error, f"cannot open {path}") from error
        stale = index._env.reader_check()
        if stale:
            _log.info("%s: cleared %d readers that had died", path, stale)
        return index

    def load(self, group: GroupId) -> StoredGroup:
        """Reads the content for ``group``. Raises :class:`TierIOError`."""
        dbs = self._groups[group]
        with _lmdb_errors(f"cannot read {self._path}"), self._env.begin() as txn:
            items = list(_entries(txn, dbs.records, KEY_BYTES))
            touches = list(_entries(txn, dbs.touches, 8))
            quarantined = frozenset(_slots(txn, dbs.quarantine))
        dbs.next_touch = int.from_bytes(touches[-1][0], "big") + 1 if touches else 0
        dbs.touch_bytes = sum(len(value) + _TOUCH_OVERHEAD for _, value in touches)
        return StoredGroup(
            keys=[Key(key) for key, _ in items],
            records=[value for _, value in items],
            touches=[value for _, value in touches],
            quarantined=quarantined,
        )

    def touch_bytes(self, group: GroupId) -> int:
        """Approximate bytes of the group's log of touches in the map."""
        return self._groups[group].touch_bytes

    def commit(self, changes: Mapping[GroupId, IndexChanges]) -> None:
        """Commits all of ``changes`` or nothing. After the return, no end of this process undoes the commit; see
        :meth:`sync` for crashes of the system. Raises :class:`TierIOError`; the index stays usable.

        After an error of the medium it is unknown whether the changes were committed.
        """
        with _lmdb_errors(f"cannot commit to {self._path}"):
            try:
                self._commit(changes)
            except lmdb.PanicError:
                # A commit failed while it wrote the file's head: the environment is dead, and the file has either the
                # old state or the new.
                self._env.close()
                self._env, self._groups = self._open()
                for group in self._ids:
                    self.load(group)
                self._commit(changes)

    def sync(self) -> None:
        """Makes earlier commits durable over crashes of the system. Raises :class:`TierIOError`."""
        with _lmdb_errors(f"cannot sync {self._path}"):
            self._env.sync(True)

    def close(self) -> None:
        self._env.close()
        with suppress(OSError):  # if the file stays, the next start reads all pages
            (self._path / OPEN).unlink()

    def _open(self, *, read_all: bool = False) -> tuple[lmdb.Environment, dict[GroupId, _GroupDatabases]]:
        env = lmdb.open(
            str(self._path),
            map_size=self._map_bytes,
            max_dbs=3 * len(self._ids),
            max_readers=8,
            mode=superblock.PRIVATE_FILE,
            writemap=False,  # with writemap, a full disk is a SIGBUS
            # Unless durable, a commit syncs the transaction's pages, but its head only with the next commit or by
            # sync(): half the wait. A kill loses nothing. A crash of the system may undo the last transaction as a
            # whole, and, as LMDB promises, no more. A record that comes back so may have lost its bytes to another
            # block: its checksum tells.
            metasync=self._durable,
            sync=True,
            lib_version=ENGINE,
        )
        try:
            if read_all:
                read_pages(env)
            return env, {group: _GroupDatabases.open(env, group) for group in self._ids}
        except BaseException:
            env.close()  # a process may open a file of LMDB only once
            raise

    def _commit(self, changes: Mapping[GroupId, IndexChanges]) -> None:
        for group, change in changes.items():
            self._groups[group].quarantined.update(change.quarantine)
        with self._env.begin(write=True) as txn:
            for group, change in changes.items():
                _apply(txn, self._groups[group], change)
        for group, change in changes.items():
            dbs = self._groups[group]
            dbs.quarantined.difference_update(change.lift)
            if change.anew:
                dbs.touch_bytes = 0
            dbs.next_touch += len(change.touches)
            dbs.touch_bytes += sum(len(value) + _TOUCH_OVERHEAD for value in change.touches)


def _apply(txn: lmdb.Transaction[bytes], dbs: _GroupDatabases, change: IndexChanges) -> None:
    for key, record in sorted(_record_ops(txn, dbs, change).items()):
        if record is None:
            txn.delete(key, db=dbs.records)
        else:
            txn.put(key, record, db=dbs.records)
    if change.anew:
        txn.drop(dbs.touches, delete=False)
    for sequence, value in enumerate(change.touches, dbs.next_touch):
        txn.put(sequence_key(sequence), value, db=dbs.touches)
    for slot in change.quarantine:
        txn.put(slot_key(slot), b"", db=dbs.quarantine)
    for slot in dbs.quarantined.intersection(change.lift):
        txn.delete(slot_key(slot), db=dbs.quarantine)


def _slots(txn: lmdb.Transaction[bytes], quarantine: _Database) -> Iterator[SlotId]:
    return (SlotId(int.from_bytes(key, "big")) for key, _ in _entries(txn, quarantine, 4))


def _entries(txn: lmdb.Transaction[bytes], database: _Database, key_bytes: int) -> Iterator[tuple[bytes, bytes]]:
    """The entries of a database, without keys of a wrong length, which are damaged."""
    return (entry for entry in txn.cursor(database) if len(entry[0]) == key_bytes)


def _record_ops(txn: lmdb.Transaction[bytes], dbs: _GroupDatabases, change: IndexChanges) -> dict[Key, bytes | None]:
    """Records by key after the change; None = the record is deleted."""
    ops: dict[Key, bytes | None] = dict.fromkeys(change.deletes)
    ops.update(change.puts)
    for key, traits in change.restate:
        stored = ops[key] if key in ops else txn.get(key, db=dbs.records)
        if stored is not None:
            ops[key] = restated(key, stored, traits)
    return ops


@contextmanager
def _lmdb_errors(what: str) -> Iterator[None]:
    try:
        yield
    except lmdb.Error as error:
        raise _tier_error(error, what) from error


def _tier_error(error: lmdb.Error, what: str) -> TierIOError:
    """The error of a tier for LMDB's. LMDB's own codes are negative, the system's positive."""
    own = errno.ENOSPC if isinstance(error, lmdb.MapFullError) else errno.EIO
    code: int = getattr(error, "code", 0)  # errors made by the binding itself have none
    return TierIOError(code if code > 0 else own, f"{what}: {error}")


@dataclass(slots=True)
class IndexChanges:
    """Changes of a transaction to a group, deletes first."""

    deletes: list[Key] = field(default_factory=list)
    puts: list[tuple[Key, bytes]] = field(default_factory=list)
    restate: list[tuple[Key, Traits]] = field(default_factory=list)
    touches: list[bytes] = field(default_factory=list)
    anew: bool = False
    """The touches replace all touches so far."""
    quarantine: list[SlotId] = field(default_factory=list)
    lift: list[SlotId] = field(default_factory=list)
    """Slots with a new block, which leave the quarantine."""
