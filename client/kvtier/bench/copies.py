"""The copies of a loaded daemon without the daemon: the same bytes a second on the same kinds of edges."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import numpy as np

from kvtier.bench.raw_disk import BATCH, RawSlab
from kvtier.tensors import Bytes

SLOTS: Final = 8 * BATCH


class Copies:
    """One thread an edge, each pacing itself to a rate, a batch of 32 blocks at a time."""

    def __init__(self, directory: Path, block_bytes: int) -> None:
        self._device, self._host = (_memory(block_bytes) for _ in range(2))
        self._slab = RawSlab(directory / "copies.slab", block_bytes, SLOTS)
        self._batch_bytes = BATCH * block_bytes
        self._ending = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, rates: Mapping[str, float]) -> None:
        """``rates``: bytes a second by edge, such as ``device>host``; edges of no rate stand still."""
        self.stop()
        self._ending.clear()
        for edge, rate in rates.items():
            if rate > 0:
                work = (self._step(edge), self._batch_bytes / rate)
                self._threads.append(threading.Thread(target=self._pace, args=work, name=edge))
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def close(self) -> None:
        self.stop()
        self._slab.__exit__(None, None, None)

    def _pace(self, step: Callable[[], None], seconds: float) -> None:
        due = time.monotonic()
        while not self._ending.wait(max(0.0, due - time.monotonic())):
            step()
            # What could not be kept up with is not made up for: the disk gives what it gives.
            due = max(due + seconds, time.monotonic())

    def _step(self, edge: str) -> Callable[[], None]:
        source, target = edge.split(">")
        memory = self._device if "device" in (source, target) else self._host
        slots = np.random.default_rng(len(edge)).permutation(SLOTS)[:BATCH]
        parts = [memory[slot] for slot in slots]
        if target == "disk":
            return lambda: self._slab.write(self._slab.scattered(BATCH), parts)
        if source == "disk":
            return lambda: self._slab.read(self._slab.scattered(BATCH), parts)
        read, write = (self._device, self._host) if source == "device" else (self._host, self._device)

        def copy() -> None:
            for slot in slots:
                np.copyto(write[slot], read[slot])

        return copy


def _memory(block_bytes: int) -> Bytes:
    flat = np.frombuffer(mmap.mmap(-1, SLOTS * block_bytes), dtype=np.uint8)
    flat[:] = 1
    rows: Bytes = flat.reshape(SLOTS, block_bytes)
    return rows
