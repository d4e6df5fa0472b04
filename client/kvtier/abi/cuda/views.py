"""Views of device memory for torch and other libraries, without a copy."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from kvtier.abi.cuda.driver import Address
from kvtier.abi.cuda.memory import DeviceMemory
from kvtier.abi.layout import DEVICE, ArenaLayout

if TYPE_CHECKING:
    import torch


class DeviceView:
    """``nbytes`` bytes from ``offset`` of a :class:`~kvtier.abi.cuda.memory.DeviceMemory`. A view, or a tensor made
    from a view, keeps the memory alive. Raises ``ValueError`` for a range outside the memory."""

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
        """Version 3: one dimension of uint8, without a stream: the lender has made sure that the bytes are there."""
        return {
            "shape": (self.nbytes,),
            "strides": None,
            "typestr": "|u1",
            "data": (self.address if self.nbytes else 0, self.readonly),
            "stream": None,
            "version": 3,
        }

    def tensor(self) -> torch.Tensor:
        """Returns a uint8 tensor of these bytes, on the device. torch has no read-only tensors: the caller must not
        write to the tensor of a read-only view."""
        import torch

        # torch refuses a read-only view, and an empty view without an address. The storage of the tensor keeps the
        # object, and so the memory.
        place = self.address if self.nbytes else self._memory.address
        interface = {**self.__cuda_array_interface__, "data": (place, False)}
        exposed = SimpleNamespace(__cuda_array_interface__=interface, view=self)
        return torch.as_tensor(exposed, device=f"cuda:{self._memory.driver.ordinal}")


@dataclass(slots=True, frozen=True, eq=False)
class DevicePool:
    """All slots of a group in one pool: ``shape`` is [slots, bytes of a block], ``stride`` the bytes from one slot to
    the next. Other clients may own any of the slots."""

    memory: DeviceMemory
    offset: int
    shape: tuple[int, int]
    stride: int

    @classmethod
    def all_of(cls, memory: DeviceMemory, layout: ArenaLayout) -> list[tuple[DevicePool, ...]]:
        return [
            tuple(
                cls(memory, pool.device_offset, (group.slots[DEVICE], pool.block_bytes), pool.padded_bytes)
                for pool in group.pools
            )
            for group in layout.groups
        ]

    def address(self, slot: int) -> Address:
        """Returns a slot's address. Raises :class:`IndexError` for a slot that does not exist."""
        if not 0 <= slot < self.shape[0]:
            raise IndexError(f"slot {slot} of {self.shape[0]}")
        return Address(self.memory.address + self.offset + slot * self.stride)

    def slot(self, slot: int, *, readonly: bool) -> DeviceView:
        """Returns a view of a slot. Raises :class:`IndexError` for a slot that does not exist."""
        return DeviceView(self.memory, self.address(slot) - self.memory.address, self.shape[1], readonly=readonly)
