"""Blocks whose bytes are pieces in several arrays.

An engine whose tensors have the layer outermost keeps a block as a *page*: one piece in each tensor. These tensors are
*planes*. ``cache.put(keys, planes[pages])`` gathers the pieces, and ``cache.get(keys, planes[pages])`` scatters them.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, cast

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kvtier.errors import InvalidArgument
from kvtier.memory.arrays import Bytes, CudaArray, OnGpu, address_of, bytes_of, is_readonly, is_tensor, stream_of

if TYPE_CHECKING:
    import torch

    from kvtier.deadline import Fence
    from kvtier.memory.gpu import Gpu


Part: TypeAlias = "NDArray[Any] | torch.Tensor | CudaArray"
"""An array [pages, ...] of any dtype; each page is one contiguous run of bytes."""

_TURN_S: Final = 0.002
"""Seconds that a copy keeps the GIL. A handover takes as long as the copy of a large page."""


@dataclass(slots=True, frozen=True, eq=False)
class Plane:
    """Bytes ``[offset, offset + nbytes)`` of every block; page p begins at ``address + p * stride``. ``memory``: begins
    at the address; None on a GPU."""

    array: Part
    pages: int
    offset: int
    nbytes: int
    address: int
    stride: int
    readonly: bool
    memory: memoryview | None

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


class Pool(NamedTuple):
    """All slots of a pool: start of the first, stride between slots, and bytes of a block in the pool."""

    start: int
    stride: int
    nbytes: int


class Planes:
    """The arrays of an engine's pages. ``planes[pages]`` are blocks, one per page, wherever a cache or an arena takes
    blocks. ``get`` returns the numbers of the pages that it filled."""

    def __init__(self, parts: Sequence[Part | tuple[int, Part]], block_bytes: int | None = None) -> None:
        """``parts``: arrays or tensors [pages, ...], all on the CPU or all on one GPU. Each part has the bytes of a
        block that follow the part before; ``(offset, array)``: the bytes from an offset on.

        Args:
            block_bytes: default: the end of the last part. A block may have bytes that no part has, for example other
                ranks' bytes. These bytes are not read, and only ``arena.write`` of reserved slots skips them.
        Raises: :class:`InvalidArgument`, which names the part; a tensor with the pages of K and V, for example, is two
        parts.
        """
        found: list[Plane] = []
        for number, part in enumerate(parts):
            offset, array = part if isinstance(part, tuple) else (found[-1].end if found else 0, part)
            found.append(_plane(f"parts[{number}]", offset, array))
        if not found:
            raise InvalidArgument("parts", "no arrays", "one or more")
        self.block_bytes: Final = max(each.end for each in found) if block_bytes is None else block_bytes
        self.planes: Final = tuple(sorted(found, key=lambda plane: plane.offset))
        self.pages: Final = found[0].pages
        self.on_gpu: Final = found[0].memory is None
        self.nbytes: Final = sum(each.nbytes for each in found)
        """Bytes of a block that the arrays have."""
        for number, each in enumerate(found):
            field = f"parts[{number}]"
            if each.pages != self.pages:
                raise InvalidArgument(field, f"{each.pages} pages", f"{self.pages}, as parts[0] has")
            if (each.memory is None) != self.on_gpu:
                raise InvalidArgument(field, "an array elsewhere", "on the CPU or the GPU, where parts[0] is")
            if not 0 <= each.offset <= self.block_bytes - each.nbytes:
                place = f"bytes {each.offset} to {each.end}"
                raise InvalidArgument(field, place, f"within the block's {self.block_bytes} bytes")
        for before, after in pairwise(self.planes):
            if after.offset < before.end:
                place = f"bytes {after.offset} to {after.end}"
                raise InvalidArgument(f"parts[{found.index(after)}]", place, "bytes that no other part has")

    def __getitem__(self, pages: Sequence[int] | NDArray[np.integer[Any]]) -> Pages:
        """The blocks in these pages. Raises :class:`InvalidArgument` for a page that does not exist."""
        numbers = np.fromiter(map(operator.index, pages), np.intp, len(pages))
        (wrong,) = np.nonzero((numbers < 0) | (numbers >= self.pages))
        if len(wrong):
            raise InvalidArgument(f"pages[{wrong[0]}]", int(numbers[wrong[0]]), f"0 to {self.pages - 1}")
        return Pages(self, numbers)


def _plane(field: str, offset: int, array: Part) -> Plane:
    first: Bytes | None = None
    if isinstance(array, np.ndarray):
        (pages, *shape), readonly = array.shape, not array.flags.writeable
        nbytes, address, stride = array[:1].nbytes, array.ctypes.data, array.strides[0]
        contiguous = array[:1].flags.c_contiguous
        if contiguous:
            first = array[:1].reshape(-1).view(np.uint8)
    elif is_tensor(array):
        (pages, *shape), readonly = array.shape, False
        nbytes, address, stride = array[:1].nbytes, array.data_ptr(), array.stride(0) * array.element_size()
        contiguous = array[:1].is_contiguous()
        if contiguous and not array.is_cuda:
            first = bytes_of(array[:1])
    else:
        interface = array.__cuda_array_interface__
        (pages, *shape), readonly = interface["shape"], is_readonly(array)
        item = np.dtype(interface["typestr"]).itemsize
        packed = [item * math.prod(shape[axis:]) for axis in range(len(shape) + 1)]
        stride, *inner = interface.get("strides") or packed
        nbytes, address, contiguous = packed[0], address_of(array), inner == packed[1:]
    if not nbytes:
        raise InvalidArgument(field, "an array without bytes", "pages of 1 byte or more")
    if not contiguous:
        message = "one contiguous run of bytes each: slice the array into several parts"
        raise InvalidArgument(field, f"pages of shape {list(shape)}, not contiguous", message)
    if pages > 1 and stride < nbytes:
        raise InvalidArgument(field, f"pages of {nbytes} bytes, {stride} bytes apart", f"{nbytes} bytes apart or more")
    memory = None if first is None else as_strided(first, ((pages - 1) * stride + nbytes,), (1,)).data
    return Plane(array, pages, offset, nbytes, address, stride, readonly, memory)


@dataclass(slots=True, frozen=True, eq=False)
class Pages:
    """Blocks, one per page of ``planes``. ``gpu``: the GPU that copies them, None on the CPU and before :meth:`within`.
    Do not touch them before ``after``."""

    planes: Planes
    numbers: NDArray[np.intp]
    gpu: Gpu | None = None
    after: tuple[Fence, ...] = ()

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers.tolist())

    def __getitem__(self, some: slice | NDArray[np.intp]) -> Pages:
        return replace(self, numbers=self.numbers[some])

    def require(self, field: str, count: int, block_bytes: int, what: str = "key") -> None:
        if len(self) != count:
            raise InvalidArgument(field, f"{len(self)} pages", f"{count}, one a {what}")
        if self.planes.block_bytes != block_bytes:
            raise InvalidArgument(field, f"planes of {self.planes.block_bytes} bytes a block", f"{block_bytes} bytes")

    def require_whole(self, field: str) -> None:
        """Raises :class:`InvalidArgument` if a block has bytes that no plane has."""
        if self.planes.nbytes != self.planes.block_bytes:
            part = f"planes of {self.planes.nbytes} bytes of a block's {self.planes.block_bytes}"
            raise InvalidArgument(field, part, "planes of all bytes: only arena.write of reserved slots takes a part")

    def require_writable(self, field: str) -> None:
        for number, plane in enumerate(self.planes.planes):
            if plane.readonly:
                raise InvalidArgument(field, f"planes of which number {number} is read-only", "writable")

    def within(self, reach: Callable[[OnGpu], Gpu | None] | None) -> Pages | None:
        """The same pages, for copies by the GPU that ``reach`` finds for all planes, after the present work of their
        streams. None: ``reach`` finds no such GPU, or is None."""
        if self.gpu is not None or not self.planes.on_gpu:
            return self
        if reach is None:
            return None
        arrays: list[Any] = [plane.array for plane in self.planes.planes]
        gpu, *others = {reach(array) for array in arrays}
        if gpu is None or others:
            return None
        streams = {None if is_tensor(array) else stream_of(array) for array in arrays}
        return replace(self, gpu=gpu, after=tuple(gpu.fence(stream) for stream in streams))

    def copy(self, pools: Sequence[Bytes], slots: Sequence[int], *, to_slots: bool) -> None:
        """Copies between pages and slots, both on the CPU. ``pools``: [slots, bytes] each; the slots must exist.

        Copies piece by piece under the GIL: numpy would release it for each piece, and beside a busy thread wait a
        whole switch interval to get it back. A thread that has kept the lock for long waits that much longer for it, so
        a turn lasts as long as the last wait.
        """
        alike: dict[tuple[int, int, int], list[tuple[slice, memoryview]]] = {}
        for pool, at, plane, begin, nbytes in self._cuts([pool.shape[1] for pool in pools], len(slots)):
            piece = slice(at, at + nbytes), cast(memoryview, plane.memory)[begin:]
            alike.setdefault((pool, plane.stride, nbytes), []).append(piece)
        begun, turn = time.perf_counter(), _TURN_S
        for slot, page in zip(slots, self, strict=True):
            for (pool, stride, nbytes), pieces in alike.items():
                part, here = pools[pool][slot].data, slice(page * stride, page * stride + nbytes)
                if to_slots:
                    for there, memory in pieces:
                        part[there] = memory[here]
                else:
                    for there, memory in pieces:
                        memory[here] = part[there]
            now = time.perf_counter()
            if now - begun > turn:
                time.sleep(0)
                begun = time.perf_counter()
                turn = max(_TURN_S, begun - now)

    def runs(self, pools: Sequence[Pool], slots: NDArray[np.intp]) -> NDArray[np.int64]:
        """All pieces, in columns: address in the slot, address in the plane, bytes."""
        cuts = [
            (pools[pool].start + at, pools[pool].stride, plane.address + begin, plane.stride, nbytes)
            for pool, at, plane, begin, nbytes in self._cuts([pool.nbytes for pool in pools], len(slots))
        ]
        start, step, address, stride, nbytes = np.array(cuts, np.int64).T
        there = start + step * slots[:, None]
        here = address + stride * self.numbers[:, None]
        return np.stack((there.reshape(-1), here.reshape(-1), np.tile(nbytes, len(self))))

    def gathered(self) -> Bytes:
        """The blocks as rows of the CPU's memory; bytes that no plane has are 0."""
        rows = np.zeros((len(self), self.planes.block_bytes), np.uint8)
        if self.planes.on_gpu:
            for plane, tensor in self._tensors("blocks"):
                rows[:, plane.offset : plane.end] = bytes_of(tensor[self.numbers]).reshape(len(self), -1)
        else:
            self.copy((rows,), range(len(self)), to_slots=True)
        return rows

    def staging(self, field: str) -> Bytes:
        if self.planes.on_gpu:
            list(self._tensors(field))
        return np.empty((len(self), self.planes.block_bytes), np.uint8)

    def scatter(self, rows: Bytes, stream: torch.cuda.Stream | None = None) -> None:
        """Fills the pages with rows of the CPU's memory; on a GPU, after the earlier work of its stream."""
        if not self.planes.on_gpu:
            return self.copy((rows,), range(len(self)), to_slots=False)
        import torch

        with torch.cuda.stream(stream):
            for plane, tensor in self._tensors("out"):
                piece = torch.from_numpy(np.ascontiguousarray(rows[:, plane.offset : plane.end])).view(tensor.dtype)
                tensor.detach()[self.numbers] = piece.reshape(len(self), *tensor.shape[1:]).to(tensor.device)
        return None

    def _cuts(self, pools: Sequence[int], slots: int) -> list[tuple[int, int, Plane, int, int]]:
        """The pieces of a block, for slots whose pools have these sizes in bytes: number of the pool, place in the
        pool, plane, place in the plane's piece, bytes. Raises :class:`InvalidArgument`."""
        self.require("blocks", slots, sum(pools), "slot")
        ends = list(accumulate(pools))
        return [
            (pool, first - (end - nbytes), plane, first - plane.offset, last - first)
            for plane in self.planes.planes
            for pool, (end, nbytes) in enumerate(zip(ends, pools, strict=True))
            if (first := max(plane.offset, end - nbytes)) < (last := min(plane.end, end))
        ]

    def _tensors(self, field: str) -> Iterator[tuple[Plane, torch.Tensor]]:
        """The planes with their tensors, for copies by torch. Raises :class:`InvalidArgument` for a plane without a
        tensor."""
        for plane in self.planes.planes:
            if not is_tensor(plane.array):
                raise InvalidArgument(field, "planes of a GPU", "tensors, or for slots that are mapped for their GPU")
            yield plane, plane.array
