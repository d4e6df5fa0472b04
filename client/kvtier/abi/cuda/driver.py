"""The driver calls of one device, with ints for addresses and handles, and an exception for every failure.

Everything here may be called from any thread. A thread that called :meth:`Driver.bind` keeps the device's context
current, which makes each of its calls cheaper: for threads of kvtier's own. On any other thread a call sets the context
and takes it away again, so that an application's choice of device, and its graph captures, stay as they were.

A call may report an error of work that was given to the device earlier.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NewType

from kvtier.abi.cuda.errors import NOT_READY, CudaError, CudaLost, CudaUnavailable, CudaUnsupported, error_of
from kvtier.abi.cuda.opening import Features, described, find, load_bindings, ordinal_at

Address = NewType("Address", int)
"""Of device memory, or of host memory, in the one address space that CUDA shares with the process."""
Stream = NewType("Stream", int)
Event = NewType("Event", int)
Handle = NewType("Handle", int)
"""Of memory that has no address yet."""

Copy = tuple[Address, Address, int]
"""Destination, source, bytes."""

BATCH: Final = 1024
"""Copies that are made in one call. More gain nothing, and drivers have crashed with tens of thousands."""

HOST_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


class _ThisThread(threading.local):
    bound: Driver | None = None
    """Whose context is current; another driver's may be next."""


_thread: Final = _ThisThread()


