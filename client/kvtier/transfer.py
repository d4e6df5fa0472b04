"""Copies between slots and the caller's arrays. Knows memory; knows nothing of calls and leases.

A block is one array of exactly ``block_bytes``: its parts in all pools, one after another, in pool order.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence, Sized
from contextvars import ContextVar
from ctypes import addressof, c_char
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias, TypeGuard, overload

import numpy as np
from numpy.typing import NDArray

from kvtier import tensors
from kvtier.beside import Shared
from kvtier.errors import InvalidArgument
from kvtier.kinds import require_kind
from kvtier.tensors import Bytes, CudaArray, DeviceBytes, Row

if TYPE_CHECKING:
    import torch

    from kvtier.fences import Fence
    from kvtier.gpu import Gpu

_BYTE: Final = np.dtype(np.uint8)
_ARRAY: Final = {np.ndarray}
_nbytes_of: Final[Callable[[Any], int]] = attrgetter("nbytes")
_address_in: Final[Callable[[Any], c_char]] = c_char.from_buffer
INLINE_BYTES: Final = 1 << 20
"""Copies up to this size run on the loop; above it a thread does less harm than the stall."""

_MOST_AT_ONCE: Final = 4 << 20
"""A larger block is never copied on the loop."""
_ONE_CALL_BYTES: Final = 4 << 20
"""Where one call of numpy copies all and no other put goes on, so much is copied on the loop: to wake a thread, and to
be woken by it, takes about as long."""

copy_in: ContextVar[Callable[[Callable[[], None]], asyncio.Future[None]] | None] = ContextVar("copy_in", default=None)
"""Where copies of this task run, whatever their size. None: here, or in a thread of the loop's executor."""

Block: TypeAlias = "NDArray[Any] | torch.Tensor | CudaArray | DeviceBytes"
Blocks: TypeAlias = (
    "NDArray[Any] | torch.Tensor | Sequence[NDArray[Any]] | Sequence[torch.Tensor] "
    "| Sequence[CudaArray] | Sequence[Row]"
)
"""n blocks: one array or tensor whose first axis is the block, or a sequence of n of them. Any dtype and shape. Arrays
of a GPU that are no tensors, only for slots in memory of that GPU."""


Slots: TypeAlias = "Sequence[int] | NDArray[np.integer[Any]]"


@overload
def readable(blocks: Blocks, count: int, block_bytes: int) -> list[Bytes]: ...
@overload
def readable(blocks: Blocks, count: int, block_bytes: int, gpu: Gpu | None) -> list[Row]: ...
def readable(blocks: Blocks, count: int, block_bytes: int, gpu: Gpu | None = None) -> list[Row] | list[Bytes]:
    """The blocks' bytes, flat, copied only where an array is not contiguous, or on a GPU.

    ``gpu``: of the slots that they are for; what lies on it stays there, and is taken when this thread's current
    stream has done what it was given so far.

    Raises :class:`InvalidArgument` where there are not ``count`` of ``block_bytes`` each.
    """
    _check(blocks, "blocks", count, block_bytes)
    after = _Reached(gpu)
    # All of them before the point is marked that they are taken at: on a GPU it only begins here.
    in_order = [block.contiguous() if tensors.is_tensor(block) and after.has(block) else block for block in blocks]
    return [
        block if _is_flat(block) or isinstance(block, DeviceBytes) else _row(block, f"blocks[{index}]", after)
        for index, block in enumerate(in_order)
    ]


def _row(block: Block, field: str, after: _Reached) -> Row:
    if tensors.is_tensor(block) or tensors.is_cuda_array(block):
        there = after.on_gpu(block)
        if there is not None:
            return there
        if tensors.is_tensor(block):
            return tensors.bytes_of(block)
        raise InvalidArgument(field, "an array of a GPU", "C-contiguous, and for slots of a GPU")
    return _bytes_of(block)


