"""Page-locked memory that bytes pass through between the device and whoever cannot reach it: disks and streams."""

from __future__ import annotations

import ctypes
from queue import Empty, LifoQueue
from typing import Final

import numpy as np

from kvtier.abi.cuda.driver import Address, Driver
from kvtier.abi.spec import PAGE, padded
from kvtierd.tiers.base import Bytes

BUFFERS: Final = 4
"""One for the disk's writer, one for each of its two readers, and one whose bytes are still on their way to the device
while a reader fetches the next."""


class Buffer:
    """Page-aligned memory, whose bytes are zero at first. ``memory`` is for whoever knows that it is there still."""

    def __init__(self, driver: Driver, nbytes: int) -> None:
        self._driver = driver
        self._allocated = driver.alloc_host(nbytes + PAGE)  # where it begins, the documentation does not say
        self.address = padded(self._allocated)
        self.memory: Bytes = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(self.address))
        self.memory.fill(0)

    def close(self) -> None:
        self._driver.free_host(Address(self._allocated))


class Staging:
    """At most :data:`BUFFERS` buffers of ``nbytes`` each, made when first wanted: who needs none takes none."""

    def __init__(self, driver: Driver, nbytes: int) -> None:
        self.nbytes: Final = nbytes
        self._driver = driver
        self._slots: LifoQueue[Buffer | None] = LifoQueue()
        for _ in range(BUFFERS):
            self._slots.put(None)

    def take(self) -> Buffer:
        """Waits for one that is free. Raises :class:`~kvtier.abi.cuda.errors.CudaError` where it cannot be made."""
        buffer = self._slots.get()
        if buffer is not None:
            return buffer
        try:
            return Buffer(self._driver, self.nbytes)
        except BaseException:
            self._slots.put(None)
            raise

    def give_back(self, buffer: Buffer) -> None:
        """Nothing copies to or from it any more."""
        self._slots.put(buffer)

    def abandon(self) -> None:
        """One that was taken may be copied to or from for ever: another takes its place."""
        self._slots.put(None)

    def close(self) -> None:
        """Every buffer has been given back."""
        while True:
            try:
                buffer = self._slots.get_nowait()
            except Empty:
                return
            if buffer is not None:
                buffer.close()
