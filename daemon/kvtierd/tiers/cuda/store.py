"""Where the slots of a cache's device tier are in the memory of a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvtier.abi.cuda.driver import Address, Driver
from kvtier.abi.cuda.memory import DeviceMemory
from kvtier.abi.layout import ArenaLayout
from kvtierd.core.ids import GroupId, SlotId, Tier
from kvtierd.tiers.cuda.pool import CudaSegment


@dataclass(slots=True, frozen=True)
class _Pool:
    """``nbytes`` of each slot, ``stride`` apart, from ``start`` on."""

    start: Address
    stride: int
    slots: int
    nbytes: int

    @classmethod
    def of(cls, layout: ArenaLayout, group: int, pool: int, base: Address) -> _Pool:
        place = layout.groups[group].pools[pool]
        slots = layout.groups[group].slots[Tier.DEVICE]
        return cls(Address(base + place.device_offset), place.padded_bytes, slots, place.block_bytes)

    def address(self, slot: SlotId) -> Address:
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot}")
        return Address(self.start + slot * self.stride)


class CudaDevice:
    """One region a pool, the same slot index in each. Only copies of the GPU reach the bytes: it is no
    :class:`kvtierd.tiers.base.MemoryStore`. For any thread."""

    def __init__(self, layout: ArenaLayout, segment: CudaSegment) -> None:
        """``segment``: the arena's, which closes it."""
        self._segment: Final = segment
        self.memory: Final[DeviceMemory] = segment.memory
        self.driver: Final[Driver] = segment.gpu.driver
        self.node: Final = segment.gpu.node
        base = segment.memory.address
        self._pools: Final = [
            [_Pool.of(layout, index, pool, base) for pool in range(len(group.pools))]
            for index, group in enumerate(layout.groups)
        ]

    @property
    def tier(self) -> Tier:
        return Tier.DEVICE

    def address(self, group: GroupId, pool: int, slot: SlotId) -> Address:
        """Of the slot's first byte in a pool. Raises IndexError for a slot that does not exist."""
        return self._pools[group][pool].address(slot)

    def stride(self, group: GroupId, pool: int) -> int:
        """Bytes from one slot to the next in a pool: what a slot has there, padded to 4096."""
        return self._pools[group][pool].stride

    def nbytes(self, group: GroupId, pool: int) -> int:
        """Exact bytes of a slot in a pool."""
        return self._pools[group][pool].nbytes

    @property
    def lost(self) -> str | None:
        """Why no byte here can be relied on, and no call will succeed; None: all is well. It is lost for all caches."""
        return self._segment.gpu.lost

    def lose(self, why: str) -> None:
        """A call said so: :class:`kvtier.abi.cuda.errors.CudaLost`. The first reason stays."""
        self._segment.gpu.lose(why)
