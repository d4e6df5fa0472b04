"""The transactional truth of a store: an LMDB environment that says which blocks are on disk, and where.

What is not in here is not stored, whatever the slabs hold. One thread at a time may call.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import lmdb

from kvtierd.core.ids import GroupId, Key, SlotId
from kvtierd.tiers.base import DamagedDirectory, TierIOError
from kvtierd.tiers.disk.changes import Changes
from kvtierd.tiers.disk.files import PRIVATE_DIR, PRIVATE_FILE, io_errors, sync_directory
from kvtierd.tiers.disk.journal import MOST_INLINE, decode_journal, encode_journal, fit, journal_bytes
from kvtierd.tiers.disk.records import HEAD_BYTES, encode_recency, restated, sequence_key, slot_key
from kvtierd.tiers.disk.sound import after_closing, before_opening

if TYPE_CHECKING:
    from lmdb import _Database

ENGINE: Final = 0
"""LMDB 0.9. Its files and those of 1.0 are unreadable to each other, so it is never left to the library's default."""

_BYTES_PER_SLOT: Final = 1024
_SPARE_BYTES: Final = 256
_COPIES: Final = 3
_PAGE: Final = 4096
_PAGE_HEADER: Final = 16
_NODE_OVERHEAD: Final = 48
_JOURNAL_SHIFT: Final = 4
_MOST_JOURNAL: Final = 1 << 20
_CARRIED_AN_OP: Final = 2
"""Ops of the journal's older part that are carried over for each new one: so at most half as many come meanwhile, and
the journal, whose older part is what fills half of it, never fills."""
_BASE_BYTES: Final = 8 << 20
_TOUCH_OVERHEAD: Final = 24
_log = logging.getLogger(__name__)