class _Reached:
    """The points that the streams have reached which blocks are made or used on, marked when the first block is seen
    to need it: this thread's current stream, unless an array says another one."""

    def __init__(self, gpu: Gpu | None) -> None:
        self._gpu: Final = gpu
        self._fences: dict[int | None, Fence] = {}

    def has(self, block: torch.Tensor | CudaArray) -> bool:
        """Whether it lies on the GPU, for all that is known of it."""
        return self._gpu is not None and (not tensors.is_tensor(block) or block.is_cuda)

    def on_gpu(self, block: torch.Tensor | CudaArray) -> DeviceBytes | None:
        if self._gpu is None or not self.has(block):
            return None
        stream = None if tensors.is_tensor(block) else tensors.stream_of(block)
        if stream not in self._fences:
            self._fences[stream] = self._gpu.fence(stream)
        return tensors.on_gpu(block, self._gpu.driver.ordinal, self._fences[stream])


def _is_flat(block: Block) -> TypeGuard[Bytes]:
    return isinstance(block, np.ndarray) and block.dtype is _BYTE and block.ndim == 1 and block.flags.c_contiguous


def _bytes_of(block: Any) -> Bytes:
    flat: Bytes = np.ascontiguousarray(block).reshape(-1).view(np.uint8)
    return flat


@overload
def writable(out: Blocks, count: int, block_bytes: int) -> list[Bytes]: ...
@overload
def writable(out: Blocks, count: int, block_bytes: int, gpu: Gpu | None) -> list[Row]: ...
def writable(out: Blocks, count: int, block_bytes: int, gpu: Gpu | None = None) -> list[Row] | list[Bytes]:
    """The bytes of the caller's arrays, to be written in place. Raises :class:`InvalidArgument`, as above.

    For a tensor that is not contiguous memory, of the CPU or of ``gpu``: fresh bytes, for :func:`deliver` to bring
    there.
    """
    if in_one_piece(out, count, block_bytes):
        return list(rows_of(out, count))
    _check(out, "out", count, block_bytes)
    targets: list[Row] = []
    after = _Reached(gpu)
    for index, block in enumerate(out):
        if isinstance(block, DeviceBytes):
            targets.append(block)
            continue
        may_be = tensors.is_tensor(block) or (tensors.is_cuda_array(block) and tensors.is_writable(block))
        there = after.on_gpu(block) if may_be else None
        if there is not None:
            targets.append(there)
        elif tensors.is_tensor(block):
            in_place = tensors.is_in_place(block)
            targets.append(tensors.bytes_of(block) if in_place else np.empty(block_bytes, np.uint8))
        elif isinstance(block, np.ndarray) and block.flags.c_contiguous and block.flags.writeable:
            targets.append(block.reshape(-1).view(np.uint8))
        else:
            limit = "C-contiguous and writable; one of a GPU, for a get from the device tier there"
            raise InvalidArgument(f"out[{index}]", "an array that is not", limit)
    return targets


def in_one_piece(out: Blocks | None, count: int, block_bytes: int) -> TypeGuard[NDArray[Any]]:
    """Whether it is one array that can be written in place, for which there is less to check."""
    return (
        isinstance(out, np.ndarray)
        and len(out) == count > 0
        and out.nbytes == count * block_bytes
        and out.flags.c_contiguous
        and out.flags.writeable
    )


def are_rows(out: Blocks) -> bool:
    """Whether its blocks are flat bytes as they are."""
    return isinstance(out, np.ndarray) and out.ndim == 2 and out.dtype == _BYTE


def as_rows(out: Blocks | None, shape: tuple[int, int]) -> Bytes | None:
    """An array of this shape, flat bytes as they are and in one piece, or the one whose rows a list has, or where there
    is none a fresh one. None: it is something else."""
    if out is None:
        return np.empty(shape, _BYTE)
    if isinstance(out, list):
        # Few steps of Python for all of them: see kvtier.again.
        fit = len(out) == shape[0] and set(map(type, out)) == _ARRAY and set(map(_nbytes_of, out)) == {shape[1]}
        return rows_of_one(out) if fit and _is_flat(out[0]) else None
    if not isinstance(out, np.ndarray) or out.shape != shape or out.dtype is not _BYTE or not out.flags.carray:
        return None
    return out


