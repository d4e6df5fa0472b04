"""The caller's arrays and tensors as rows of bytes, one per block, and slots as tensors.

torch is imported only for a caller who passes or asks for a tensor.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from kvtier.abi.attention import Needed
from kvtier.errors import InvalidArgument, require_kind
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
    from kvtier.deadline import Fence
    from kvtier.memory.gpu import Gpu

T = TypeVar("T")

_DTYPES: Final = {"float8_e4m3": "float8_e4m3fn"}
"""Maps dtypes of :class:`kvtier.CacheSpec` to torch's names where these differ."""


@dataclass(slots=True, frozen=True, eq=False)
class DeviceBytes:
    """A block's bytes in GPU memory, kept alive by ``owner``. Do not touch them before ``after`` has passed."""

    address: int
    nbytes: int
    owner: object
    gpu: Gpu
    after: Fence


Row: TypeAlias = "Bytes | DeviceBytes"
"""A block's bytes outside slots, flat. In GPU memory only if that GPU reaches the slots."""
Rows: TypeAlias = "Sequence[Row] | Bytes | Pages"
"""The bytes of n blocks: n rows, one C-contiguous array [n, bytes of a block], or n pages."""
GroupRows: TypeAlias = "Mapping[int, Rows]"
"""The bytes of blocks by window group; a group may be missing."""
PrefixRows: TypeAlias = "list[Row | int | None]"
"""The copied blocks of a prefix: per block a row, or the number of the filled page; None for a block before a sliding
window, which is not copied."""


Reach: TypeAlias = "Callable[[OnGpu], Gpu | None]"
"""Returns the GPU that a block lies on if that GPU reaches the block's slots; None: the copy goes through the CPU's
memory."""


Block: TypeAlias = "NDArray[Any] | torch.Tensor | CudaArray | DeviceBytes"
Blocks: TypeAlias = (
    "NDArray[Any] | torch.Tensor | Sequence[NDArray[Any]] | Sequence[torch.Tensor] | Sequence[CudaArray]"
    " | Sequence[bytes] | Sequence[bytearray] | Rows"
)
"""n blocks: one array or tensor whose first axis is the block, a sequence of n arrays, tensors or ``bytes``, or n pages
of :class:`kvtier.Planes`. Any dtype and shape. GPU arrays that are not tensors need mapped slots."""


def readable(blocks: Blocks, count: int, block_bytes: int, reach: Reach | None = None) -> Rows:
    """The bytes of the caller's blocks, copied only if an array is not contiguous or out of reach.

    Args:
        reach: of the target slots. Blocks within reach stay on their GPU, and are taken after the present work of the
            streams that they were made on. None: no GPU is within reach.

    Raises:
        InvalidArgument: there are not ``count`` blocks of ``block_bytes``.
    """
    if isinstance(blocks, Pages):
        blocks.require("blocks", count, block_bytes)
        blocks.require_whole("blocks")
        pages = blocks.within(reach)
        return blocks.gathered() if pages is None else pages
    whole = _one_array(blocks, count, block_bytes)
    if whole is not None:
        return whole
    each = _checked(blocks, "blocks", count, block_bytes)
    after = _Reached(reach)
    # Make all blocks contiguous before the fences are marked: on a GPU these copies only begin here.
    in_order = [block.contiguous() if reach and is_tensor(block) and block.is_cuda else block for block in each]
    return [_readable(block, f"blocks[{index}]", after) for index, block in enumerate(in_order)]


def _readable(block: Block, field: str, after: _Reached) -> Row:
    if isinstance(block, DeviceBytes):
        return block
    if not isinstance(block, np.ndarray) and (is_tensor(block) or is_cuda_array(block)):
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

    An array or tensor that is not contiguous, or neither on the CPU nor within ``reach``, gets fresh bytes, as do pages
    out of reach. :func:`fill` copies these into it. Raises InvalidArgument if there are not ``count`` writable blocks
    of ``block_bytes``.
    """
    if isinstance(out, Pages):
        out.require("out", count, block_bytes)
        out.require_writable("out")
        pages = None if reach is None else out.within(reach)
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


def _one_array(blocks: Blocks, count: int, block_bytes: int) -> Bytes | None:
    """The bytes of all blocks as one array, if they are contiguous in the CPU's memory."""
    if is_tensor(blocks) and is_in_place(blocks):
        blocks = bytes_of(blocks).reshape(len(blocks), -1)
    if not isinstance(blocks, np.ndarray) or not blocks.flags.c_contiguous:
        return None
    if len(blocks) != count or blocks.nbytes != count * block_bytes or not count:
        return None
    rows: Bytes = blocks.reshape(count, -1).view(np.uint8)
    return rows


def _checked(blocks: Blocks, field: str, count: int, block_bytes: int) -> Sequence[Block]:
    require_kind(field, blocks, Sized)
    if len(blocks) != count:
        raise InvalidArgument(field, f"{len(blocks)} blocks", f"{count}, one a key")
    each: list[Any] = [np.frombuffer(one, np.uint8) if isinstance(one, (bytes, bytearray)) else one for one in blocks]
    for index, block in enumerate(each):
        nbytes = nbytes_of(block) if is_cuda_array(block) else getattr(block, "nbytes", None)
        if nbytes is None:
            raise InvalidArgument(f"{field}[{index}]", type(block).__name__, "an array, a tensor or bytes")
        if nbytes != block_bytes:
            raise InvalidArgument(f"{field}[{index}]", f"{nbytes} bytes", f"{block_bytes} bytes")
    return each


