"""The caller's arrays and tensors as rows of bytes, one a block, and slots as tensors.

Nothing here imports torch before the caller has: who passes a tensor has it, who asks for one wants it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from kvtier.abi.attention import Needed
from kvtier.errors import InvalidArgument
from kvtier.memory.arrays import (
    Bytes,
    CudaArray,
    OnGpu,
    address_of,
    bytes_of,
    is_contiguous,
    is_cuda_array,
    is_readonly,
    is_tensor,
    nbytes_of,
    stream_of,
)
from kvtier.memory.planes import Pages

if TYPE_CHECKING:
    import torch

    from kvtier.abi.cuda.views import DeviceView
    from kvtier.memory.gpu import Fence, Gpu


_DTYPES: Final = {"float8_e4m3": "float8_e4m3fn"}
"""Where torch has another name for a dtype of :class:`kvtier.CacheSpec`."""


@dataclass(slots=True, frozen=True, eq=False)
class DeviceBytes:
    """A block's bytes in memory of a GPU, which ``owner`` keeps; nobody may touch them here before ``after``."""

    address: int
    nbytes: int
    owner: object
    gpu: Gpu
    after: Fence


Row: TypeAlias = "Bytes | DeviceBytes"
"""A block's bytes outside of slots, flat. Those of a GPU only where it reaches the slots."""
Rows: TypeAlias = "Sequence[Row] | Bytes | Pages"
"""The bytes of n blocks: n rows, one C-contiguous array of them, [n, bytes of a block], or n pages."""
PrefixRows: TypeAlias = "list[Row | int | None]"
"""What was copied of a prefix, a row a block, or the number of the page that was filled; None before a sliding window,
where nothing is."""


Reach: TypeAlias = "Callable[[OnGpu], Gpu | None]"
"""Tells which GPU a block lies on, where that reaches the slots that the block is for; None: it stays with the CPU."""


Block: TypeAlias = "NDArray[Any] | torch.Tensor | CudaArray | DeviceBytes"
Blocks: TypeAlias = (
    "NDArray[Any] | torch.Tensor | Sequence[NDArray[Any]] | Sequence[torch.Tensor] | Sequence[CudaArray]"
    " | Sequence[bytes] | Sequence[bytearray] | Rows"
)
"""n blocks: one array or tensor whose first axis is the block, a sequence of n of them or of ``bytes``, or n pages of
:class:`kvtier.Planes`. Any dtype and shape. Arrays of a GPU that are no tensors, only for slots that are mapped."""


def readable(blocks: Blocks, count: int, block_bytes: int, reach: Reach | None = None) -> Rows:
    """The bytes of the caller's blocks, copied only where an array is not contiguous, or out of reach.

    Args:
        reach: of the slots that they are for; blocks within it stay on their GPU, and are taken once the streams that
            they were made on have done what they were given so far. None: no GPU is.

    Raises:
        InvalidArgument: where there are not ``count`` blocks of ``block_bytes``.
    """
    if isinstance(blocks, Pages):
        blocks.require("blocks", count, block_bytes)
        blocks.require_whole("blocks")
        pages = _in_reach(blocks, reach)
        return blocks.gathered() if pages is None else pages
    whole = _one_array(blocks, count, block_bytes)
    if whole is not None:
        return whole
    each = _checked(blocks, "blocks", count, block_bytes)
    after = _Reached(reach)
    # All of them before the point is marked that they are taken at: on a GPU it only begins here.
    in_order = [block.contiguous() if reach and is_tensor(block) and block.is_cuda else block for block in each]
    return [_readable(block, f"blocks[{index}]", after) for index, block in enumerate(in_order)]


def _readable(block: Block, field: str, after: _Reached) -> Row:
    if isinstance(block, DeviceBytes):
        return block
    if is_tensor(block) or is_cuda_array(block):
        there = after.on_gpu(block)
        if there is not None:
            return there
        if is_tensor(block):
            return bytes_of(block)
        raise InvalidArgument(field, "an array of a GPU", "C-contiguous, and for slots that are mapped for its GPU")
    flat: Bytes = np.ascontiguousarray(block).reshape(-1).view(np.uint8)
    return flat


