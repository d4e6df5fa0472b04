"""Page-locked memory between the device and disks or streams, which cannot reach the device."""

from __future__ import annotations

import ctypes
import threading
from contextlib import suppress
from typing import Final

import numpy as np

from kvtier.abi.cuda.driver import Address, Driver
from kvtier.abi.cuda.errors import CudaLost
from kvtier.abi.spec import PAGE, padded
from kvtierd.tiers.base import Bytes, TierIOError
from kvtierd.tiers.memfd import near

BUFFERS: Final = 4
"""Buffers for the disk's writer, for each of its two readers, and for bytes that are still on their way to the device
while a reader fetches the next."""


class Buffer:
    """Page-aligned memory, zeroed at first. ``memory`` must not be used after :meth:`close`."""

    def __init__(self, driver: Driver, nbytes: int) -> None:
        self._driver = driver
        self._allocated = driver.alloc_host(nbytes + PAGE)  # the driver's alignment is not documented
        self.address = padded(self._allocated)
        self.memory: Bytes = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(self.address))
        self.memory.fill(0)

    def close(self) -> None:
        with suppress(CudaLost):  # a lost device takes nothing back
            self._driver.free_host(Address(self._allocated))


class Staging:
    """At most :data:`BUFFERS` buffers of ``nbytes`` each, made on first use. ``node``: see :func:`near`. For any
    thread. Raises :class:`~kvtier.abi.cuda.errors.CudaError`, and :class:`TierIOError` after :meth:`close`."""

    def __init__(self, driver: Driver, nbytes: int, node: int | None = None) -> None:
        self._driver = driver
        self._nbytes = nbytes
        self._node = node
        self._changed = threading.Condition()
        self._idle: list[Buffer] = []
        self._to_make = BUFFERS
        self._closed = False

    def take(self) -> Buffer:
        """Takes a buffer, and waits until one is free."""
        with self._changed:
            self._changed.wait_for(lambda: self._idle or self._to_make or self._closed)
            if self._closed:
                raise TierIOError(0, "the cache is closed")
            if self._idle:
                return self._idle.pop()
            self._to_make -= 1
        try:
            self._driver.bind()
            with near(self._node):
                return Buffer(self._driver, self._nbytes)
        except BaseException:
            self.abandon()
            raise

    def give_back(self, buffer: Buffer) -> None:
        """Takes a buffer back. No copy uses it any more."""
        with self._changed:
            if not self._closed:
                self._idle.append(buffer)
                self._changed.notify()
                return
        buffer.close()

    def abandon(self) -> None:
        """Gives up a buffer that a copy may use for ever, or that could not be made. Another buffer may take its
        place."""
        with self._changed:
            self._to_make += 1
            self._changed.notify()

    def close(self) -> None:
        """Closes the idle buffers. A taken buffer is closed when it is given back."""
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
            self._changed.notify_all()
        for buffer in idle:
            buffer.close()
