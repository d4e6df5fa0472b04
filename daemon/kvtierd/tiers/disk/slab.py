"""The payload file of a window group: a preallocated array of records, moved from and to the caller's memory."""

from __future__ import annotations

import errno
import logging
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Final, NamedTuple, Self

from kvtier.abi.spec import PAGE
from kvtierd.core.ids import SlotId
from kvtierd.tiers.base import DamagedDirectory, TierIOError
from kvtierd.tiers.disk.superblock import NotAFile, allocate, io_errors, open_file

MAX_PARTS: Final = 1024
"""Most buffers that Linux takes in one vectored call (IOV_MAX)."""
_THREADS: Final = 8
"""Most calls in the disk's queue at a time, for all slabs together."""
_threads: Final = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvtier-slab")

_log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class SlabShape:
    """A group's slab: ``slots`` records of ``record_bytes`` (a multiple of 4096) each. ``chained``: no block is stored,
    or recovered, without its parent. In other groups blocks are usable without ancestors."""

    record_bytes: int
    slots: int
    chained: bool = True

    @property
    def nbytes(self) -> int:
        return self.record_bytes * self.slots


class SlabRecord(NamedTuple):
    """A record to move. ``number``: the caller's number for it."""

    number: int
    slot: SlotId
    parts: Sequence[memoryview]


RecordRun = Sequence[SlabRecord]
"""Pieces of adjacent slots, moved by a single call."""

Moving = Future[list[int]]
"""A thread that moves pieces. Its result is the numbers of pieces that it could not move."""


def create_slab(path: Path, shape: SlabShape) -> None:
    """Makes a slab's file. Raises :class:`TierIOError`; ENOSPC if the disk has less room than it reported."""
    with io_errors(f"cannot create {path}"):
        allocate(path, shape.nbytes, os.O_CREAT | os.O_EXCL)


class Slab:
    """Blocking reads and writes of whole records; threads may call at the same time, for different slots."""

    def __init__(self, path: Path, shape: SlabShape, fd: int) -> None:
        self.path = path
        self.shape = shape
        self._fd = fd

    @classmethod
    def open(cls, path: Path, shape: SlabShape) -> Self:
        """Opens a slab. Missing parts of the file are allocated anew; they read as zeros, which fail every checksum.
        Raises :class:`DamagedDirectory` if there is no file, :class:`TierIOError`."""
        with io_errors(f"cannot open {path}"):
            try:
                fd = _open_direct(path)
            except FileNotFoundError:
                raise DamagedDirectory(path.parent, f"{path.name} is missing") from None
            except NotAFile as error:
                raise DamagedDirectory(path.parent, f"{path.name} is {error.kind}") from error
        slab, status = cls(path, shape, fd), os.fstat(fd)
        if status.st_size < shape.nbytes or status.st_blocks * 512 < shape.nbytes:
            _log.warning("%s has lost part of its %d bytes; allocating them again", path, shape.nbytes)
            try:
                slab.allocate()
            except TierIOError:
                slab.close()
                raise
        return slab

    def begin_write(self, pieces: Iterable[SlabRecord]) -> list[Moving]:
        """Begins to write records. The caller must not change the memory before the threads are done."""
        return [_threads.submit(self._move, os.pwritev, runs) for runs in self._shares(pieces)]

    def read(self, pieces: Iterable[SlabRecord]) -> list[int]:
        """Reads records, and waits for them. Returns the numbers of the pieces not read."""
        own, *others = self._shares(pieces)
        moving = [_threads.submit(self._move, os.preadv, runs) for runs in others]
        try:
            return self._move(os.preadv, own) + [number for each in moving for number in each.result()]
        finally:
            wait(moving)  # no thread may still write to the memory, even after an error

    def sync(self) -> None:
        """Makes earlier writes durable. Raises :class:`OSError`; all writes since the last sync may then be lost."""
        os.fdatasync(self._fd)

    def probe(self) -> None:
        """Writes a page behind the last record and reads it back. Raises :class:`TierIOError` if that fails."""
        with mmap.mmap(-1, PAGE) as page, io_errors(f"cannot use {self.path}"):
            page[:] = os.urandom(PAGE)
            sent = bytes(page)
            moved = os.pwritev(self._fd, [page], self.shape.nbytes)
            os.fdatasync(self._fd)
            page[:] = bytes(PAGE)
            if moved != PAGE or os.preadv(self._fd, [page], self.shape.nbytes) != PAGE or bytes(page) != sent:
                raise OSError(errno.EIO, "what was written is not what is read")

    def allocate(self) -> None:
        """Allocates missing parts of the file. Raises :class:`TierIOError`."""
        with io_errors(f"cannot allocate {self.path}"):
            os.posix_fallocate(self._fd, 0, self.shape.nbytes)
            os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)

    def _shares(self, pieces: Iterable[SlabRecord]) -> list[Sequence[RecordRun]]:
        """Runs by thread; at least one share."""
        runs = adjacent(pieces)
        return [runs[first::_THREADS] for first in range(min(_THREADS, len(runs)))] or [[]]

    def _move(self, call: Callable[[int, list[memoryview], int], int], runs: Iterable[RecordRun]) -> list[int]:
        """Moves runs. Returns the numbers of pieces that were not moved. A bad sector does not cost its neighbours."""
        failed: list[int] = []
        for run in runs:
            wanted = len(run) * self.shape.record_bytes
            try:
                buffers = [part for piece in run for part in piece.parts]
                moved = call(self._fd, buffers, run[0].slot * self.shape.record_bytes)
                fault = f"{moved} of {wanted} bytes" if moved != wanted else None
            except OSError as error:
                fault = error.strerror
            if fault is None:
                continue
            _log.warning("%s: %d records from slot %d: %s", self.path, len(run), run[0].slot, fault)
            failed += [run[0].number] if len(run) == 1 else self._move(call, [[piece] for piece in run])
        return failed


def adjacent(pieces: Iterable[SlabRecord]) -> list[RecordRun]:
    """Joins pieces of adjacent slots into runs, as far as a single call can take them."""
    runs: list[list[SlabRecord]] = []
    buffers, following = 0, -1
    for piece in sorted(pieces, key=itemgetter(1)):
        buffers += len(piece.parts)
        if piece.slot != following or buffers > MAX_PARTS:
            runs.append([])
            buffers = len(piece.parts)
        runs[-1].append(piece)
        following = piece.slot + 1
    return [*runs]


def _open_direct(path: Path) -> int:
    """Opens a file for direct I/O. Without direct I/O on the file system, the page cache has a copy of every byte."""
    try:
        return open_file(path, os.O_RDWR | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL or isinstance(error, NotAFile):
            raise
    _log.warning("%s: no direct I/O on this file system, going through the page cache", path)
    return open_file(path, os.O_RDWR)
