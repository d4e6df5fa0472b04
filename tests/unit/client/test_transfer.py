"""Copies between slots and arrays: parts in pool order, any dtype and shape, sizes checked before any copy."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvtier import tensors, transfer
from kvtier.errors import InvalidArgument

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
    transfer.into_slots(memory, [3, 1], blocks)
    assert np.array_equal(memory[0][3], blocks[0][:48])
    assert np.array_equal(memory[1][1], blocks[1][48:])
    back = [np.empty(BLOCK_BYTES, np.uint8) for _ in range(2)]
    transfer.out_of_slots(memory, [1, 3], back)
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
    (flat,) = transfer.readable([block], 1, BLOCK_BYTES)
    assert flat.tobytes() == block.tobytes()


def test_one_array_whose_first_axis_is_the_block_is_n_blocks() -> None:
    blocks = np.arange(3 * 16, dtype=np.float32).reshape(3, 16)
    flat = transfer.readable(blocks, 3, BLOCK_BYTES)
    assert [row.tobytes() for row in flat] == [row.tobytes() for row in blocks]


@pytest.mark.parametrize(
    ("blocks", "field", "value", "limit"),
    [
        ([np.zeros(63, np.uint8)], "blocks[0]", "63 bytes", "64 bytes"),
        ([np.zeros(64, np.uint8)] * 2, "blocks", "2 blocks", "1, one a key"),
        ([b"x" * 64], "blocks[0]", "bytes", "a numpy array or a torch tensor"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(blocks: Any, field: str, value: str, limit: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        transfer.readable(blocks, 1, BLOCK_BYTES)
    assert (refusal.value.field, refusal.value.value, refusal.value.limit) == (field, value, limit)


def test_an_output_that_cannot_be_written_in_place_is_refused() -> None:
    strided = np.zeros(128, np.uint8)[::2]
    frozen = np.zeros(64, np.uint8)
    frozen.flags.writeable = False
    for out in (strided, frozen):
        with pytest.raises(InvalidArgument, match=r"out\[0\]"):
            transfer.writable([out], 1, BLOCK_BYTES)


def test_an_output_is_written_through_its_own_shape() -> None:
    out = np.zeros((4, 4), np.float32)
    (flat,) = transfer.writable([out], 1, BLOCK_BYTES)
    flat[:] = np.arange(16, dtype=np.float32).view(np.uint8)
    assert np.array_equal(out, np.arange(16, dtype=np.float32).reshape(4, 4))


async def test_only_large_copies_leave_the_loop_s_thread() -> None:
    where: list[int] = []
    await transfer.run(lambda: where.append(threading.get_ident()), transfer.INLINE_BYTES)
    await transfer.run(lambda: where.append(threading.get_ident()), transfer.INLINE_BYTES + 1)
    assert where[0] == threading.get_ident()
    assert where[1] != threading.get_ident()


@pytest.mark.parametrize("times", [1, 2])
async def test_a_copy_has_ended_when_its_caller_goes_on_however_often_it_is_cancelled(times: int) -> None:
    started, go, ended = threading.Event(), threading.Event(), threading.Event()

    def copy() -> None:
        started.set()
        go.wait(10)
        ended.set()

    task = asyncio.create_task(transfer.run(copy, transfer.INLINE_BYTES + 1))
    await asyncio.to_thread(started.wait, 10)
    for _ in range(times):
        task.cancel()
        await asyncio.wait([task], timeout=0.01)
    assert not task.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_something_else_is_done_while_the_thread_copies() -> None:
    done, seen = threading.Event(), []
    async with transfer.Steps([lambda: seen.append(done.wait(10))], transfer.INLINE_BYTES + 1) as steps:
        await steps.made(0)
        done.set()
    assert seen == [True]


async def test_a_step_is_told_before_the_next_has_ended() -> None:
    go, made = threading.Event(), []

    def first() -> None:
        made.append(1)

    def second() -> None:
        assert go.wait(10)
        made.append(2)

    async with transfer.Steps([first, second], transfer.INLINE_BYTES + 1) as steps:
        await steps.made(1)
        assert made == [1]
        go.set()
        await steps.made(2)
        assert made == [1, 2]


@pytest.mark.parametrize("nbytes", [1, transfer.INLINE_BYTES + 1])
async def test_an_error_beside_a_copy_is_raised_when_that_has_ended(nbytes: int) -> None:
    copied: list[bool] = []

    def copy() -> None:
        time.sleep(0.01)  # longer than it takes to fail
        copied.append(True)

    with pytest.raises(LookupError):
        async with transfer.Steps([copy], nbytes):
            raise LookupError("beside")
    assert copied == [True]


@pytest.mark.parametrize("made", [0, 1, 2])
async def test_a_copy_that_fails_is_told_though_what_was_beside_it_did_not(made: int) -> None:
    def fail() -> None:
        raise LookupError("copy")

    with pytest.raises(LookupError):
        async with transfer.Steps([fail, fail], transfer.INLINE_BYTES + 1) as steps:
            await steps.made(made)


TOO_LARGE = transfer._MOST_AT_ONCE + 1
"""Bytes of a block that no loop copies: another thread does."""


def halves(own: Callable[[], object], half: Callable[[], object], block_bytes: int = TOO_LARGE) -> transfer.Sharing:
    """Two blocks, of which the first thread to come takes ``own``, and another one, unless it is late, ``half``."""

    def copy(start: int, end: int) -> None:
        for number in range(start, end):
            (own, half)[number]()

    return transfer.Sharing(copy, 2, block_bytes)


async def test_half_of_the_first_copy_is_made_by_another_thread() -> None:
    both = threading.Barrier(2)
    threads: list[int] = []

    def half() -> None:
        threads.append(threading.get_ident())
        both.wait(10)

    def last() -> None:
        assert len(threads) == 2

    async with transfer.Steps([last], transfer.INLINE_BYTES + 1, shared=halves(half, half)) as steps:
        await steps.made(1)
        assert len(threads) == 2
    assert len({*threads, threading.get_ident()}) == 3


async def test_small_blocks_are_copied_by_the_loop_as_well_which_others_have_in_between() -> None:
    begun, taken = threading.Event(), threading.Event()
    turn, turns = 0, list[int]()
    threads: list[tuple[int, int]] = []

    def copy(start: int, end: int) -> None:
        threads.append((threading.get_ident(), end - start))
        if threading.get_ident() == here:
            turns.append(turn)
            if len(turns) == 3:
                taken.set()
        else:
            begun.set()
            assert taken.wait(10)

    async def other() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    here = threading.get_ident()
    beside = asyncio.create_task(other())
    shared = transfer.Sharing(copy, 6, transfer.INLINE_BYTES)
    async with transfer.Steps([], transfer.INLINE_BYTES + 1, shared=shared) as steps:
        await asyncio.to_thread(begun.wait, 10)  # the thread takes its half first
        await steps.made(1)
    beside.cancel()
    assert [count for thread, count in threads if thread == here] == [1, 1, 1]
    assert turns == sorted(set(turns))


@pytest.mark.parametrize("one_call", [False, True])
async def test_what_one_call_copies_leaves_the_loop_s_thread_only_where_it_is_larger(one_call: bool) -> None:
    where: list[int] = []
    for nbytes in (transfer.INLINE_BYTES + 1, 4 << 20, (4 << 20) + 1):
        async with transfer.Steps([lambda: where.append(threading.get_ident())], nbytes, one_call=one_call):
            pass
    assert [thread == threading.get_ident() for thread in where] == [one_call, one_call, False]


async def test_what_fails_on_the_loop_is_raised_when_the_thread_has_ended() -> None:
    begun, go = threading.Event(), threading.Event()
    ended: list[bool] = []

    def copy(start: int, end: int) -> None:
        if threading.get_ident() == here:
            go.set()
            raise ValueError("on the loop")
        begun.set()
        assert go.wait(10)
        ended.append(True)

    here = threading.get_ident()
    with pytest.raises(ValueError, match="on the loop"):
        async with transfer.Steps(
            [lambda: ended.append(False)],
            transfer.INLINE_BYTES + 1,
            shared=transfer.Sharing(copy, 4, 1 << 20),
        ) as steps:
            await asyncio.to_thread(begun.wait, 10)
            await steps.made(1)
    assert ended == [True]


async def test_a_copy_is_made_when_both_halves_are() -> None:
    both, go = threading.Barrier(2), threading.Event()
    ended: list[bool] = []

    def own() -> None:
        both.wait(10)

    def half() -> None:
        both.wait(10)
        ended.append(go.wait(10))

    async with transfer.Steps([lambda: None], transfer.INLINE_BYTES + 1, shared=halves(own, half)) as steps:
        made = asyncio.create_task(steps.made(1))
        await asyncio.wait([made], timeout=0.05)
        assert not made.done()
        go.set()
        await made
        assert ended == [True]


@pytest.mark.parametrize("nbytes", [1, transfer.INLINE_BYTES + 1], ids=["here", "in a thread"])
async def test_nobody_waits_for_a_thread_that_has_not_begun(nbytes: int) -> None:
    """All threads of the loop but one are busy."""
    made: list[str] = []
    loop, go = asyncio.get_running_loop(), threading.Event()
    loop.set_default_executor(ThreadPoolExecutor(2))
    busy = loop.run_in_executor(None, go.wait, 10)
    shared = halves(lambda: made.append("own"), lambda: made.append("half"))
    async with transfer.Steps([], nbytes, shared=shared):
        pass
    assert made == ["own", "half"]
    go.set()
    await busy


@pytest.mark.parametrize("first", ["_make", "_help"])
async def test_what_fails_in_the_other_thread_is_raised(first: str) -> None:
    """``first``: of the two threads. Either may come first, and the other one's half is what fails."""
    both, come = threading.Barrier(2), threading.Event()

    class Ordered(ThreadPoolExecutor):
        def submit(self, work: Callable[..., Any], /, *args: Any, **more: Any) -> Future[Any]:
            def begin() -> Any:
                if work.__name__ != first:
                    assert come.wait(10)
                return work(*args, **more)

            return super().submit(begin)

    def fail() -> None:
        both.wait(10)
        raise ValueError("the other half")

    def own() -> None:
        come.set()
        made.append(both.wait(10))
        assert steps._shared is not None and steps._copying is not None
        for _ in range(10_000):
            if steps._shared.failed if first == "_make" else steps._copying.done():
                ended.append(True)
                break
            pause.wait(0.001)

    made, ended = list[int](), list[bool]()
    pause = threading.Event()
    asyncio.get_running_loop().set_default_executor(Ordered(2))
    steps = transfer.Steps([lambda: made.append(-1)], transfer.INLINE_BYTES + 1, shared=halves(own, fail))
    with pytest.raises(ValueError, match="the other half"):
        async with steps:
            await steps.made(1)
    assert ended == [True]
    assert -1 not in made


