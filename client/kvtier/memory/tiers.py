"""Mapped memory of one tier, addressed by the CPU or a GPU: views, writes and reads of its slots."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Final, TypeAlias, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvtier import buffers
from kvtier.abi import attach
from kvtier.abi.cuda import driver as cuda
from kvtier.abi.cuda.driver import Address, Copy
from kvtier.abi.cuda.errors import CudaError, CudaUnavailable
from kvtier.abi.cuda.memory import DeviceMemory
from kvtier.abi.cuda.page_locks import CHUNK_BYTES, Chunk, PageLocks
from kvtier.abi.cuda.views import DevicePool, DeviceView
from kvtier.abi.layout import ArenaLayout
from kvtier.buffers import DeviceBytes, Row, Rows, Slots
from kvtier.deadline import PASSED, Fence
from kvtier.errors import DaemonError, InvalidArgument
from kvtier.memory.arrays import Bytes, OnGpu
from kvtier.memory.gpu import Gpu, joined
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
            return self._copy_pages(group, slots, blocks, to_host=to_host)
        cpu, gpus = _by_gpu(slots, blocks)
        (buffers.into_slots if to_host else buffers.out_of_slots)(self._pools[group], *cpu)
        for gpu, rows in gpus.items():
            stream = gpu.to_host if to_host else gpu.to_device
            gpu.copy(stream, *self._copies(gpu, group, rows, to_host=to_host))
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

    def _copies(
        self, gpu: Gpu, group: int, rows: Sequence[tuple[int, DeviceBytes]], *, to_host: bool
    ) -> tuple[list[Copy], list[Copy]]:
        """The copies between slots and rows on a GPU, split by the slots' memory: (pageable, page-locked). Returns when
        the rows may be touched."""
        gpu.reached(row.after for _, row in rows)
        start, pools = self._data.ctypes.data, self._pools[group]
        slots = buffers.checked(pools, [slot for slot, _ in rows])
        there = np.array([row.address for _, row in rows], np.int64)
        pageable: list[Copy] = []
        batch: list[Copy] = []
        for pool in pools:
            offsets = pool.ctypes.data - start + slots * pool.strides[0]
            nbytes = np.full(len(slots), pool.shape[1])
            for copies, more in zip((pageable, batch), self._split(gpu, offsets, there, nbytes, to_host), strict=True):
                copies += more
            there += pool.shape[1]
        return pageable, batch

    def _copy_pages(self, group: int, slots: Slots, blocks: Pages, *, to_host: bool) -> None:
        gpu, pages = _taken(blocks, self)
        pools, start = self._pools[group], self._data.ctypes.data
        places = [Pool(pool.ctypes.data - start, pool.strides[0], pool.shape[1]) for pool in pools]
        runs = pages.runs(places, buffers.checked(pools, slots))
        gpu.copy(gpu.to_host if to_host else gpu.to_device, *self._split(gpu, *runs, to_host))

    def _split(
        self, gpu: Gpu, offsets: NDArray[np.int64], there: NDArray[np.int64], nbytes: NDArray[np.int64], to_host: bool
    ) -> tuple[list[Copy], list[Copy]]:
        """The copies between offsets in the segment and addresses on a GPU, split by the segment's memory: (pageable,
        page-locked)."""
        locked, start = self._lock(gpu).nbytes, self._data.ctypes.data
        pageable: list[Copy] = []
        batch: list[Copy] = []
        for offset, device, some_bytes in _within_chunks(offsets, there, nbytes):
            dst, src = (start + offset, device) if to_host else (device, start + offset)
            ready = offset + some_bytes <= locked
            for copies, some in ((batch, ready), (pageable, ~ready)):
                copies += zip(dst[some].tolist(), src[some].tolist(), some_bytes[some].tolist(), strict=True)
        return pageable, batch

    def _lock(self, gpu: Gpu) -> PageLocks:
        with self._locking:
            if self._locks is None:
                data = self._data
                end = -(-len(data) // cuda.HOST_PAGE) * cuda.HOST_PAGE
                chunks = [
                    Chunk(data.ctypes.data + offset, min(CHUNK_BYTES, end - offset))
                    for offset in range(0, end, CHUNK_BYTES)
                ]
                self._locks = PageLocks("arena", gpu.driver, chunks)
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


Pieces: TypeAlias = "tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]"
"""Offsets in a segment, addresses in a GPU's memory, and sizes in bytes."""