class Driver:
    """One device and its primary context, which is kept until :meth:`close`.

    Every call raises :class:`~kvtier.abi.cuda.errors.CudaError` or one of its kinds.

    ``ordinal`` counts the devices that this process sees, ``uuid`` has 16 bytes and is the same in every process.
    """

    ordinal: Final[int]
    uuid: Final[bytes]
    name: Final[str]
    features: Final[Features]

    @classmethod
    def open(cls, device: str) -> Driver:
        """``device``: ``cuda``, ``cuda:1`` or ``GPU-<uuid>``.

        Raises :class:`~kvtier.abi.cuda.errors.CudaUnavailable`, which says what is missing, and ``ValueError`` for a
        text that names no device.
        """
        return cls(load_bindings(), device)

    @staticmethod
    def ordinal_at(address: int) -> int:
        """The :attr:`ordinal` of the device that an address of CUDA's memory is of, whoever allocated it.

        Raises :class:`~kvtier.abi.cuda.errors.CudaUnavailable` where that cannot be told.
        """
        return ordinal_at(load_bindings(), address)

    def __init__(self, bindings: Any, device: str) -> None:
        found = find(bindings, device)
        self._cuda = bindings
        self._device = found.handle
        self.ordinal = found.ordinal
        self.uuid = found.uuid
        self.name = found.name
        self.features = found.features
        self._batched = bindings.CUmemcpyAttributes()
        self._batched.srcAccessOrder = bindings.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        # By the copy engines: the processors of the device are for those who compute.
        self._batched.flags = bindings.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
        self._relaxed = bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self._fd = bindings.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        try:
            self._context = self._plain(bindings.cuDevicePrimaryCtxRetain, self._device)
        except CudaError as error:
            # The device is full, or in a mode that lets one process in, or none.
            raise CudaUnavailable(f"device {device} ({self.name}) takes no context of this process: {error}") from error

    def close(self) -> None:
        """Gives the context back. Streams, events and plain memory end with it unless someone else uses it, too."""
        with suppress(CudaLost):  # a context that is lost ends with the process
            self._plain(self._cuda.cuDevicePrimaryCtxRelease, self._device)

    def bind(self) -> None:
        """Makes the context current on this thread until another driver's is. For threads that nobody else makes CUDA
        calls on."""
        if _thread.bound is not self:
            self._plain(self._cuda.cuCtxSetCurrent, self._context)
            # Else a query while some other thread captures a graph would be refused, and would spoil the capture.
            self._plain(self._cuda.cuThreadExchangeStreamCaptureMode, self._relaxed)
            _thread.bound = self

    @contextmanager
    def visit(self) -> Iterator[None]:
        """Makes the context current on this thread for the block, whose calls are then as cheap as after :meth:`bind`.
        For several of them in a row on a thread of the application's, whose own context is back afterwards."""
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
        """Free and total bytes of the device. Not all that is free can be had."""
        free, total = self._call(self._cuda.cuMemGetInfo)
        return free, total

    def pci_address(self) -> str:
        """As Linux writes it: ``0000:3b:00.0``."""
        name: bytes = self._plain(self._cuda.cuDeviceGetPCIBusId, 16, self._device)
        return name.split(b"\0")[0].decode("ascii", "replace").lower()

    # Memory that has a handle, an address range and a mapping of the one at the other. ---------------------------

    def granularity(self) -> int:
        """Bytes, a power of two: what addresses and sizes of such memory are multiples of."""
        minimum = self._cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self._call(self._cuda.cuMemGetAllocationGranularity, self._properties(), minimum))

    def create(self, nbytes: int) -> Handle:
        """Memory of a multiple of :meth:`granularity`, which can be exported where ``features.posix_fd``, and
        registered with a network card where ``features.rdma``."""
        return Handle(int(self._call(self._cuda.cuMemCreate, nbytes, self._properties(), 0)))

    def release(self, handle: Handle) -> None:
        """Ends the handle. The memory lives on while it is mapped or exported."""
        self._call(self._cuda.cuMemRelease, handle)

    def reserve(self, nbytes: int) -> Address:
        """An address range at a multiple of :meth:`granularity`."""
        return Address(int(self._call(self._cuda.cuMemAddressReserve, nbytes, self.granularity(), 0, 0)))

    def unreserve(self, address: Address, nbytes: int) -> None:
        """Gives back a whole range that nothing is mapped to any more."""
        self._call(self._cuda.cuMemAddressFree, address, nbytes)

    def map(self, address: Address, nbytes: int, handle: Handle) -> None:
        """Puts the memory's first ``nbytes`` at a reserved address. Not to be touched before :meth:`allow`."""
        self._call(self._cuda.cuMemMap, address, nbytes, 0, handle, 0)

    def unmap(self, address: Address, nbytes: int) -> None:
        """Ends a mapping, the whole of it. Nothing may be copying to or from it."""
        self._call(self._cuda.cuMemUnmap, address, nbytes)

    def allow(self, address: Address, nbytes: int) -> None:
        """Lets this device read and write what is mapped there."""
        access = self._cuda.CUmemAccessDesc()
        access.location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.ordinal
        access.flags = self._cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._call(self._cuda.cuMemSetAccess, address, nbytes, [access], 1)

    def export_fd(self, handle: Handle) -> int:
        """A new file descriptor of the memory, the caller's to close. It keeps the memory alive, in any process."""
        fd = int(self._call(self._cuda.cuMemExportToShareableHandle, handle, self._fd, 0))
        os.set_inheritable(fd, False)
        return fd

    def import_fd(self, fd: int) -> Handle:
        """The memory behind a descriptor that some process exported. The descriptor stays the caller's to close."""
        return Handle(int(self._call(self._cuda.cuMemImportFromShareableHandle, fd, self._fd)))

    def _properties(self) -> Any:
        wanted = self._cuda.CUmemAllocationProp()
        wanted.type = self._cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wanted.location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        wanted.location.id = self.ordinal
        if self.features.posix_fd:
            wanted.requestedHandleTypes = self._fd
        wanted.allocFlags.gpuDirectRDMACapable = int(self.features.rdma)
        return wanted

    # Memory without a handle, and memory of the host. -------------------------------------------------------------

    def alloc(self, nbytes: int) -> Address:
        """Device memory that no other process can have."""
        return Address(int(self._call(self._cuda.cuMemAlloc, nbytes)))

    def free(self, address: Address) -> None:
        self._call(self._cuda.cuMemFree, address)

    def register(self, address: Address, nbytes: int) -> None:
        """Page-locks memory of this process: copies of it then are asynchronous, and faster. Whole pages, none of
        them registered yet. No copy may reach beyond what one call registered."""
        if address % HOST_PAGE or nbytes % HOST_PAGE or nbytes <= 0:
            raise ValueError(f"{nbytes} bytes at {address:#x}: must be whole pages of {HOST_PAGE} bytes")
        self._call(self._cuda.cuMemHostRegister, address, nbytes, self._cuda.CU_MEMHOSTREGISTER_PORTABLE)

    def unregister(self, address: Address) -> None:
        """``address``: what :meth:`register` was given. Nothing may be copying to or from it."""
        self._call(self._cuda.cuMemHostUnregister, address)

    def alloc_host(self, nbytes: int) -> Address:
        """New page-locked memory of this process."""
        return Address(int(self._call(self._cuda.cuMemHostAlloc, nbytes, self._cuda.CU_MEMHOSTALLOC_PORTABLE)))

    def free_host(self, address: Address) -> None:
        self._call(self._cuda.cuMemFreeHost, address)

    # Streams and events. ------------------------------------------------------------------------------------------

    def stream(self) -> Stream:
        """A stream that waits for no other, the default stream included."""
        flags = self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING
        return Stream(int(self._call(self._cuda.cuStreamCreate, flags)))

    def idle(self, stream: Stream) -> bool:
        """Whether all is done that the stream was given. Does not wait. For who cannot record an event."""
        if _thread.bound is not self:
            with self.visit():
                return self.idle(stream)
        return self._answered(self._cuda.cuStreamQuery, stream)

    def drop_stream(self, stream: Stream) -> None:
        """What the stream was given is still done."""
        self._call(self._cuda.cuStreamDestroy, stream)

    def capturing(self, stream: Stream) -> bool:
        """Whether what the stream is given goes into a graph instead of being done."""
        none = self._cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
        return bool(self._call(self._cuda.cuStreamIsCapturing, stream) != none)

    def event(self) -> Event:
        """An event without a time, :meth:`done` until it is recorded."""
        return Event(int(self._call(self._cuda.cuEventCreate, self._cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING)))

    def drop_event(self, event: Event) -> None:
        self._call(self._cuda.cuEventDestroy, event)

    def record(self, event: Event, stream: Stream) -> None:
        """From now on the event stands for what the stream has been given so far."""
        self._call(self._cuda.cuEventRecord, event, stream)

    def done(self, event: Event) -> bool:
        """Whether all is done that the event stands for. Does not wait."""
        if _thread.bound is not self:
            with self.visit():
                return self.done(event)
        return self._answered(self._cuda.cuEventQuery, event)

    def _answered(self, query: Any, of: Event | Stream) -> bool:
        try:
            code = query(of)[0]
        except (RuntimeError, KeyError, ValueError) as error:
            raise self._raised(query.__name__, error) from error
        if not code:
            return True
        if code == NOT_READY:
            return False
        raise self._error(query.__name__, int(code))

    def wait(self, stream: Stream, event: Event) -> None:
        """What the stream is given from now on starts after what the event stands for now."""
        self._call(self._cuda.cuStreamWaitEvent, stream, event, 0)

    # Copies. The call returns at once; source and destination stay as they are until an event after it is done. ----

    def copy(self, dst: Address, src: Address, nbytes: int, stream: Stream) -> None:
        self._call(self._cuda.cuMemcpyAsync, dst, src, nbytes, stream)

    def copy_batch(self, dsts: Sequence[int], srcs: Sequence[int], sizes: Sequence[int], stream: Stream) -> None:
        """Copies of at least one byte each, in few calls and in no order among themselves: none may touch what another
        writes. Host memory must be page-locked. Only where ``features.batch_copy``."""
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
        """Of what the bindings raise themselves: the driver lacks the call, or they do not know the code."""
        if isinstance(error, RuntimeError):
            return CudaUnsupported(call, 0, "not found", str(error))
        code = re.search(r"\d+", str(error))
        return self._error(call, int(code[0]) if code else 0)

    def _error(self, call: str, code: int) -> CudaError:
        return error_of(call, code, *described(self._cuda, code))