def rows_of(out: NDArray[Any], count: int) -> Bytes:
    """The bytes of an array that is :func:`in_one_piece`."""
    rows: Bytes = out.reshape(count, -1).view(np.uint8)
    return rows


async def deliver(out: Blocks, rows: Sequence[Row]) -> None:
    """After :func:`writable` and a copy into what it gave: fills the tensors that could not be written in place, those
    of a GPU when this thread's current stream has done what it was given so far."""
    late = _late(out, rows)
    if late:
        await run(lambda: _fill(late), sum(len(row) for _, row, _ in late))


def deliver_here(out: Blocks, rows: Sequence[Row]) -> None:
    """The same in this thread."""
    _fill(_late(out, rows))


_Late: TypeAlias = "tuple[torch.Tensor, Bytes, torch.cuda.Stream | None]"


def _late(out: Blocks, rows: Sequence[Row]) -> list[_Late]:
    """With the current streams of this thread: that which copies has others."""
    if isinstance(out, np.ndarray):
        return []
    return [
        (block, row, tensors.current_stream(block))
        for block, row in zip(out, rows, strict=True)
        if tensors.is_tensor(block) and not isinstance(row, DeviceBytes) and not tensors.is_in_place(block)
    ]


def _fill(late: Sequence[_Late]) -> None:
    for tensor, row, stream in late:
        tensors.fill(tensor, row, stream)


async def run(copy: Callable[[], None], nbytes: int, *, waits: bool = False) -> None:
    """Runs a copy of ``nbytes``, in a thread where it would hold up the loop. ``waits``: it does, however small.

    A cancelled caller still waits for the thread to end, however often it is cancelled: the memory that it reads or
    writes is the caller's, or held by a lease that must not be released before.
    """
    if _fits_here(nbytes, waits, INLINE_BYTES):
        copy()
    else:
        await _to_the_end(_begun(copy))


@dataclass(slots=True, frozen=True)
class Sharing:
    """A copy that two threads can make: ``copy`` copies the blocks from one number up to another, of ``count``."""

    copy: Callable[[int, int], None]
    count: int
    block_bytes: int


