"""Turns of clients, on a clock that only work moves."""

import asyncio
from collections import Counter
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from kvtierd.rights import User
from kvtierd.service.turns import LOOKS, SLICE_S, Turns

LONG_S, SHORT_S = 2 * SLICE_S, SLICE_S / 8


class Clients:
    """Calls of sessions. ``done``: the sessions whose calls have ended, in order, with the time of each."""

    def __init__(self) -> None:
        self.now = 0.0
        self.turns = Turns(lambda: self.now)
        self.done: list[tuple[Any, float]] = []
        self.calls: list[asyncio.Task[None]] = []

    @staticmethod
    def session(number: int, uid: int) -> Any:
        return SimpleNamespace(id=number, peer=SimpleNamespace(identity=User(uid, frozenset())), step_s=inf)

    def call(self, session: Any, seconds: float, steps: int = 1) -> asyncio.Task[None]:
        async def work() -> None:
            for step in range(steps):
                if step:
                    await asyncio.sleep(0)
                self.now += seconds
            self.done.append((session, self.now))

        async def call() -> None:
            await self.turns.begin(session)
            await self.turns.measured(session, work())

        self.calls.append(asyncio.create_task(call()))
        return self.calls[-1]

    async def end(self) -> None:
        await asyncio.gather(*self.calls)


async def test_a_short_call_waits_for_one_long_call_of_others_at_most() -> None:
    clients = Clients()
    flood = [clients.session(number, uid=1) for number in range(10)]
    for _ in range(20):
        for each in flood:
            clients.call(each, LONG_S)
    for uid in (1, 2):
        other = clients.session(100 + uid, uid)
        for _ in range(2):  # until its calls are known to be short
            await clients.call(other, SHORT_S)
        for _ in range(20):
            for _ in range(LOOKS):
                await asyncio.sleep(0)
            came = clients.now
            await clients.call(other, SHORT_S)
            assert clients.now - came <= LONG_S + 2 * SHORT_S
    assert len(clients.done) < 200, "the flood was over too soon"
    await clients.end()


async def test_accounts_and_their_sessions_have_equal_time() -> None:
    clients = Clients()
    many = [clients.session(number, uid=1) for number in range(9)]
    one = clients.session(100, uid=2)
    for _ in range(40):
        for each in many:
            clients.call(each, 2 * LONG_S)
        clients.call(one, LONG_S)
    while [session for session, _ in clients.done].count(one) < 20:  # noqa: ASYNC110  a turn of the loop each
        await asyncio.sleep(0)
    times = Counter[int]()
    for session, _ in clients.done:
        times[session.peer.identity.uid] += 2 if session is not one else 1
    assert times[1] == pytest.approx(times[2], abs=4)
    counts = Counter(session.id for session, _ in clients.done if session is not one)
    assert max(counts.values()) - min(counts[each.id] for each in many) <= 1
    await clients.end()


async def test_calls_of_a_session_begin_in_their_order() -> None:
    clients = Clients()
    begun: list[int] = []
    session, other = clients.session(1, uid=1), clients.session(2, uid=2)

    async def call(number: int) -> None:
        await clients.turns.begin(session)
        begun.append(number)
        clients.now += LONG_S

    for number in range(20):
        clients.calls.append(asyncio.create_task(call(number)))
        clients.call(other, LONG_S)
    await clients.end()
    assert begun == sorted(begun)


async def test_a_long_call_that_gives_others_their_turn_waits_for_its_own() -> None:
    clients = Clients()
    long, other = clients.session(1, uid=1), clients.session(2, uid=2)
    clients.call(long, LONG_S, steps=20)
    for _ in range(10):
        clients.call(other, LONG_S)
    await clients.end()
    assert [session for session, _ in clients.done] == [other] * 10 + [long]


async def test_a_cancelled_call_is_cancelled_inside_and_has_no_turn() -> None:
    clients = Clients()
    session = clients.session(1, uid=1)
    ended: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    waiting = asyncio.ensure_future(clients.turns.measured(session, wait()))
    queued = [clients.call(session, LONG_S) for _ in range(3)]
    for _ in range(2):
        await asyncio.sleep(0)
    for task in (waiting, queued[1]):
        task.cancel()
    await asyncio.wait([waiting, *queued])
    assert (ended, len(clients.done)) == (["cancelled"], 2)


async def test_calls_that_were_short_and_are_long_are_not_begun_together() -> None:
    clients = Clients()
    session, other = clients.session(1, uid=1), clients.session(2, uid=2)
    for each in (session, other):
        for _ in range(20):
            await clients.call(each, SHORT_S / 100)
    for _ in range(100):
        clients.call(session, LONG_S)
    for _ in range(3):
        await asyncio.sleep(0)
    came = clients.now
    await clients.call(other, SHORT_S)
    assert clients.now - came <= 3 * LONG_S
    await clients.end()