def _within_chunks(
    offsets: NDArray[np.int64], addresses: NDArray[np.int64], left: NDArray[np.int64]
) -> Iterator[Pieces]:
    """Pieces of ``left`` bytes, cut where chunks of :mod:`kvtier.abi.cuda.page_locks` meet."""
    while len(left):
        fit = np.minimum(left, CHUNK_BYTES - offsets % CHUNK_BYTES)
        yield offsets, addresses, fit
        rest = left > fit
        offsets, addresses, left = (offsets + fit)[rest], (addresses + fit)[rest], (left - fit)[rest]


class CannotMap(Exception):
    """This process cannot map the memory; the message says why."""


async def map_device(fd: int, told: attach.CudaHandle) -> Callable[[ArenaLayout], CudaMemory]:
    """Maps the memory of a descriptor, which the caller keeps. Raises :class:`CannotMap`."""
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
    opening.add_done_callback(_heard)
    try:
        gpu, memory = await asyncio.shield(opening)
    except (CudaUnavailable, CudaError) as error:
        raise CannotMap(str(error)) from error
    return partial(CudaMemory, gpu, memory)


def _heard(opening: asyncio.Future[Any]) -> None:
    """Reads the outcome, so that asyncio does not log a failure whose caller has gone."""
    if not opening.cancelled():
        opening.exception()


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
        pageable, batch = self._copies(group, slots, blocks)
        self.gpu.copy(self.gpu.to_device, pageable, batch)

    def read(self, group: int, slots: Slots, blocks: Rows) -> None:
        copies = self._copies(group, [int(slot) for slot in slots], blocks)
        turned = ([(row, slot, nbytes) for slot, row, nbytes in some] for some in copies)
        self.gpu.copy(self.gpu.to_host, *turned)

    def fence(self, stream: int | None) -> Fence:
        return self.gpu.fence(stream)

    def _copies(self, group: int, slots: Sequence[int], blocks: Rows) -> tuple[list[Copy], list[Copy]]:
        """Copies from blocks to slots: of the CPU's memory, which may or may not be page-locked by its owner, and of
        the GPU's. Returns when the blocks may be touched."""
        if isinstance(blocks, Pages):
            return self._page_copies(group, slots, blocks)
        rows = list(blocks)
        self.gpu.reached(row.after for row in rows if isinstance(row, DeviceBytes))
        pageable: list[Copy] = []
        batch: list[Copy] = []
        begun = 0
        for pool in self._pools[group]:
            nbytes = pool.shape[1]
            # Copies of one array are joined. Separately page-locked memory stays separate for the driver, even if one
            # array begins at another's end.
            for _, some in groupby(zip(slots, rows, strict=True), key=_array_of):
                pairs = list(some)
                copies = batch if isinstance(pairs[0][1], DeviceBytes) else pageable
                copies += joined((pool.address(slot), Address(_address_of(row) + begun), nbytes) for slot, row in pairs)
            begun += nbytes
        return pageable, batch

    def _page_copies(self, group: int, slots: Sequence[int], pages: Pages) -> tuple[list[Copy], list[Copy]]:
        if pages.planes.on_gpu:
            _, pages = _taken(pages, self)
        pools = self._pools[group]
        for slot in slots:
            pools[0].address(slot)
        places = [Pool(int(pool.address(0)), pool.stride, pool.shape[1]) for pool in pools]
        runs = pages.runs(places, np.asarray(slots, np.intp))
        copies = list(zip(*(run.tolist() for run in runs), strict=True))
        return ([], copies) if pages.planes.on_gpu else (copies, [])


Memory: TypeAlias = CpuMemory | CudaMemory
"""The slots of one tier, by window group."""


def _address_of(block: Row) -> int:
    return block.address if isinstance(block, DeviceBytes) else block.ctypes.data


def _array_of(row: tuple[int, Row]) -> int:
    """Id of the array that a block belongs to."""
    block: Any = row[1]
    while isinstance(block, np.ndarray) and isinstance(block.base, np.ndarray):
        block = block.base
    return id(block)
