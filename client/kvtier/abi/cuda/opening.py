"""Finds a device by name: loads NVIDIA's bindings, starts the driver, and searches the visible devices."""

from __future__ import annotations

import importlib
import os
import re
from dataclasses import dataclass
from typing import Any, Final

from kvtier.abi.cuda.errors import NO_DEVICE, NOT_INITIALIZED, CudaMissing, CudaUnavailable

_NAME: Final = re.compile(r"cuda(?::(?P<ordinal>\d{1,4}))?|(?:GPU|MIG)-(?P<uuid>[0-9a-f-]{32,36})")
_OLDEST_BINDINGS: Final = (12, 9, 1)
"""Older bindings hold the interpreter lock in every call: while the driver works, the other threads stand still."""
_OLDEST_DRIVER: Final = 12080
"""A version of cuDriverGetVersion: 1000 × major + 10 × minor. The first with cuMemcpyBatchAsync."""
_BATCH_COPY: Final = {12: 12080, 13: 13000}
"""The driver that each major version of the bindings needs for cuMemcpyBatchAsync: its arguments changed in 13.0."""


@dataclass(slots=True, frozen=True)
class Features:
    """``driver_version``: 1000 × major + 10 × minor of the newest CUDA that the driver knows. ``vmm``: memory can have
    an address range of its own. ``posix_fd``: other processes can have this memory. ``batch_copy``: one call makes many
    copies of page-locked memory."""

    driver_version: int
    vmm: bool
    posix_fd: bool
    batch_copy: bool


@dataclass(slots=True, frozen=True)
class FoundDevice:
    """A device. ``ordinal`` numbers the devices that this process sees, ``handle`` is NVIDIA's CUdevice."""

    ordinal: int
    handle: Any
    uuid: bytes
    name: str
    features: Features


def is_device_name(text: str) -> bool:
    """Returns whether ``text`` names a CUDA device: ``cuda``, ``cuda:1``, ``GPU-<uuid>`` or ``MIG-<uuid>``."""
    return _NAME.fullmatch(text) is not None


def uuid_name(uuid: bytes) -> str:
    """A device's 16 bytes as ``nvidia-smi -L`` writes them: ``GPU-0123abcd-…``."""
    digits = uuid.hex()
    return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def load_bindings() -> Any:
    """Imports ``cuda.bindings.driver``. Raises :class:`CudaMissing`."""
    try:
        version: str = importlib.import_module("cuda.bindings").__version__
        bindings = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise CudaMissing(
            f"NVIDIA's Python bindings cannot be imported ({error}): pip install '.[cuda]' in a clone of kvtier"
        ) from error
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < _OLDEST_BINDINGS:
        oldest = ".".join(map(str, _OLDEST_BINDINGS))
        raise CudaMissing(
            f"cuda-bindings {version} hold the interpreter lock in every call, {oldest} is the oldest that do not: "
            "pip install --upgrade '.[cuda]' in a clone of kvtier"
        )
    return bindings


def find(bindings: Any, device: str) -> FoundDevice:
    """Starts CUDA in this process and looks ``device`` up. Raises :class:`CudaUnavailable`, and ``ValueError`` for a
    text that is no device name."""
    match = _NAME.fullmatch(device)
    if match is None:
        raise ValueError(f"device {device!r}: must be cuda, cuda:N or GPU-<uuid>")
    _start(bindings)
    count = _asked(bindings, "cuDeviceGetCount")
    if count == 0:
        raise CudaUnavailable(f"device {device}: this process sees no CUDA device{_visible()}")
    wanted = bytes.fromhex(match["uuid"].replace("-", "")) if match["uuid"] else None
    if wanted is not None:
        ordinal = next((n for n in range(count) if _uuid(bindings, _handle(bindings, n)) == wanted), None)
    else:
        ordinal = int(match["ordinal"] or 0)
    if ordinal is None or ordinal >= count:
        seen = ", ".join(f"cuda:{n} {uuid_name(_uuid(bindings, _handle(bindings, n)))}" for n in range(count))
        raise CudaUnavailable(f"device {device}: not among those that this process sees: {seen}{_visible()}")
    return _described(bindings, ordinal)


