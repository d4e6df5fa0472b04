"""Turns of the loop before verbs that may wait for nothing."""

from __future__ import annotations

import asyncio

from kvtier.turns import Turns


async def test_only_who_asks_twice_in_a_turn_waits_for_the_others() -> None:
    turns, loop = Turns(), asyncio.get_running_loop()
    others: list[str] = []
    for turn in ("first", "second"):
        loop.call_soon(others.append, turn)
        await turns.take()
        assert turn not in others
        await turns.take()
        assert turn in others
        await asyncio.sleep(0)


async def test_whoever_repeats_a_verb_lets_the_others_have_each_turn() -> None:
    turns, repeated = Turns(), 0
    over = asyncio.get_running_loop().create_task(_turns_of_the_loop(5))
    while not over.done():
        await turns.take()
        repeated += 1
    assert repeated <= 12


async def _turns_of_the_loop(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)