class Steps:
    """Copies that are made one after another, in a thread where they would hold up the loop: what is done meanwhile
    stands in the body of ``async with``, which ends when the last copy has, as :func:`run` does."""

    def __init__(
        self,
        copies: Sequence[Callable[[], None]],
        nbytes: int,
        *,
        shared: Sharing | None = None,
        one_call: bool = False,
        waits: bool = False,
    ) -> None:
        """``nbytes``: of all of them. ``shared``: comes before them and counts as one of them. The loop makes some of
        it while it waits, no more at a time than what may hold it up, and lets all others have their turn in between.
        Of blocks too large for that another thread makes some. ``one_call``: see ``_ONE_CALL_BYTES``. ``waits``: as for
        :func:`run`."""
        loop = asyncio.get_running_loop()
        self._loop: Final = loop
        self._thread: Final = threading.get_ident()
        self._copies: Final = copies
        self._here: Final = _fits_here(nbytes, waits, _ONE_CALL_BYTES if one_call else INLINE_BYTES)
        self._shared: Final = None if shared is None else Shared(shared.copy, shared.count, self._over)
        self._some: Final = 0 if shared is None else _at_a_time(shared.block_bytes)
        """Blocks that the loop copies at a time; 0: none."""
        self._count: Final = len(copies) + (shared is not None)
        self._passed: Final = [loop.create_future() for _ in range(self._count + 1)]
        """So many copies have been made."""
        self._copying: asyncio.Future[None] | None = None
        self._helper_ended: Final = loop.create_future()

    async def made(self, count: int) -> None:
        """Waits until so many copies have been made; 0: until the thread is at work, or has had time for that. What is
        to be done here while it copies waits for that, since it could not begin while this one has the interpreter's
        lock."""
        if self._copying is None:
            return
        shared = self._shared
        if shared is not None and self._some:
            while shared.help(self._some):
                await asyncio.sleep(0)
                if not count:
                    break
            if not count:
                return
        if shared is not None and count:
            await self._passed[1]
        await self._passed[count]
        if self._copying.done():
            self._copying.result()
        if shared is not None:
            shared.check()

    async def __aenter__(self) -> Self:
        if self._here:
            self._make()
            return self
        self._copying = _begun(self._make)
        self._copying.add_done_callback(self._wake_all)
        if self._shared is not None and not self._some:
            self._loop.run_in_executor(None, self._help, self._shared)
        return self

    async def __aexit__(self, *_: object) -> None:
        shared = self._shared
        try:
            if self._copying is not None:
                await _to_the_end(self._copying)
        finally:
            if shared is not None and shared.leave() and not self._some:
                await _to_the_end(self._helper_ended)
        if shared is not None:
            shared.check()

    def _make(self) -> None:
        made = 0
        if not self._some:
            self._tell(self._passed[0])
        if self._shared is not None:
            self._shared.make()  # which tells when it is over: the other thread may end later
            if self._shared.failed:
                return
            made = 1
        for number, copy in enumerate(self._copies, made + 1):
            copy()
            self._tell(self._passed[number])

    def _help(self, shared: Shared) -> None:
        try:
            while shared.help(None):
                pass
        finally:
            self._tell(self._helper_ended)

    def _over(self) -> None:
        self._tell(self._passed[1])

    def _tell(self, passed: asyncio.Future[None]) -> None:
        if threading.get_ident() == self._thread:
            _wake(passed)
        else:
            self._loop.call_soon_threadsafe(_wake, passed)

    def _wake_all(self, copying: asyncio.Future[None]) -> None:
        """Where a copy fails, those after it are never made."""
        if copying.cancelled() or copying.exception() is not None or (self._shared is not None and self._shared.failed):
            for passed in self._passed:
                _wake(passed)


