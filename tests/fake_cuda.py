"""Daemons, clients and unit tests on the fakes in ``tests/fakes``: of NVIDIA's bindings, and of the driver below."""

import importlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest

from kvtier.abi.cuda import driver as cuda_driver
from kvtier.abi.cuda.driver import Driver
from kvtier.abi.cuda.memory import DeviceMemory
from kvtier.memory.arrays import Bytes
from kvtier.memory.gpu import Gpu

FAKES: Final = Path(__file__).parent / "fakes"
VARIABLE: Final = "KVTIER_FAKE_CUDA"
_numbers = itertools.count()


def fake_environment(environment: Mapping[str, str] = os.environ, **settings: Any) -> dict[str, str]:
    """``environment`` for a process that finds the fake where it looks for NVIDIA's bindings. ``settings``: the
    fields of ``Settings`` in ``tests/fakes/cuda/bindings/_settings.py``."""
    paths = [str(FAKES), *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(paths), VARIABLE: _json(settings)}


def stub_environment(folder: Path, *options: str) -> dict[str, str]:
    """The environment for a process whose NVIDIA bindings, the real ones, call ``tests/fakes/libcuda.c``.

    Args:
        options: of the compiler; the source names them. It puts the library into ``folder``.
    """
    source, library = FAKES / "libcuda.c", folder / "libcuda.so.1"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", *options, "-o", library, source], check=True, timeout=60)
    environment = os.environ | {"LD_LIBRARY_PATH": str(folder)}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    return environment


def load_fake(**settings: Any) -> ModuleType:
    """A fake ``cuda.bindings.driver`` in this process, with a state of its own."""
    name = f"fake_cuda_{next(_numbers)}"
    spec = ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = [str(FAKES / "cuda")]
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = _json(settings)
    try:
        sys.modules[name] = importlib.util.module_from_spec(spec)
        return importlib.import_module(f"{name}.bindings.driver")
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def use(fake: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Has this process find its GPUs in the fake, which it has not opened yet."""
    monkeypatch.setattr(cuda_driver, "load_bindings", lambda: fake)
    monkeypatch.setattr(Gpu, "_open", {})
    return fake


class GpuArray:
    """Rows of bytes in memory of a GPU, ``stride`` bytes apart. ``bytes``: the same memory, since the fake's addresses
    are this process's own."""

    def __init__(self, driver: Driver, *shape: int, content: Any = 0, stride: int = 1) -> None:
        self.memory = DeviceMemory.create(driver, shape[0] * max(stride, *shape[1:], 1))
        place = {"shape": shape, "typestr": "|u1", "data": (int(self.memory.address), False), "version": 3}
        if stride > 1:
            place["strides"] = (stride, 1)
        self.__cuda_array_interface__: dict[str, Any] = place
        self.bytes: Bytes = np.asarray(SimpleNamespace(__array_interface__=place))
        self.bytes[:] = content


def until(true: Callable[[], object]) -> None:
    """Waits for what the fake does in the background."""
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def _json(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, default=os.fspath)
