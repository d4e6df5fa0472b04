"""The loop's thread: results, errors, copies in the calling thread, interrupts that leave nothing, ends."""

import asyncio
import errno
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue

import pytest

from kvtier.errors import ClientClosed
from kvtier.sync.loop import LoopCall, LoopThread
from tests.limits import limited

PATIENCE_S = 20


async def nothing() -> None:
    pass


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    thread = LoopThread("test")
    yield thread
    thread.stop(nothing)


def interrupt_main() -> None:
    """What Ctrl-C does."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


def test_ctrl_c_cancels_the_call_and_waits_for_its_end(thread: LoopThread) -> None:
    ended = []

    async def work() -> None:
        asyncio.get_running_loop().call_soon(interrupt_main)
        try:
            await forever()
        finally:
            await asyncio.sleep(0.01)  # an end that takes several turns
            ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        thread.run(work)
    assert ended == [True]


def test_what_a_call_gets_although_it_was_interrupted_is_undone(thread: LoopThread) -> None:
    undone = []

    async def stubborn() -> str:
        interrupt_main()
        try:
            await forever()
        except asyncio.CancelledError:
            return "lease"  # the answer was there already

        raise AssertionError("never")

    async def undo(result: str) -> None:
        undone.append(result)

    with pytest.raises(KeyboardInterrupt):
        thread.run(stubborn, undo)
    assert undone == ["lease"]


def test_a_second_ctrl_c_does_not_wait_and_the_result_is_still_undone(thread: LoopThread) -> None:
    undone, let_go = threading.Event(), threading.Event()

    async def stubborn() -> str:
        interrupt_main()
        try:
            await forever()
        except asyncio.CancelledError:
            interrupt_main()
            await asyncio.to_thread(let_go.wait)
        return "lease"

    async def undo(_: str) -> None:
        undone.set()

    with pytest.raises(KeyboardInterrupt):
        thread.run(stubborn, undo)
    assert not undone.is_set()
    let_go.set()
    assert undone.wait(PATIENCE_S)


def test_ctrl_c_leaves_no_lock_behind_wherever_it_comes() -> None:
    """The loop's thread would wait for it for ever, and whoever closes the client for that thread."""
    loop = asyncio.new_event_loop()
    for steps in range(50):
        call, go = LoopCall(loop, nothing, None), SimpleQueue[int]()
        call.settle(None)

        def interrupt(go: SimpleQueue[int] = go) -> None:
            for _ in range(100 * go.get(timeout=PATIENCE_S)):
                pass
            interrupt_main()

        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        with pytest.raises(KeyboardInterrupt):
            go.put(steps)
            while True:
                with suppress(ClientClosed):
                    call.wait()
        interrupting.join()
        settling = threading.Thread(target=call.settle, args=[None], daemon=True)
        settling.start()
        settling.join(PATIENCE_S)
        assert not settling.is_alive(), "the call's lock is held by a thread that has left"
    loop.close()


def test_threads_that_call_while_it_stops_get_an_answer_or_a_refusal() -> None:
    thread = LoopThread("test")

    async def work() -> int:
        await asyncio.sleep(0)
        return 1

    def calls() -> int:
        made = 0
        while True:
            try:
                made += thread.run(work)
            except ClientClosed:
                return made

    with ThreadPoolExecutor(4) as pool:
        callers = [pool.submit(calls) for _ in range(4)]
        for _ in range(20):
            thread.run(work)
        thread.stop(nothing)
        for caller in callers:
            caller.result(PATIENCE_S)


def test_where_no_loop_can_be_made_nobody_waits_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_many_open_files() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("asyncio.events.new_event_loop", too_many_open_files)
    with pytest.raises(OSError, match="Too many open files"), limited(PATIENCE_S):
        LoopThread("test")


def test_its_own_thread_cannot_wait_for_itself(thread: LoopThread) -> None:
    async def work() -> None:
        thread.run(nothing)

    with pytest.raises(ClientClosed) as refused:
        thread.run(work)
    assert refused.value.reason == "OWN_THREAD"
