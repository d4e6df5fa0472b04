"""What a failed CUDA call means for whoever made it."""

from __future__ import annotations

from typing import Final


class CudaError(RuntimeError):
    """A CUDA call failed. Of no more special kind: a call that the driver refuses, so a mistake of this program.

    ``call`` is the entry point, ``code`` and ``name`` the CUresult, ``text`` what NVIDIA says about it. As
    asynchronous work reports its errors through whatever is called next, ``call`` need not be what went wrong.
    """

    def __init__(self, call: str, code: int, name: str, text: str) -> None:
        super().__init__(f"{call}: {name} ({code}): {text}")
        self.call = call
        self.code = code
        self.name = name
        self.text = text


class CudaOutOfMemory(CudaError):
    """The device, or the address space or the page-locked memory of this process, has no room. Nothing has changed."""


class CudaLost(CudaError):
    """The device, or this process's use of it, is gone: every later call fails as well until the process ends, and
    no byte of device memory can be relied on."""


class CudaUnsupported(CudaError):
    """Device, driver or machine cannot do this as they are set up, however often it is asked."""


class CudaUnavailable(RuntimeError):
    """No such device can be opened here. The message says what is missing and what to do."""


class CudaMissing(CudaUnavailable):
    """NVIDIA's driver or its bindings are not installed, or are too old for kvtier."""


OUT_OF_MEMORY: Final = 2
NOT_INITIALIZED: Final = 3
NO_DEVICE: Final = 100
NOT_READY: Final = 600
CAPTURE_IMPLICIT: Final = 906
CAPTURED_EVENT: Final = 907

LOST: Final = {
    46: "DEVICE_UNAVAILABLE",
    214: "ECC_UNCORRECTABLE",
    220: "NVLINK_UNCORRECTABLE",
    226: "CONTAINED",
    700: "ILLEGAL_ADDRESS",
    702: "LAUNCH_TIMEOUT",
    709: "CONTEXT_IS_DESTROYED",
    710: "ASSERT",
    714: "HARDWARE_STACK_ERROR",
    715: "ILLEGAL_INSTRUCTION",
    716: "MISALIGNED_ADDRESS",
    717: "INVALID_ADDRESS_SPACE",
    718: "INVALID_PC",
    719: "LAUNCH_FAILED",
    721: "TENSOR_MEMORY_LEAK",
    805: "MPS_CONNECTION_FAILED",
    806: "MPS_RPC_FAILURE",
    807: "MPS_SERVER_NOT_READY",
    810: "MPS_CLIENT_TERMINATED",
    911: "EXTERNAL_DEVICE",
    999: "UNKNOWN",
}
"""Those of which NVIDIA says that the process must end, that the context cannot be used any more, or that the hardware
or the server in front of it failed; and UNKNOWN, which is what a device answers that has fallen off its bus."""

UNSUPPORTED: Final = {
    34: "STUB_LIBRARY",
    36: "CALL_REQUIRES_NEWER_DRIVER",
    800: "NOT_PERMITTED",
    801: "NOT_SUPPORTED",
    802: "SYSTEM_NOT_READY",
    803: "SYSTEM_DRIVER_MISMATCH",
    804: "COMPAT_NOT_SUPPORTED_ON_DEVICE",
}


def error_of(call: str, code: int, name: str, text: str) -> CudaError:
    """The error of the kind that ``code`` stands for."""
    if code == OUT_OF_MEMORY:
        return CudaOutOfMemory(call, code, name, text)
    if code in LOST:
        return CudaLost(call, code, name, text)
    if code in UNSUPPORTED:
        return CudaUnsupported(call, code, name, text)
    return CudaError(call, code, name, text)
