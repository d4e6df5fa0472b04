"""Replies that a session remembers: calls that are given up or cancelled, and what is forgotten when."""

import asyncio

import pytest

from kvtierd.service.errors import CallRefused
from kvtierd.service.sessions import REMEMBERED, ReplyMemory


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


async def test_a_call_ends_with_its_caller_and_a_repeat_that_waits_runs_it_anew() -> None:
    gate = asyncio.Event()
    memory, call = ReplyMemory[int](), Counted(gate)
    first, second = (asyncio.create_task(memory.answer(1, b"a", call)) for _ in range(2))
    await turns()
    assert call.runs == 1, "the repeat waits"
    first.cancel()
    await turns()
    assert (call.cancelled, call.runs) == (1, 2)
    gate.set()
    assert await second == await memory.answer(1, b"a", call) == 2
    assert first.cancelled()


async def test_a_repeat_gets_the_reply_that_it_waited_for() -> None:
    gate = asyncio.Event()
    memory, call = ReplyMemory[int](), Counted(gate)
    callers = [asyncio.create_task(memory.answer(1, b"a", call)) for _ in range(3)]
    await turns()
    callers[2].cancel()
    gate.set()
    assert await asyncio.gather(*callers[:2]) == [1, 1]
    assert call.cancelled == 0, "only its own caller's end ends it"


async def test_old_answers_are_forgotten_but_never_a_call_that_runs() -> None:
    gate = asyncio.Event()
    memory, waiting, quick = ReplyMemory[int](), Counted(gate), Counted()
    running = asyncio.create_task(memory.answer(1, b"a", waiting))
    await asyncio.sleep(0)
    for seq in range(2, REMEMBERED + 10):
        await memory.answer(seq, b"a", quick)
    before = quick.runs
    await memory.answer(2, b"a", quick)
    assert quick.runs == before + 1, "the oldest was forgotten"
    repeat = asyncio.create_task(memory.answer(1, b"a", waiting))
    await asyncio.sleep(0)
    gate.set()
    assert await running == await repeat == 1


async def test_a_reply_is_kept_as_long_as_it_must_not_be_forgotten() -> None:
    memory, call, leased = ReplyMemory[int](), Counted(), {1, 2, 3}
    for seq in range(1, 10 * REMEMBERED):
        await memory.answer(seq, b"a", call, lambda reply: reply in leased)
    assert [await memory.give_up(seq) for seq in range(1, 5)] == [1, 2, 3, None]


async def test_the_memory_is_bounded_by_what_is_kept() -> None:
    memory, call = ReplyMemory[int](), Counted()
    for seq in range(1, 10 * REMEMBERED):
        await memory.answer(seq, b"a", call, lambda reply: reply < REMEMBERED)
    assert len(memory._calls) <= 2 * REMEMBERED + 1


async def test_a_call_that_is_given_up_while_it_runs_is_cancelled() -> None:
    memory, call = ReplyMemory[int](), Counted(asyncio.Event())
    caller = asyncio.create_task(memory.answer(1, b"a", call))
    await turns()
    assert await memory.give_up(1) is None
    assert call.cancelled == 1
    await asyncio.wait([caller])


async def test_a_reply_is_not_lost_with_whoever_was_cancelled_while_asking_for_it() -> None:
    """A release that its client gives up in that moment comes again, and has to release something."""
    memory = ReplyMemory[int]()
    assert await memory.answer(1, b"a", Counted()) == 1
    asking = asyncio.create_task(memory.give_up(1))
    asyncio.get_running_loop().call_soon(asking.cancel)
    await asyncio.wait([asking])
    got = None if asking.cancelled() else asking.result()
    assert [got, await memory.give_up(1)] in ([1, None], [None, 1])


async def test_a_call_that_comes_after_it_was_given_up_never_begins() -> None:
    memory, call = ReplyMemory[int](), Counted()
    assert [await memory.give_up(1) for _ in range(2)] == [None, None]
    with pytest.raises(CallRefused, match="given up"):
        await memory.answer(1, b"a", call)
    assert call.runs == 0
    assert await memory.answer(2, b"b", call) == 1
