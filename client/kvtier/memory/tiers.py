"""Mapped memory of one tier, addressed by the CPU or a GPU: views, writes and reads of its slots."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeAlias, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvtier import buffers
from kvtier.abi import attach
from kvtier.abi.cuda.driver import Copies, joined
from kvtier.abi.cuda.memory import DeviceMemory
from kvtier.abi.cuda.page_locks import PageLocks
from kvtier.abi.cuda.views import DevicePool, DeviceView
from kvtier.abi.layout import ArenaLayout
from kvtier.buffers import DeviceBytes, Row, Rows, Slots
from kvtier.deadline import PASSED, Fence
from kvtier.errors import DaemonError, InvalidArgument
from kvtier.memory.arrays import Bytes, OnGpu
from kvtier.memory.gpu import Gpu
from kvtier.memory.planes import Pages, Pool
from kvtier.types import Tier

View: TypeAlias = "Bytes | Any"
"""Bytes in place: a numpy array, or a :class:`kvtier.abi.cuda.views.DeviceView` of memory that only a GPU addresses."""


class CpuMemory:
    """Shared memory, as numpy arrays, unmapped when the last array over it is gone.

    Blocks may lie on any GPU of this process. The first GPU block starts page-locking of the memory in the background,
    after which the GPU reads and writes the memory without the CPU.
    """

    def __init__(self, layout: ArenaLayout, tier: Tier, data: Bytes) -> None:
        """``data``: the tier's whole segment, as the array made from its mapping."""
        self._data: Final = data
        self._pools: Final = [
            tuple(layout.pool_view(data, tier, group, pool) for pool in range(len(place.pools)))
            for group, place in enumerate(layout.groups)
        ]
        self._locking: Final = threading.Lock()
        self._locks: PageLocks | None = None

    def reach(self, block: OnGpu) -> Gpu | None:
        """The GPU that a block lies on, if blocks there can be copied directly; else None."""
        return Gpu.holding(block)

    def waits(self, blocks: Rows) -> bool:
        """Whether a copy of any size waits for a device, so that it does not belong on an event loop."""
        return _any_on_gpu(blocks)

    def view(self, group: int, slot: int, *, write: bool) -> list[Bytes]:
        """A slot's bytes in place, one 1-D view per pool."""
        views = [pool[slot] for pool in self._pools[group]]
        if not write:
            for view in views:
                view.flags.writeable = False
        return views

    def write(self, group: int, slots: Sequence[int], blocks: Rows) -> None:
        """Copies blocks into slots. When it returns or raises, no copy is running."""
        self._copy(group, slots, blocks, to_host=True)

    def read(self, group: int, slots: Slots, blocks: Rows) -> None:
        """Copies slots into blocks. When it returns or raises, no copy is running. Raises :class:`IndexError` for a
        slot that does not exist."""
        self._copy(group, slots, blocks, to_host=False)

    def _copy(self, group: int, slots: Slots, blocks: Rows, *, to_host: bool) -> None:
        if isinstance(blocks, Pages) and blocks.planes.on_gpu:
            gpu, pages = _taken(blocks, self)
            runs = pages.runs(self._places(group), buffers.checked(self._pools[group], slots))
            return self._run(gpu, runs, to_host=to_host)
        cpu, gpus = _by_gpu(slots, blocks)
        (buffers.into_slots if to_host else buffers.out_of_slots)(self._pools[group], *cpu)
        for gpu, rows in gpus.items():
            gpu.reached(row.after for _, row in rows)
            numbers = buffers.checked(self._pools[group], [slot for slot, _ in rows])
            self._run(gpu, _row_runs(self._places(group), numbers, [row for _, row in rows]), to_host=to_host)
        return None

    async def checksums(self, group: int, slots: Sequence[int]) -> bytes:
        """xxh3-128 checksums of the slots, 16 bytes each."""
        pools, digest = self._pools[group], xxhash.xxh3_128()

        def of_slot(slot: int) -> bytes:
            digest.reset()
            for pool in pools:
                digest.update(pool[slot].data)
            return digest.digest()

        nbytes = len(slots) * sum(pool.shape[1] for pool in pools)
        return await buffers.run_copy(lambda: b"".join(map(of_slot, slots)), nbytes)

    def fence(self, stream: int | None) -> Fence:
        """The point that a stream has reached: see :func:`kvtier.memory.gpu.fence_over`."""
        return PASSED

    def _places(self, group: int) -> list[Pool]:
        return [Pool(pool.ctypes.data, pool.strides[0], pool.shape[1]) for pool in self._pools[group]]

    def _run(self, gpu: Gpu, runs: Copies, *, to_host: bool) -> None:
        """Copies between slots and a GPU. ``runs``: in columns, address in the slot, address on the GPU, bytes."""
        copies, locked = self._lock(gpu).split(runs, 0)
        if to_host:
            gpu.copy(gpu.to_host, copies, locked)
        else:
            gpu.copy(gpu.to_device, copies[[1, 0, 2]], locked)

    def _lock(self, gpu: Gpu) -> PageLocks:
        with self._locking:
            if self._locks is None:
                data = self._data
                self._locks = PageLocks("arena", gpu.driver, data.ctypes.data, len(data))
                self._locks.start(data.base)
                # The array ends before its mapping. At the end of the process both stay: copies may be running.
                weakref.finalize(data, self._locks.stop).atexit = False
            return self._locks


