"""An event loop in a thread of its own, and threads that wait for coroutines on it.

Whoever waits also lends its thread to the coroutine that it waits for: copies of the caller's arrays run there, and
several callers copy side by side.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from contextvars import copy_context
from queue import Empty, SimpleQueue
from typing import Any, Final, Generic, TypeVar

from kvtier import transfer
from kvtier.errors import ClientClosed, KvtierError
from kvtier.fences import Fence, Stream, fence_of
from kvtier.lease import Lease
from kvtier.session import require_timeout

T = TypeVar("T")

Work = Callable[[], Coroutine[Any, Any, T]]
"""Makes the coroutine; called on the loop."""

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

    def usable_here(self, timeout: float | None) -> bool:
        """Whether what needs no loop may be done in the calling thread: not in a forked child, nor after :meth:`stop`.

        Raises :class:`InvalidArgument` for a bad ``timeout``, though nothing waits.
        """
        if timeout is not None:
            require_timeout(timeout)
        return not self._stopping and os.getpid() == self._pid

    def fence(self, leases: Iterable[Lease], stream: Stream | None) -> Fence:
        """As :func:`kvtier.fences.fence_of`: here, since the loop's thread has other current streams.

        Raises also :class:`ClientClosed`, as :meth:`run` does.
        """
        self.require_usable()
        return fence_of((lease for lease in leases if not lease.released), stream)

    def run(self, work: Work[T], undo: Callable[[T], Coroutine[Any, Any, None]] | None = None) -> T:
        """The coroutine's result, awaited on the loop.

        A caller that is interrupted (Ctrl-C) cancels it and waits until it has ended; a result that came all the same
        is given to ``undo``. Raises :class:`ClientClosed` after :meth:`stop` and in a forked child.
        """
        self.require_usable()
        call = Call(self._loop, work, undo)
        try:
            self._begin(call)
            over = call.wait()
        except ClientClosed:
            raise
        except BaseException:
            call.leave()
            raise
        finally:
            with self._lock:
                self._calls.discard(call)
        return over()

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

    def _begin(self, call: Call[Any]) -> None:
        with self._lock:
            self._calls.add(call)
            if self._stopping:
                raise _closed()
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
                call.settle_closed()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._farewell = self._loop.create_future()
        self._started.set()
        farewell = await self._farewell
        await farewell()

    def require_usable(self) -> None:
        """Raises :class:`ClientClosed` in a forked child and in the loop's own thread."""
        if self.forked:
            message = f"the client belongs to process {self._pid}, and a forked child can have none"
            raise ClientClosed(message, reason="FORKED")
        if threading.current_thread() is self._thread:
            raise ClientClosed("called from the client's own thread, which cannot wait for itself", reason="OWN_THREAD")


class Call(Generic[T]):
    """One coroutine on the loop and the one thread that waits for it."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Work[T],
        undo: Callable[[T], Coroutine[Any, Any, None]] | None,
    ) -> None:
        self._loop: Final = loop
        self._work: Final = work
        self._undo: Final = undo
        # A lock alone is let go of wherever a signal comes. A condition may be interrupted when it has just been taken:
        # it would be held for ever, and the loop's thread wait for it.
        self._lock: Final = threading.Lock()
        self._changed: Final[SimpleQueue[None]] = SimpleQueue()
        # Shared with the waiting thread, under `_lock`:
        self._copies: deque[_Copy] = deque()
        self._over: Callable[[], T] | None = None
        self._left = False
        # The loop's thread only:
        self._task: asyncio.Task[T] | None = None
        self._abandoned = False

    # -- the waiting thread ----------------------------------------------------------------------------------------

    def wait(self, *, lend: bool = True) -> Callable[[], T]:
        """What gives the coroutine's result once it is over. ``lend``: carries out its copies meanwhile."""
        while True:
            with self._lock:
                if self._over is not None:
                    return self._over
                copy = self._copies[0] if lend and self._copies else None
            if copy is None:
                with suppress(Empty):
                    self._changed.get(timeout=_LOOK_UP_S)
                continue
            # It stays first in line until it is done: an interrupted one must not be lost, the coroutine waits for it.
            copy.carry_out()
            with self._lock:
                self._copies.popleft()

    def leave(self) -> None:
        """Cancels the coroutine and waits for its end: nothing touches the caller's arrays afterwards."""
        with self._lock:
            self._left, self._over = True, None
            copies = list(self._copies)
        try:
            for copy in copies:
                copy.end(None)
            self._loop.call_soon_threadsafe(self._abandon)
        except RuntimeError:
            return  # the loop is closed, hence every coroutine on it over
        self.wait(lend=False)

    # -- the loop's thread -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        if self._abandoned:
            return
        context = copy_context()
        context.run(transfer.copy_in.set, self.copy)
        self._task = self._loop.create_task(self._work(), context=context)
        self._task.add_done_callback(self._ended)

    def copy(self, work: Callable[[], None]) -> asyncio.Future[None]:
        """Has the waiting thread carry out a copy."""
        copy = _Copy(work, self._loop)
        with self._lock:
            if self._left:
                copy.done.cancel()
            else:
                self._copies.append(copy)
                self._changed.put(None)
        return copy.done

    def settle_closed(self) -> None:
        """The loop is gone. Does nothing where the call is over."""

        def closed() -> T:
            raise _closed()

        self._settle(closed)

    def _abandon(self) -> None:
        self._abandoned = True
        if self._task is None:
            self.settle_closed()
        elif self._task.done():
            self._ended(self._task)
        else:
            self._task.cancel()

    def _ended(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self.settle_closed()
        elif self._abandoned and self._undo is not None and task.exception() is None:
            undoing = self._loop.create_task(_undone(self._undo(task.result())))
            undoing.add_done_callback(lambda _: self.settle_closed())
        else:
            self._settle(task.result)

    def _settle(self, over: Callable[[], T]) -> None:
        with self._lock:
            if self._over is None:
                self._over = over
                self._changed.put(None)


class _Copy:
    """A copy that a coroutine awaits and another thread carries out."""

    def __init__(self, work: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
        self._work = work
        self._loop = loop
        self.done: asyncio.Future[None] = loop.create_future()

    def carry_out(self) -> None:
        try:
            self._work()
        except Exception as error:  # noqa: BLE001  it is raised where the copy is awaited
            self.end(error)
        else:
            self._loop.call_soon_threadsafe(self._set, None, False)

    def end(self, error: Exception | None) -> None:
        """Not carried out: with an error, or cancelled."""
        self._loop.call_soon_threadsafe(self._set, error, error is None)

    def _set(self, error: Exception | None, cancelled: bool) -> None:
        if self.done.done():
            return
        if cancelled:
            self.done.cancel()
        elif error is not None:
            self.done.set_exception(error)
        else:
            self.done.set_result(None)


async def _undone(undo: Coroutine[Any, Any, None]) -> None:
    try:
        await undo
    except KvtierError as error:
        # The daemon gives back what this process holds when the client is closed, or the process ends.
        _log.warning("what an interrupted call had got could not be given back at once: %s", error)


def _closed() -> ClientClosed:
    return ClientClosed("the client is closed", reason="CLOSED")