class _Reached:
    """The fences of the streams on which blocks are made or used: this thread's current stream, unless an array names
    another. A fence is marked for the first block that needs it."""

    def __init__(self, reach: Reach | None) -> None:
        self._reach: Final = reach
        self._fences: dict[tuple[Gpu, int | None], Fence] = {}

    def on_gpu(self, block: OnGpu) -> DeviceBytes | None:
        """The block, if it lies in C order on a GPU within reach."""
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
    thread's current stream. Pass them to :func:`fill`, in any thread."""
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
    """The same rows, typed as rows of the CPU. No row may lie on a GPU."""
    return cast("Sequence[Bytes]", rows)


def for_needed(rows: Rows, needed: Needed) -> Rows:
    """Picks the rows of the needed blocks from rows of a chain, one per block."""
    if not needed.sinks:
        return rows[needed.first : needed.stop]
    return picked(rows, np.r_[: needed.sinks, needed.first : needed.stop])


def picked(rows: Rows, some: NDArray[np.intp]) -> Rows:
    """The rows with these ascending numbers, not copied."""
    if len(some) and some[-1] - some[0] == len(some) - 1:
        return rows[some[0] : some[-1] + 1]
    return rows[some] if isinstance(rows, Pages) else [rows[at] for at in some.tolist()]


def is_in_place(block: NDArray[Any] | torch.Tensor) -> bool:
    """Whether the array's or tensor's own memory can be used as a row: on the CPU, in C order."""
    if isinstance(block, np.ndarray):
        return block.flags.c_contiguous
    return block.device.type == "cpu" and block.is_contiguous()


def torch_stream(tensor: torch.Tensor) -> torch.cuda.Stream | None:
    """This thread's current stream on the tensor's GPU. None for a tensor on the CPU."""
    import torch

    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None


def fill(late: Sequence[Late]) -> None:
    """Copies bytes into arrays, tensors and pages on any device, each after the earlier work of its stream. Returns
    when the copies have ended."""
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
    """A 1-D tensor of ``dtype`` (a name of the specification) over the bytes of a view, read-only views included. torch
    has no read-only tensors: see :meth:`kvtier.lease.Lease.tensors`."""
    import torch

    if isinstance(view, np.ndarray):
        # Without the read-only flag, which torch would warn of. numpy keeps the object, and so the mapping.
        interface = {**view.__array_interface__, "data": (view.ctypes.data, False)}
        raw = torch.from_numpy(np.asarray(SimpleNamespace(__array_interface__=interface, view=view)))
    else:
        raw = view.tensor()
    return raw.view(getattr(torch, _DTYPES.get(dtype, dtype)))


INLINE_BYTES: Final = 8 << 20
"""Copies up to this size run on the event loop: waking threads takes as long. Two threads make a larger copy."""
_PARTS: Final = 8
"""Number of parts of a larger copy; each thread takes one after another."""

Slots: TypeAlias = "Sequence[int] | NDArray[np.integer[Any]]"


async def run_copy(copy: Callable[[], T], nbytes: int, *, waits: bool = False) -> T:
    """Runs a copy without holding up the event loop, and returns its result.

    A cancelled caller still waits for the copy to end: the memory is the caller's, or held by a lease.

    Args:
        nbytes: size of the copy; a small copy runs on the loop.
        waits: the copy waits for a device, so it never runs on the loop.
    """
    if nbytes <= INLINE_BYTES and not waits:
        return copy()
    # Not asyncio.to_thread: its task is cancelled, and its thread forgotten, when the loop is torn down.
    copying = asyncio.get_running_loop().run_in_executor(None, copy)
    cancelled: asyncio.CancelledError | None = None
    while not copying.done():
        try:
            await asyncio.wait([copying])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return copying.result()


def _copy_slots(
    pools: Sequence[Bytes], slots: Slots, blocks: Sequence[Bytes] | Bytes | Pages, *, to_slots: bool
) -> None:
    """Copies blocks into slots, or out of them. Raises IndexError for a slot that does not exist. ``pools``: one 2-D
    view per pool, a row per slot."""
    index = checked(pools, slots)
    if isinstance(blocks, Pages):
        return blocks.copy(pools, index.tolist(), to_slots=to_slots)

    def copy(start: int, end: int) -> None:
        some, rows, offset = index[start:end], blocks[start:end], 0
        # One array takes one call, so one wait for the GIL beside a busy thread.
        if isinstance(rows, np.ndarray) and not to_slots and len(pools) == 1 and pools[0].flags.c_contiguous:
            pools[0].take(some, axis=0, out=rows, mode="clip")
            return
        for pool in pools:
            part = slice(offset, offset + pool.shape[1])
            if isinstance(rows, np.ndarray) and to_slots:
                pool[some] = rows[:, part]
            else:
                for slot, row in zip(some.tolist(), rows, strict=True):
                    np.copyto(*((pool[slot], row[part]) if to_slots else (row[part], pool[slot])))
            offset = part.stop

    _in_parts(copy, pools, len(index))


into_slots: Final = partial(_copy_slots, to_slots=True)
out_of_slots: Final = partial(_copy_slots, to_slots=False)


def checked(pools: Sequence[Bytes], slots: Slots) -> NDArray[np.intp]:
    """The slots, as an index of each pool. Raises IndexError for a slot that does not exist."""
    index = np.asarray(slots, dtype=np.intp)
    if len(index) and not 0 <= index.min() <= index.max() < len(pools[0]):
        raise IndexError(f"slots {slots}: the pool has {len(pools[0])}")
    return index


def _in_parts(copy: Callable[[int, int], None], pools: Sequence[Bytes], blocks: int) -> None:
    """Copies ``blocks`` blocks; a large copy with a second thread, which has ended when this returns."""
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
    """Waits for the helper thread, through an interrupt (Ctrl-C) too: the caller takes the memory back afterwards."""
    if other.cancel():
        return  # the helper had not begun
    interrupt = None
    while not other.done():
        try:
            wait([other])
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
    other.result()
