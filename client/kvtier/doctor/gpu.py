"""The GPU that the device tier is to be on: bindings, driver, device, and whether it has what is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.doctor.finding import Finding, fail, ok, warn
from kvtier.words import size

NAME: Final = "GPU"
STAND_IN: Final = "stand-in"
_TIMEOUT_S: Final = 60.0
_VERSION: Final = Path("/proc/driver/nvidia/version")
_WSL: Final = Path("/dev/dxg")
_ASK: Final = """
import json, sys
from kvtier.abi.cuda.driver import Driver
from kvtier.abi.cuda.errors import CudaError, CudaUnavailable
from kvtier.abi.cuda.opening import uuid_name
try:
    driver = Driver.open(sys.argv[1])
    free, total = driver.memory()
except (CudaError, CudaUnavailable) as error:
    print(json.dumps({"error": str(error)}))
else:
    has = driver.features
    print(json.dumps({
        "name": driver.name, "uuid": uuid_name(driver.uuid), "version": has.driver_version, "free": free,
        "total": total, "vmm": has.vmm, "posix_fd": has.posix_fd, "batch_copy": has.batch_copy,
    }))
"""
_ADVICE: Final = "nvidia-smi says whether the driver works; of a service see also systemd/kvtierd.service.d/gpu.conf"


@dataclass(slots=True, frozen=True)
class Device:
    """``version``: of the newest CUDA that the driver knows, 1000 × major + 10 × minor. Sizes in bytes; the rest is
    what :class:`kvtier.abi.cuda.opening.Features` has. ``error``: why it could not be asked, or opened."""

    name: str = ""
    uuid: str = ""
    version: int = 0
    free: int = 0
    total: int = 0
    vmm: bool = False
    posix_fd: bool = False
    batch_copy: bool = False
    error: str = ""


@dataclass(slots=True, frozen=True)
class Gpu:
    """``driver``: the NVIDIA driver's line, None = none is loaded. ``device``: None = none is asked for."""

    driver: str | None
    device: Device | None = None


def read(device: str) -> Gpu:
    """``device``: as in the configuration. It is opened in a process of its own: a driver that is broken may crash or
    hang."""
    return Gpu(_driver(), None if device == STAND_IN else _asked(device))


def _driver() -> str | None:
    if _WSL.exists():
        return "the driver of WSL"
    try:
        return _VERSION.read_text().splitlines()[0]
    except (OSError, IndexError):
        return None


def _asked(device: str) -> Device:
    try:
        answer = subprocess.run(
            [sys.executable, "-c", _ASK, device], check=False, capture_output=True, text=True, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Device(error=str(error))
    if answer.returncode != 0:
        return Device(error=(answer.stderr.strip().splitlines() or [f"exit status {answer.returncode}"])[-1])
    return Device(**json.loads(answer.stdout.splitlines()[-1]))


def check(gpu: Gpu, device_bytes: int, *, running: bool) -> Finding:
    """``device_bytes``: 0 where there is no device tier, or it is a share of what is free. ``running``: a daemon is,
    and may have that memory already."""
    device = gpu.device
    if device is None:
        return _without(gpu.driver, device_bytes)
    if device.error:
        return fail(NAME, device.error, _ADVICE)
    about = f"{device.name} {device.uuid}, {size(device.free)} of {size(device.total)} free"
    version = f"CUDA {device.version // 1000}.{device.version % 1000 // 10}"
    room = device.total if running else device.free
    if device_bytes > room:
        advice = "make device_bytes smaller, or end what uses the memory: nvidia-smi lists it"
        return fail(NAME, f"{about}; device_bytes is {size(device_bytes)}", advice)
    if not device.posix_fd:
        lacks = "cannot export it as a file descriptor" if device.vmm else "has no virtual memory management"
        advice = "clients put and get through streams; engines that compute in the device tier need to map it"
        return warn(NAME, f"{about}; nobody else can map its memory: it {lacks}", advice)
    copies = "copies in batches" if device.batch_copy else "copies one by one: CUDA 12.8 can do them in batches"
    return ok(NAME, f"{about}; {version}, memory can be shared, {copies}")


def _without(driver: str | None, device_bytes: int) -> Finding:
    if driver is None:
        return ok(NAME, "no NVIDIA driver is loaded: a device tier is a stand-in in shared memory")
    if device_bytes:
        found = f"{driver}, but the device tier is a stand-in in shared memory"
        return warn(NAME, found, 'set device = "cuda" for memory of the GPU')
    return ok(NAME, f"{driver}; there is no device tier")
