"""An event loop in its own thread, and other threads that wait for coroutines on it."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Final, Generic, TypeVar

from kvtier.deadline import Fence, Stream
from kvtier.errors import ClientClosed, KvtierError
from kvtier.lease import Hold, fence_of

T = TypeVar("T")

LoopWork = Callable[[], Coroutine[Any, Any, T]]
"""Makes the coroutine; called on the loop."""
Undo = Callable[[T], Coroutine[Any, Any, None]]

_log = logging.getLogger(__name__)

_LOOK_UP_S: Final = 1.0
"""Seconds between wake-ups of a waiting thread: a signal that arrives just before the thread sleeps on a lock does not
wake it."""


class LoopThread:
    """Runs coroutines for other threads until :meth:`stop`. Thread-safe, except in its own thread."""

    def __init__(self, name: str) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._calls: set[LoopCall[Any]] = set()
        self._stopping = False
        self._farewell: asyncio.Future[LoopWork[None]]
        self._started: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()
        self._loop = self._started.result()

    @property
    def forked(self) -> bool:
        """Whether this process is a forked child, whose parent has the thread."""
        return os.getpid() != self._pid

    @property
    def running(self) -> bool:
        """False once :meth:`stop` has begun."""
        return not self._stopping

    def fence(self, leases: Iterable[Hold], stream: Stream | None) -> Fence:
        """Like :func:`kvtier.lease.fence_of`, in the caller's thread: the loop's thread has other current streams.
        Raises :class:`ClientClosed` too, like :meth:`run`."""
        self.require_usable()
        return fence_of((part for lease in leases for part in lease.groups if not part.released), stream)

    def run(self, work: LoopWork[T], undo: Undo[T] | None = None) -> T:
        """The coroutine's result, awaited on the loop.

        A caller that is interrupted (Ctrl-C) cancels the coroutine and waits for its end; a result in spite of that
        goes to ``undo``. Raises :class:`ClientClosed` after :meth:`stop` and in a forked child.
        """
        self.require_usable()
        call = LoopCall(self._loop, work, undo)
        try:
            self._begin(call)
            return call.wait()
        except Exception:
            raise  # the coroutine's error, or the loop is closed
        except BaseException:
            call.leave()
            raise
        finally:
            with self._lock:
                self._calls.discard(call)

    def submit(self, work: LoopWork[T]) -> Future[T]:
        """Begins the coroutine without waiting; cancelling the future cancels it. Raises like :meth:`run`."""
        self.require_usable()
        return asyncio.run_coroutine_threadsafe(work(), self._loop)

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Calls back on the loop. Raises like :meth:`run`."""
        self.require_usable()
        self._loop.call_soon_threadsafe(callback)

    def stop(self, farewell: LoopWork[None]) -> None:
        """Runs ``farewell``, then ends the thread; running calls raise :class:`ClientClosed`. A second caller waits for
        the end, too. Does nothing in a forked child."""
        self.stop_soon(farewell)
        if not self.forked and threading.current_thread() is not self._thread:
            self._thread.join()

    def stop_soon(self, farewell: LoopWork[None]) -> None:
        """Like :meth:`stop`, without waiting."""
        if self.forked:
            return
        with self._lock:
            if not self._stopping:
                self._stopping = True
                self._loop.call_soon_threadsafe(self._farewell.set_result, farewell)

    def require_usable(self) -> None:
        """Raises :class:`ClientClosed` in a forked child, after :meth:`stop` and in the loop's own thread."""
        if self.forked:
            message = f"the client belongs to process {self._pid}, and a forked child can have none"
            raise ClientClosed(message, reason="FORKED")
        if threading.current_thread() is self._thread:
            raise ClientClosed("called from the client's own thread, which cannot wait for itself", reason="OWN_THREAD")
        if self._stopping:
            raise _closed()

    def _begin(self, call: LoopCall[Any]) -> None:
        with self._lock:
            if self._stopping:
                raise _closed()
            self._calls.add(call)
            self._loop.call_soon_threadsafe(call.begin)

    def _serve(self) -> None:
        try:
            with asyncio.Runner() as runner:
                runner.run(self._main())
        except Exception as error:
            if self._started.done():
                raise
            self._started.set_exception(error)  # usually no file descriptor is left for the loop
        finally:
            with self._lock:
                left, self._calls = self._calls, set()
            for call in left:
                call.settle(None)

    async def _main(self) -> None:
        loop = asyncio.get_running_loop()
        self._farewell = loop.create_future()
        self._started.set_result(loop)
        farewell = await self._farewell
        await farewell()


class LoopCall(Generic[T]):
    """A coroutine on the loop, and the thread that waits for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, work: LoopWork[T], undo: Undo[T] | None) -> None:
        self._loop: Final = loop
        self._work: Final = work
        self._undo: Final = undo
        # Not a condition, as futures have: an interrupt just after its lock is taken leaves the lock held for ever, and
        # the loop's thread waits for it.
        self._over: Final[SimpleQueue[asyncio.Task[T] | None]] = SimpleQueue()
        self._task: asyncio.Task[T] | None = None
        self._left = False

    def wait(self) -> T:
        """The coroutine's result, in the waiting thread."""
        while True:
            with suppress(Empty):
                task = self._over.get(timeout=_LOOK_UP_S)
                if task is None or task.cancelled():
                    raise _closed()
                return task.result()

    def leave(self) -> None:
        """Cancels the coroutine and waits for its end: nothing touches the caller's arrays afterwards."""
        with suppress(RuntimeError, ClientClosed):  # the loop is closed, so all its coroutines have ended
            self._loop.call_soon_threadsafe(self._leave)
            self.wait()

    def begin(self) -> None:
        """Starts the coroutine. Called on the loop."""
        self._task = self._loop.create_task(self._run())
        self._task.add_done_callback(self._ended)

    async def _run(self) -> T:
        return await self._work()  # an error of making the coroutine ends the task, too

    def settle(self, task: asyncio.Task[T] | None) -> None:
        """Wakes the waiting thread: the task has ended; None: the loop has."""
        self._over.put(task)

    def _leave(self) -> None:
        self._left = True
        if self._task is None:
            self.settle(None)  # interrupted before the task began
        elif not self._task.cancel():
            self._ended(self._task)

    def _ended(self, task: asyncio.Task[T]) -> None:
        failed = task.cancelled() or task.exception() is not None
        if self._left and self._undo is not None and not failed:
            undoing = self._loop.create_task(_undone(self._undo(task.result())))
            undoing.add_done_callback(lambda _: self.settle(None))
        else:
            self.settle(None if self._left else task)


async def _undone(undo: Coroutine[Any, Any, None]) -> None:
    try:
        await undo
    except KvtierError as error:
        # The daemon takes the slots back when the client is closed or the process ends.
        _log.warning("what an interrupted call had got could not be given back at once: %s", error)


def _closed() -> ClientClosed:
    return ClientClosed("the client is closed", reason="CLOSED")
