"""An event loop in a thread of its own, and threads that wait for coroutines on it."""

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

from kvtier.errors import ClientClosed, KvtierError
from kvtier.lease import Lease, fence_of
from kvtier.memory.gpu import Fence, Stream

T = TypeVar("T")

Work = Callable[[], Coroutine[Any, Any, T]]
"""Makes the coroutine; called on the loop."""
Undo = Callable[[T], Coroutine[Any, Any, None]]

_log = logging.getLogger(__name__)

_LOOK_UP_S: Final = 1.0
"""A signal that comes between Python's last look for one and the sleep on a lock wakes nobody: the sleeper looks up."""


class LoopThread:
    """Runs coroutines for other threads until :meth:`stop`. All methods may be called from any thread but its own."""

    def __init__(self, name: str) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._calls: set[Call[Any]] = set()
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop
        self._farewell: asyncio.Future[Work[None]]
        self._started = threading.Event()
        self._fault: Exception | None = None
        """Why there is no loop."""
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()
        self._started.wait()
        if self._fault is not None:
            raise self._fault

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that made it: the thread stayed behind in the parent."""
        return os.getpid() != self._pid

    @property
    def running(self) -> bool:
        """False once it is being stopped."""
        return not self._stopping

    def fence(self, leases: Iterable[Lease], stream: Stream | None) -> Fence:
        """As :func:`kvtier.memory.gpu.fence_of`: here, since the loop's thread has other current streams.

        Raises also :class:`ClientClosed`, as :meth:`run` does.
        """
        self.require_usable()
        return fence_of((lease for lease in leases if not lease.released), stream)

    def run(self, work: Work[T], undo: Undo[T] | None = None) -> T:
        """The coroutine's result, awaited on the loop.

        A caller that is interrupted (Ctrl-C) cancels it and waits until it has ended; a result that came all the same
        is given to ``undo``. Raises :class:`ClientClosed` after :meth:`stop` and in a forked child.
        """
        self.require_usable()
        call = Call(self._loop, work, undo)
        try:
            self._begin(call)
            return call.wait()
        except Exception:
            raise  # the coroutine's own, or there is no loop
        except BaseException:
            call.leave()
            raise
        finally:
            with self._lock:
                self._calls.discard(call)

    def submit(self, work: Work[T]) -> Future[T]:
        """Begins the coroutine and does not wait for it; who cancels the future cancels it. Raises as :meth:`run`."""
        self.require_usable()
        return asyncio.run_coroutine_threadsafe(work(), self._loop)

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Calls back on the loop. Raises as :meth:`run`."""
        self.require_usable()
        self._loop.call_soon_threadsafe(callback)

    def stop(self, farewell: Work[None]) -> None:
        """Runs ``farewell``, then ends the thread; calls still under way raise :class:`ClientClosed`.

        Whoever comes second waits for the end, too. In a forked child nothing happens.
        """
        if self.forked:
            return
        self.stop_soon(farewell)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def stop_soon(self, farewell: Work[None]) -> None:
        """The same without waiting for it."""
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

    def _begin(self, call: Call[Any]) -> None:
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
            if self._started.is_set():
                raise
            self._fault = error  # no descriptor for a loop, mostly
        finally:
            self._started.set()
            with self._lock:
                left, self._calls = self._calls, set()
            for call in left:
                call.settle(None)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._farewell = self._loop.create_future()
        self._started.set()
        farewell = await self._farewell
        await farewell()


class Call(Generic[T]):
    """One coroutine on the loop and the one thread that waits for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Work[T], undo: Undo[T] | None) -> None:
        self._loop: Final = loop
        self._work: Final = work
        self._undo: Final = undo
        # Not a condition, as futures have: one that is interrupted when it has just been taken is held for ever, and
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
        with suppress(RuntimeError, ClientClosed):  # the loop is closed, hence every coroutine on it over
            self._loop.call_soon_threadsafe(self._leave)
            self.wait()

    def begin(self) -> None:
        """On the loop."""
        self._task = self._loop.create_task(self._work())
        self._task.add_done_callback(self._ended)

    def settle(self, task: asyncio.Task[T] | None) -> None:
        """The task has ended; None: the loop has."""
        self._over.put(task)

    def _leave(self) -> None:
        self._left = True
        if self._task is None:
            self.settle(None)  # interrupted before it was handed over
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
        # The daemon gives back what this process holds when the client is closed, or the process ends.
        _log.warning("what an interrupted call had got could not be given back at once: %s", error)


def _closed() -> ClientClosed:
    return ClientClosed("the client is closed", reason="CLOSED")
