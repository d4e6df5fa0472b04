"""Page-locking a mapping: chunk after chunk in the background, so that whoever copies need not wait for it."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from typing import Final

from kvtier.abi.cuda import driver as cuda
from kvtier.abi.cuda.errors import CudaError, CudaLost

CHUNK_BYTES: Final = 64 << 20
"""Other calls of the driver may have to wait while it locks a chunk's pages, a copy's among them. A multiple of every
page size that hosts have."""

_kept: Final[list[object]] = []
"""Mappings that could not be unlocked: the driver would go on copying to and from their pages, whatever is mapped at
their addresses later."""

_log = logging.getLogger(__name__)


class PageLocks:
    """Locks a mapping from its first byte on. What is not locked, yet or ever, is copied all the same, slower.

    No copy may cross the border of two chunks: to the driver they are strangers.
    """

    def __init__(self, driver: cuda.Driver, mapping: object, address: int, nbytes: int) -> None:
        """``mapping``: kept until nothing of it is locked any more; ``nbytes`` from ``address``, which begins a page,
        are mapped by it, to the end of the last page."""
        self.locked = 0
        """Bytes, from ``address`` on."""
        self._driver: Final = driver
        self._address: Final = address
        self._nbytes: Final = -(-nbytes // cuda.HOST_PAGE) * cuda.HOST_PAGE
        self._over: Final = threading.Event()
        threading.Thread(target=self._run, args=[mapping], name="kvtier-page-locks", daemon=True).start()

    def close(self) -> None:
        """Has everything unlocked, soon. No copy may be under way."""
        self._over.set()

    def _run(self, mapping: object) -> None:
        starts: list[cuda.Address] = []
        try:
            self._lock(starts)
            self._over.wait()
            with suppress(CudaLost):  # nothing is copied any more
                while starts:
                    self._driver.unregister(starts[-1])
                    starts.pop()
        except CudaError as error:
            _kept.append(mapping)
            _log.warning("%d chunks of host memory stay page-locked: %s", len(starts), error)

    def _lock(self, starts: list[cuda.Address]) -> None:
        try:
            self._driver.bind()
            for offset in range(0, self._nbytes, CHUNK_BYTES):
                if self._over.is_set():
                    return
                start, nbytes = cuda.Address(self._address + offset), min(CHUNK_BYTES, self._nbytes - offset)
                self._driver.register(start, nbytes)
                starts.append(start)
                self.locked = offset + nbytes
        except CudaError as error:
            _log.warning(
                "%d of %d bytes of host memory are page-locked, copies of the rest are slower: %s",
                self.locked,
                self._nbytes,
                error,
            )
