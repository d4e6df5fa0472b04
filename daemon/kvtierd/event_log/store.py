"""The log's file: an LMDB environment of records by first id, bounded in bytes and age.

One thread writes; any may read, one at a time. A record that is damaged is not told: what it held is a hole in the ids,
as is what was never logged.
"""

from __future__ import annotations

import errno
import logging
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import lmdb

from kvtierd.event_log.clock import Clocks, LogClock
from kvtierd.event_log.runs import Head, LoggedRun, decode, decode_head, encode, id_of, joined, key_of
from kvtierd.tiers.base import DamagedDirectory, TierIOError
from kvtierd.tiers.disk import index
from kvtierd.tiers.disk.files import PRIVATE_FILE
from kvtierd.tiers.disk.index import ENGINE, closed, opening, read_pages

if TYPE_CHECKING:
    from lmdb import _Database

RECORD_BYTES: Final = 64 << 10
RECORD_EVENTS: Final = 256
"""Runs that follow each other become one record up to so many bytes or events."""

PIECE_EVENTS: Final = 1024
"""A reader is given no more at once, unless one record has them: whoever filters them looks at each."""

_DATA: Final = "data.mdb"
_PLACE_KEY: Final = b"place"
_CLOCK_KEY: Final = b"clock"
_PLACE: Final = struct.Struct("<QQQQ")
_FILL: Final = (3, 4)
"""Of the map, how much records may take. LMDB reuses no page freed by the two transactions before, nor by those that a
reader still sees, and a value over half a page needs pages in one piece."""
_PIECE: Final = 256
"""Most records that one transaction deletes: a lowered bound is reached in several."""
_MOST_RETRIES: Final = 3
DAMAGE: Final = (*index.DAMAGE, struct.error)
"""What comes of pages that are not what was written, as far as it is noticed: LMDB has no checksums of them."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Place:
    """``last``: the last id ever logged. ``latest_ns``: the latest time of an event so far. ``compacted``: the highest
    id that was deleted for bytes or age, 0 = none; ``compacted_ns``: the latest time up to there."""

    last: int = 0
    latest_ns: int = 0
    compacted: int = 0
    compacted_ns: int = 0


@dataclass(slots=True, frozen=True)
class Extent:
    """What the log holds at a moment. ``oldest``: the first id, None where there is nothing; ``oldest_stamp``: when
    that was logged, by the log's clock. ``epochs``: first id and number of each, in order; those that are gone are left
    out."""

    place: Place
    oldest: int | None
    oldest_stamp: int
    used_bytes: int
    epochs: tuple[tuple[int, int], ...]


class EventStore:
    """On a directory that is ours: see :mod:`kvtierd.event_log.directory`."""

    def __init__(self, path: Path, max_bytes: int, max_age_ns: int, clocks: Clocks) -> None:
        """Raises :class:`DamagedDirectory` for files that are damaged, short or not LMDB's, :class:`TierIOError`."""
        self.most_at_once: Final = max_bytes // 8
        """Bytes that one transaction should take at most: larger ones leave too little of a small log."""
        self._path: Final = path
        self._map_bytes: Final = max_bytes
        self._max_age_ns: Final = max_age_ns
        self._clocks: Final = clocks
        self._reading: Final = threading.Lock()
        """Held by a reader, and while the environment goes away under them."""
        self.dead = False
        """It must be opened anew before it can be used."""
        self.damage: str | None = None
        """Why its file cannot be gone on with: writing has met what was never written."""
        with opening(path) as unclean, _errors(f"cannot open {path}"):
            self._open(read_all=unclean)
            stale = self._env.reader_check()
        if stale:
            _log.info("%s: cleared %d readers that had died", path, stale)

    @property
    def last_epoch(self) -> int:
        """The newest that anything was logged of, 0 = none."""
        return self.extent.epochs[-1][1] if self.extent.epochs else 0

    @property
    def oldest_age_ns(self) -> int:
        """How long ago the oldest record was logged; 0 where there is none."""
        return 0 if self.extent.oldest is None else self._clock.now() - self.extent.oldest_stamp

    def append(self, runs: Sequence[LoggedRun], epoch_first: int) -> int:
        """All of them or none, in one transaction that also makes room: runs of one epoch, whose first id is
        ``epoch_first``, with ids above all before.

        Returns how many events are not in the log because their run is larger than the log may be. Where there is no
        room in the map whatever is deleted, the log begins anew with these runs. Raises :class:`TierIOError`.
        """
        fitting = [run for run in runs if run.size <= self._room(0) // 2]
        with self._writing():
            for _ in range(_MOST_RETRIES):
                try:
                    self._transact(fitting, epoch_first)
                    break
                except lmdb.MapFullError:
                    if not self._drop_a_quarter():
                        self._begin_anew()
            else:
                self._begin_anew()
                self._transact(fitting, epoch_first)
        return sum(run.count for run in runs) - sum(run.count for run in fitting)

    def tidy(self) -> bool:
        """Deletes what is too old, or too much, in one bounded piece. Whether there may be more. Raises
        :class:`TierIOError`."""
        before = self.extent
        if before.oldest is None or (before.used_bytes <= self._room(0) and not self._too_old(before.oldest_stamp)):
            return False
        with self._writing():
            self._transact((), 0)
        return self.extent.oldest != before.oldest

    def after(self, cursor: int, max_bytes: int) -> LoggedRun | None:
        """The oldest events held with an id above ``cursor``, of one epoch and without a hole: at most ``max_bytes``
        and :data:`PIECE_EVENTS`, at least a record, which may begin at or before the cursor. None if there are none.
        Raises :class:`TierIOError`."""
        found: list[LoggedRun] = []
        size = count = 0
        with self._reader() as txn, txn.cursor(self._runs) as at:
            for run in _runs_after(at, cursor):
                size += run.size
                count += run.count
                if found and (size > max_bytes or count > PIECE_EVENTS or not _follows(run, found[-1])):
                    break
                found.append(run)
        return joined(found) if found else None

    def since(self, time_ns: int) -> int | None:
        """The first id held of an event at or after that time, None where all are before, whatever the clock did
        meanwhile. Raises :class:`TierIOError`."""
        with self._reader() as txn, txn.cursor(self._runs) as at:
            low, high = self.extent.oldest or 0, self.extent.place.last + 1
            while low < high:
                middle = (low + high) // 2
                found = next(_heads(at, at.set_range(key_of(middle))), None)
                if found is None or found.so_far_ns >= time_ns:
                    high = middle
                else:
                    low = found.last + 1
            # Up to here all are before. What first reached the time may be deleted, or damaged: then it comes later.
            for head in _heads(at, at.set_range(key_of(low))):
                if head.latest_ns >= time_ns and (run := decode(id_of(at.key()), at.value())) is not None:
                    return run.first_at(time_ns)
        return None

    def close(self) -> None:
        if not self.dead:
            self._let_go()
            closed(self._path)

    def _let_go(self) -> None:
        with self._reading:
            self.dead = True
            self._env.close()

    def _open(self, *, read_all: bool = False) -> None:
        for name in (_DATA, "lock.mdb"):
            (self._path / name).touch(PRIVATE_FILE)
        env = lmdb.open(
            str(self._path),
            map_size=self._map_bytes,
            max_dbs=3,
            max_readers=8,
            mode=PRIVATE_FILE,
            writemap=False,  # with it a full disk is a SIGBUS
            metasync=False,  # a kill loses nothing; when the system goes down, at most the last transaction
            sync=True,
            meminit=False,
            lib_version=ENGINE,
        )
        try:
            self._refuse_short(env)
            if read_all:
                read_pages(env)
            self._runs: _Database = env.open_db(b"runs")
            self._epochs: _Database = env.open_db(b"epochs")
            self._meta: _Database = env.open_db(b"meta")
            with env.begin() as txn:
                place = txn.get(_PLACE_KEY, db=self._meta)
                self._clock = LogClock(self._clocks, txn.get(_CLOCK_KEY, db=self._meta))
                self.extent = self._extent(txn, Place(*_PLACE.unpack(place)) if place is not None else Place())
        except struct.error as error:
            env.close()
            raise DamagedDirectory(self._path, f"what it says of itself cannot be read: {error}") from error
        except BaseException:
            env.close()  # LMDB opens a file once a process
            raise
        self._env = env

    def _refuse_short(self, env: lmdb.Environment) -> None:
        """It would be read through a mapping: past the file's end that is a SIGBUS."""
        info: Any = env.info()
        pages: Any = env.stat()
        missing = (info["last_pgno"] + 1) * pages["psize"] - (self._path / _DATA).stat().st_size
        if info["last_txnid"] and missing > 0:
            raise DamagedDirectory(self._path, f"{_DATA} is {missing} bytes shorter than it says")

    def _transact(self, runs: Sequence[LoggedRun], epoch_first: int) -> None:
        now = self._clock.now()
        so_far_ns = self.extent.place.latest_ns
        records: list[tuple[bytes, bytes]] = []
        for run in _grouped(runs):
            so_far_ns = max(so_far_ns, run.latest_ns)
            records.append((key_of(run.first), encode(run, so_far_ns, now)))
        with self._env.begin(write=True) as txn:
            place = self._make_room(txn, sum(len(record) for _, record in records))
            for key, record in records:
                if not txn.put(key, record, append=True, db=self._runs):
                    raise ValueError(f"id {id_of(key)} is not above {place.last}, the last that was logged")
            if runs:
                txn.put(key_of(epoch_first), key_of(runs[0].epoch), db=self._epochs)
                place = replace(place, last=runs[-1].last, latest_ns=so_far_ns)
            extent = self._told(txn, place)
        self.extent = extent

    def _make_room(self, txn: lmdb.Transaction[bytes], incoming: int) -> Place:
        """Deletes the oldest records while they are too old, or too much beside what comes."""
        place, room = self.extent.place, self._room(incoming)
        with txn.cursor(self._runs) as at:
            there = at.first()
            for _ in range(_PIECE):
                head = _head(at) if there else None
                enough = head is not None and not self._too_old(head.stamp) and _used_bytes(txn, self._runs) <= room
                if not there or enough:
                    break
                there, place = _delete(at, place)
        return place

    def _drop_a_quarter(self) -> bool:
        """In transactions of their own, so that the pages can be used again. False if not even that has room."""
        place = self.extent.place
        try:
            with self._env.begin(write=True) as txn, txn.cursor(self._runs) as at:
                there = at.first()
                stat: Any = txn.stat(self._runs)
                for _ in range(stat["entries"] // 4 + 1):
                    if there:
                        there, place = _delete(at, place)
                extent = self._told(txn, place)
            self.extent = extent
            for _ in range(2):
                with self._env.begin(write=True) as txn:
                    self._told(txn, place)
        except lmdb.MapFullError:
            return False
        return True

    def _begin_anew(self) -> None:
        _log.warning("event log begins anew: its map has no room left path=%s", self._path)
        before, clock = self.extent.place, self._clock
        self._let_go()
        (self._path / _DATA).unlink()
        self._open()
        self._clock, self.dead = clock, False
        with self._env.begin(write=True) as txn:
            extent = self._told(txn, replace(before, compacted=before.last, compacted_ns=before.latest_ns))
        self.extent = extent

    def _told(self, txn: lmdb.Transaction[bytes], place: Place) -> Extent:
        """What is to be so once the transaction has committed."""
        packed = _PLACE.pack(place.last, place.latest_ns, place.compacted, place.compacted_ns)
        txn.put(_PLACE_KEY, packed, db=self._meta)
        txn.put(_CLOCK_KEY, self._clock.to_stored(), db=self._meta)
        return self._extent(txn, place)

    def _extent(self, txn: lmdb.Transaction[bytes], place: Place) -> Extent:
        with txn.cursor(self._runs) as at:
            there = at.first()
            oldest = id_of(at.key()) if there else None
            head = _head(at) if there else None
        with txn.cursor(self._epochs) as at:
            epochs = [(id_of(first), id_of(number)) for first, number in at]
        while len(epochs) > 1 and epochs[1][0] <= place.compacted + 1:
            epochs.pop(0)
        stamp = head.stamp if head is not None else self._clock.now()
        return Extent(place, oldest, stamp, _used_bytes(txn, self._runs), tuple(epochs))

    def _room(self, incoming: int) -> int:
        """Bytes that records may take before so many come."""
        part, whole = _FILL
        return max(0, self._map_bytes * part // whole - incoming)

    def _too_old(self, stamp: int) -> bool:
        return self._clock.now() - stamp > self._max_age_ns

    @contextmanager
    def _reader(self) -> Iterator[lmdb.Transaction[memoryview]]:
        with _errors(f"cannot read {self._path}"), self._reading, self._env.begin(buffers=True) as txn:
            yield txn

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A commit that died while it wrote the file's head leaves a dead environment; the file holds one of its two
        states. One that meets damage would meet it again."""
        with _errors(f"cannot write {self._path}"):
            try:
                yield
            except lmdb.PanicError:
                self._let_go()
                raise
            except DAMAGE as error:
                self.damage = str(error)
                self._let_go()
                raise


def _grouped(runs: Sequence[LoggedRun]) -> Iterator[LoggedRun]:
    """Runs joined to records."""
    group: list[LoggedRun] = []
    size = count = 0
    for run in runs:
        size += run.size
        count += run.count
        if group and (size > RECORD_BYTES or count > RECORD_EVENTS or not _follows(run, group[-1])):
            yield joined(group)
            group, size, count = [], run.size, run.count
        group.append(run)
    if group:
        yield joined(group)


def _follows(run: LoggedRun, before: LoggedRun) -> bool:
    return run.first == before.last + 1 and run.epoch == before.epoch


def _runs_after(at: lmdb.Cursor[memoryview], cursor: int) -> Iterator[LoggedRun]:
    """Sound runs in order, from the first with an id above ``cursor`` on."""
    there = _seek(at, cursor)
    while there:
        run = decode(id_of(at.key()), at.value())
        if run is not None and run.last > cursor:
            yield run
        there = at.next()


def _seek(at: lmdb.Cursor[memoryview], cursor: int) -> bool:
    """To the record that holds the id after ``cursor``, else to the first above. False where there is none."""
    there = at.set_range(key_of(cursor + 1))
    if there and id_of(at.key()) == cursor + 1:
        return True
    if not (at.prev() if there else at.last()):
        return at.first()
    head = _head(at)
    return (head is not None and head.last > cursor) or at.next()


def _heads(at: lmdb.Cursor[memoryview], there: bool) -> Iterator[Head]:
    """Sound heads from the cursor's place on; the cursor moves along."""
    while there:
        if (head := _head(at)) is not None:
            yield head
        there = at.next()


def _head(at: lmdb.Cursor[bytes] | lmdb.Cursor[memoryview]) -> Head | None:
    return decode_head(id_of(at.key()), at.value())


def _delete(at: lmdb.Cursor[bytes], place: Place) -> tuple[bool, Place]:
    """Deletes the oldest record. Whether there is another, where the cursor then is, and what is so from then on."""
    head = _head(at)
    there = at.delete() and bool(at.key())
    compacted = id_of(at.key()) - 1 if there else place.last
    return there, replace(
        place, compacted=compacted, compacted_ns=max(place.compacted_ns, head.so_far_ns if head is not None else 0)
    )


def _used_bytes(txn: lmdb.Transaction[bytes], database: _Database) -> int:
    stat: Any = txn.stat(database)
    return int((stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]) * stat["psize"])


@contextmanager
def _errors(what: str) -> Iterator[None]:
    try:
        yield
    except lmdb.Error as error:
        own = errno.ENOSPC if isinstance(error, lmdb.MapFullError) else errno.EIO
        code: int = getattr(error, "code", 0)  # LMDB's own are negative, those made by the binding have none
        raise TierIOError(code if code > 0 else own, f"{what}: {error}") from error
    except OSError as error:
        raise TierIOError(error.errno or errno.EIO, f"{what}: {error.strerror or error}") from error
