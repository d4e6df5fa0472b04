"""Copies between slots and arrays of blocks. Knows memory; knows nothing of calls and leases.

A block is one flat array of ``block_bytes``: its parts in all pools, one after another, in pool order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache, partial
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvtier.buffers import Bytes

INLINE_BYTES: Final = 4 << 20
"""Copies up to this size run on the event loop: to wake a thread takes as long."""

_SHARED_BYTES: Final = 8 << 20
"""From this size on two threads copy."""
_PARTS: Final = 8
"""Into so many parts such a copy is cut; each thread takes one after another."""

Slots: TypeAlias = "Sequence[int] | NDArray[np.integer[Any]]"


async def run(copy: Callable[[], None], nbytes: int, *, waits: bool = False) -> None:
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


def _wake(waiter: asyncio.Future[None], _: object) -> None:
    if not waiter.done():
        waiter.set_result(None)


def into_slots(pools: Sequence[Bytes], slots: Slots, blocks: Sequence[Bytes] | Bytes) -> None:
    """Writes blocks into slots. ``pools``: as :meth:`kvtier.arena.Arena.pools` gives them."""
    index = np.asarray(slots, dtype=np.intp)

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


def out_of_slots(pools: Sequence[Bytes], slots: Slots, blocks: Sequence[Bytes] | Bytes) -> None:
    """Reads slots into blocks. Raises IndexError for a slot that does not exist."""
    index = np.asarray(slots, dtype=np.intp)
    if len(index) and not 0 <= index.min() <= index.max() < len(pools[0]):
        raise IndexError(f"slots {slots}: the pool has {len(pools[0])}")

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


def _in_parts(copy: Callable[[int, int], None], pools: Sequence[Bytes], blocks: int) -> None:
    """Makes a copy of ``blocks`` blocks; a large one with a second thread, which has ended when this returns."""
    nbytes = blocks * sum(pool.shape[1] for pool in pools)
    if nbytes < _SHARED_BYTES or blocks < 2:
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
