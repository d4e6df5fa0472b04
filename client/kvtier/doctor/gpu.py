"""CUDA: driver, torch, and whether they get along."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.doctor.finding import Finding, fail, ok, warn
from kvtier.words import size

NAME: Final = "GPU"
_TIMEOUT_S: Final = 120.0
_VERSION: Final = Path("/proc/driver/nvidia/version")
_WSL: Final = Path("/dev/dxg")
_ASK_TORCH: Final = """
import json, torch
here = torch.cuda.is_available()
count = torch.cuda.device_count() if here else 0
devices = [(p.name, p.total_memory) for p in map(torch.cuda.get_device_properties, range(count))]
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "devices": devices}))
"""


@dataclass(slots=True, frozen=True)
class Torch:
    """``cuda``: the version it was built for, None = none. ``error``: why it could not be asked."""

    version: str = ""
    cuda: str | None = None
    devices: tuple[tuple[str, int], ...] = ()
    error: str = ""


@dataclass(slots=True, frozen=True)
class Gpu:
    """``driver``: the NVIDIA driver's line, None = none is loaded. ``torch``: None = not installed, or not asked."""

    driver: str | None
    torch: Torch | None


def read() -> Gpu:
    """Asks torch, where there is a driver, in a process of its own: it is big, and may crash with a broken driver."""
    driver = _driver()
    return Gpu(driver, _torch() if driver is not None and importlib.util.find_spec("torch") else None)


def _driver() -> str | None:
    if _WSL.exists():
        return "the driver of WSL"
    try:
        return _VERSION.read_text().splitlines()[0]
    except (OSError, IndexError):
        return None


def _torch() -> Torch:
    try:
        answer = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH], check=False, capture_output=True, text=True, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Torch(error=str(error))
    if answer.returncode != 0:
        return Torch(error=(answer.stderr.strip().splitlines() or [f"exit status {answer.returncode}"])[-1])
    said = json.loads(answer.stdout.splitlines()[-1])
    return Torch(said["version"], said["cuda"], tuple((name, total) for name, total in said["devices"]))


def check(gpu: Gpu, device_bytes: int) -> Finding:
    torch = gpu.torch
    if (driver := gpu.driver) is None:
        return ok(NAME, "no NVIDIA driver is loaded: the device tier is a stand-in in shared memory")
    if torch is None:
        return warn(NAME, f"{driver}, but torch is not installed", "pip install 'kvtier[daemon]' where kvtierd runs")
    if torch.error:
        return (fail if device_bytes else warn)(
            NAME, f"{driver}; torch fails: {torch.error}", f"{sys.executable} -c 'import torch' says more"
        )
    if torch.cuda is None:
        found = f"{driver}, but torch {torch.version} is built without CUDA"
        return warn(NAME, found, "install torch for CUDA: https://pytorch.org/get-started/locally")
    if not torch.devices:
        advice = (
            "nvidia-smi says whether the driver works; CUDA_VISIBLE_DEVICES may hide the device; rights on /dev/nvidia*"
        )
        return warn(NAME, f"{driver}; torch {torch.version} (CUDA {torch.cuda}) sees no device", advice)
    devices = ", ".join(f"{name} {size(total)}" for name, total in torch.devices)
    largest = max(total for _, total in torch.devices)
    if device_bytes > largest:
        return fail(NAME, f"{devices}; device_bytes is {size(device_bytes)}", "make device_bytes smaller")
    return ok(NAME, f"{devices}; torch {torch.version}, CUDA {torch.cuda}")
