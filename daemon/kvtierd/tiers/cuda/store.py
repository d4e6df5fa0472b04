"""Where the slots of a cache's device tier are in the memory of a GPU."""

from __future__ import annotations

from typing import Final

from kvtier.abi.cuda.driver import Address, Driver
from kvtier.abi.cuda.memory import DeviceMemory
from kvtier.abi.cuda.views import DevicePool
from kvtier.abi.layout import ArenaLayout
from kvtierd.core.ids import GroupId, SlotId, Tier
from kvtierd.tiers.cuda.pool import CudaSegment


class CudaDevice:
    """One region a pool, the same slot index in each. Only copies of the GPU reach the bytes: it is no
    :class:`kvtierd.tiers.base.MemoryStore`. For any thread."""

    def __init__(self, layout: ArenaLayout, segment: CudaSegment) -> None:
        """``segment``: the arena's, which closes it."""
        self._segment: Final = segment
        self.memory: Final[DeviceMemory] = segment.memory
        self.driver: Final[Driver] = segment.gpu.driver
        self.node: Final = segment.gpu.node
        self._pools: Final = DevicePool.all_of(segment.memory, layout)

    @property
    def tier(self) -> Tier:
        return Tier.DEVICE

    def address(self, group: GroupId, pool: int, slot: SlotId) -> Address:
        """Of the slot's first byte in a pool. Raises IndexError for a slot that does not exist."""
        return self._pools[group][pool].address(slot)

    def stride(self, group: GroupId, pool: int) -> int:
        """Bytes from one slot to the next in a pool: what a slot has there, padded to 4096."""
        return self._pools[group][pool].stride

    @property
    def lost(self) -> str | None:
        """Why no byte here can be relied on, and no call will succeed; None: all is well. It is lost for all caches."""
        return self._segment.gpu.lost

    def lose(self, why: str) -> None:
        """A call said so: :class:`kvtier.abi.cuda.errors.CudaLost`. The first reason stays."""
        self._segment.gpu.lose(why)