async def test_an_error_in_the_own_half_is_raised_when_the_other_has_ended() -> None:
    both, go = threading.Barrier(2), threading.Event()
    ended: list[bool] = []

    def fail() -> None:
        both.wait(10)
        raise ValueError("the own half")

    def half() -> None:
        both.wait(10)
        ended.append(go.wait(10))

    async def copy() -> None:
        async with transfer.Steps([], transfer.INLINE_BYTES + 1, shared=halves(fail, half)):
            pass

    copying = asyncio.create_task(copy())
    await asyncio.wait([copying], timeout=0.01)
    assert not copying.done()
    go.set()
    with pytest.raises(ValueError, match="the own half"):
        await copying
    assert ended == [True]


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
            await transfer.run(copy, transfer.INLINE_BYTES + 1)
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
    transfer.out_of_slots([pool], slots, one)
    transfer.out_of_slots([pool], np.array(slots), several)
    assert np.array_equal(one, pool[slots])
    assert np.array_equal(one, several)


@pytest.mark.parametrize("slot", [9, 2**31])
def test_a_slot_that_there_is_not_is_not_read(slot: int) -> None:
    pool, rows = np.zeros((9, 16), np.uint8), np.ones((2, 16), np.uint8)
    for targets in (rows, list(rows)):
        with pytest.raises(IndexError):
            transfer.out_of_slots([pool], [0, slot], targets)
    transfer.out_of_slots([pool], [], rows[:0])


