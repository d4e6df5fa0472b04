"""A fake of ``cuda.bindings.driver`` without a GPU: the calls that kvtier makes, with their arguments and answers.

Device memory is real memory of the machine at real addresses, exported as real descriptors, so several processes share
it. Streams are threads that do their work late. A call that CUDA's documentation forbids is refused, and everything
else about it is in ``_settings``: what goes wrong, when, and what is written down.

Only for tests: of what is here, what begins with ``fake_`` is not NVIDIA's.
"""
# ruff: noqa: F401, F403

from typing import Final

from ._copy_calls import cuMemcpyAsync, cuMemcpyBatchAsync, cuMemsetD8Async
from ._device_calls import (
    cuCtxPopCurrent,
    cuCtxPushCurrent,
    cuCtxSetCurrent,
    cuDeviceGet,
    cuDeviceGetAttribute,
    cuDeviceGetCount,
    cuDeviceGetName,
    cuDeviceGetPCIBusId,
    cuDeviceGetUuid,
    cuDevicePrimaryCtxRelease,
    cuDevicePrimaryCtxRetain,
    cuDriverGetVersion,
    cuGetErrorString,
    cuInit,
    cuThreadExchangeStreamCaptureMode,
)
from ._enums import *
from ._memory_calls import (
    cuMemAddressFree,
    cuMemAddressReserve,
    cuMemAlloc,
    cuMemCreate,
    cuMemExportToShareableHandle,
    cuMemFree,
    cuMemFreeHost,
    cuMemGetAllocationGranularity,
    cuMemGetInfo,
    cuMemHostAlloc,
    cuMemHostRegister,
    cuMemHostUnregister,
    cuMemImportFromShareableHandle,
    cuMemMap,
    cuMemRelease,
    cuMemSetAccess,
    cuMemUnmap,
    cuPointerGetAttribute,
)
from ._state import STATE
from ._stream_calls import (
    cuEventCreate,
    cuEventDestroy,
    cuEventQuery,
    cuEventRecord,
    cuStreamCreate,
    cuStreamDestroy,
    cuStreamIsCapturing,
    cuStreamQuery,
    fake_capture,
    fake_left,
    fake_work,
)
from ._structs import (
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

if STATE.settings.bindings == 12:
    cuDeviceGetUuid_v2 = cuDeviceGetUuid
