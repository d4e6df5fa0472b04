"""Copies between slots and arrays: parts in pool order, arrays of any dtype and shape, and copies that end in time."""

import asyncio
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvtier import buffers

POOLS = (48, 16)
BLOCK_BYTES = sum(POOLS)


def pools(slots: int = 4) -> list[NDArray[np.uint8]]:
    """Two pools whose slots are further apart than they are long, as in an arena."""
    return [np.zeros((slots, 128), dtype=np.uint8)[:, :nbytes] for nbytes in POOLS]


def numbered(count: int) -> list[NDArray[np.uint8]]:
    rng = np.random.default_rng(count)
    return [rng.integers(0, 256, BLOCK_BYTES, dtype=np.uint8) for _ in range(count)]


def test_blocks_come_back_from_the_slots_they_went_to() -> None:
    memory, blocks = pools(), numbered(2)
    buffers.into_slots(memory, [3, 1], blocks)
    assert np.array_equal(memory[0][3], blocks[0][:48])
    assert np.array_equal(memory[1][1], blocks[1][48:])
    back = [np.empty(BLOCK_BYTES, np.uint8) for _ in range(2)]
    buffers.out_of_slots(memory, [1, 3], back)
    assert np.array_equal(back[0], blocks[1])
    assert np.array_equal(back[1], blocks[0])
    assert not memory[0][[0, 2]].any()


@pytest.mark.parametrize(
    "block",
    [
        np.arange(16, dtype=np.float32),
        np.arange(32, dtype=np.float16).reshape(2, 4, 4),
        np.arange(128, dtype=np.uint8)[::2],
        np.arange(16, dtype=np.int32).reshape(4, 4).T,
    ],
    ids=["float32", "three axes", "strided", "transposed"],
)
def test_any_dtype_and_shape_of_the_right_size_is_taken_in_c_order(block: NDArray[Any]) -> None:
    (flat,) = buffers.of_cpu(buffers.readable([block], 1, BLOCK_BYTES))
    assert flat.tobytes() == block.tobytes()


@pytest.mark.parametrize("times", [1, 2])
async def test_a_copy_has_ended_when_its_caller_goes_on_however_often_it_is_cancelled(times: int) -> None:
    started, go, ended = threading.Event(), threading.Event(), threading.Event()

    def copy() -> None:
        started.set()
        go.wait(10)
        ended.set()

    task = asyncio.create_task(buffers.run_copy(copy, buffers.INLINE_BYTES + 1))
    await asyncio.to_thread(started.wait, 10)
    for _ in range(times):
        task.cancel()
        await asyncio.wait([task], timeout=0.01)
    assert not task.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every copy is made by two threads."""
    monkeypatch.setattr(buffers, "INLINE_BYTES", 0)


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("in_one", [False, True], ids=["list", "one array"])
def test_two_threads_copy_each_block_once(in_one: bool) -> None:
    pool, slots = np.zeros((64, 16), np.uint8), np.random.default_rng(2).permutation(64)[:37]
    whole = np.random.default_rng(1).integers(1, 256, (37, 16), dtype=np.uint8)
    buffers.into_slots([pool], slots, whole if in_one else list(whole))
    assert np.array_equal(pool[slots], whole)
    assert np.count_nonzero(pool.any(axis=1)) == 37
    back = np.zeros_like(whole)
    buffers.out_of_slots([pool], slots, back if in_one else list(back))
    assert np.array_equal(back, whole)


class Gated(list[NDArray[np.uint8]]):
    """Blocks of which a thread other than the first waits for ``go`` before it copies any, or raises ``error``."""

    def __init__(self, blocks: Sequence[NDArray[np.uint8]], error: Exception | None = None) -> None:
        super().__init__(blocks)
        self._first = threading.get_ident()
        self._error = error
        self.started, self.go, self.ended = threading.Event(), threading.Event(), threading.Event()

    def __getitem__(self, at: Any) -> Any:
        if threading.get_ident() != self._first:
            self.started.set()
            self.go.wait(10)
            self.ended.set()
            if self._error is not None:
                raise self._error
        else:
            self.started.wait(10)
            self.go.set()
        return super().__getitem__(at)


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("error", [None, ValueError("the other half")])
def test_a_copy_has_ended_in_both_threads_when_it_returns(error: Exception | None) -> None:
    pool, blocks = np.zeros((16, 16), np.uint8), Gated(list(np.ones((16, 16), np.uint8)), error)
    with nullcontext() if error is None else pytest.raises(ValueError, match="the other half"):
        buffers.into_slots([pool], range(16), blocks)
    assert blocks.ended.is_set()
    assert pool.all() == (error is None)


def test_a_loop_that_is_torn_down_waits_for_a_copy_before_the_slots_are_given_back() -> None:
    """``asyncio.run`` cancels every task that is left, also those that nobody but a copy's caller knows of."""
    started, go, ended = threading.Event(), threading.Event(), threading.Event()
    ended_at_release: list[bool] = []

    def copy() -> None:
        started.set()
        go.wait(10)
        ended.set()

    async def put() -> None:
        try:
            await buffers.run_copy(copy, buffers.INLINE_BYTES + 1)
        finally:
            ended_at_release.append(ended.is_set())

    async def main() -> asyncio.Task[None]:
        task = asyncio.create_task(put())
        await asyncio.to_thread(started.wait, 10)
        asyncio.get_running_loop().call_later(0.05, go.set)
        return task

    asyncio.run(main())
    assert ended_at_release == [True]


@pytest.mark.parametrize("gaps", [False, True], ids=["adjacent slots", "slots with gaps"])
def test_slots_are_read_into_the_rows_of_one_array_as_into_arrays(gaps: bool) -> None:
    memory = np.random.default_rng(1).integers(0, 256, (9, 24), dtype=np.uint8)
    pool = memory[:, :16] if gaps else np.ascontiguousarray(memory[:, :16])
    slots = [8, 0, 3, 3]
    one = np.zeros((4, 16), np.uint8)
    several = [np.zeros(16, np.uint8) for _ in slots]
    buffers.out_of_slots([pool], slots, one)
    buffers.out_of_slots([pool], np.array(slots), several)
    assert np.array_equal(one, pool[slots])
    assert np.array_equal(one, several)


@pytest.mark.parametrize("slot", [9, 2**31])
def test_a_slot_that_there_is_not_is_not_read(slot: int) -> None:
    pool, rows = np.zeros((9, 16), np.uint8), np.ones((2, 16), np.uint8)
    for targets in (rows, list(rows)):
        with pytest.raises(IndexError):
            buffers.out_of_slots([pool], [0, slot], targets)
    buffers.out_of_slots([pool], [], rows[:0])


def test_a_tensor_whose_first_axis_is_the_block_is_one_array() -> None:
    tensor = torch.arange(48, dtype=torch.uint8).reshape(3, 16)
    rows = buffers.readable(tensor, 3, 16)
    assert isinstance(rows, np.ndarray)
    assert rows.ctypes.data == tensor.data_ptr()
