from __future__ import annotations

import asyncio

import pytest

from kvtierd.service.errors import CallRefused
from kvtierd.service.replies import REMEMBERED, ReplyMemory


class Counted:
    """A call that counts how often it runs, and waits for ``gate`` if there is one."""

    def __init__(self, gate: asyncio.Event | None = None) -> None:
        self.runs = 0
        self.cancelled = 0
        self._gate = gate

    async def __call__(self) -> int:
        self.runs += 1
        try:
            if self._gate is not None:
                await self._gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return self.runs


async def turns() -> None:
    """Whatever can run without anything from outside has run when this returns."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_repeat_is_answered_and_not_executed() -> None:
    memory, call = ReplyMemory[int](), Counted()
    assert [await memory.answer(1, b"a", call) for _ in range(3)] == [1, 1, 1]
    assert await memory.answer(2, b"a", call) == 2


async def test_what_never_waits_runs_at_once_and_is_remembered_like_the_rest() -> None:
    memory, call = ReplyMemory[int](), Counted()
    answers = [memory.answer(1, b"a", call, waits=False) for _ in range(2)]
    assert [await answer for answer in answers] == [1, 1]
    with pytest.raises(CallRefused):
        await memory.answer(1, b"b", call, waits=False)


async def test_what_never_waits_and_is_refused_runs_anew() -> None:
    memory = ReplyMemory[int]()
    runs = 0

    async def refuse() -> int:
        nonlocal runs
        runs += 1
        raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            await memory.answer(1, b"a", refuse, waits=False)
    assert runs == 2


async def test_what_waits_though_it_should_not_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        await ReplyMemory[int]().answer(1, b"a", Counted(asyncio.Event()), waits=False)


@pytest.mark.parametrize("at_once", [False, True])
async def test_a_repeat_in_flight_waits_for_the_same_answer(at_once: bool) -> None:
    gate = asyncio.Event()
    memory, call = ReplyMemory[int](), Counted(gate)
    both = [asyncio.create_task(memory.answer(1, b"a", call, at_once=at_once)) for _ in range(2)]
    await turns()
    gate.set()
    assert await asyncio.gather(*both) == [1, 1]


async def test_another_body_under_a_used_number_is_refused() -> None:
    memory, call = ReplyMemory[int](), Counted()
    await memory.answer(1, b"a", call)
    with pytest.raises(CallRefused) as refused:
        await memory.answer(1, b"b", call)
    assert refused.value.detail.field == "seq"
    assert call.runs == 1


@pytest.mark.parametrize("at_once", [False, True])
async def test_what_was_refused_runs_anew(at_once: bool) -> None:
    memory, call = ReplyMemory[int](), Counted()

    async def refuse() -> int:
        raise ValueError("no")

    both = [asyncio.create_task(memory.answer(1, b"a", refuse, at_once=at_once)) for _ in range(2)]
    assert [type(error) for error in await asyncio.gather(*both, return_exceptions=True)] == [ValueError, ValueError]
    assert await memory.answer(1, b"a", call, at_once=at_once) == 1


@pytest.mark.parametrize("at_once", [False, True])
async def test_a_call_ends_with_the_last_who_waits_for_it_and_may_then_run_again(at_once: bool) -> None:
    gate = asyncio.Event()
    memory, call = ReplyMemory[int](), Counted(gate)
    first, second = (asyncio.create_task(memory.answer(1, b"a", call, at_once=at_once)) for _ in range(2))
    await turns()
    first.cancel()
    await turns()
    assert call.cancelled == 0, "somebody still waits"
    second.cancel()
    await asyncio.wait([first, second])
    await asyncio.sleep(0)
    assert call.cancelled == 1
    gate.set()
    assert await memory.answer(1, b"a", call, at_once=at_once) == 2


async def test_an_answer_whose_only_waiter_was_cancelled_late_is_kept() -> None:
    memory, call = ReplyMemory[int](), Counted()
    waiter = asyncio.create_task(memory.answer(1, b"a", call))
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # the call has run; the waiter has not been woken yet
    waiter.cancel()
    await asyncio.wait([waiter])
    assert await memory.answer(1, b"a", call) == 1


@pytest.mark.parametrize("at_once", [False, True])
async def test_old_answers_are_forgotten_but_never_a_call_that_runs(at_once: bool) -> None:
    gate = asyncio.Event()
    memory, waiting, quick = ReplyMemory[int](), Counted(gate), Counted()
    running = asyncio.create_task(memory.answer(1, b"a", waiting, at_once=at_once))
    await asyncio.sleep(0)
    for seq in range(2, REMEMBERED + 10):
        await memory.answer(seq, b"a", quick, at_once=at_once)
    before = quick.runs
    await memory.answer(2, b"a", quick, at_once=at_once)
    assert quick.runs == before + 1, "the oldest was forgotten"
    repeat = asyncio.create_task(memory.answer(1, b"a", waiting, at_once=at_once))
    await asyncio.sleep(0)
    gate.set()
    assert await running == await repeat == 1


async def test_what_begins_at_once_and_does_not_wait_takes_no_turn_of_the_loop() -> None:
    memory, call = ReplyMemory[int](), Counted()
    answer = memory.answer(1, b"a", call, at_once=True)
    with pytest.raises(StopIteration) as end:
        answer.send(None)
    assert end.value.value == 1
    assert await memory.answer(1, b"a", call, at_once=True) == 1
    assert call.runs == 1


async def test_what_has_begun_hears_of_its_end_even_before_its_task_has_run() -> None:
    memory, call = ReplyMemory[int](), Counted(asyncio.Event())
    answer = memory.answer(1, b"a", call, at_once=True)
    answer.send(None)
    answer.close()  # whoever asked is gone in the same turn
    await turns()
    assert call.cancelled == 1


async def test_others_may_wait_for_what_a_call_that_has_begun_waits_for() -> None:
    memory, shared = ReplyMemory[int](), asyncio.get_running_loop().create_future()

    async def call() -> int:
        await asyncio.sleep(0)
        return int(await shared)

    async def other() -> int:
        return int(await shared)

    both = [memory.answer(seq, b"a", each, at_once=True) for seq, each in ((1, other), (2, call))]
    waiting = [asyncio.ensure_future(each) for each in (*both, other(), other())]
    await asyncio.sleep(0)
    shared.set_result(3)
    assert await asyncio.gather(*waiting) == [3, 3, 3, 3]


async def test_what_begins_at_once_cannot_bind_itself_to_the_task_of_who_asks() -> None:
    async def call() -> None:
        async with asyncio.timeout(60):
            await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="inside a task"):
        await ReplyMemory[None]().answer(1, b"a", call, at_once=True)
    assert asyncio.current_task() is not None


async def test_a_recall_is_answered_as_the_call_was() -> None:
    memory, call = ReplyMemory[int](), Counted()
    assert await memory.answer(1, b"a", call) == 1
    assert await memory.recall(1, b"a") == 1
    with pytest.raises(CallRefused, match="no other call"):
        await memory.recall(1, b"b")


async def test_a_recall_of_a_call_that_runs_waits_for_it_and_ends_it_with_its_last_caller() -> None:
    memory, call = ReplyMemory[int](), Counted(asyncio.Event())
    first = asyncio.create_task(memory.answer(1, b"a", call))
    await turns()
    second = asyncio.create_task(memory.recall(1, b"a"))
    await turns()
    first.cancel()
    await turns()
    assert (call.cancelled, second.done()) == (0, False)
    second.cancel()
    await turns()
    assert call.cancelled == 1


async def test_a_call_that_comes_after_its_recall_never_begins() -> None:
    memory, call = ReplyMemory[int](), Counted()
    for _ in range(2):
        with pytest.raises(CallRefused) as refused:
            await memory.recall(1, b"a")
        assert refused.value.detail.reason == "NEVER_BEGAN"
    with pytest.raises(CallRefused, match="given up"):
        await memory.answer(1, b"a", call)
    assert call.runs == 0
    assert await memory.answer(2, b"b", call) == 1