def test_rows_are_delivered_as_they_are_only_where_they_are_what_was_given() -> None:
    assert transfer.are_rows(np.zeros((2, 16), np.uint8))
    for other in (np.zeros((2, 4), np.float32), np.zeros((2, 4, 4), np.uint8), [np.zeros(16, np.uint8)]):
        assert not transfer.are_rows(other)


def apart(whole: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    return [row.copy() for row in whole]


def in_another_order(whole: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    return [whole[index] for index in (1, 0, 2, 3)]


def with_gaps(whole: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    return list(np.zeros((8, 16), np.uint8)[::2])


def parts_of(whole: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    return [row[:8] for row in whole]


def read_only(whole: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    whole.flags.writeable = False
    return list(whole)


@pytest.mark.parametrize("rows_of", [list, apart, in_another_order, with_gaps, read_only])
def test_slots_have_the_blocks_wherever_those_lie(
    rows_of: Callable[[NDArray[np.uint8]], list[NDArray[np.uint8]]],
) -> None:
    whole = np.random.default_rng(1).integers(0, 256, (4, 16), dtype=np.uint8)
    pool = np.zeros((9, 16), np.uint8)
    rows = rows_of(whole)
    transfer.into_slots([pool], [8, 0, 3, 5], rows)
    assert np.array_equal(pool[[8, 0, 3, 5]], rows)
    assert not pool[[1, 2, 4, 6, 7]].any()


@pytest.mark.parametrize("rows_of", [list, apart, in_another_order, with_gaps])
def test_blocks_have_the_slots_wherever_they_lie(
    rows_of: Callable[[NDArray[np.uint8]], list[NDArray[np.uint8]]],
) -> None:
    pool = np.random.default_rng(1).integers(0, 256, (9, 16), dtype=np.uint8)
    rows = rows_of(np.zeros((4, 16), np.uint8))
    transfer.out_of_slots([pool], [8, 0, 3, 5], rows)
    assert np.array_equal(rows, pool[[8, 0, 3, 5]])


def test_rows_that_are_listed_are_filled_through_their_array_only_if_they_are_all_of_it_in_order() -> None:
    whole = np.zeros((4, 16), np.uint8)
    assert transfer.as_rows(list(whole), (4, 16)) is whole
    assert transfer.as_rows(list(whole), (4, 8)) is None
    for rows_of in (apart, in_another_order, with_gaps, parts_of):
        assert transfer.as_rows(rows_of(whole), (4, 16)) is None
    assert transfer.as_rows([bytearray(16), bytearray(16)], (2, 16)) is None  # type: ignore[arg-type]
    shorter = list(np.zeros((5, 16), np.uint8)[:4])
    one = transfer.as_rows(shorter, (4, 16))
    assert one is not None
    assert (one.shape, one.ctypes.data) == ((4, 16), shorter[0].ctypes.data)
    assert transfer.as_rows(read_only(whole), (4, 16)) is None


def test_only_rows_one_after_another_are_copied_as_one_array() -> None:
    whole = np.zeros((4, 16), np.uint8)
    one = transfer.rows_of_one(list(whole[1:]))
    assert one is not None
    assert (one.shape, one.flags.c_contiguous, np.shares_memory(one, whole)) == ((3, 16), True, True)
    tensor = torch.zeros((4, 16), dtype=torch.uint8)
    one = transfer.rows_of_one(transfer.readable(tensor, 4, 16))
    assert one is not None
    assert one.ctypes.data == tensor.data_ptr()
    for rows_of in (apart, in_another_order, with_gaps, parts_of, read_only):
        assert transfer.rows_of_one(rows_of(whole)) is None
    assert transfer.rows_of_one([]) is None


async def test_tensors_are_filled_on_the_stream_that_was_current_where_it_was_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread that fills them has another one."""
    loop, filled = asyncio.get_running_loop(), list[tuple[int, bool]]()
    monkeypatch.setattr(tensors, "current_stream", lambda tensor: threading.get_ident())
    here = threading.get_ident()
    monkeypatch.setattr(
        tensors, "fill", lambda tensor, row, stream: filled.append((stream, threading.get_ident() == here))
    )
    monkeypatch.setattr(transfer, "_begun", lambda copy: loop.run_in_executor(None, copy))
    monkeypatch.setattr(transfer, "INLINE_BYTES", 0)
    out = [torch.zeros(4, 4, dtype=torch.uint8).t()[:2]]
    await transfer.deliver(out, [np.zeros(8, np.uint8)])
    assert filled == [(here, False)]