def _taken(blocks: Pages, memory: Memory) -> tuple[Gpu, Pages]:
    """Pages on a GPU, once they may be touched. Raises :class:`InvalidArgument` if the GPU does not reach the slots."""
    pages = blocks.within(memory.reach)
    if pages is None or pages.gpu is None:
        raise InvalidArgument("blocks", "planes of a GPU", "planes of one GPU that the slots are mapped for")
    pages.gpu.reached(pages.after)
    return pages.gpu, pages


def _any_on_gpu(blocks: Rows) -> bool:
    if isinstance(blocks, Pages):
        return blocks.planes.on_gpu
    return not isinstance(blocks, np.ndarray) and DeviceBytes in map(type, blocks)


def _by_gpu(
    slots: Slots, blocks: Rows
) -> tuple[tuple[Slots, Sequence[Bytes] | Bytes | Pages], dict[Gpu, list[tuple[int, DeviceBytes]]]]:
    """Slots and blocks in the CPU's memory, and the other blocks by GPU, each with its slot."""
    gpus: dict[Gpu, list[tuple[int, DeviceBytes]]] = {}
    if not _any_on_gpu(blocks):
        return (slots, blocks if isinstance(blocks, Pages) else buffers.of_cpu(blocks)), gpus
    cpu: list[tuple[int, Bytes]] = []
    for slot, block in zip(slots, cast("Sequence[Row]", blocks), strict=True):
        if isinstance(block, DeviceBytes):
            gpus.setdefault(block.gpu, []).append((int(slot), block))
        else:
            cpu.append((int(slot), block))
    return ([slot for slot, _ in cpu], [block for _, block in cpu]), gpus


def _row_runs(pools: Sequence[Pool], slots: NDArray[np.intp], rows: Sequence[Row]) -> Copies:
    """The parts of rows in each pool, in columns: address in the slot, address in the row, bytes."""
    addresses = np.array([_address_of(row) for row in rows], np.int64)
    parts: list[Copies] = []
    for start, stride, nbytes in pools:
        parts.append(np.stack((start + stride * slots, addresses, np.full(len(slots), nbytes))))
        addresses = addresses + nbytes
    return np.concatenate(parts, axis=1)


