"""An allocation of device memory, at an address of this process."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Final

from kvtier.abi.cuda.driver import Address, Driver, Handle
from kvtier.abi.cuda.errors import CudaError, CudaLost, CudaOutOfMemory


class DeviceMemory:
    """``nbytes`` of device memory at ``address``, until :meth:`close`, or until nothing refers to this object.

    ``fd`` is a descriptor of the memory for other processes; this object closes it. If ``fd`` is ``None``, ``why_not``
    says why other processes cannot have the memory.
    """

    def __init__(
        self, driver: Driver, address: Address, nbytes: int, undo: ExitStack, *, fd: int | None, why_not: str | None
    ) -> None:
        self.driver: Final = driver
        self.address: Final = address
        self.nbytes: Final = nbytes
        self.fd: Final = fd
        self.why_not: Final = why_not
        self._undo = undo
        self._garbage = _finalized(self, end)

    @classmethod
    def create(cls, driver: Driver, nbytes: int) -> DeviceMemory:
        """Allocates memory, its bytes not set, that other processes can have if the device allows it. Raises
        :class:`~kvtier.abi.cuda.errors.CudaOutOfMemory`, or another ``CudaError``, and then keeps nothing."""
        _checked(nbytes)
        why_not: str | None = None
        if not driver.features.vmm:
            why_not = f"{driver.name} has no virtual memory management"
        elif not driver.features.posix_fd:
            why_not = f"{driver.name} cannot export memory as a file descriptor"
        else:
            try:
                return cls._mapping(driver, driver.create(_rounded(driver, nbytes)), nbytes, driver.export_fd)
            except (CudaOutOfMemory, CudaLost):
                raise
            except CudaError as error:
                # The device supports sharing, but this container or virtual machine does not allow it. The code may be
                # any, for example INVALID_VALUE.
                why_not = str(error)
        with ExitStack() as undo:
            address = driver.alloc(nbytes)
            undo.callback(driver.free, address)
            return cls(driver, address, nbytes, undo.pop_all(), fd=None, why_not=why_not)

    @classmethod
    def from_fd(cls, driver: Driver, fd: int, nbytes: int, *, keep: bool = False) -> DeviceMemory:
        """Maps the memory of ``nbytes`` behind a descriptor, which stays the caller's. With ``keep`` this object has a
        copy of the descriptor, to hand on.

        ``driver`` must be open on the memory's device. Raises ``CudaError``, and then keeps nothing.
        """
        _checked(nbytes)
        return cls._mapping(driver, driver.import_fd(fd), nbytes, (lambda _: os.dup(fd)) if keep else None)

    @classmethod
    def _mapping(
        cls, driver: Driver, handle: Handle, nbytes: int, shared: Callable[[Handle], int] | None
    ) -> DeviceMemory:
        """Maps the memory of a handle, and releases the handle. ``shared``: makes a descriptor to hand on."""
        with ExitStack() as undo, ExitStack() as until_mapped:
            until_mapped.callback(driver.release, handle)
            fd, size = None if shared is None else shared(handle), _rounded(driver, nbytes)
            if fd is not None:
                undo.callback(os.close, fd)
            address = driver.reserve(size)
            undo.callback(driver.unreserve, address, size)
            driver.map(address, size, handle)
            undo.callback(driver.unmap, address, size)
            driver.allow(address, size)
            until_mapped.close()
            why_not = "the memory belongs to another process" if fd is None else None
            return cls(driver, address, nbytes, undo.pop_all(), fd=fd, why_not=why_not)

    def close(self) -> None:
        """Gives the memory back. No copy of it may be under way, and no view of it may be used afterwards. A second
        call does nothing."""
        if self._garbage.detach() is not None:
            end(self._undo)

    def collected_by(self, ending: Callable[[ExitStack], None]) -> None:
        """Calls ``ending`` when nothing refers to this object any more. ``ending`` must call :func:`end`, then or
        later."""
        self._garbage.detach()
        self._garbage = _finalized(self, ending)


def _rounded(driver: Driver, nbytes: int) -> int:
    granularity = driver.granularity()
    return -(-nbytes // granularity) * granularity


def _checked(nbytes: int) -> None:
    if nbytes <= 0:
        raise ValueError(f"device memory of {nbytes} bytes: must be at least 1")


def _finalized(
    memory: DeviceMemory, ending: Callable[[ExitStack], None]
) -> weakref.finalize[[ExitStack], DeviceMemory]:
    garbage = weakref.finalize(memory, ending, memory._undo)
    garbage.atexit = False  # the memory ends with the process anyway, and copies may still be under way
    return garbage


def end(undo: ExitStack) -> None:
    """Gives the memory back. No copy of it may be under way. Raises ``CudaError``."""
    with suppress(CudaLost):  # memory of a lost device cannot be given back before the process ends
        undo.close()
