"""The calls about memory."""

from typing import Final

from ._entry import entry, must_be_an_int, must_be_zero, number_of
from ._enums import CUmemAccess_flags, CUmemAllocationHandleType, CUpointer_attribute, CUresult
from ._enums import CUmemLocationType as _Location
from ._memory import GRANULARITY
from ._refusal import Refusal, invalid
from ._state import STATE
from ._structs import CUdeviceptr, CUmemAccessDesc, CUmemAllocationProp, CUmemGenericAllocationHandle, CUmemLocation

_memory: Final = STATE.memory


@entry(2)
def cuMemGetInfo() -> tuple[int, int]:
    return _memory.free_bytes(STATE.device()), STATE.settings.memory


@entry(1)
def cuMemGetAllocationGranularity(prop: CUmemAllocationProp, option: int) -> int:
    _check_properties(prop)
    return GRANULARITY


@entry(1)
def cuMemCreate(size: int, prop: CUmemAllocationProp, flags: int) -> CUmemGenericAllocationHandle:
    must_be_zero(flags)
    _check_properties(prop)
    return CUmemGenericAllocationHandle(
        _memory.create(size, bool(prop.requestedHandleTypes), number_of(prop.location.id))
    )


@entry()
def cuMemRelease(handle: CUmemGenericAllocationHandle | int) -> None:
    _memory.release(int(handle))


@entry(1)
def cuMemAddressReserve(size: int, alignment: int, addr: CUdeviceptr | int, flags: int) -> CUdeviceptr:
    must_be_zero(flags)
    return CUdeviceptr(_memory.reserve(size, alignment))


@entry()
def cuMemAddressFree(ptr: CUdeviceptr | int, size: int) -> None:
    _memory.unreserve(int(ptr), size)


@entry()
def cuMemMap(
    ptr: CUdeviceptr | int, size: int, offset: int, handle: CUmemGenericAllocationHandle | int, flags: int
) -> None:
    must_be_zero(flags)
    _memory.map(int(ptr), size, offset, int(handle))


@entry()
def cuMemUnmap(ptr: CUdeviceptr | int, size: int) -> None:
    _memory.unmap(int(ptr), size)


@entry()
def cuMemSetAccess(ptr: CUdeviceptr | int, size: int, desc: list[CUmemAccessDesc], count: int) -> None:
    if count != 1 or len(desc) != 1:
        raise invalid("the fake knows one descriptor")
    _check_location(desc[0].location)
    if desc[0].flags != CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE:
        raise Refusal(CUresult.CUDA_ERROR_NOT_SUPPORTED, "the fake knows PROT_READWRITE")
    _memory.allow(int(ptr), size, number_of(desc[0].location.id))


@entry(1)
def cuMemExportToShareableHandle(
    handle: CUmemGenericAllocationHandle | int, handleType: CUmemAllocationHandleType, flags: int
) -> int:
    must_be_zero(flags)
    _check_handle_type(handleType)
    return _memory.export(int(handle))


@entry(1)
def cuMemImportFromShareableHandle(
    osHandle: int, shHandleType: CUmemAllocationHandleType
) -> CUmemGenericAllocationHandle:
    _check_handle_type(shHandleType)
    must_be_an_int(osHandle)
    return CUmemGenericAllocationHandle(_memory.import_(osHandle))


@entry(1)
def cuPointerGetAttribute(attribute: CUpointer_attribute, ptr: CUdeviceptr | int) -> int:
    if attribute != CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        raise Refusal(CUresult.CUDA_ERROR_NOT_SUPPORTED, "the fake knows DEVICE_ORDINAL")
    if _memory.kind(int(ptr), 1) == "pageable":
        raise invalid(f"{int(ptr):#x} is not memory of CUDA")
    device = _memory.device_of(int(ptr), 1)
    return 0 if device is None else STATE.visible().index(device)


@entry(1)
def cuMemAlloc(bytesize: int) -> CUdeviceptr:
    return CUdeviceptr(_memory.alloc(bytesize, STATE.device()))


@entry()
def cuMemFree(dptr: CUdeviceptr | int) -> None:
    STATE.context()
    _memory.free(int(dptr))


@entry()
def cuMemHostRegister(p: int, bytesize: int, Flags: int) -> None:
    STATE.context()
    must_be_an_int(p)
    _memory.register(p, bytesize)


@entry()
def cuMemHostUnregister(p: int) -> None:
    STATE.context()
    must_be_an_int(p)
    _memory.unregister(p)


@entry(1)
def cuMemHostAlloc(bytesize: int, Flags: int) -> int:
    STATE.context()
    return _memory.alloc_host(bytesize)


@entry()
def cuMemFreeHost(p: int) -> None:
    STATE.context()
    must_be_an_int(p)
    _memory.free_host(p)


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
    number_of(location.id)


def _check_handle_type(kind: CUmemAllocationHandleType) -> None:
    if kind != CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR:
        raise invalid(f"handle type {kind!r}")
    if "posix_fd" in STATE.settings.features_off:
        raise Refusal(CUresult.CUDA_ERROR_NOT_SUPPORTED, "no handles of this type")
