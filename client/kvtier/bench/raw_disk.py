"""What the disk gives without kvtier: the same slots, threads and batches past the page cache, a call after another."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import numpy as np

from kvtier.tensors import Bytes

BATCH: Final = 32
"""Blocks of one reader's turn, and at least between two calls of ``fdatasync``: the daemon's numbers."""
WRITE_BYTES: Final = 8 << 20
"""More blocks, if so small, go with one ``fdatasync``."""
READERS: Final = 2
_FILL_BYTES: Final = 64 << 20


class RawSlab:
    """A file of ``slots`` records, all of them written before, beside the daemon's on the same file system."""

    def __init__(self, path: Path, record_bytes: int, slots: int) -> None:
        self.slots: Final = slots
        self._record: Final = record_bytes
        self._path: Final = path
        self._random: Final = random.Random(1)
        self._fd: Final = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
        self._threads: Final = ThreadPoolExecutor(READERS)
        self._fill()

    def scattered(self, count: int) -> list[int]:
        """Slots of a round."""
        return self._random.sample(range(self.slots), count)

    def write(self, slots: Sequence[int], parts: Sequence[Bytes]) -> None:
        """One thread; each batch ascending, neighbours in one call, one ``fdatasync``."""
        batch = max(BATCH, WRITE_BYTES // self._record)
        for start in range(0, len(slots), batch):
            self._each_run(slots[start : start + batch], parts[start : start + batch], os.pwritev)
            os.fdatasync(self._fd)

    def read(self, slots: Sequence[int], parts: Sequence[Bytes]) -> None:
        """As many threads as the daemon has readers."""
        batches = [slice(start, start + BATCH) for start in range(0, len(slots), BATCH)]
        reading = [self._threads.submit(self._each_run, slots[batch], parts[batch], os.preadv) for batch in batches]
        for each in reading:
            each.result()

    def _each_run(
        self, slots: Sequence[int], parts: Sequence[Bytes], call: Callable[[int, Sequence[memoryview], int], int]
    ) -> None:
        order = sorted(range(len(slots)), key=slots.__getitem__)
        start = 0
        for end in range(1, len(order) + 1):
            if end < len(order) and slots[order[end]] == slots[order[end - 1]] + 1:
                continue
            run = [parts[index].data for index in order[start:end]]
            if call(self._fd, run, slots[order[start]] * self._record) != len(run) * self._record:
                raise OSError(f"{self._path}: a short transfer")
            start = end

    def _fill(self) -> None:
        """Written, not only allocated: a file system treats the first write of a place as something else."""
        total = self.slots * self._record
        os.posix_fallocate(self._fd, 0, total)
        page = np.frombuffer(mmap.mmap(-1, _FILL_BYTES), dtype=np.uint8)
        page[:] = 1
        for start in range(0, total, _FILL_BYTES):
            os.pwritev(self._fd, [page[: min(_FILL_BYTES, total - start)].data], start)
        os.fdatasync(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown()
        os.close(self._fd)
        self._path.unlink()
