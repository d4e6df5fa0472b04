"""Those who read the past take turns: the share of the loop that all of them have together, by a clock of its own."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any

import pytest

from kvtierd.service.turns import QUIET_SHARE, SHARE, Turns

LEAST_S = 0.0002


class Clock(selectors.SelectSelector):
    """Time passes where the loop would wait, and where it is told that something takes time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def select(self, timeout: float | None = None) -> Any:
        self.now += max(0.0, timeout or 0.0)
        return super().select(0)


class Loop(asyncio.SelectorEventLoop):
    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._clock = clock

    def time(self) -> float:
        return self._clock.now


def run(clock: Clock, main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=lambda: Loop(clock)) as runner:
        runner.run(main)


async def hold(clock: Clock, turns: Turns, took_s: float) -> None:
    async with turns.turn(LEAST_S):
        clock.now += took_s


@pytest.mark.parametrize(("others", "share"), [(0.3, QUIET_SHARE), (0.7, SHARE), (1.0, SHARE)])
@pytest.mark.parametrize("took_s", [0.0, 0.00005, 0.001, 0.03])
@pytest.mark.parametrize("readers", [1, 300])
def test_all_of_them_together_have_a_bounded_share_however_long_a_turn_takes(
    took_s: float, readers: int, others: float, share: int
) -> None:
    """``others``: how much of the time the loop's thread computes for somebody."""
    clock = Clock()

    async def main() -> None:
        turns, began = Turns(lambda: others * clock.now), clock.now

        async def read() -> None:
            for _ in range(10):
                await hold(clock, turns, took_s)

        await asyncio.gather(*(read() for _ in range(readers)))
        count, counted_s = 10 * readers, max(took_s, LEAST_S)
        all_of_it = clock.now - began
        assert all_of_it >= (count - 1) * share * counted_s * 0.999
        assert all_of_it <= count * share * counted_s * 1.001, "and they are not kept waiting for longer"

    run(clock, main())


def test_they_come_in_order_and_who_has_left_keeps_nobody_waiting() -> None:
    clock = Clock()

    async def main() -> None:
        turns, done = Turns(lambda: clock.now), list[int]()

        async def read(number: int) -> None:
            await hold(clock, turns, 0.001)
            done.append(number)

        began = clock.now
        tasks = [asyncio.create_task(read(number)) for number in range(200)]
        await tasks[0]
        for task in tasks[3:-1]:
            task.cancel()
        await tasks[-1]
        assert done == [0, 1, 2, 199]
        assert clock.now - began == pytest.approx(3 * SHARE * 0.001 + 0.001)

    run(clock, main())


def test_who_comes_after_a_quiet_time_does_not_wait() -> None:
    clock = Clock()

    async def main() -> None:
        turns = Turns(lambda: clock.now)
        await hold(clock, turns, 0.001)
        await asyncio.sleep(1)
        before = clock.now
        await hold(clock, turns, 0.001)
        assert clock.now - before == pytest.approx(0.001)

    run(clock, main())


def test_who_is_not_called_in_time_is_told_and_comes_back_to_its_place() -> None:
    clock = Clock()

    async def main() -> None:
        turns, done = Turns(lambda: clock.now), list[str]()

        async def read(name: str) -> None:
            await hold(clock, turns, 0.001)
            done.append(name)

        async def patient() -> None:
            place, missed = turns.place(), 0
            while True:
                async with turns.turn(LEAST_S, place, clock.now + 0.0017) as come:
                    clock.now += 0.001 if come else 0.0
                if come:
                    break
                missed += 1
            done.append(f"after {missed}")

        before = [asyncio.create_task(read("before")) for _ in range(4)]
        waits = asyncio.create_task(patient())
        behind = [asyncio.create_task(read("behind")) for _ in range(8)]
        await asyncio.gather(*before, waits, *behind)
        assert done[:4] == ["before"] * 4
        found = next(place for place, name in enumerate(done) if name.startswith("after "))
        assert found <= 5, "one may pass while it is not waiting"
        assert int(done[found].split()[1]) >= 4, "20 ms, in pieces of less than two"

    run(clock, main())


def test_who_does_not_come_back_in_time_is_passed_by() -> None:
    clock = Clock()

    async def main() -> None:
        turns = Turns(lambda: clock.now)
        place = turns.place()
        first = asyncio.create_task(hold(clock, turns, 0.001))
        second = asyncio.create_task(hold(clock, turns, 0.001))
        await first
        async with turns.turn(LEAST_S, place, clock.now) as come:
            assert not come
        await second
        async with turns.turn(LEAST_S, place) as come:
            assert come

    run(clock, main())
