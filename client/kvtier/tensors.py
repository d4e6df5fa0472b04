"""Tensors of torch: their bytes as arrays, and slots as tensors, without copies where both are CPU memory.

Nothing here imports torch before the caller has: who passes a tensor has it, who asks for one wants it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeGuard, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

    from kvtier.abi.cuda.views import DeviceView
    from kvtier.fences import Fence

Bytes = NDArray[np.uint8]

_DTYPES: Final = {"float8_e4m3": "float8_e4m3fn"}
"""Where torch has another name for a dtype of :class:`kvtier.CacheSpec`."""


@dataclass(slots=True, frozen=True, eq=False)
class DeviceBytes:
    """A block's bytes in memory of a GPU, which ``owner`` keeps; nobody may touch them here before ``after``."""

    address: int
    nbytes: int
    owner: object
    after: Fence


Row: TypeAlias = "Bytes | DeviceBytes"
"""A block's bytes outside of slots, flat. Those of a GPU only where the slots are memory of the same one."""
Rows: TypeAlias = "Sequence[Row] | Bytes"
"""The bytes of n blocks: n rows, or one C-contiguous array of them, [n, bytes of a block]."""


@runtime_checkable
class CudaArray(Protocol):
    """What CuPy, Numba and others call an array of a GPU."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


def is_cuda_array(value: object) -> TypeGuard[CudaArray]:
    """Whether it is one, tensors of torch aside."""
    return not is_tensor(value) and not isinstance(value, np.ndarray) and isinstance(value, CudaArray)


def nbytes_of(array: CudaArray) -> int:
    interface = array.__cuda_array_interface__
    return int(np.dtype(interface["typestr"]).itemsize * math.prod(interface["shape"]))


def is_writable(array: CudaArray) -> bool:
    return not array.__cuda_array_interface__["data"][1]


def stream_of(array: CudaArray) -> int | None:
    """The stream that whoever takes the array has to come after: version 3 of the interface. None: none of its own."""
    stream = array.__cuda_array_interface__.get("stream")
    return stream if isinstance(stream, int) else None


def of_cpu(rows: Sequence[Row]) -> Sequence[Bytes]:
    """The same ones, of which none was taken where it lies on a GPU: they are not for slots there."""
    return cast("Sequence[Bytes]", rows)


def on_gpu(value: torch.Tensor | CudaArray, ordinal: int, after: Fence) -> DeviceBytes | None:
    """Its bytes where they lie on this GPU in C order. Of an array that is no tensor the GPU is taken for granted."""
    if is_tensor(value):
        here = value.device.type == "cuda" and value.device.index == ordinal and value.is_contiguous()
        return DeviceBytes(value.data_ptr(), value.nbytes, value, after) if here else None
    interface = value.__cuda_array_interface__
    size, strides = np.dtype(interface["typestr"]).itemsize, interface.get("strides")
    expected = [size * math.prod(interface["shape"][axis + 1 :]) for axis in range(len(interface["shape"]))]
    if strides is not None and list(strides) != expected:
        return None
    return DeviceBytes(interface["data"][0], nbytes_of(value), value, after)


def is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """A tensor's bytes in C order, flat: its own memory where that is contiguous and the CPU's, else a copy."""
    import torch

    flat: Bytes = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat


def is_in_place(tensor: torch.Tensor) -> bool:
    """Whether :func:`bytes_of` gives the tensor's own memory."""
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def current_stream(tensor: torch.Tensor) -> torch.cuda.Stream | None:
    """The stream that this thread gives its work on the tensor to. None: there is none on the CPU."""
    import torch

    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None


def fill(tensor: torch.Tensor, data: NDArray[np.uint8], stream: torch.cuda.Stream | None) -> None:
    """Copies bytes into a tensor on any device, after what its stream was given before; when this returns they are
    there."""
    import torch

    source = torch.from_numpy(data).view(tensor.dtype).reshape(tensor.shape)
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        tensor.detach().copy_(source)


def over(view: Bytes | DeviceView, dtype: str) -> torch.Tensor:
    """A 1-D tensor of ``dtype`` (as a specification names it) over the bytes of a view, also a read-only one.

    torch knows no read-only tensors: see :meth:`kvtier.lease.Lease.tensors`.
    """
    import torch

    raw = torch.from_numpy(np.asarray(_Exposed(view))) if isinstance(view, np.ndarray) else view.tensor()
    return raw.view(getattr(torch, _DTYPES.get(dtype, dtype)))


class _Exposed:
    """The same memory without the read-only flag, which torch would warn of; keeps the mapping alive."""

    def __init__(self, view: Bytes) -> None:
        self._view = view
        address, _ = view.__array_interface__["data"]
        self.__array_interface__: dict[str, Any] = view.__array_interface__ | {"data": (address, False)}
