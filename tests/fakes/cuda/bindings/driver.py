"""A fake of ``cuda.bindings.driver`` without a GPU: the calls that kvtier makes, with their arguments and answers.

Device memory is real memory of the machine at real addresses, exported as real descriptors, so several processes share
it. Streams are threads that do their work late. A call that CUDA's documentation forbids is refused, and everything
else about it is in ``_settings``: what goes wrong, when, and what is written down.

Only for tests: of what is here, ``fake_work`` and ``fake_left`` are not NVIDIA's.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, Final

from ._enums import *  # noqa: F403
from ._enums import (
    CUdevice_attribute,
    CUmemAccess_flags,
    CUmemAllocationHandleType,
    CUmemorytype,
    CUresult,
    CUstreamCaptureMode,
)
from ._enums import CUmemcpySrcAccessOrder as _Order
from ._enums import CUmemLocationType as _Location
from ._memory import GRANULARITY
from ._races import check_batch
from ._refusal import Refusal, invalid
from ._state import LEGACY, STATE, uuid
from ._streams import FakeStream
from ._structs import (
    CUDA_MEMCPY2D,
    CUcontext,
    CUdevice,
    CUdeviceptr,
    CUevent,
    CUmemAccessDesc,
    CUmemAllocationProp,
    CUmemcpyAttributes,
    CUmemGenericAllocationHandle,
    CUmemLocation,
    CUstream,
    CUuuid,
)

CU_MEMHOSTALLOC_PORTABLE: Final = 1
CU_MEMHOSTREGISTER_PORTABLE: Final = 1
_MAX_PITCH: Final = 2**31 - 1
_CONTEXT: Final = 0xC0_0000
_BATCH_COPY: Final = 12080 if STATE.settings.bindings == 12 else 13000
"""The driver's version that brought the call in the form of the bindings."""
_PIECE: Final = 256 << 10
"""Bytes between which a copy lets others have their turn, so that one that races is seen half done."""

_Function = Callable[..., Any]
_memory = STATE.memory


def _entry(outputs: int = 0, *, after_loss: bool = False) -> Callable[[_Function], _Function]:
    """A call of the driver. ``outputs``: values it answers beside the code. ``after_loss``: works on a lost device."""

    def wrap(function: _Function) -> _Function:
        @functools.wraps(function)
        def entry(*arguments: Any) -> Any:
            return STATE.call(function, arguments, outputs, after_loss)

        entry.outputs = outputs  # type: ignore[attr-defined]
        return entry

    return wrap


# The device and its context. ----------------------------------------------------------------------------------------


@_entry(after_loss=True)
def cuInit(Flags: int) -> None:
    if Flags:
        raise invalid("Flags must be 0")
    if not STATE.visible():
        raise Refusal(CUresult.CUDA_ERROR_NO_DEVICE, "no device is visible")
    STATE.started = True


@_entry(1, after_loss=True)
def cuDriverGetVersion() -> int:
    return STATE.settings.driver_version


@_entry(1, after_loss=True)
def cuDeviceGetCount() -> int:
    return len(STATE.visible())


@_entry(1, after_loss=True)
def cuDeviceGet(ordinal: int) -> CUdevice:
    _number_of(ordinal)
    return CUdevice(ordinal)


@_entry(1, after_loss=True)
def cuDeviceGetUuid(dev: CUdevice | int) -> CUuuid:
    return CUuuid(uuid(_number_of(dev)))


@_entry(1, after_loss=True)
def cuDeviceGetName(length: int, dev: CUdevice | int) -> bytes:
    return f"Fake GPU {_number_of(dev)}".encode()[: length - 1].ljust(length, b"\0")


@_entry(1, after_loss=True)
def cuDeviceGetAttribute(attrib: CUdevice_attribute, dev: CUdevice | int) -> int:
    _number_of(dev)
    off = STATE.settings.features_off
    prefix = "CU_DEVICE_ATTRIBUTE_"
    match attrib.name.removeprefix(prefix):
        case "MAX_PITCH":
            return _MAX_PITCH
        case "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED":
            return int("vmm" not in off)
        case "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM":
            return int("registered_address" not in off)
        case "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED":
            return int("posix_fd" not in off)
        case _:
            return 1


@_entry(1)
def cuDevicePrimaryCtxRetain(dev: CUdevice | int) -> CUcontext:
    _number_of(dev)
    STATE.retained[_CONTEXT + int(dev)] += 1
    return CUcontext(_CONTEXT + int(dev))


@_entry()
def cuDevicePrimaryCtxRelease(dev: CUdevice | int) -> None:
    if not STATE.retained[_CONTEXT + int(dev)]:
        raise Refusal(CUresult.CUDA_ERROR_INVALID_CONTEXT, "the context was not retained")
    STATE.retained[_CONTEXT + int(dev)] -= 1


@_entry(after_loss=True)
def cuCtxSetCurrent(ctx: CUcontext | int) -> None:
    STATE.thread.contexts[-1:] = [_live_context(ctx)]


@_entry(after_loss=True)
def cuCtxPushCurrent(ctx: CUcontext | int) -> None:
    STATE.thread.contexts.append(_live_context(ctx))


@_entry(1, after_loss=True)
def cuCtxPopCurrent() -> CUcontext:
    if not STATE.thread.contexts:
        raise Refusal(CUresult.CUDA_ERROR_INVALID_CONTEXT, "no context is current on this thread")
    return CUcontext(STATE.thread.contexts.pop())


@_entry(1, after_loss=True)
def cuThreadExchangeStreamCaptureMode(mode: CUstreamCaptureMode) -> CUstreamCaptureMode:
    before = CUstreamCaptureMode(STATE.thread.capture_mode)
    STATE.thread.capture_mode = CUstreamCaptureMode(mode)
    return before


def cuGetErrorString(error: CUresult) -> tuple[CUresult, bytes]:
    return CUresult.CUDA_SUCCESS, f"the fake's {error.name}".encode()


def _number_of(dev: CUdevice | int) -> int:
    visible = STATE.visible()
    if not 0 <= int(dev) < len(visible):
        raise Refusal(CUresult.CUDA_ERROR_INVALID_DEVICE, f"no device {int(dev)}")
    return visible[int(dev)]


def _live_context(ctx: CUcontext | int) -> int:
    if not STATE.retained[int(ctx)]:
        raise Refusal(CUresult.CUDA_ERROR_INVALID_CONTEXT, f"no context {int(ctx):#x}")
    return int(ctx)


# Memory. ------------------------------------------------------------------------------------------------------------


@_entry(2)
def cuMemGetInfo() -> tuple[int, int]:
    STATE.context()
    return _memory.free_bytes(), STATE.settings.memory


@_entry(1)
def cuMemGetAllocationGranularity(prop: CUmemAllocationProp, option: int) -> int:
    _check_properties(prop)
    return GRANULARITY


@_entry(1)
def cuMemCreate(size: int, prop: CUmemAllocationProp, flags: int) -> CUmemGenericAllocationHandle:
    _zero(flags)
    _check_properties(prop)
    return CUmemGenericAllocationHandle(_memory.create(size, bool(prop.requestedHandleTypes)))


@_entry()
def cuMemRelease(handle: CUmemGenericAllocationHandle | int) -> None:
    _memory.release(int(handle))


@_entry(1)
def cuMemAddressReserve(size: int, alignment: int, addr: CUdeviceptr | int, flags: int) -> CUdeviceptr:
    _zero(flags)
    return CUdeviceptr(_memory.reserve(size, alignment))


@_entry()
def cuMemAddressFree(ptr: CUdeviceptr | int, size: int) -> None:
    _memory.unreserve(int(ptr), size)


@_entry()
def cuMemMap(
    ptr: CUdeviceptr | int, size: int, offset: int, handle: CUmemGenericAllocationHandle | int, flags: int
) -> None:
    _zero(flags)
    _memory.map(int(ptr), size, offset, int(handle))


@_entry()
def cuMemUnmap(ptr: CUdeviceptr | int, size: int) -> None:
    _memory.unmap(int(ptr), size)


@_entry()
def cuMemSetAccess(ptr: CUdeviceptr | int, size: int, desc: list[CUmemAccessDesc], count: int) -> None:
    if count != 1 or len(desc) != 1:
        raise invalid("the fake knows one descriptor")
    _check_location(desc[0].location)
    if desc[0].flags != CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE:
        raise Refusal(CUresult.CUDA_ERROR_NOT_SUPPORTED, "the fake knows PROT_READWRITE")
    _memory.allow(int(ptr), size)


@_entry(1)
def cuMemExportToShareableHandle(
    handle: CUmemGenericAllocationHandle | int, handleType: CUmemAllocationHandleType, flags: int
) -> int:
    _zero(flags)
    _check_handle_type(handleType)
    return _memory.export(int(handle))


@_entry(1)
def cuMemImportFromShareableHandle(
    osHandle: int, shHandleType: CUmemAllocationHandleType
) -> CUmemGenericAllocationHandle:
    _check_handle_type(shHandleType)
    _pointer(osHandle)
    return CUmemGenericAllocationHandle(_memory.import_(osHandle))


@_entry(1)
def cuMemAlloc(bytesize: int) -> CUdeviceptr:
    STATE.context()
    return CUdeviceptr(_memory.alloc(bytesize))


@_entry()
def cuMemFree(dptr: CUdeviceptr | int) -> None:
    STATE.context()
    _memory.free(int(dptr))


@_entry()
def cuMemHostRegister(p: int, bytesize: int, Flags: int) -> None:
    STATE.context()
    _pointer(p)
    _memory.register(p, bytesize)


@_entry()
def cuMemHostUnregister(p: int) -> None:
    STATE.context()
    _pointer(p)
    _memory.unregister(p)


@_entry(1)
def cuMemHostAlloc(bytesize: int, Flags: int) -> int:
    STATE.context()
    return _memory.alloc_host(bytesize)


@_entry()
def cuMemFreeHost(p: int) -> None:
    STATE.context()
    _pointer(p)
    _memory.free_host(p)


def _pointer(value: int) -> None:
    if not isinstance(value, int):
        raise TypeError(f"Provided argument is of type {type(value)} but expected int")


def _zero(flags: int) -> None:
    if flags:
        raise invalid("flags must be 0")


def _check_properties(prop: CUmemAllocationProp) -> None:
    if "vmm" in STATE.settings.features_off:
        raise Refusal(CUresult.CUDA_ERROR_NOT_SUPPORTED, "no virtual memory management")
    if not prop.type:
        raise invalid("type is not set")
    _check_location(prop.location)
    if prop.requestedHandleTypes:
        _check_handle_type(prop.requestedHandleTypes)


def _check_location(location: CUmemLocation) -> None:
    if location.type != _Location.CU_MEM_LOCATION_TYPE_DEVICE:
        raise invalid("location is not a device")
    _number_of(location.id)


def _check_handle_type(kind: CUmemAllocationHandleType) -> None:
    if kind != CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR:
        raise invalid(f"handle type {kind!r}")
    if "posix_fd" in STATE.settings.features_off:
        raise Refusal(CUresult.CUDA_ERROR_NOT_SUPPORTED, "no handles of this type")


# Streams and events. ------------------------------------------------------------------------------------------------


@_entry(1)
def cuStreamCreate(Flags: int) -> CUstream:
    return CUstream(STATE.new_stream())


@_entry()
def cuStreamDestroy(hStream: CUstream | int) -> None:
    if int(hStream) in (*LEGACY, 2):
        raise invalid("a default stream")
    stream = STATE.stream(int(hStream))
    stream.end()
    STATE.races.gone(stream.number)
    del STATE.streams[int(hStream)]


