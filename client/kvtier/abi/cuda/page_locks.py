"""Page-locks host memory, chunk after chunk in the background, so that copies do not wait for it."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.abi.cuda import driver as cuda
from kvtier.abi.cuda.driver import Address, Copies, Driver
from kvtier.abi.cuda.errors import CudaError, CudaLost

CHUNK_BYTES: Final = 64 << 20
"""Bytes of a chunk. Other driver calls, also for copies, may wait while the driver locks a chunk. A multiple of every
page size of hosts."""
STOP_S: Final = 5.0
"""Seconds that a close waits for one chunk."""

_kept: Final[list[object]] = []
"""Mappings that could not be unlocked. The pages stay mapped: the driver would use their old pages even after another
mapping has taken their addresses."""

_log = logging.getLogger(__name__)


class PageLocks:
    """Locks ``nbytes`` of memory at ``address``, a page of the host, to the end of the last page, chunk by chunk.
    Memory that is not locked can be copied, too, but slower. No copy may cross the border of two chunks, which the
    driver does not join: see :meth:`split`."""

    def __init__(self, name: str, driver: Driver, address: int, nbytes: int) -> None:
        self.nbytes = 0
        """Locked bytes, the first of the memory."""
        self.total: Final = -(-nbytes // cuda.HOST_PAGE) * cuda.HOST_PAGE
        self.problem: str | None = None
        """The reason why the other chunks stay unlocked."""
        self._name: Final = name
        self._driver: Final = driver
        self._start: Final = address
        self._over: Final = threading.Event()
        self._thread: threading.Thread | None = None
        self._stays = False

    def split(self, copies: Copies, side: int) -> tuple[Copies, NDArray[np.bool_]]:
        """Cuts copies where chunks meet. ``side``: the row of ``copies`` that has addresses of the memory. Returns also
        which copies are of locked memory; memory elsewhere is taken for locked."""
        pieces: list[Copies] = []
        while True:
            fit = np.minimum(copies[2], CHUNK_BYTES - (copies[side] - self._start) % CHUNK_BYTES)
            pieces.append(np.stack((copies[0], copies[1], fit)))
            if not (more := copies[2] > fit).any():
                break
            copies = (copies + np.stack((fit, fit, -fit)))[:, more]
        copies = np.concatenate(pieces, axis=1)
        offsets = copies[side] - self._start
        return copies, (offsets + copies[2] <= self.nbytes) | (offsets < 0) | (offsets >= self.total)

    def start(self, mapping: object) -> None:
        """Begins to lock. ``mapping``: the mapping of the chunks, kept until no chunk is locked any more."""
        self._thread = threading.Thread(target=self._run, args=[mapping], name="kvtier-page-locks", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Begins to unlock everything, without waiting. No copy may be under way."""
        self._over.set()

    def close(self) -> bool:
        """Like :meth:`stop`, but waits. Returns False if memory is still locked and must stay mapped."""
        self.stop()
        while (thread := self._thread) is not None and thread.is_alive():
            before = self.nbytes
            thread.join(STOP_S)
            if thread.is_alive() and self.nbytes == before:
                _log.error("page-locking hangs in the driver name=%s", self._name)
                return False
        return not self._stays

    def _run(self, mapping: object) -> None:
        self._lock()
        self._over.wait()
        try:
            with suppress(CudaLost):  # nothing can be undone, and nothing is copied any more
                while self.nbytes:
                    first = (self.nbytes - 1) // CHUNK_BYTES * CHUNK_BYTES
                    self._driver.unregister(Address(self._start + first))
                    self.nbytes = first
        except CudaError as error:
            self._stays = True
            _kept.append(mapping)
            _log.warning("host memory stays page-locked name=%s bytes=%d why=%r", self._name, self.nbytes, error)

    def _lock(self) -> None:
        try:
            self._driver.bind()
            while left := self.total - self.nbytes:
                if self._over.is_set():
                    return
                nbytes = min(CHUNK_BYTES, left)
                self._driver.register(Address(self._start + self.nbytes), nbytes)
                self.nbytes += nbytes
        except CudaError as error:
            self.problem = f"{self.nbytes} of {self.total} bytes of host memory are page-locked: {error}"
            _log.warning("%s name=%s", self.problem, self._name)
        else:
            _log.info("host memory is page-locked name=%s bytes=%d", self._name, self.nbytes)
