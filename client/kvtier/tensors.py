"""Tensors of torch: their bytes as arrays, and slots as tensors, without copies where both are CPU memory.

Nothing here imports torch before the caller has: who passes a tensor has it, who asks for one wants it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final, TypeGuard

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

    from kvtier.abi.cuda.views import DeviceView

Bytes = NDArray[np.uint8]

_DTYPES: Final = {"float8_e4m3": "float8_e4m3fn"}
"""Where torch has another name for a dtype of :class:`kvtier.CacheSpec`."""


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


def fill(tensor: torch.Tensor, data: NDArray[np.uint8]) -> None:
    """Copies bytes into a tensor on any device."""
    import torch

    source = torch.from_numpy(data).view(tensor.dtype).reshape(tensor.shape)
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