@_entry(1)
def cuEventCreate(Flags: int) -> CUevent:
    return CUevent(STATE.new_event())


@_entry()
def cuEventDestroy(hEvent: CUevent | int) -> None:
    STATE.event(int(hEvent))
    del STATE.events[int(hEvent)]


@_entry()
def cuEventRecord(hEvent: CUevent | int, hStream: CUstream | int) -> None:
    event, stream = STATE.event(int(hEvent)), STATE.stream(int(hStream))
    if event.context != stream.context:
        raise Refusal(CUresult.CUDA_ERROR_INVALID_HANDLE, "event and stream are of different contexts")
    event.mark = stream.mark()
    event.clock = STATE.races.recorded(stream.number)


@_entry()
def cuEventQuery(hEvent: CUevent | int) -> None:
    event = STATE.event(int(hEvent))
    if not event.mark.reached.is_set():
        raise Refusal(CUresult.CUDA_ERROR_NOT_READY, "")
    STATE.races.saw(event.clock)


@_entry()
def cuStreamWaitEvent(hStream: CUstream | int, hEvent: CUevent | int, Flags: int) -> None:
    if Flags:
        raise invalid("Flags must be 0")
    event, stream = STATE.event(int(hEvent)), STATE.stream(int(hStream))
    stream.give(event.mark.reached.wait)
    STATE.races.waited(stream.number, event.clock)


def fake_work(stream: int, work: Callable[[], Any]) -> None:
    """Not NVIDIA's: a kernel. ``work`` is done by the stream in its turn; no lock is held meanwhile."""
    with STATE.lock:
        given = STATE.stream(stream)
    given.give(work)


def fake_left() -> dict[str, int]:
    """Not NVIDIA's: what this process has made and not given back, by kind."""
    return STATE.left()


# Copies. ------------------------------------------------------------------------------------------------------------


@_entry()
def cuMemcpyAsync(dst: CUdeviceptr | int, src: CUdeviceptr | int, ByteCount: int, hStream: CUstream | int) -> None:
    _give_copies(STATE.stream(int(hStream)), [(int(dst), int(src), ByteCount)] if ByteCount else [])


@_entry()
def cuMemcpy2DAsync(pCopy: CUDA_MEMCPY2D, hStream: CUstream | int) -> None:
    dst, dst_kind = _side(pCopy.dstMemoryType, pCopy.dstHost, pCopy.dstDevice)
    src, src_kind = _side(pCopy.srcMemoryType, pCopy.srcHost, pCopy.srcDevice)
    width, rows = pCopy.WidthInBytes, pCopy.Height
    for pitch in (pCopy.srcPitch, pCopy.dstPitch):
        if not width <= pitch <= _MAX_PITCH:
            raise invalid(f"pitch {pitch} of rows of {width} bytes")
    copies = [(dst + row * pCopy.dstPitch, src + row * pCopy.srcPitch, width) for row in range(rows)]
    for to, start, nbytes in copies:
        if (_memory.kind(to, nbytes) == "device", _memory.kind(start, nbytes) == "device") != (dst_kind, src_kind):
            raise invalid("a memory type does not fit its address")
    _give_copies(STATE.stream(int(hStream)), copies)