def writable(out: Blocks, count: int, block_bytes: int, reach: Reach | None = None) -> Rows:
    """The bytes of the caller's arrays, to be written in place.

    Of an array or tensor that is not contiguous, or neither the CPU's nor within ``reach``, and of pages for which
    there is no reach: fresh bytes, which :func:`fill` copies into them.

    Raises:
        InvalidArgument: where there are not ``count`` blocks of ``block_bytes`` that can be written.
    """
    if isinstance(out, Pages):
        out.require("out", count, block_bytes)
        out.require_writable("out")
        pages = None if reach is None else _in_reach(out, reach)
        return out.staging("out") if pages is None else pages
    whole = _one_array(out, count, block_bytes)
    if whole is not None and whole.flags.writeable:
        return whole
    each = _checked(out, "out", count, block_bytes)
    after = _Reached(reach)
    return [_writable(block, f"out[{index}]", block_bytes, after) for index, block in enumerate(each)]


def _writable(block: Block, field: str, block_bytes: int, after: _Reached) -> Row:
    if isinstance(block, DeviceBytes):
        return block
    if is_tensor(block) or (is_cuda_array(block) and not is_readonly(block)):
        there = after.on_gpu(block)
        if there is not None:
            return there
    if is_tensor(block):
        return bytes_of(block) if is_in_place(block) else np.empty(block_bytes, np.uint8)
    if isinstance(block, np.ndarray) and block.flags.writeable:
        flat: Bytes = block.reshape(-1).view(np.uint8) if is_in_place(block) else np.empty(block_bytes, np.uint8)
        return flat
    limit = "writable; one of a GPU C-contiguous, and for a get from slots that are mapped for it"
    raise InvalidArgument(field, "an array that is not", limit)


def _in_reach(pages: Pages, reach: Reach | None) -> Pages | None:
    """The pages as slots are copied to or from them; None: they lie on a GPU out of reach."""
    return pages.within(reach if reach is not None else lambda array: None)


def _one_array(blocks: Blocks, count: int, block_bytes: int) -> Bytes | None:
    """The bytes of all blocks as one array, where they lie in one piece of the CPU's memory."""
    if is_tensor(blocks) and is_in_place(blocks):
        blocks = bytes_of(blocks).reshape(len(blocks), -1)
    if not isinstance(blocks, np.ndarray) or not blocks.flags.c_contiguous:
        return None
    if len(blocks) != count or blocks.nbytes != count * block_bytes or not count:
        return None
    rows: Bytes = blocks.reshape(count, -1).view(np.uint8)
    return rows


def _checked(blocks: Blocks, field: str, count: int, block_bytes: int) -> Sequence[Block]:
    """The blocks one by one."""
    if len(blocks) != count:
        raise InvalidArgument(field, f"{len(blocks)} blocks", f"{count}, one a key")
    each: list[Any] = [np.frombuffer(one, np.uint8) if isinstance(one, bytes | bytearray) else one for one in blocks]
    for index, block in enumerate(each):
        nbytes = nbytes_of(block) if is_cuda_array(block) else getattr(block, "nbytes", None)
        if nbytes is None:
            raise InvalidArgument(f"{field}[{index}]", type(block).__name__, "an array, a tensor or bytes")
        if nbytes != block_bytes:
            raise InvalidArgument(f"{field}[{index}]", f"{nbytes} bytes", f"{block_bytes} bytes")
    return each


