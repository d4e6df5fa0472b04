"""Lets SGLang run on the CPU from PyPI's wheel, which is built for CUDA: on the path of its processes, hence imported
by Python before anything else."""

import builtins
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Final

import torch

_ABSENT: Final = ("IPython", "torchvision")
"""Packages that SGLang imports and a text model does not use. PyPI's torchvision is CUDA's."""


class _AnyName(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Absent(ModuleType):
    """Has every name, each of which is a class with every name."""

    __version__ = "0"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyName(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        package = name.partition(".")[0]
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if package in _ABSENT else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _CudaRuntime:
    """Registers a host pool with no GPU."""

    def cudaHostRegister(self, *_: int) -> int:
        return 0

    def cudaHostUnregister(self, *_: int) -> int:
        return 0


# Copies between the host pool and the device pool, which SGLang takes from its CUDA kernels. Its modules do not have
# the names on a CPU, so they are found here.


def transfer_kv_direct(
    *,
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def transfer_kv_per_layer_direct_pf_lf(
    *,
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """From pages, each with all layers, into one layer of the device pool."""
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[src_indices // page_size, layer_id, src_indices % page_size]


def transfer_kv_all_layer_direct_lf_pf(
    *,
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """From the layers of the device pool, those of K before those of V, into pages."""
    layers = len(src_ptrs) // len(dst_ptrs)
    for number, source in enumerate(src_ptrs):
        pages = dst_ptrs[number // layers]
        pages[dst_indices // page_size, number % layers, dst_indices % page_size] = source[src_indices]


sys.meta_path.insert(0, _Finder())
torch.cuda.cudart = _CudaRuntime
for function in (transfer_kv_direct, transfer_kv_per_layer_direct_pf_lf, transfer_kv_all_layer_direct_lf_pf):
    setattr(builtins, function.__name__, function)