@_entry(int(STATE.settings.bindings == 12))
def cuMemcpyBatchAsync(
    dsts: list[CUdeviceptr],
    srcs: list[CUdeviceptr],
    sizes: list[int],
    count: int,
    attrs: list[CUmemcpyAttributes],
    attrsIdxs: list[int],
    numAttrs: int,
    hStream: CUstream | int,
) -> int:
    if STATE.settings.driver_version < _BATCH_COPY:
        raise RuntimeError('Function "cuMemcpyBatchAsync" not found')
    for values, kind in ((dsts, "CUdeviceptr"), (srcs, "CUdeviceptr"), (sizes, "int"), (attrs, "CUmemcpyAttributes")):
        if not all(type(value).__name__ == kind for value in values):
            raise TypeError(f"an argument is not a list of {kind}")
    if int(hStream) in LEGACY:
        raise invalid("the legacy stream")
    if not count or not len(dsts) == len(srcs) == len(sizes) == count or not all(sizes):
        raise invalid(f"{count} copies: lists of {len(dsts)}, {len(srcs)} and {len(sizes)}, no size of 0")
    if numAttrs != 1 or attrsIdxs != [0] or len(attrs) != 1:
        raise invalid("the fake knows one attribute, of all copies")
    if attrs[0].srcAccessOrder != _Order.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM:
        raise invalid("srcAccessOrder is not set")
    copies = [(int(dst), int(src), nbytes) for dst, src, nbytes in zip(dsts, srcs, sizes, strict=True)]
    if any("pageable" in (_memory.kind(dst, nbytes), _memory.kind(src, nbytes)) for dst, src, nbytes in copies):
        raise invalid("pageable memory, of which NVIDIA does not say that a batch takes it everywhere")
    _give_copies(STATE.stream(int(hStream)), copies)
    return 2**64 - 1


if STATE.settings.bindings == 12:
    cuDeviceGetUuid_v2 = cuDeviceGetUuid

if "batch_copy" in STATE.settings.features_off:
    del cuMemcpyBatchAsync  # as in bindings before 12.8
elif STATE.settings.bindings == 12:
    cuMemcpyBatchAsync.__doc__ = "Returns\n-------\nCUresult\nfailIdx : int"


@_entry()
def cuMemsetD8Async(dstDevice: CUdeviceptr | int, uc: int, N: int, hStream: CUstream | int) -> None:
    address = int(dstDevice)
    if not 0 <= uc <= 255:
        raise OverflowError(f"unsigned char of {uc}")
    kind = _memory.kind(address, N)
    if kind == "pageable":
        raise invalid(f"{address:#x} is not memory of CUDA")

    def fill() -> None:
        with STATE.lock:
            if STATE.is_lost():
                return
            _check_unchanged(address, N, kind)
            ctypes.memset(address, uc, N)

    stream = STATE.stream(int(hStream))
    STATE.races.given(stream.number, (), [(address, address + N)])
    stream.give(fill)


def _side(kind: CUmemorytype | None, host: int, device: CUdeviceptr | int) -> tuple[int, bool]:
    if kind == CUmemorytype.CU_MEMORYTYPE_HOST:
        return host, False
    if kind == CUmemorytype.CU_MEMORYTYPE_DEVICE:
        return int(device), True
    raise invalid(f"memory type {kind!r}")


def _give_copies(stream: FakeStream, copies: list[tuple[int, int, int]]) -> None:
    if not copies:
        return
    kinds = [(_memory.kind(dst, nbytes), _memory.kind(src, nbytes)) for dst, src, nbytes in copies]
    check_batch(copies)
    reads = [(src, src + nbytes) for _, src, nbytes in copies]
    STATE.races.given(stream.number, reads, [(dst, dst + nbytes) for dst, _, nbytes in copies])
    stream.give(lambda: _copy(copies[::-1], kinds[::-1]))


def _copy(copies: list[tuple[int, int, int]], kinds: list[tuple[str, str]]) -> None:
    for (dst, src, nbytes), kind in zip(copies, kinds, strict=True):
        for done in range(0, nbytes, _PIECE):
            # With the lock, so that no range goes away under the copy; a real device would fault, or worse.
            with STATE.lock:
                if STATE.is_lost():
                    return
                _check_unchanged(dst, nbytes, kind[0])
                _check_unchanged(src, nbytes, kind[1])
                ctypes.memmove(dst + done, src + done, min(_PIECE, nbytes - done))


def _check_unchanged(address: int, nbytes: int, kind: str) -> None:
    # Pageable memory is copied by the processor, which does not mind that it is page-locked meanwhile.
    if kind != "pageable" and _memory.kind(address, nbytes) != kind:
        raise invalid(f"memory at {address:#x} went away under a copy")
