"""The slots of a device tier that is memory of a GPU, mapped by its driver into this process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtier.abi import attach
from kvtier.abi.cuda.driver import Address, Copy
from kvtier.abi.cuda.errors import CudaError, CudaUnavailable
from kvtier.abi.cuda.memory import DeviceMemory
from kvtier.abi.cuda.views import DeviceView
from kvtier.abi.layout import DEVICE, ArenaLayout
from kvtier.buffers import DeviceBytes, Row, Rows
from kvtier.errors import DaemonError
from kvtier.fences import Fence
from kvtier.gpu import Gpu
from kvtier.transfer import Slots

if TYPE_CHECKING:
    import torch


class CannotMap(Exception):
    """The message says why this process cannot have the memory."""


async def mapped(fd: int, told: attach.CudaMemory) -> Callable[[ArenaLayout], CudaMemory]:
    """Maps the memory behind a descriptor, which stays the caller's. Raises :class:`CannotMap`."""
    kept = os.dup(fd)

    def open_and_map() -> tuple[Gpu, DeviceMemory]:
        try:
            gpu = Gpu.of(told.uuid)
            return gpu, DeviceMemory.from_fd(gpu.driver, kept, told.nbytes)
        finally:
            os.close(kept)

    # In a thread, since CUDA takes seconds to start. Whoever is cancelled leaves it running: it has the descriptor.
    opening = asyncio.get_running_loop().run_in_executor(None, open_and_map)
    opening.add_done_callback(_heard)
    try:
        gpu, memory = await asyncio.shield(opening)
    except (CudaUnavailable, CudaError) as error:
        raise CannotMap(str(error)) from error
    return partial(CudaMemory, gpu, memory)


def _heard(opening: asyncio.Future[Any]) -> None:
    """asyncio would say that nobody was told of a failure: its caller may have gone."""
    if not opening.cancelled():
        opening.exception()


class CudaMemory:
    """Implements :class:`kvtier.memory.Memory`. It is unmapped when the last view of it is gone."""

    waits = True

    def __init__(self, gpu: Gpu, memory: DeviceMemory, layout: ArenaLayout) -> None:
        """Raises :class:`DaemonError` where it is shorter than the layout says."""
        if memory.nbytes < layout.device_bytes:
            message = f"device memory of {memory.nbytes} bytes: the layout says {layout.device_bytes}"
            raise DaemonError(message, reason="BAD_ARENA")
        self.gpu = gpu
        self._pools = [
            tuple(
                DevicePool(memory, pool.device_offset, (group.slots[DEVICE], pool.block_bytes), pool.padded_bytes)
                for pool in group.pools
            )
            for group in layout.groups
        ]

    def pools(self, group: int) -> tuple[DevicePool, ...]:
        return self._pools[group]

    def view(self, group: int, slot: int, *, write: bool) -> list[DeviceView]:
        return [pool.slot(slot, readonly=not write) for pool in self._pools[group]]

    def write(self, group: int, slots: Sequence[int], blocks: Rows) -> None:
        rows = list(blocks)
        self._after(rows)
        self.gpu.copy(self._parts(group, slots, rows))

    def read(self, group: int, slots: Slots, blocks: Rows) -> None:
        rows = list(blocks)
        self._after(rows)
        parts = self._parts(group, [int(slot) for slot in slots], rows)
        self.gpu.copy([(part, slot, nbytes) for slot, part, nbytes in copies] for copies in parts)

    def fence(self, stream: int | None) -> Fence:
        return self.gpu.fence(stream)

    def _after(self, blocks: Sequence[Row]) -> None:
        """Returns when the blocks that lie on the GPU may be touched."""
        for fence in {block.after for block in blocks if isinstance(block, DeviceBytes)}:
            self.gpu.wait(fence.passed)

    def _parts(self, group: int, slots: Sequence[int], blocks: Sequence[Row]) -> Iterator[list[Copy]]:
        """Where each slot's part in each pool is, where that part of its block is, and its length; by pool, and by
        the array that blocks are rows of."""
        begun = 0
        for pool in self._pools[group]:
            nbytes = pool.shape[1]
            for _, rows in groupby(zip(slots, blocks, strict=True), key=_array_of):
                yield [(pool.address(slot), Address(_address_of(block) + begun), nbytes) for slot, block in rows]
            begun += nbytes


def _address_of(block: Row) -> int:
    return block.address if isinstance(block, DeviceBytes) else block.ctypes.data


def _array_of(row: tuple[int, Row]) -> int:
    """Which array a block is in."""
    block: Any = row[1]
    while isinstance(block, np.ndarray) and isinstance(block.base, np.ndarray):
        block = block.base
    return id(block)


@dataclass(slots=True, frozen=True, eq=False)
class DevicePool:
    """All slots of a group in one pool: ``shape`` is [slots, bytes of a block], ``stride`` the bytes from one slot to
    the next. Any bytes of it may be somebody else's."""

    memory: DeviceMemory
    offset: int
    shape: tuple[int, int]
    stride: int

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
        """Version 3, as of :class:`kvtier.abi.cuda.views.DeviceView`, in two dimensions."""
        return {
            "shape": self.shape,
            "strides": (self.stride, 1),
            "typestr": "|u1",
            "data": (self.address(0) if self.shape[0] else self.memory.address, False),
            "stream": None,
            "version": 3,
        }

    def tensor(self) -> torch.Tensor:
        """A uint8 tensor of the same shape, not copied."""
        import torch

        return torch.as_tensor(self, device=f"cuda:{self.memory.driver.ordinal}")