async def map_device(fd: int, told: attach.CudaHandle) -> Callable[[ArenaLayout], CudaMemory]:
    """Maps the memory of a descriptor, which the caller keeps. Raises :class:`CudaUnavailable`, :class:`CudaError`."""
    kept = os.dup(fd)

    def open_and_map() -> tuple[Gpu, DeviceMemory]:
        try:
            gpu = Gpu.of(told.uuid)
            memory = DeviceMemory.from_fd(gpu.driver, kept, told.nbytes)
            memory.collected_by(gpu.unmap_later)
            return gpu, memory
        finally:
            os.close(kept)

    # In a thread, since CUDA starts slowly. A cancelled caller leaves the thread running: it has its own descriptor.
    opening = asyncio.get_running_loop().run_in_executor(None, open_and_map)
    # Read, so that asyncio does not log a failure whose caller has gone.
    opening.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    gpu, memory = await asyncio.shield(opening)
    return partial(CudaMemory, gpu, memory)


class CudaMemory:
    """GPU memory, unmapped when its last view is gone: see :meth:`kvtier.memory.gpu.Gpu.unmap_later`."""

    def __init__(self, gpu: Gpu, memory: DeviceMemory, layout: ArenaLayout) -> None:
        """Raises :class:`DaemonError` if the memory is smaller than the layout."""
        if memory.nbytes < layout.device_bytes:
            message = f"device memory of {memory.nbytes} bytes: the layout says {layout.device_bytes}"
            raise DaemonError(message, reason="BAD_ARENA")
        self.gpu: Final = gpu
        self._pools = DevicePool.all_of(memory, layout)

    def reach(self, block: OnGpu) -> Gpu | None:
        return self.gpu if Gpu.holding(block) is self.gpu else None

    def waits(self, blocks: Rows) -> bool:
        return True

    def view(self, group: int, slot: int, *, write: bool) -> list[DeviceView]:
        return [pool.slot(slot, readonly=not write) for pool in self._pools[group]]

    def write(self, group: int, slots: Sequence[int], blocks: Rows) -> None:
        self.gpu.copy(self.gpu.to_device, *self._copies(group, slots, blocks))

    def read(self, group: int, slots: Slots, blocks: Rows) -> None:
        copies, on_gpu = self._copies(group, [int(slot) for slot in slots], blocks)
        self.gpu.copy(self.gpu.to_host, copies[[1, 0, 2]], on_gpu)

    def fence(self, stream: int | None) -> Fence:
        return self.gpu.fence(stream)

    def _copies(self, group: int, slots: Sequence[int], blocks: Rows) -> tuple[Copies, NDArray[np.bool_]]:
        """Copies from blocks to slots, and which blocks are in the GPU's memory; others are in the CPU's, which may or
        may not be page-locked by its owner. Returns when the blocks may be touched."""
        places = [Pool(pool.memory.address + pool.offset, pool.stride, pool.shape[1]) for pool in self._pools[group]]
        for slot in slots:
            self._pools[group][0].address(slot)
        numbers = np.asarray(slots, np.intp)
        if isinstance(blocks, Pages):
            if blocks.planes.on_gpu:
                _, blocks = _taken(blocks, self)
            runs = blocks.runs(places, numbers)
            return runs, np.full(runs.shape[1], blocks.planes.on_gpu)
        rows = list(blocks)
        self.gpu.reached(row.after for row in rows if isinstance(row, DeviceBytes))
        # Copies of one array are joined. Separately page-locked memory stays separate for the driver, even if one array
        # begins at another's end.
        arrays = np.array([-1 - n if isinstance(row, DeviceBytes) else _array_of(row) for n, row in enumerate(rows)])
        runs, arrays = joined(_row_runs(places, numbers, rows), np.tile(arrays.astype(np.int64), len(places)))
        return runs, arrays < 0


Memory: TypeAlias = CpuMemory | CudaMemory
"""The slots of one tier, by window group."""


def _address_of(block: Row) -> int:
    return block.address if isinstance(block, DeviceBytes) else block.ctypes.data


def _array_of(block: Any) -> int:
    """Id of the array that a block belongs to."""
    while isinstance(block, np.ndarray) and isinstance(block.base, np.ndarray):
        block = block.base
    return id(block)
