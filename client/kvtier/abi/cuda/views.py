"""Bytes of device memory, as torch and others take them in: without a copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvtier.abi.cuda.driver import Address
from kvtier.abi.cuda.memory import DeviceMemory
from kvtier.abi.layout import DEVICE, ArenaLayout

if TYPE_CHECKING:
    import torch


class DeviceView:
    """``nbytes`` bytes from ``offset`` of a :class:`~kvtier.abi.cuda.memory.DeviceMemory`, which lives as long as a
    view of it, or a tensor made from one, does.

    Raises ``ValueError`` for a range that is not in the memory.
    """

    __slots__ = ("__weakref__", "_memory", "address", "nbytes", "readonly")

    def __init__(self, memory: DeviceMemory, offset: int, nbytes: int, *, readonly: bool = False) -> None:
        if offset < 0 or nbytes < 0 or offset + nbytes > memory.nbytes:
            raise ValueError(f"bytes {offset} to {offset + nbytes}: the memory has {memory.nbytes}")
        self._memory: Final = memory
        self.address: Final = Address(memory.address + offset)
        self.nbytes: Final = nbytes
        self.readonly: Final = readonly

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3: one dimension of uint8, in no stream's order: whoever lent the bytes has seen to it that they
        are there."""
        return self._interface(self.address if self.nbytes else 0, self.readonly)

    def tensor(self) -> torch.Tensor:
        """A uint8 tensor of these bytes, on the device. torch knows no tensor that cannot be written to, so one of
        a read-only view is the caller's word not to."""
        import torch

        return torch.as_tensor(_Writable(self), device=f"cuda:{self._memory.driver.ordinal}")

    def _interface(self, pointer: int, readonly: bool) -> dict[str, Any]:
        return {
            "shape": (self.nbytes,),
            "strides": None,
            "typestr": "|u1",
            "data": (pointer, readonly),
            "stream": None,
            "version": 3,
        }


class _Writable:
    """A view as torch takes it, which refuses one that says that it is read-only, and one of nothing that points
    nowhere. torch keeps this object, and so the memory, while the tensor's storage lives."""

    __slots__ = ("_view",)

    def __init__(self, view: DeviceView) -> None:
        self._view = view

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        view = self._view
        return view._interface(view.address if view.nbytes else view._memory.address, readonly=False)


@dataclass(slots=True, frozen=True, eq=False)
class DevicePool:
    """All slots of a group in one pool: ``shape`` is [slots, bytes of a block], ``stride`` the bytes from one slot to
    the next. Any bytes of it may be somebody else's."""

    memory: DeviceMemory
    offset: int
    shape: tuple[int, int]
    stride: int

    @classmethod
    def all_of(cls, memory: DeviceMemory, layout: ArenaLayout) -> list[tuple[DevicePool, ...]]:
        """Of all groups."""
        return [
            tuple(
                cls(memory, pool.device_offset, (group.slots[DEVICE], pool.block_bytes), pool.padded_bytes)
                for pool in group.pools
            )
            for group in layout.groups
        ]

    def address(self, slot: int) -> Address:
        """Raises :class:`IndexError` for a slot that there is not."""
        if not 0 <= slot < self.shape[0]:
            raise IndexError(f"slot {slot} of {self.shape[0]}")
        return Address(self.memory.address + self.offset + slot * self.stride)

    def slot(self, slot: int, *, readonly: bool) -> DeviceView:
        """Raises :class:`IndexError`, likewise."""
        return DeviceView(self.memory, self.address(slot) - self.memory.address, self.shape[1], readonly=readonly)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3, as of :class:`DeviceView`, in two dimensions."""
        return {
            "shape": self.shape,
            "strides": (self.stride, 1),
            "typestr": "|u1",
            "data": (self.address(0) if self.shape[0] else self.memory.address, False),
            "stream": None,
            "version": 3,
        }

    def tensor(self) -> torch.Tensor:
        """A uint8 tensor of the same shape, not copied. Its rows are padded: to reshape them all would copy them."""
        import torch

        return torch.as_tensor(self, device=f"cuda:{self.memory.driver.ordinal}")