async def run_shared(copy: Callable[[int, int], None], count: int, nbytes: int) -> None:
    """Runs a copy of ``count`` blocks, too large for the loop alone, in a thread and in turns on the loop: ``copy``
    makes it from one block up to another. A cancelled caller waits as in :func:`run`."""
    async with Steps([], nbytes, shared=Sharing(copy, count, nbytes // count)) as steps:
        await steps.made(1)


def _at_a_time(block_bytes: int) -> int:
    """Blocks that the loop copies before it lets others have their turn; 0: one would hold it up too long."""
    return max(1, INLINE_BYTES // block_bytes) if block_bytes <= _MOST_AT_ONCE else 0


def _fits_here(nbytes: int, waits: bool, most: int) -> bool:
    """Whether a copy is made at once, on the loop."""
    return copy_in.get() is None and nbytes <= most and not waits


def _begun(copy: Callable[[], None]) -> asyncio.Future[None]:
    elsewhere = copy_in.get()
    if elsewhere is not None:
        return elsewhere(copy)
    # Not a task (asyncio.to_thread): those are cancelled, their threads forgotten, when a loop is torn down.
    return asyncio.get_running_loop().run_in_executor(None, copy)


async def _to_the_end(copying: asyncio.Future[None]) -> None:
    loop = asyncio.get_running_loop()
    cancelled: asyncio.CancelledError | None = None
    while not copying.done():
        ended = loop.create_future()  # asyncio.wait does the same at three times the cost
        copying.add_done_callback(partial(_wake, ended))
        try:
            await ended
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    copying.result()


def _wake(waiter: asyncio.Future[None], _: object = None) -> None:
    if not waiter.done():
        waiter.set_result(None)


def into_slots(pools: Sequence[Bytes], slots: Sequence[int], blocks: Sequence[Bytes] | Bytes) -> None:
    """Writes blocks into slots. ``pools`` as :meth:`kvtier.arena.Arena.pools` gives them."""
    whole = _in_one_call(pools, blocks)
    if whole is not None:
        pools[0][np.asarray(slots, dtype=np.intp)] = whole
        return
    start = 0
    for pool in pools:
        end = start + pool.shape[1]
        for slot, block in zip(slots, blocks, strict=True):
            np.copyto(pool[slot], block[start:end])
        start = end


def are_slots(pools: Sequence[Bytes], slots: NDArray[np.intp]) -> bool:
    """Whether the pools have all of these."""
    return not len(slots) or bool(0 <= np.minimum.reduce(slots) <= np.maximum.reduce(slots) < len(pools[0]))


def out_of_slots(pools: Sequence[Bytes], slots: Slots, blocks: Sequence[Bytes] | Bytes, known: bool = False) -> None:
    """Reads slots into blocks. Raises IndexError for a slot that there is not. ``known``: they :func:`are_slots`."""
    whole = _in_one_call(pools, blocks)
    if whole is not None:
        index = np.asarray(slots, dtype=np.intp)
        if not known and not are_slots(pools, index):
            raise IndexError(f"slots {slots}: the pool has {len(pools[0])}")
        pools[0].take(index, axis=0, out=whole, mode="clip")
        return
    if isinstance(slots, np.ndarray):
        slots = slots.tolist()
    start = 0
    for pool in pools:
        end = start + pool.shape[1]
        for slot, block in zip(slots, blocks, strict=True):
            np.copyto(block[start:end], pool[slot])
        start = end


def _in_one_call(pools: Sequence[Bytes], blocks: Sequence[Bytes] | Bytes) -> Bytes | None:
    """The blocks as one array, where a single call of numpy can copy them from or to their slots.

    It does so without the interpreter's lock. A call a block asks for the lock between any two, and waits for it for as
    long as a busy thread may keep it, which is 5 ms. Of a pool with gaps between its slots it would make a copy.
    """
    if len(pools) != 1 or not pools[0].flags.c_contiguous:
        return None
    return blocks if isinstance(blocks, np.ndarray) else rows_of_one(blocks)


def rows_of_one(blocks: Sequence[Bytes]) -> Bytes | None:
    """The array whose rows these are, all of one length and one after another in memory; None where they are not, or
    may not be written. The caller keeps them while it uses that array."""
    if len(blocks) < 2:
        return None
    first, count, nbytes = blocks[0], len(blocks), len(blocks[0])
    try:
        start, following = _address_of(first), _address_of(blocks[1])
        # As is nearly always seen by the second one, arrays apart; else all of them, in few steps of Python.
        if following != start + nbytes or _addresses_of(blocks) != list(range(start, start + count * nbytes, nbytes)):
            return None
        whole = as_rows(first.base, (count, nbytes)) if type(first.base) is np.ndarray else None
        if whole is not None and _address_of(whole) == start:
            return whole
    except TypeError:
        return None
    return np.lib.stride_tricks.as_strided(first, (count, nbytes), (nbytes, 1))


def _address_of(block: Bytes) -> int:
    """A sixth of what numpy takes to tell it. Raises TypeError where it has gaps, or may not be written."""
    return addressof(_address_in(block))


def _addresses_of(blocks: Sequence[Bytes]) -> list[int]:
    return list(map(addressof, map(_address_in, blocks)))


def _check(blocks: Blocks, field: str, count: int, block_bytes: int) -> None:
    require_kind(field, blocks, Sized, "a list of arrays or tensors, one a key")
    if len(blocks) != count:
        raise InvalidArgument(field, f"{len(blocks)} blocks", f"{count}, one a key")
    for index, block in enumerate(blocks):
        if isinstance(block, np.ndarray | DeviceBytes) or tensors.is_tensor(block):
            nbytes = block.nbytes
        elif tensors.is_cuda_array(block):
            nbytes = tensors.nbytes_of(block)
        else:
            raise InvalidArgument(f"{field}[{index}]", type(block).__name__, "a numpy array or a torch tensor")
        if nbytes != block_bytes:
            raise InvalidArgument(f"{field}[{index}]", f"{nbytes} bytes", f"{block_bytes} bytes")
