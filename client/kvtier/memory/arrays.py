"""Arrays and tensors of any kind, on the CPU or a GPU, by their own descriptions.

torch is imported only for a caller who passes a tensor.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeGuard, runtime_checkable

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


Bytes = NDArray[np.uint8]


@runtime_checkable
class CudaArray(Protocol):
    """A GPU array of CuPy, Numba and others."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


def is_cuda_array(value: object) -> TypeGuard[CudaArray]:
    """Whether the value is a GPU array other than a torch tensor."""
    return not isinstance(value, np.ndarray) and not is_tensor(value) and isinstance(value, CudaArray)


OnGpu: TypeAlias = "torch.Tensor | CudaArray"
"""A tensor or array that may lie on a GPU."""


def is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def address_of(array: CudaArray) -> int:
    return int(array.__cuda_array_interface__["data"][0])


def nbytes_of(array: CudaArray) -> int:
    interface = array.__cuda_array_interface__
    return int(np.dtype(interface["typestr"]).itemsize * math.prod(interface["shape"]))


def is_readonly(array: CudaArray) -> bool:
    return bool(array.__cuda_array_interface__["data"][1])


def stream_of(array: CudaArray) -> int | None:
    """The stream whose work a user of the array must wait for, by version 3 of the interface. None: the array names no
    stream."""
    stream = array.__cuda_array_interface__.get("stream")
    return stream if isinstance(stream, int) else None


def is_contiguous(block: OnGpu) -> bool:
    """Whether the block lies in C order, without gaps."""
    if is_tensor(block):
        return block.is_contiguous()
    interface = block.__cuda_array_interface__
    size, strides = np.dtype(interface["typestr"]).itemsize, interface.get("strides")
    expected = [size * math.prod(interface["shape"][axis + 1 :]) for axis in range(len(interface["shape"]))]
    return strides is None or list(strides) == expected


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """A tensor's bytes in C order, flat: its own memory if that is contiguous and on the CPU, else a copy."""
    import torch

    flat: Bytes = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat
