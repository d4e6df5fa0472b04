"""Page-locking the host tier: chunk after chunk in the background, so that the daemon serves meanwhile."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.abi.cuda import driver as cuda
from kvtier.abi.cuda.driver import Address, Driver
from kvtier.abi.cuda.errors import CudaError, CudaLost

CHUNK_BYTES: Final = 64 << 20
"""Other calls of the driver may have to wait while it locks a chunk's pages, a copy's among them."""
STOP_S: Final = 5.0
"""How long a close waits for the chunk that is being locked."""

_log = logging.getLogger(__name__)


class Chunk(NamedTuple):
    """Whole slots of one group, to the end of the host's last page of them."""

    address: int
    nbytes: int


def chunks_of(start: int, slots: int, record_bytes: int) -> Iterator[Chunk]:
    """Of one group, whose slot 0 is at ``start``. Slots are handed out from the lowest number up, and so are chunks.

    A chunk begins a page of the host, which may be larger than a slot. No other group is in its last page: groups begin
    at multiples of huge pages.
    """
    page = cuda.HOST_PAGE
    step = page // math.gcd(page, record_bytes)  # so many slots fill whole pages
    together = max(1, CHUNK_BYTES // record_bytes // step) * step
    for first in range(0, slots, together):
        nbytes = min(together, slots - first) * record_bytes
        yield Chunk(start + first * record_bytes, -(-nbytes // page) * page)


def in_turn(groups: Sequence[Iterator[Chunk]]) -> list[Chunk]:
    """The first chunk of every group, then the second: what is used first is ready first."""
    return [chunk for chunk in chain.from_iterable(zip_longest(*groups)) if chunk is not None]


class PageLocks:
    """Of one cache's host segment. What is not locked, yet or ever, is copied all the same, slower.

    ``chunks`` do not overlap and are locked in the order given. They must stay mapped until :meth:`close` has said
    that nothing of them is locked any more.
    """

    def __init__(self, name: str, driver: Driver, chunks: Sequence[Chunk]) -> None:
        self._name = name
        self._driver = driver
        self._chunks = chunks
        by_address = sorted((chunk.address, chunk.nbytes, number) for number, chunk in enumerate(chunks))
        self._starts, nbytes, self._numbers = np.array([(0, 0, -1), *by_address]).T
        self._ends = self._starts + nbytes
        self.locked = 0
        """So many of ``chunks``, the first ones."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtierd-page-locks", daemon=True)
        self.nbytes = 0
        """Bytes that are locked."""
        self.total: Final = sum(chunk.nbytes for chunk in chunks)
        self.problem: str | None = None
        """Why the rest is not locked, and will not be."""

    def start(self) -> None:
        self._thread.start()

    @property
    def complete(self) -> bool:
        return self.locked == len(self._chunks)

    def chunks_at(self, addresses: NDArray[np.int64]) -> NDArray[np.int64]:
        """Numbers of the chunks that these addresses lie in; -1 for one that is not of the host segment."""
        places = np.searchsorted(self._starts, addresses, "right") - 1
        return np.where(addresses < self._ends[places], self._numbers[places], -1)

    def close(self) -> bool:
        """Undoes everything. Blocks. No copy may be under way. False: some of it is locked still, and must stay mapped.

        A second close tries the rest again. Of a lost device nothing can be undone, and nothing copies any more.
        """
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(STOP_S)
        if self._thread.is_alive():
            _log.error("page-locking hangs in the driver name=%s", self._name)
            return False
        self._driver.bind()
        while self.locked:
            chunk = self._chunks[self.locked - 1]
            try:
                self._driver.unregister(Address(chunk.address))
            except CudaLost:
                return True
            except CudaError as error:
                _log.warning("host memory stays page-locked name=%s bytes=%d why=%r", self._name, self.nbytes, error)
                return False
            self.locked -= 1
            self.nbytes -= chunk.nbytes
        return True

    def _run(self) -> None:
        try:
            self._driver.bind()
            for chunk in self._chunks:
                if self._stopping.is_set():
                    return
                self._driver.register(Address(chunk.address), chunk.nbytes)
                self.locked += 1
                self.nbytes += chunk.nbytes
        except CudaError as error:
            self.problem = f"{self.nbytes} of {self.total} bytes of host memory are page-locked: {error}"
            _log.warning("%s name=%s", self.problem, self._name)
        else:
            _log.info("host memory is page-locked name=%s bytes=%d", self._name, self.nbytes)
