"""Page-locking the host tier."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest

import numpy as np
from numpy.typing import NDArray

from kvtier.abi.cuda import driver as cuda
from kvtier.abi.cuda.driver import Driver
from kvtier.abi.cuda.page_locks import CHUNK_BYTES, Chunk, PageLocks


def chunks_of(start: int, slots: int, record_bytes: int) -> Iterator[Chunk]:
    """Whole slots of one group, whose slot 0 is at ``start``, to the end of the host's last page of them. Slots are
    handed out from the lowest number up, and so are chunks.

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


class SegmentLocks(PageLocks):
    """Of one cache's host segment."""

    def __init__(self, name: str, driver: Driver, chunks: Sequence[Chunk]) -> None:
        super().__init__(name, driver, chunks)
        by_address = sorted((chunk.address, chunk.nbytes, number) for number, chunk in enumerate(chunks))
        self._starts, nbytes, self._numbers = np.array([(0, 0, -1), *by_address]).T
        self._ends = self._starts + nbytes

    def chunks_at(self, addresses: NDArray[np.int64]) -> NDArray[np.int64]:
        """Numbers of the chunks that these addresses lie in; -1 for one that is not of the host segment."""
        places = np.searchsorted(self._starts, addresses, "right") - 1
        return np.where(addresses < self._ends[places], self._numbers[places], -1)