class _Reached:
    """The points that streams have reached on which blocks are made or used, marked for the first block that needs one:
    this thread's current stream, unless an array names another stream."""

    def __init__(self, reach: Reach | None) -> None:
        self._reach: Final = reach
        self._fences: dict[tuple[Gpu, int | None], Fence] = {}

    def on_gpu(self, block: OnGpu) -> DeviceBytes | None:
        """The block where it lies in C order on a GPU within reach."""
        if self._reach is None or (is_tensor(block) and not block.is_cuda) or not is_contiguous(block):
            return None
        gpu = self._reach(block)
        if gpu is None:
            return None
        stream = None if is_tensor(block) else stream_of(block)
        if (gpu, stream) not in self._fences:
            self._fences[gpu, stream] = gpu.fence(stream)
        address, nbytes = (
            (block.data_ptr(), block.nbytes) if is_tensor(block) else (address_of(block), nbytes_of(block))
        )
        return DeviceBytes(address, nbytes, block, gpu, self._fences[gpu, stream])


Late: TypeAlias = "tuple[NDArray[Any] | torch.Tensor | Pages, Bytes, torch.cuda.Stream | None]"


def late(out: Blocks, rows: PrefixRows) -> list[Late]:
    """The arrays, tensors and pages of ``out`` that could not be written in place, each with its bytes and this
    thread's current stream: for :func:`fill`, in whatever thread."""
    if isinstance(out, np.ndarray) and is_in_place(out):
        return []
    if isinstance(out, Pages):
        array = out.planes.planes[0].array
        stream = torch_stream(array) if is_tensor(array) else None
        return [(out[at : at + 1], row, stream) for at, row in enumerate(rows) if isinstance(row, np.ndarray)]
    return [
        (block, row, torch_stream(block) if is_tensor(block) else None)
        for block, row in zip(out, rows, strict=False)
        if (is_tensor(block) or isinstance(block, np.ndarray))
        and isinstance(row, np.ndarray)
        and not is_in_place(block)
    ]


def of_cpu(rows: Rows | PrefixRows) -> Sequence[Bytes]:
    """The same ones, of which none was taken where it lies on a GPU: they are not for slots there."""
    return cast("Sequence[Bytes]", rows)


def for_needed(rows: Rows, needed: Needed) -> Rows:
    """Of rows, one a block of a chain, those of the blocks needed."""
    if not needed.sinks:
        return rows[needed.first : needed.stop]
    return picked(rows, np.r_[: needed.sinks, needed.first : needed.stop])


def picked(rows: Rows, some: NDArray[np.intp]) -> Rows:
    """The rows with these numbers, which rise; not copied."""
    if len(some) and some[-1] - some[0] == len(some) - 1:
        return rows[some[0] : some[-1] + 1]
    return rows[some] if isinstance(rows, Pages) else [rows[at] for at in some.tolist()]


def is_in_place(block: NDArray[Any] | torch.Tensor) -> bool:
    """Whether its own memory is a row: of the CPU, and in C order."""
    if isinstance(block, np.ndarray):
        return block.flags.c_contiguous
    return block.device.type == "cpu" and block.is_contiguous()


def torch_stream(tensor: torch.Tensor) -> torch.cuda.Stream | None:
    """The stream that this thread gives its work on the tensor to. None: there is none on the CPU."""
    import torch

    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None


def fill(late: Sequence[Late]) -> None:
    """Copies bytes into arrays, tensors and pages on any device, each after what its stream was given before; when this
    returns they are there."""
    for target, data, stream in late:
        if isinstance(target, Pages):
            target.scatter(data[None], stream)
            continue
        if isinstance(target, np.ndarray):
            target[...] = data.view(target.dtype).reshape(target.shape)
            continue
        import torch

        source = torch.from_numpy(data).view(target.dtype).reshape(target.shape)
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            target.detach().copy_(source)


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


INLINE_BYTES: Final = 8 << 20
"""Copies up to this size run on the event loop: to wake threads takes as long. Above it two threads copy."""
_PARTS: Final = 8
"""Into so many parts such a copy is cut; each thread takes one after another."""

Slots: TypeAlias = "Sequence[int] | NDArray[np.integer[Any]]"


