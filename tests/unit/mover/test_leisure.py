"""What the loop does at leisure gives way to all that is ready, one piece a turn, and is never put off for good."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any

import pytest

from kvtierd.mover import leisure as module
from kvtierd.mover.leisure import PATIENCE, Leisure
from kvtierd.mover.mailbox import Mailbox


def run(test: Callable[[Leisure], Coroutine[Any, Any, None]]) -> None:
    """On a loop with such a selector."""
    leisure = Leisure()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(leisure)) as runner:
        runner.run(asyncio.wait_for(test(leisure), 30))


def test_what_takes_many_turns_is_over_before_the_first_deferred_piece() -> None:
    async def test(leisure: Leisure) -> None:
        done: list[str] = []
        idle = asyncio.Event()
        for piece in ("first", "second"):
            leisure.defer(done.append, piece)
        leisure.defer(idle.set)
        for turn in range(PATIENCE - 2):
            await asyncio.sleep(0)
            done.append(f"turn {turn}")
        await idle.wait()
        assert done == [*(f"turn {turn}" for turn in range(PATIENCE - 2)), "first", "second"]

    run(test)


def test_a_loop_that_is_never_idle_does_one_piece_in_so_many_turns() -> None:
    async def test(leisure: Leisure) -> None:
        turns = 0
        called: list[int] = []
        for _ in range(4):
            leisure.defer(lambda: called.append(turns))
        while len(called) < 4:
            await asyncio.sleep(0)
            turns += 1
        apart = [after - before for before, after in pairwise(called)]
        assert called[0] <= PATIENCE
        assert set(apart) == {PATIENCE}

    run(test)


def test_what_threads_post_is_drained_although_the_loop_sleeps_and_gives_way_where_it_does_not() -> None:
    async def test(leisure: Leisure) -> None:
        taken: list[int] = []
        arrived = asyncio.Event()

        def drain() -> None:
            taken.extend(mailbox.take(1, lambda value: 1))
            arrived.set()

        mailbox: Mailbox[int] = Mailbox(asyncio.get_running_loop(), drain, leisure.defer)
        thread = threading.Thread(target=mailbox.post, args=([1, 2],))
        thread.start()
        await arrived.wait()
        assert taken == [1]
        for _ in range(PATIENCE - 2):
            await asyncio.sleep(0)
        assert taken == [1]  # the rest comes when nothing else is ready
        arrived.clear()
        await arrived.wait()
        assert taken == [1, 2]
        thread.join()

    run(test)


def test_what_one_piece_defers_comes_after_those_that_wait() -> None:
    async def test(leisure: Leisure) -> None:
        done: list[str] = []
        idle = asyncio.Event()

        def first() -> None:
            done.append("first")
            leisure.defer(done.append, "later")
            leisure.defer(idle.set)

        leisure.defer(first)
        leisure.defer(done.append, "second")
        await idle.wait()
        assert done == ["first", "second", "later"]

    run(test)


def test_what_is_expected_is_waited_for_by_a_loop_that_has_nothing_else_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EXPECTED_S", 20.0)

    async def test(leisure: Leisure) -> None:
        done: list[str] = []
        idle, loop = asyncio.Event(), asyncio.get_running_loop()

        def somebody() -> None:
            time.sleep(0.02)  # takes far longer than the loop to find itself idle
            loop.call_soon_threadsafe(done.append, "expected")

        leisure.defer(done.append, "deferred")
        leisure.defer(idle.set)
        leisure.expect()
        thread = threading.Thread(target=somebody)
        thread.start()
        await idle.wait()
        assert done == ["expected", "deferred"]
        thread.join()

    run(test)


def test_what_is_expected_and_does_not_come_puts_nothing_off_for_long() -> None:
    async def test(leisure: Leisure) -> None:
        idle = asyncio.Event()
        leisure.defer(idle.set)
        leisure.expect()
        await idle.wait()

    run(test)


def test_what_is_deferred_gives_way_to_a_thread_that_hurries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HURRY_S", 20.0)

    async def test(leisure: Leisure) -> None:
        done: list[str] = []
        idle, loop = asyncio.Event(), asyncio.get_running_loop()
        hurries = True

        def somebody() -> None:
            nonlocal hurries
            time.sleep(0.02)  # takes far longer than the loop to find itself idle
            hurries = False
            loop.call_soon_threadsafe(done.append, "prepared")

        leisure.hurries = lambda: hurries
        leisure.defer(done.append, "deferred")
        leisure.defer(idle.set)
        thread = threading.Thread(target=somebody)
        thread.start()
        await idle.wait()
        assert done == ["prepared", "deferred"]
        thread.join()

    run(test)


def test_a_thread_that_never_ends_to_hurry_puts_nothing_off_for_long() -> None:
    async def test(leisure: Leisure) -> None:
        idle = asyncio.Event()
        leisure.hurries = lambda: True
        leisure.defer(idle.set)
        await idle.wait()

    run(test)


def test_what_comes_in_is_seen_by_a_loop_that_is_never_idle() -> None:
    async def test(leisure: Leisure) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            seen = asyncio.Event()
            asyncio.get_running_loop().add_reader(ours, seen.set)
            await asyncio.sleep(0)
            theirs.send(b"1")
            while not seen.is_set():  # noqa: ASYNC110  it is to be busy
                await asyncio.sleep(0)
            asyncio.get_running_loop().remove_reader(ours)

    run(test)


def test_a_loop_that_is_busy_asks_the_kernel_only_so_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLLS_APART_S", 60.0)

    async def test(leisure: Leisure) -> None:
        asked = 0

        def count() -> None:
            nonlocal asked
            asked += 1

        await asyncio.sleep(0.001)
        leisure.between = count
        for _ in range(100):
            await asyncio.sleep(0)
        assert asked == 0
        await asyncio.sleep(0.001)
        assert asked == 1
        leisure.between = None

    run(test)