def ordinal_at(bindings: Any, address: int) -> int:
    """Returns the visible device that an address of CUDA memory belongs to. Raises :class:`CudaUnavailable`."""
    kind = bindings.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    return int(_asked(bindings, "cuPointerGetAttribute", kind, address))


def _start(bindings: Any) -> None:
    try:
        code = int(bindings.cuInit(0)[0])
    except RuntimeError as error:
        raise CudaMissing(
            f"NVIDIA's driver is not here ({error}): install it, or start the container with the GPU"
        ) from error
    if (version := _asked(bindings, "cuDriverGetVersion")) < _OLDEST_DRIVER:
        raise CudaMissing(
            f"NVIDIA's driver is for CUDA {_dotted(version)}, and kvtier needs {_dotted(_OLDEST_DRIVER)} or newer: "
            "install a newer driver"
        )
    if code == NO_DEVICE:
        raise CudaUnavailable(f"NVIDIA's driver finds no CUDA device{_visible()}")
    if code == NOT_INITIALIZED:
        raise CudaUnavailable(
            "CUDA does not start here: a process that was forked after its parent started CUDA cannot use it: "
            "start the process with spawn or exec"
        )
    if code:
        raise CudaUnavailable(f"NVIDIA's driver does not start: {_said(bindings, code)}")


def _described(bindings: Any, ordinal: int) -> FoundDevice:
    handle = _handle(bindings, ordinal)
    version = _asked(bindings, "cuDriverGetVersion")
    kinds = bindings.CUdevice_attribute
    prefix = "CU_DEVICE_ATTRIBUTE_"

    def attribute(name: str) -> int:
        return int(_asked(bindings, "cuDeviceGetAttribute", getattr(kinds, prefix + name), handle))

    if not attribute("UNIFIED_ADDRESSING"):
        raise CudaUnavailable(f"device cuda:{ordinal} has no unified addressing, which kvtier's copies need")
    vmm = bool(attribute("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"))
    features = Features(
        driver_version=version,
        vmm=vmm,
        posix_fd=vmm and bool(attribute("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED")),
        # If it is 0 (WSL), a batch gives host addresses to the device, but registered memory has other addresses there.
        batch_copy=_has_batch_copy(bindings, version) and bool(attribute("CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM")),
    )
    name = _asked(bindings, "cuDeviceGetName", 128, handle).split(b"\0")[0].decode("ascii", "replace")
    return FoundDevice(ordinal, handle, _uuid(bindings, handle), name, features)


def _has_batch_copy(bindings: Any, driver_version: int) -> bool:
    # The docstring tells the two forms apart without a driver: 12's also returns the number of the failed copy.
    major = 12 if "failIdx" in (bindings.cuMemcpyBatchAsync.__doc__ or "").split("Returns\n")[-1] else 13
    return driver_version >= _BATCH_COPY[major]


def _handle(bindings: Any, ordinal: int) -> Any:
    return _asked(bindings, "cuDeviceGet", ordinal)


def _uuid(bindings: Any, handle: Any) -> bytes:
    # In the bindings of CUDA 12 the plain call does not tell the instances of a MIG device apart; in 13's it does.
    call = "cuDeviceGetUuid_v2" if hasattr(bindings, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
    return bytes(_asked(bindings, call, handle).bytes)


def _asked(bindings: Any, call: str, *arguments: Any) -> Any:
    try:
        code, answer = getattr(bindings, call)(*arguments)
    except RuntimeError as error:
        raise CudaMissing(f"NVIDIA's driver is too old for the bindings ({error}): install a newer one") from error
    if code:
        raise CudaUnavailable(f"{call}: {_said(bindings, int(code))}")
    return answer


def _said(bindings: Any, code: int) -> str:
    name, text = described(bindings, code)
    return f"{name} ({code}): {text}"


def described(bindings: Any, code: int) -> tuple[str, str]:
    """Returns name and description of a CUresult; ``unknown`` for a code that the bindings are too old to know."""
    try:
        result = bindings.CUresult(code)
    except ValueError:
        return "unknown", "an error that these bindings do not know"
    text = bindings.cuGetErrorString(result)[1]
    return result.name, text.decode("utf-8", "replace") if text else "no description"


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _visible() -> str:
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if value is None else f" (CUDA_VISIBLE_DEVICES={value})"
