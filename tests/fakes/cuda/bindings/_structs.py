"""NVIDIA's structs and handles. As in theirs, a field that does not exist cannot be set."""

from dataclasses import dataclass, field

from ._enums import (
    CUmemAccess_flags,
    CUmemAllocationHandleType,
    CUmemAllocationType,
    CUmemcpySrcAccessOrder,
    CUmemLocationType,
)


class _Number:
    """A handle or a pointer: made of an int, turns into one, and is equal only to itself."""

    __slots__ = ("_value",)

    def __init__(self, value: int = 0) -> None:
        if type(value) is not int or not 0 <= value < 1 << 64:
            raise TypeError(f"{type(self).__name__} of {value!r}")
        self._value = value

    def __int__(self) -> int:
        return self._value

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._value:#x}>"


class CUdevice(_Number):
    pass


class CUcontext(_Number):
    pass


class CUdeviceptr(_Number):
    pass


class CUstream(_Number):
    pass


class CUevent(_Number):
    pass


class CUmemGenericAllocationHandle(_Number):
    pass


@dataclass(slots=True)
class CUuuid:
    bytes: bytes = bytes(16)


@dataclass(slots=True)
class CUmemLocation:
    type: CUmemLocationType = CUmemLocationType.CU_MEM_LOCATION_TYPE_INVALID
    id: int = 0


@dataclass(slots=True)
class _AllocFlags:
    gpuDirectRDMACapable: int = 0


@dataclass(slots=True)
class CUmemAllocationProp:
    type: CUmemAllocationType = CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_INVALID
    requestedHandleTypes: CUmemAllocationHandleType = CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE
    location: CUmemLocation = field(default_factory=CUmemLocation)
    allocFlags: _AllocFlags = field(default_factory=_AllocFlags)


@dataclass(slots=True)
class CUmemAccessDesc:
    location: CUmemLocation = field(default_factory=CUmemLocation)
    flags: CUmemAccess_flags = CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_NONE


@dataclass(slots=True)
class CUmemcpyAttributes:
    srcAccessOrder: CUmemcpySrcAccessOrder = CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_INVALID
    flags: int = 0
