"""Page-locks host memory, chunk after chunk in the background, so that copies do not wait for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from kvtier.abi.cuda.driver import Address, Driver
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


class Chunk(NamedTuple):
    """Whole pages of the host."""

    address: int
    nbytes: int


class PageLocks:
    """Locks ``chunks``, which do not overlap, in the order given. Memory that is not locked can be copied, too, but
    slower. No copy may cross the border of two chunks: the driver does not join them."""

    def __init__(self, name: str, driver: Driver, chunks: Sequence[Chunk]) -> None:
        self.locked = 0
        """Number of locked chunks, the first ones of ``chunks``."""
        self.nbytes = 0
        self.total: Final = sum(chunk.nbytes for chunk in chunks)
        self.problem: str | None = None
        """The reason why the other chunks stay unlocked."""
        self._name: Final = name
        self._driver: Final = driver
        self._chunks: Final = chunks
        self._over: Final = threading.Event()
        self._thread: threading.Thread | None = None
        self._stays = False

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
            before = self.locked
            thread.join(STOP_S)
            if thread.is_alive() and self.locked == before:
                _log.error("page-locking hangs in the driver name=%s", self._name)
                return False
        return not self._stays

    def _run(self, mapping: object) -> None:
        self._lock()
        self._over.wait()
        try:
            with suppress(CudaLost):  # nothing can be undone, and nothing is copied any more
                while self.locked:
                    chunk = self._chunks[self.locked - 1]
                    self._driver.unregister(Address(chunk.address))
                    self.locked -= 1
                    self.nbytes -= chunk.nbytes
        except CudaError as error:
            self._stays = True
            _kept.append(mapping)
            _log.warning("host memory stays page-locked name=%s bytes=%d why=%r", self._name, self.nbytes, error)

    def _lock(self) -> None:
        try:
            self._driver.bind()
            for chunk in self._chunks:
                if self._over.is_set():
                    return
                self._driver.register(Address(chunk.address), chunk.nbytes)
                self.locked += 1
                self.nbytes += chunk.nbytes
        except CudaError as error:
            self.problem = f"{self.nbytes} of {self.total} bytes of host memory are page-locked: {error}"
            _log.warning("%s name=%s", self.problem, self._name)
        else:
            _log.info("host memory is page-locked name=%s bytes=%d", self._name, self.nbytes)
