"""Errors of CUDA calls, by their meaning for the caller."""

from __future__ import annotations

from typing import Final


class CudaError(RuntimeError):
    """A CUDA call failed. This class itself: the driver refused the call, which is a mistake of this program.

    ``call`` is the entry point, ``code`` and ``name`` the CUresult, ``text`` NVIDIA's description. Asynchronous work
    reports its errors through a later call, so ``call`` need not be the cause.
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
    """The device, or this process's use of it, is lost: every later call of the process fails, too, and no byte of
    device memory is reliable."""


class CudaUnsupported(CudaError):
    """Device, driver or machine do not support the call in their present setup. A retry fails, too."""


class CudaUnavailable(RuntimeError):
    """The device cannot be opened here. The message gives the reason and a remedy."""


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
"""Codes after which, according to NVIDIA, the process must end, the context is unusable, or the hardware or its server
has failed; and UNKNOWN, the answer of a device that has fallen off its bus."""

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
    """Returns the error for ``code``, of the matching class."""
    if code == OUT_OF_MEMORY:
        return CudaOutOfMemory(call, code, name, text)
    if code in LOST:
        return CudaLost(call, code, name, text)
    if code in UNSUPPORTED:
        return CudaUnsupported(call, code, name, text)
    return CudaError(call, code, name, text)
