"""The payload file of one window group: a preallocated array of records, moved from and to the caller's memory."""

from __future__ import annotations

import errno
import logging
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Self

from kvtier.abi.spec import PAGE
from kvtierd.tiers.base import DamagedDirectory
from kvtierd.tiers.disk.files import PRIVATE_FILE, io_errors
from kvtierd.tiers.disk.runs import Piece, Run, adjacent, run_of
from kvtierd.tiers.disk.transfers import Way, begin
from kvtierd.tiers.disk.values import SlabShape

_log = logging.getLogger(__name__)


def create_slab(path: Path, shape: SlabShape) -> None:
    """Raises :class:`TierIOError`, ENOSPC where the disk has less room than it said."""
    with io_errors(f"cannot create {path}"):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, PRIVATE_FILE)
        try:
            os.posix_fallocate(fd, 0, shape.nbytes)
            os.fsync(fd)
        finally:
            os.close(fd)


class Slab:
    """Blocking reads and writes of whole records; threads may call at the same time, for different slots."""

    def __init__(self, path: Path, shape: SlabShape, fd: int, *, direct: bool) -> None:
        self.path = path
        self.shape = shape
        self.direct = direct
        """False where the file system has no direct I/O and the page cache holds every byte a second time."""
        self._fd = fd

    @classmethod
    def open(cls, path: Path, shape: SlabShape) -> Self:
        """What is missing of the file is allocated anew; it reads as zeros, which no checksum passes.

        Raises :class:`DamagedDirectory` where there is no file, :class:`TierIOError`.
        """
        if not path.is_file():
            raise DamagedDirectory(path.parent, f"{path.name} is missing")
        with io_errors(f"cannot open {path}"):
            fd, direct = _open_direct(path)
            slab = cls(path, shape, fd, direct=direct)
            try:
                status = os.fstat(fd)
                if status.st_size < shape.nbytes or status.st_blocks * 512 < shape.nbytes:
                    _log.warning("%s has lost part of its %d bytes; allocating them again", path, shape.nbytes)
                    os.posix_fallocate(fd, 0, shape.nbytes)
                    os.fsync(fd)
            except OSError:
                slab.close()
                raise
        return slab

    def begin_write(self, pieces: Iterable[Piece]) -> Callable[[], list[int]]:
        """Returns while the disk works. What it returns waits for that, once, and gives the numbers of pieces that were
        not written whole."""
        return self._begin(Way.WRITE, pieces)

    def read(self, pieces: Iterable[Piece]) -> list[int]:
        """The numbers of pieces that were not read whole."""
        return self._begin(Way.READ, pieces)()

    def sync(self) -> None:
        """Raises :class:`OSError`: then nothing written since the last sync may be taken as stored."""
        os.fdatasync(self._fd)

    def probe(self) -> None:
        """Writes a page behind the last record and reads it back. Raises :class:`TierIOError` where that fails."""
        with mmap.mmap(-1, PAGE) as page, io_errors(f"cannot use {self.path}"):
            page[:] = os.urandom(PAGE)
            sent = bytes(page)
            moved = os.pwritev(self._fd, [page], self.shape.nbytes)
            os.fdatasync(self._fd)
            page[:] = bytes(PAGE)
            if moved != PAGE or os.preadv(self._fd, [page], self.shape.nbytes) != PAGE or bytes(page) != sent:
                raise OSError(errno.EIO, "what was written is not what is read")

    def allocate(self) -> None:
        """Whatever of the file is missing. Raises :class:`TierIOError`."""
        with io_errors(f"cannot allocate {self.path}"):
            os.posix_fallocate(self._fd, 0, self.shape.nbytes)
            os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)

    def _begin(self, way: Way, pieces: Iterable[Piece]) -> Callable[[], list[int]]:
        runs = adjacent(pieces, self.shape.record_bytes)
        end = begin(self._fd, way, self._wanted(runs))

        def failed() -> list[int]:
            numbers: list[int] = []
            for run, moved in zip(runs, end(), strict=True):
                if (fault := self._fault(run, moved)) is not None:
                    _log.warning("%s: %d records from slot %d: %s", self.path, len(run), run[0].slot, fault)
                    numbers += self._one_by_one(way, run)
            return numbers

        return failed

    def _one_by_one(self, way: Way, run: Sequence[Piece]) -> list[int]:
        """One bad sector must not cost its neighbours."""
        if len(run) == 1:
            return [run[0].number]
        moved = begin(self._fd, way, self._wanted([[piece] for piece in run]))()
        return [piece.number for piece, nbytes in zip(run, moved, strict=True) if self._fault([piece], nbytes)]

    def _wanted(self, runs: Iterable[Sequence[Piece]]) -> list[Run]:
        return [run_of(run, self.shape.record_bytes) for run in runs]

    def _fault(self, run: Sequence[Piece], moved: int) -> str | None:
        """Why the records of adjacent slots could not be moved whole."""
        wanted = len(run) * self.shape.record_bytes
        return None if moved == wanted else _said(moved, wanted)


def _said(moved: int, wanted: int) -> str:
    return os.strerror(-moved) if moved < 0 else f"{moved} of {wanted} bytes"


def _open_direct(path: Path) -> tuple[int, bool]:
    try:
        return os.open(path, os.O_RDWR | os.O_DIRECT), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    _log.warning("%s: no direct I/O on this file system, going through the page cache", path)
    return os.open(path, os.O_RDWR), False