def index_bytes(slots: int, label_bytes: int = 0) -> int:
    """Map size for ``slots`` records, all groups together, with labels of ``label_bytes``.

    Random keys leave pages about two thirds full, and values over half a page get pages of their own. One transaction
    may rewrite everything, and LMDB reuses no page freed by the two before it: replacing all blocks at once, over and
    over, was measured to reach three times what they take. So that was 422 bytes a slot without labels, 1,044 with
    labels of 168 bytes, 12,500 with 1,900. Recency and the log of touches add at most 40, the journal and what LMDB has
    not freed of it a quarter.
    """
    a_slot = max(_BYTES_PER_SLOT, _COPIES * _bytes_in_pages(HEAD_BYTES + label_bytes) + _SPARE_BYTES)
    return _BASE_BYTES + slots * (a_slot + a_slot // 4)


def _bytes_in_pages(value: int) -> int:
    """What a record takes of pages that are two thirds full."""
    if value > MOST_INLINE:
        return (value + _PAGE_HEADER + _PAGE - 1) // _PAGE * _PAGE + _NODE_OVERHEAD
    return _PAGE // max(1, (_PAGE - _PAGE_HEADER) * 2 // 3 // (value + _NODE_OVERHEAD))


@dataclass(slots=True, frozen=True)
class Stored:
    """Everything the index holds of one group, not yet decoded."""

    keys: Sequence[Key]
    records: Sequence[bytes]
    recency: Sequence[tuple[SlotId, bytes]]
    touches: Sequence[bytes]
    quarantined: frozenset[SlotId]


@dataclass(slots=True)
class _Group:
    """``pending``: what the journal says of records and the tree may not say yet, in memory; it outranks the tree.

    ``leaving``: keys that the journal's older part, the entries under ``older_end`` of ``older_bytes``, names, in
    falling order, as far as they have not been carried over. It goes with the last of them. A key that is changed
    meanwhile is named by a newer entry, so whether it is carried over as it was or as it is does not matter.

    ``quarantined``: no other slots are in the database of that name.
    """

    records: _Database
    journal: _Database
    touches: _Database
    recency: _Database
    quarantine: _Database
    quarantined: set[SlotId] = field(default_factory=set)
    pending: dict[Key, bytes | None] = field(default_factory=dict)
    leaving: list[Key] = field(default_factory=list)
    older_end: int = 0
    older_bytes: int = 0
    next_entry: int = 0
    journal_bytes: int = 0
    next_touch: int = 0
    touch_bytes: int = 0

    @classmethod
    def open(cls, env: lmdb.Environment, group: GroupId) -> Self:
        """Raises ValueError for a journal that this daemon cannot read."""

        def database(name: str) -> _Database:
            return env.open_db(f"{name}-{group}".encode())

        opened = cls(
            database("records"), database("journal"), database("touches"), database("recency"), database("quarantine")
        )
        with env.begin() as txn:
            entries = list(txn.cursor(opened.journal))
            opened.quarantined.update(_slots(txn, opened.quarantine))
        opened.pending = decode_journal(value for _, value in entries)
        opened.journal_bytes = sum(len(value) for _, value in entries)
        opened.next_entry = int.from_bytes(entries[-1][0], "big") + 1 if entries else 0
        return opened


class Index:
    def __init__(self, path: Path, groups: Sequence[GroupId], map_bytes: int) -> None:
        self._path = path
        self._map_bytes = map_bytes
        self._ids = tuple(groups)
        room = max(0, map_bytes - _BASE_BYTES)
        self._most_journal = min(_MOST_JOURNAL, (room >> _JOURNAL_SHIFT) // len(self._ids))
        self._env, self._groups = self._open()

    @classmethod
    def create(cls, path: Path, groups: Sequence[GroupId], map_bytes: int) -> None:
        """Makes an empty index with all its room allocated: no later transaction finds the disk full.

        Raises :class:`TierIOError`.
        """
        with io_errors(f"cannot create {path}"), _lmdb_errors(f"cannot create {path}"):
            path.mkdir(PRIVATE_DIR)
            (path / "data.mdb").touch(PRIVATE_FILE)
            (path / "lock.mdb").touch(PRIVATE_FILE)
            index = cls(path, groups, map_bytes)
            index.close()
            fd = os.open(path / "data.mdb", os.O_RDWR)
            try:
                os.posix_fallocate(fd, 0, map_bytes)
                os.fsync(fd)
            finally:
                os.close(fd)
            sync_directory(path)

    @classmethod
    def open(cls, path: Path, groups: Sequence[GroupId], map_bytes: int) -> Self:
        """Raises :class:`DamagedDirectory` for a file that is missing, short, damaged or not LMDB's,
        :class:`TierIOError`.

        Short is refused here because LMDB reads through a mapping: past the file's end that is a SIGBUS.
        """
        data = path / "data.mdb"
        if not data.is_file() or data.stat().st_size < map_bytes:
            raise DamagedDirectory(path, f"data.mdb is missing or shorter than {map_bytes} bytes")
        before_opening(path)
        try:
            index = cls(path, groups, map_bytes)
        except (lmdb.InvalidError, lmdb.CorruptedError, lmdb.VersionMismatchError, ValueError) as error:
            raise DamagedDirectory(path, str(error)) from error
        except lmdb.Error as error:
            raise _tier_error(error, f"cannot open {path}") from error
        stale = index._env.reader_check()
        if stale:
            _log.info("%s: cleared %d readers that had died", path, stale)
        return index

    def load(self, group: GroupId) -> Stored:
        """Everything of ``group``. Raises :class:`TierIOError`."""
        dbs = self._groups[group]
        with _lmdb_errors(f"cannot read {self._path}"), self._env.begin() as txn:
            items = [item for item in txn.cursor(dbs.records) if item[0] not in dbs.pending]
            items += [(key, record) for key, record in dbs.pending.items() if record is not None]
            recency = [(SlotId(int.from_bytes(key, "big")), value) for key, value in txn.cursor(dbs.recency)]
            touches = list(txn.cursor(dbs.touches))
            quarantined = frozenset(_slots(txn, dbs.quarantine))
        dbs.next_touch = int.from_bytes(touches[-1][0], "big") + 1 if touches else 0
        dbs.touch_bytes = sum(len(value) + _TOUCH_OVERHEAD for _, value in touches)
        return Stored(
            keys=[Key(key) for key, _ in items],
            records=[value for _, value in items],
            recency=recency,
            touches=[value for _, value in touches],
            quarantined=quarantined,
        )

    def touch_bytes(self, group: GroupId) -> int:
        """About what the group's log of touches takes in the map."""
        return self._groups[group].touch_bytes

    def commit(self, changes: Mapping[GroupId, Changes]) -> None:
        """All of ``changes`` or nothing, and whatever becomes of this process when this returns; see :meth:`sync` for
        the system. Raises :class:`TierIOError`; the index stays usable.

        After an error of the medium it is not known which of the two it was.
        """
        with _lmdb_errors(f"cannot commit to {self._path}"):
            try:
                self._commit(changes)
            except lmdb.PanicError:
                # A commit died while it wrote the file's head: the environment is dead, the file holds one of its two
                # states.
                self._env.close()
                self._env, self._groups = self._open()
                for group in self._ids:
                    self.load(group)
                self._commit(changes)

    def sync(self) -> None:
        """What has been committed outlasts the system, too, when this returns. Raises :class:`TierIOError`."""
        with _lmdb_errors(f"cannot sync {self._path}"):
            self._env.sync(True)

    def close(self) -> None:
        self._env.close()
        after_closing(self._path)

    def _open(self) -> tuple[lmdb.Environment, dict[GroupId, _Group]]:
        env = lmdb.open(
            str(self._path),
            map_size=self._map_bytes,
            max_dbs=5 * len(self._ids),
            max_readers=8,
            mode=PRIVATE_FILE,
            writemap=False,  # with it a full disk is a SIGBUS
            # A transaction's pages are synced, its head with the next transaction's or by sync(): half the wait. A kill
            # loses nothing. When the system goes down, the last transaction may be undone, whole; LMDB promises that
            # no more is. A record that comes back so may lie where other bytes are now: its checksum says so.
            metasync=False,
            sync=True,
            lib_version=ENGINE,
        )
        try:
            return env, {group: _Group.open(env, group) for group in self._ids}
        except BaseException:
            env.close()  # LMDB opens a file once a process
            raise

    def _commit(self, changes: Mapping[GroupId, Changes]) -> None:
        for group, change in changes.items():
            self._groups[group].quarantined.update(change.quarantine)
        try:
            entered = self._transact(changes, self._most_journal, _CARRIED_AN_OP)
        except lmdb.MapFullError:
            # To carry the journal over takes more room than to go on with it.
            entered = self._transact(changes, self._map_bytes, 0)
        for group, change in changes.items():
            dbs = self._groups[group]
            entered[group].note(dbs, self._most_journal)
            dbs.quarantined.difference_update(change.lift)
            if change.recency is not None:
                dbs.touch_bytes = 0
            dbs.next_touch += len(change.touches)
            dbs.touch_bytes += sum(len(value) + _TOUCH_OVERHEAD for value in change.touches)

    def _transact(
        self, changes: Mapping[GroupId, Changes], most_journal: int, carried_an_op: int
    ) -> dict[GroupId, _Entered]:
        with self._env.begin(write=True) as txn:
            return {
                group: _apply(txn, self._groups[group], change, most_journal, carried_an_op)
                for group, change in changes.items()
            }


@dataclass(slots=True, frozen=True)
class _Entered:
    """What a transaction has done to a group's journal: so many values more, or, None, all of it is in the tree.
    ``carried``: so many of those that were leaving are in the tree, too."""

    ops: Mapping[Key, bytes | None]
    values: Sequence[bytes] | None
    carried: int = 0

    def note(self, dbs: _Group, most_journal: int) -> None:
        """Once it has committed."""
        if self.values is None:
            dbs.pending.clear()
            dbs.leaving.clear()
            dbs.journal_bytes = 0
            return
        for key in _next_to_leave(dbs, self.carried):
            del dbs.pending[key]
        dbs.pending.update(self.ops)
        dbs.next_entry += len(self.values)
        dbs.journal_bytes += sum(map(len, self.values))
        if self.carried:
            del dbs.leaving[-self.carried :]
            if not dbs.leaving:
                dbs.journal_bytes -= dbs.older_bytes
        if not dbs.leaving and 2 * dbs.journal_bytes > most_journal:
            dbs.leaving = sorted(dbs.pending, reverse=True)
            dbs.older_end, dbs.older_bytes = dbs.next_entry, dbs.journal_bytes


def _apply(
    txn: lmdb.Transaction[bytes], dbs: _Group, change: Changes, most_journal: int, carried_an_op: int
) -> _Entered:
    entered = _enter(txn, dbs, _record_ops(txn, dbs, change), most_journal, carried_an_op)
    if change.recency is not None:
        txn.drop(dbs.touches, delete=False)
        for place, value in encode_recency(change.recency):
            txn.put(place, value, db=dbs.recency)
    for sequence, value in enumerate(change.touches, dbs.next_touch):
        txn.put(sequence_key(sequence), value, db=dbs.touches)
    for slot in change.quarantine:
        txn.put(slot_key(slot), b"", db=dbs.quarantine)
    for slot in dbs.quarantined.intersection(change.lift):
        txn.delete(slot_key(slot), db=dbs.quarantine)
    return entered


def _slots(txn: lmdb.Transaction[bytes], quarantine: _Database) -> Iterator[SlotId]:
    return (SlotId(int.from_bytes(key, "big")) for key, _ in txn.cursor(quarantine))


def _record_ops(txn: lmdb.Transaction[bytes], dbs: _Group, change: Changes) -> dict[Key, bytes | None]:
    ops: dict[Key, bytes | None] = dict.fromkeys(change.deletes)
    ops.update(change.puts)
    for key, traits in change.restate:
        stored = ops[key] if key in ops else dbs.pending[key] if key in dbs.pending else txn.get(key, db=dbs.records)
        if stored is not None:
            ops[key] = restated(stored, traits)
    return ops


def _enter(
    txn: lmdb.Transaction[bytes],
    dbs: _Group,
    ops: dict[Key, bytes | None],
    most_journal: int,
    carried_an_op: int,
) -> _Entered:
    """Into the journal, of which a part is carried over; where that is full, or a record too long for it, the journal
    and these go to the tree.

    LMDB keeps the memory of as many pages as one transaction has ever changed, and random keys change nearly a page
    each, so no more of them go at once than must.
    """
    if not fit(ops) or dbs.journal_bytes + journal_bytes(ops) > most_journal:
        _carry_over(txn, dbs, {**dbs.pending, **ops})
        txn.drop(dbs.journal, delete=False)
        return _Entered(ops, None)
    values = encode_journal(ops)
    for sequence, value in enumerate(values, dbs.next_entry):
        txn.put(sequence_key(sequence), value, db=dbs.journal)
    carried = min(carried_an_op * len(ops), len(dbs.leaving))
    if carried:
        _carry_over(txn, dbs, {key: dbs.pending[key] for key in _next_to_leave(dbs, carried)})
        if carried == len(dbs.leaving):
            _drop_entries(txn, dbs, dbs.older_end)
    return _Entered(ops, values, carried)


def _next_to_leave(dbs: _Group, count: int) -> list[Key]:
    return dbs.leaving[-count:] if count else []


def _carry_over(txn: lmdb.Transaction[bytes], dbs: _Group, ops: Mapping[Key, bytes | None]) -> None:
    for key, record in sorted(ops.items()):
        if record is None:
            txn.delete(key, db=dbs.records)
        else:
            txn.put(key, record, db=dbs.records)


def _drop_entries(txn: lmdb.Transaction[bytes], dbs: _Group, end: int) -> None:
    """Of the journal, those before that one."""
    with txn.cursor(dbs.journal) as cursor:
        there = cursor.first()
        while there and cursor.key() < sequence_key(end):
            there = cursor.delete()


@contextmanager
def _lmdb_errors(what: str) -> Iterator[None]:
    try:
        yield
    except lmdb.Error as error:
        raise _tier_error(error, what) from error


def _tier_error(error: lmdb.Error, what: str) -> TierIOError:
    """LMDB's own codes are negative, the system's positive."""
    own = errno.ENOSPC if isinstance(error, lmdb.MapFullError) else errno.EIO
    code: int = getattr(error, "code", 0)  # errors made by the binding itself have none
    return TierIOError(code if code > 0 else own, f"{what}: {error}")