async def run_copy(copy: Callable[[], None], nbytes: int, *, waits: bool = False) -> None:
    """Runs a copy where it does not hold up the event loop.

    A cancelled caller still waits for the copy to end: the memory is the caller's, or held by a lease.

    Args:
        nbytes: what it copies; a small copy runs on the loop.
        waits: it waits for a device, so it never runs on the loop.
    """
    if nbytes <= INLINE_BYTES and not waits:
        copy()
    else:
        # Not a task (asyncio.to_thread): those are cancelled, their threads forgotten, when a loop is torn down.
        await _to_the_end(asyncio.get_running_loop().run_in_executor(None, copy))


async def _to_the_end(copying: asyncio.Future[None]) -> None:
    cancelled: asyncio.CancelledError | None = None
    while not copying.done():
        try:
            await asyncio.wait([copying])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    copying.result()


def into_slots(pools: Sequence[Bytes], slots: Slots, blocks: Sequence[Bytes] | Bytes | Pages) -> None:
    """Writes blocks into slots. ``pools``: as :meth:`kvtier.arena.Arena.pools` gives them. Raises IndexError for a slot
    that does not exist."""
    index = checked(pools, slots)
    if isinstance(blocks, Pages):
        return blocks.copy(pools, index.tolist(), to_slots=True)

    def copy(start: int, end: int) -> None:
        some, rows, offset = index[start:end], blocks[start:end], 0
        for pool in pools:
            part = slice(offset, offset + pool.shape[1])
            if isinstance(rows, np.ndarray):
                pool[some] = rows[:, part]  # one call, so one wait for the interpreter's lock beside a busy thread
            else:
                for slot, row in zip(some.tolist(), rows, strict=True):
                    np.copyto(pool[slot], row[part])
            offset = part.stop

    _in_parts(copy, pools, len(index))


def out_of_slots(pools: Sequence[Bytes], slots: Slots, blocks: Sequence[Bytes] | Bytes | Pages) -> None:
    """Reads slots into blocks. Raises IndexError for a slot that does not exist."""
    index = checked(pools, slots)
    if isinstance(blocks, Pages):
        return blocks.copy(pools, index.tolist(), to_slots=False)

    def copy(start: int, end: int) -> None:
        some, rows, offset = index[start:end], blocks[start:end], 0
        if isinstance(rows, np.ndarray) and len(pools) == 1 and pools[0].flags.c_contiguous:
            pools[0].take(some, axis=0, out=rows, mode="clip")
            return
        for pool in pools:
            part = slice(offset, offset + pool.shape[1])
            for slot, row in zip(some.tolist(), rows, strict=True):
                np.copyto(row[part], pool[slot])
            offset = part.stop

    _in_parts(copy, pools, len(index))


def checked(pools: Sequence[Bytes], slots: Slots) -> NDArray[np.intp]:
    """The slots, as an index of each pool. Raises IndexError for one that does not exist."""
    index = np.asarray(slots, dtype=np.intp)
    if len(index) and not 0 <= index.min() <= index.max() < len(pools[0]):
        raise IndexError(f"slots {slots}: the pool has {len(pools[0])}")
    return index


def _in_parts(copy: Callable[[int, int], None], pools: Sequence[Bytes], blocks: int) -> None:
    """Makes a copy of ``blocks`` blocks; a large one with a second thread, which has ended when this returns."""
    nbytes = blocks * sum(pool.shape[1] for pool in pools)
    if nbytes <= INLINE_BYTES or blocks < 2:
        copy(0, blocks)
        return
    step = -(-blocks // _PARTS)
    left = deque((start, min(start + step, blocks)) for start in range(0, blocks, step))

    def take() -> None:
        while True:
            try:
                start, end = left.popleft()
            except IndexError:
                return
            copy(start, end)

    other = _helpers().submit(take)
    try:
        take()
    finally:
        left.clear()
        _end(other)


@cache
def _helpers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(4, "kvtier-copy")


def _end(other: Future[None]) -> None:
    """Waits for the thread that helps, through an interrupt (Ctrl-C) too: the memory is taken back afterwards."""
    if other.cancel():
        return  # it has not begun
    interrupt = None
    while not other.done():
        try:
            wait([other])
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
    other.result()
