"""The driver calls of one device, with ints for addresses and handles, and an exception for every failure.

Any thread may call any function. A thread that called :meth:`Driver.bind` keeps the device's context current, which
makes its calls cheaper; this is for kvtier's own threads. On any other thread a call sets the context and takes it away
again, so that an application's choice of device, and its graph captures, stay as they were.

A call may report an error of earlier work of the device.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NewType

import numpy as np
from numpy.typing import NDArray

from kvtier.abi.cuda.errors import NOT_READY, CudaError, CudaLost, CudaUnavailable, CudaUnsupported, error_of
from kvtier.abi.cuda.opening import described, find, load_bindings, ordinal_at

Address = NewType("Address", int)
"""Address of device or host memory, in the address space that CUDA shares with the process."""
Stream = NewType("Stream", int)
Event = NewType("Event", int)
Handle = NewType("Handle", int)
"""Handle of memory, which need not have an address yet."""

Copies = NDArray[np.int64]
"""Three rows: destination addresses, source addresses, bytes. A column is a copy; copies may be made in any order."""

BATCH: Final = 1024
"""Copies in one call. More copies gain nothing, and drivers have crashed with tens of thousands."""

HOST_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


class _ThisThread(threading.local):
    bound: Driver | None = None


_thread: Final = _ThisThread()


class Driver:
    """A device and its primary context, which is kept until :meth:`close`.

    Every call raises :class:`~kvtier.abi.cuda.errors.CudaError` or a subclass.

    ``ordinal`` numbers the devices that this process sees, ``uuid`` has 16 bytes and is the same in every process.
    """

    @classmethod
    def open(cls, device: str) -> Driver:
        """Opens a device: ``cuda``, ``cuda:1`` or ``GPU-<uuid>``.

        Raises :class:`~kvtier.abi.cuda.errors.CudaUnavailable`, with the reason, and ``ValueError`` for a text that is
        no device name.
        """
        return cls(load_bindings(), device)

    @staticmethod
    def ordinal_at(address: int) -> int:
        """Returns the :attr:`ordinal` of the device that an address of CUDA memory belongs to, from any allocator.
        Raises :class:`~kvtier.abi.cuda.errors.CudaUnavailable` if CUDA does not tell."""
        return ordinal_at(load_bindings(), address)

    def __init__(self, bindings: Any, device: str) -> None:
        found = find(bindings, device)
        self._cuda = bindings
        self._device = found.handle
        self.ordinal: Final = found.ordinal
        self.uuid: Final = found.uuid
        self.name: Final = found.name
        self.features: Final = found.features
        self._batched = bindings.CUmemcpyAttributes()
        self._batched.srcAccessOrder = bindings.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        # Copy by the copy engines: the device's processors are for computation.
        self._batched.flags = bindings.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
        self._relaxed = bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self._fd = bindings.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        try:
            self._context = self._plain(bindings.cuDevicePrimaryCtxRetain, self._device)
        except CudaError as error:
            # The device is full, or its mode admits one process only, or none.
            raise CudaUnavailable(f"device {device} ({self.name}) takes no context of this process: {error}") from error

    def close(self) -> None:
        """Gives the context back. Streams, events and plain memory end with it unless other code uses it, too."""
        with suppress(CudaLost):  # a lost context ends with the process
            self._plain(self._cuda.cuDevicePrimaryCtxRelease, self._device)

    def bind(self) -> None:
        """Makes the context current on this thread until another driver is bound. For threads on which only kvtier
        calls CUDA."""
        if _thread.bound is not self:
            self._plain(self._cuda.cuCtxSetCurrent, self._context)
            # Otherwise a query while another thread captures a graph would be refused, and would spoil the capture.
            self._plain(self._cuda.cuThreadExchangeStreamCaptureMode, self._relaxed)
            _thread.bound = self

    @contextmanager
    def visit(self) -> Iterator[None]:
        """Makes the context current on this thread for a ``with`` block, whose calls are as cheap as after
        :meth:`bind`. For several calls in a row on the application's thread, which then gets its own context back."""
        if _thread.bound is self:
            yield
            return
        before = _thread.bound
        self._plain(self._cuda.cuCtxPushCurrent, self._context)
        try:
            mode = self._plain(self._cuda.cuThreadExchangeStreamCaptureMode, self._relaxed)
            try:
                _thread.bound = self
                yield
            finally:
                _thread.bound = before
                self._plain(self._cuda.cuThreadExchangeStreamCaptureMode, mode)
        finally:
            self._plain(self._cuda.cuCtxPopCurrent)

    def memory(self) -> tuple[int, int]:
        """Returns free and total bytes of the device. Not all free bytes can be allocated."""
        free, total = self._call(self._cuda.cuMemGetInfo)
        return free, total

    def pci_address(self) -> str:
        """Returns the PCI address as Linux writes it: ``0000:3b:00.0``."""
        name: bytes = self._plain(self._cuda.cuDeviceGetPCIBusId, 16, self._device)
        return name.split(b"\0")[0].decode("ascii", "replace").lower()

    # Memory with a handle, an address range and a mapping between them. -------------------------------------------

    def granularity(self) -> int:
        """Returns a power of two: addresses and sizes of this memory are multiples of it."""
        minimum = self._cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self._call(self._cuda.cuMemGetAllocationGranularity, self._properties(), minimum))

    def create(self, nbytes: int) -> Handle:
        """Allocates a multiple of :meth:`granularity`. The memory can be exported with ``features.posix_fd``."""
        return Handle(int(self._call(self._cuda.cuMemCreate, nbytes, self._properties(), 0)))

    def release(self, handle: Handle) -> None:
        """Ends the handle. The memory lives on while it is mapped or exported."""
        self._call(self._cuda.cuMemRelease, handle)

    def reserve(self, nbytes: int) -> Address:
        """Reserves an address range at a multiple of :meth:`granularity`."""
        return Address(int(self._call(self._cuda.cuMemAddressReserve, nbytes, self.granularity(), 0, 0)))

    def unreserve(self, address: Address, nbytes: int) -> None:
        """Gives back a whole address range that has no mapping any more."""
        self._call(self._cuda.cuMemAddressFree, address, nbytes)

    def map(self, address: Address, nbytes: int, handle: Handle) -> None:
        """Maps the memory's first ``nbytes`` at a reserved address. Do not access them before :meth:`allow`."""
        self._call(self._cuda.cuMemMap, address, nbytes, 0, handle, 0)

    def unmap(self, address: Address, nbytes: int) -> None:
        """Ends a whole mapping. No copy of its memory may be under way."""
        self._call(self._cuda.cuMemUnmap, address, nbytes)

    def allow(self, address: Address, nbytes: int) -> None:
        """Lets this device read and write the memory that is mapped at an address."""
        access = self._cuda.CUmemAccessDesc()
        access.location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.ordinal
        access.flags = self._cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._call(self._cuda.cuMemSetAccess, address, nbytes, [access], 1)

    def export_fd(self, handle: Handle) -> int:
        """Returns a new descriptor of the memory, which the caller closes. Any descriptor keeps the memory alive."""
        fd = int(self._call(self._cuda.cuMemExportToShareableHandle, handle, self._fd, 0))
        os.set_inheritable(fd, False)
        return fd

    def import_fd(self, fd: int) -> Handle:
        """Returns a handle of the memory behind a descriptor. The descriptor stays the caller's to close."""
        return Handle(int(self._call(self._cuda.cuMemImportFromShareableHandle, fd, self._fd)))

    def _properties(self) -> Any:
        wanted = self._cuda.CUmemAllocationProp()
        wanted.type = self._cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wanted.location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        wanted.location.id = self.ordinal
        if self.features.posix_fd:
            wanted.requestedHandleTypes = self._fd
        return wanted

    # Memory without a handle, and memory of the host. -------------------------------------------------------------

    def alloc(self, nbytes: int) -> Address:
        """Allocates device memory that other processes cannot have."""
        return Address(int(self._call(self._cuda.cuMemAlloc, nbytes)))

    def free(self, address: Address) -> None:
        self._call(self._cuda.cuMemFree, address)

    def register(self, address: Address, nbytes: int) -> None:
        """Page-locks memory of this process, which makes copies asynchronous and faster. Whole pages, which are not yet
        registered. No copy may reach beyond the memory of one call."""
        if address % HOST_PAGE or nbytes % HOST_PAGE or nbytes <= 0:
            raise ValueError(f"{nbytes} bytes at {address:#x}: must be whole pages of {HOST_PAGE} bytes")
        self._call(self._cuda.cuMemHostRegister, address, nbytes, self._cuda.CU_MEMHOSTREGISTER_PORTABLE)

    def unregister(self, address: Address) -> None:
        """Unlocks the memory that :meth:`register` locked at ``address``. No copy of it may be under way."""
        self._call(self._cuda.cuMemHostUnregister, address)

    def alloc_host(self, nbytes: int) -> Address:
        """Allocates page-locked memory of this process."""
        return Address(int(self._call(self._cuda.cuMemHostAlloc, nbytes, self._cuda.CU_MEMHOSTALLOC_PORTABLE)))

    def free_host(self, address: Address) -> None:
        self._call(self._cuda.cuMemFreeHost, address)

    # Streams and events. ------------------------------------------------------------------------------------------

    def stream(self) -> Stream:
        """Creates a stream that waits for no other stream, not even for the default stream."""
        flags = self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING
        return Stream(int(self._call(self._cuda.cuStreamCreate, flags)))

    def idle(self, stream: Stream) -> bool:
        """Returns whether the stream has done all its work. Does not wait. For callers that cannot record an event."""
        return self._answered(self._cuda.cuStreamQuery, stream)

    def drop_stream(self, stream: Stream) -> None:
        """Destroys a stream. Its work so far is still done."""
        self._call(self._cuda.cuStreamDestroy, stream)

    def capturing(self, stream: Stream) -> bool:
        """Returns whether new work of the stream goes into a graph instead of being done."""
        none = self._cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
        return bool(self._call(self._cuda.cuStreamIsCapturing, stream) != none)

    def event(self) -> Event:
        """Creates an event without a time. Until it is recorded it is :meth:`done`."""
        return Event(int(self._call(self._cuda.cuEventCreate, self._cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING)))

    def drop_event(self, event: Event) -> None:
        self._call(self._cuda.cuEventDestroy, event)

    def record(self, event: Event, stream: Stream) -> None:
        """Makes the event stand for the stream's work so far."""
        self._call(self._cuda.cuEventRecord, event, stream)

    def done(self, event: Event) -> bool:
        """Returns whether the work that the event stands for is done. Does not wait."""
        return self._answered(self._cuda.cuEventQuery, event)

    def _answered(self, query: Any, of: Event | Stream) -> bool:
        if _thread.bound is not self:
            with self.visit():
                return self._answered(query, of)
        try:
            code = query(of)[0]
        except (RuntimeError, KeyError, ValueError) as error:
            raise self._raised(query.__name__, error) from error
        if not code:
            return True
        if code == NOT_READY:
            return False
        raise self._error(query.__name__, int(code))

    # Copies. A call returns at once; source and destination must stay as they are until a later event is done. -----

    def copy(self, dst: Address, src: Address, nbytes: int, stream: Stream) -> None:
        self._call(self._cuda.cuMemcpyAsync, dst, src, nbytes, stream)

    def copy_batch(self, dsts: Sequence[int], srcs: Sequence[int], sizes: Sequence[int], stream: Stream) -> None:
        """Makes copies of at least one byte each, in few calls and in any order: no copy may touch bytes that another
        copy writes. Host memory must be page-locked. Only with ``features.batch_copy``."""
        pointer = self._cuda.CUdeviceptr
        for first in range(0, len(sizes), BATCH):
            some = slice(first, first + BATCH)
            self._call(
                self._cuda.cuMemcpyBatchAsync,
                list(map(pointer, dsts[some])),
                list(map(pointer, srcs[some])),
                sizes[some],
                len(sizes[some]),
                [self._batched],
                [0],
                1,
                stream,
            )

    def copy_many(self, copies: Copies, locked: NDArray[np.bool_], stream: Stream) -> None:
        """Makes copies: of page-locked memory in as few calls as the driver allows, of other memory one by one."""
        if self.features.batch_copy and copies.shape[1] > 1:
            dsts, srcs, sizes = copies[:, locked].tolist()
            self.copy_batch(dsts, srcs, sizes, stream)
            copies = copies[:, ~locked]
        for dst, src, nbytes in copies.T.tolist():
            self.copy(dst, src, nbytes, stream)

    def fill(self, address: Address, byte: int, nbytes: int, stream: Stream) -> None:
        """Sets device memory to one byte value."""
        self._call(self._cuda.cuMemsetD8Async, address, byte, nbytes, stream)

    # How a call is made. ------------------------------------------------------------------------------------------

    def _call(self, call: Any, *arguments: Any) -> Any:
        if _thread.bound is not self:
            with self.visit():
                return self._plain(call, *arguments)
        return self._plain(call, *arguments)

    def _plain(self, call: Any, *arguments: Any) -> Any:
        try:
            result = call(*arguments)
        except (RuntimeError, KeyError, ValueError) as error:
            raise self._raised(call.__name__, error) from error
        if result[0]:
            raise self._error(call.__name__, int(result[0]))
        return result[1:] if len(result) > 2 else result[-1]

    def _raised(self, call: str, error: RuntimeError | KeyError | ValueError) -> CudaError:
        """Converts an error of the bindings themselves: the driver lacks the call, or they do not know the code."""
        if isinstance(error, RuntimeError):
            return CudaUnsupported(call, 0, "not found", str(error))
        code = re.search(r"\d+", str(error))
        return self._error(call, int(code[0]) if code else 0)

    def _error(self, call: str, code: int) -> CudaError:
        return error_of(call, code, *described(self._cuda, code))


def joined(copies: Copies, ranges: NDArray[np.int64]) -> tuple[Copies, NDArray[np.int64]]:
    """Joins copies that continue each other on both sides. ``ranges``: the range of memory of each copy; a joined copy
    stays in one range."""
    order = np.argsort(copies[0])
    copies, ranges = copies[:, order], ranges[order]
    apart = (copies[:2, 1:] != copies[:2, :-1] + copies[2, :-1]).any(axis=0) | (ranges[1:] != ranges[:-1])
    if apart.all():
        return copies, ranges
    firsts = np.flatnonzero(np.concatenate(([True], apart)))
    fewer = copies[:, firsts]
    fewer[2] = np.add.reduceat(copies[2], firsts)
    return fewer, ranges[firsts]
