"""A store in its own processes, so that its library cannot end the daemon, stop it or take its memory.

Requests are lines of JSON, ``[number, verb, names, sizes, at]``; a reply is ``[number, error, value]``; ``[number]``
cancels a request. Objects are in memory shared by daemon and process, one after another from the byte ``at`` on.
``hosted.py`` is the other side.
"""

from __future__ import annotations

import asyncio
import json
import logging
import mmap
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate, count, pairwise
from typing import Any, Final, Self

from kvtierd.tiers.remote.base import Listed, RemoteError, RemoteFull, RemoteRefused, RemoteUnavailable

ERRORS: Final[Mapping[str, type[RemoteError]]] = {
    error.__name__: error for error in (RemoteUnavailable, RemoteRefused, RemoteFull)
}
MOST_LINE_BYTES: Final = 8 << 20
_UNIT_BYTES: Final = 1 << 20
_START_S: Final = 30.0
_ANSWER_S: Final = 10.0
"""Seconds that a process has to answer a cancelled call before it is killed."""
_ENDLESS: Final = "its processes do not end"

_log = logging.getLogger(__name__)


def encoded_error(error: RemoteError) -> list[Any]:
    """An error in the form of a reply."""
    return [type(error).__name__, str(error), error.of_object]


def _error(told: Sequence[Any]) -> RemoteError:
    kind, message, of_object = told
    return ERRORS[kind](message, of_object=of_object)


@dataclass(slots=True, frozen=True)
class Hosting:
    """Settings of the processes for a store's library.

    Args:
        processes: Most processes; each is started when it is needed.
        calls: Most parallel calls in a process.
        cancels: Whether a process can cancel a call; otherwise the process is killed.
        room_bytes: Shared memory of a process, and so the largest object.
        memory_bytes: Most other memory of a process.
        replaces: See :class:`kvtierd.tiers.remote.base.RemoteStore`.
    """

    processes: int
    calls: int
    cancels: bool
    room_bytes: int
    memory_bytes: int
    replaces: bool


class _Room:
    """Shared memory. Calls take parts of it and wait for each other, in order of arrival."""

    def __init__(self, nbytes: int) -> None:
        self.fd: Final = os.memfd_create("kvtier-store")
        os.ftruncate(self.fd, nbytes)
        self.bytes: Final = memoryview(mmap.mmap(self.fd, nbytes))
        self._taken: Final = bytearray(nbytes // _UNIT_BYTES)
        self._taking: Final = asyncio.Lock()
        self._freed: Final = asyncio.Event()

    async def take(self, nbytes: int) -> slice:
        """The place of ``nbytes``, until :meth:`give_back`."""
        units = -(-nbytes // _UNIT_BYTES)
        if not units:
            return slice(0, 0)
        async with self._taking:
            while (first := self._taken.find(bytes(units))) < 0:
                self._freed.clear()
                await self._freed.wait()
            self._taken[first : first + units] = b"\1" * units
        return slice(first * _UNIT_BYTES, (first + units) * _UNIT_BYTES)

    def cut(self, place: slice, sizes: Sequence[int]) -> list[memoryview]:
        """Consecutive buffers, one per object."""
        ends = list(accumulate(sizes, initial=place.start))
        return [self.bytes[start:end] for start, end in pairwise(ends)]

    def give_back(self, place: slice) -> None:
        units = slice(place.start // _UNIT_BYTES, place.stop // _UNIT_BYTES)
        self._taken[units] = bytes(units.stop - units.start)
        self._freed.set()


async def _copy(source: bytes | memoryview, to: memoryview) -> None:
    for start in range(0, len(source), _UNIT_BYTES):
        to[start : start + _UNIT_BYTES] = source[start : start + _UNIT_BYTES]
        await asyncio.sleep(0)  # let other tasks run


class _StoreProcess:
    """A process that has opened the store, and the calls that it has not answered."""

    def __init__(self, process: Process, pidfd: int, hosting: Hosting, room: _Room) -> None:
        self.callers = 0
        """Calls that have chosen this process, even if their request is not sent yet."""
        self.calls: Final[dict[int, asyncio.Future[Any]]] = {}
        self.killed = False
        self._cancels: Final = hosting.cancels
        self._room: Final = room
        self._process: Final = process
        self._pidfd = pidfd
        self._numbers: Final = count()
        self.reading: Final = asyncio.create_task(self._read(), name="remote-process")

    @classmethod
    async def start(cls, hosting: Hosting, url: str, umask: str) -> Self:
        """Starts a process. Raises RemoteError if it cannot open the store. ``url``: may have a secret in it."""
        try:
            room = _Room(hosting.room_bytes)
            try:
                numbers = map(str, (hosting.memory_bytes, umask, room.fd, os.getpid()))
                command = (sys.executable, "-P", "-m", "kvtierd.tiers.remote.hosted", *numbers)
                process = await asyncio.create_subprocess_exec(
                    *command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, limit=MOST_LINE_BYTES, pass_fds=(room.fd,)
                )
                try:
                    pidfd = os.pidfd_open(process.pid)
                except OSError:
                    process.kill()
                    raise
            finally:
                os.close(room.fd)
        except OSError as failed:
            raise RemoteUnavailable(f"a process for the store did not start: {failed.strerror}") from None
        worker = cls(process, pidfd, hosting, room)
        try:
            async with asyncio.timeout(_START_S):
                await worker.call("open", [url])
        except BaseException as failed:
            await worker.end()
            if isinstance(failed, TimeoutError):
                raise RemoteUnavailable(f"the store was not opened within {_START_S:g} s") from None
            raise
        return worker

    async def call(
        self,
        verb: str,
        names: Sequence[str] = (),
        sizes: Sequence[int] = (),
        objects: Sequence[bytes] = (),
        into: Sequence[memoryview] = (),
    ) -> Any:
        """Makes a call. Returns the value of the reply. ``objects``: to be sent. ``into``: buffers for objects that are
        read. Raises RemoteError."""
        place = await self._room.take(sum(sizes))
        number, reply = self.new_number(), asyncio.get_running_loop().create_future()
        try:
            views = self._room.cut(place, sizes)
            for view, data in zip(views, objects, strict=False):
                await _copy(data, view)
            if self.reading.done():
                raise self._gone()
            self.calls[number] = reply
            reply.add_done_callback(lambda done: done.exception())  # the caller may have given up
            self._send([number, verb, list(names), list(sizes), place.start])
            value = await asyncio.shield(reply)
            for view, size, buffer in zip(views, value if into else (), into, strict=False):
                if 0 < size <= len(buffer):
                    await _copy(view[:size], buffer[:size])
            return value
        except asyncio.CancelledError:
            self._cancel(number)
            raise
        finally:  # the process may write to the place until it has answered
            if number in self.calls:
                reply.add_done_callback(lambda _: self._room.give_back(place))
            else:
                self._room.give_back(place)
            del reply  # an error in it refers to this frame, and so to the room

    def new_number(self) -> int:
        return next(self._numbers)

    def end_listing(self, number: int) -> None:
        self._send([number])

    def kill(self) -> None:
        """Ends the process. This end does not count as a death."""
        self.killed = True
        self._kill()

    async def end(self) -> None:
        self.kill()
        await asyncio.wait([self.reading])

    @property
    def end_reason(self) -> str:
        status = self._process.returncode
        return signal.Signals(-status).name if status is not None and status < 0 else f"status {status}"

    def _cancel(self, number: int) -> None:
        reply = self.calls.get(number)
        if reply is None:
            return
        if self._cancels:
            self._send([number])
            late = asyncio.get_running_loop().call_later(_ANSWER_S, self._kill)
            reply.add_done_callback(lambda _: late.cancel())
        else:
            self.kill()

    def _send(self, message: Sequence[Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")

    def _kill(self) -> None:
        if self._pidfd >= 0:  # asyncio's own kill may take the exit status from its watcher
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            while line := await self._process.stdout.readline():
                number, error, value = json.loads(line)
                reply = self.calls.pop(number)
                if error is None:
                    reply.set_result(value)
                else:
                    reply.set_exception(_error(error))
        except (ValueError, TypeError, LookupError) as wrong:
            _log.error("the process for a store talks nonsense error=%r", wrong)
        finally:
            self._kill()
            await self._process.wait()
            os.close(self._pidfd)
            self._pidfd = -1
            while self.calls:
                self.calls.popitem()[1].set_exception(self._gone())

    def _gone(self) -> RemoteUnavailable:
        return RemoteUnavailable(f"the process for the store has ended: {self.end_reason}")


class ProcessStore:
    """Implements :class:`kvtierd.tiers.remote.base.RemoteStore`: a process with the store makes each call.

    When a process dies, its calls fail, and the next call starts another process. The breaker turns calls away if
    processes die again and again.
    """

    def __init__(self, url: str, hosting: Hosting, whole_url: str, umask: str) -> None:
        """
        Args:
            url: URL for messages, without its query.
            whole_url: URL for the process.
            umask: Octal digits of the process's umask.
        """
        self.url: Final = url
        self._hosting: Final = hosting
        self._whole_url: Final = whole_url
        self._umask: Final = umask
        self._workers: Final[list[_StoreProcess]] = []
        self._starting: asyncio.Task[None] | None = None
        self._places: Final = asyncio.Semaphore(hosting.processes * hosting.calls)
        self._closed = False

    @property
    def replaces(self) -> bool:
        return self._hosting.replaces

    async def open(self) -> None:
        """Opens the store before its first call. Raises RemoteError."""
        async with self._worker():
            pass

    async def exists(self, names: Sequence[str]) -> Sequence[bool]:
        async with self._worker() as worker:
            found: Sequence[bool] = await worker.call("exists", names)
        return found

    async def get(self, names: Sequence[str], into: Sequence[memoryview]) -> Sequence[int]:
        found: list[int] = []
        for part in self._parts([len(view) for view in into], "get"):
            async with self._worker() as worker:
                found += await worker.call("get", names[part], [len(view) for view in into[part]], into=into[part])
        return found

    async def begins(self, names: Sequence[str], nbytes: int) -> Sequence[bytes]:
        into = [memoryview(bytearray(nbytes)) for _ in names]
        async with self._worker() as worker:
            sizes = await worker.call("begins", names, [nbytes] * len(names), into=into)
        return [bytes(view[: max(size, 0)]) for view, size in zip(into, sizes, strict=True)]

    async def put(self, names: Sequence[str], objects: Sequence[bytes]) -> Sequence[RemoteError | None]:
        ends: list[RemoteError | None] = []
        for part in self._parts([len(data) for data in objects], "put"):
            async with self._worker() as worker:
                told = await worker.call("put", names[part], [len(data) for data in objects[part]], objects[part])
            ends += [None if end is None else _error(end) for end in told]
        return ends

    async def delete(self, names: Sequence[str]) -> None:
        async with self._worker() as worker:
            await worker.call("delete", names)

    async def listing(self, prefix: str) -> AsyncIterator[Listed]:
        async with self._worker() as worker:
            number = worker.new_number()
            try:
                while page := await worker.call("list", [f"{number}/{prefix}"]):
                    for name, nbytes, modified_s in page:
                        yield Listed(name, nbytes, modified_s)
            finally:
                worker.end_listing(number)

    async def close(self) -> None:
        self._closed = True
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
        for worker in list(self._workers):
            await worker.end()

    @asynccontextmanager
    async def _worker(self) -> AsyncIterator[_StoreProcess]:
        async with self._places:
            while (worker := self._idle()) is None:
                if self._closed or len(self._workers) >= 2 * self._hosting.processes:
                    raise RemoteUnavailable(f"{self.url}: {'it is closed' if self._closed else _ENDLESS}")
                if self._starting is None:
                    self._starting = asyncio.create_task(self._start(), name="remote-start")
                    self._starting.add_done_callback(self._started)
                starting = self._starting
                await asyncio.wait([starting])  # a caller with little time must not cancel the start
                if not starting.cancelled():
                    starting.result()
            worker.callers += 1
            try:
                yield worker
            finally:
                worker.callers -= 1

    def _idle(self) -> _StoreProcess | None:
        found = (each for each in self._workers if not each.killed and each.callers < self._hosting.calls)
        return min(found, key=lambda each: each.callers, default=None)

    async def _start(self) -> None:
        worker = await _StoreProcess.start(self._hosting, self._whole_url, self._umask)
        self._workers.append(worker)
        worker.reading.add_done_callback(lambda _: self._ended(worker))

    def _started(self, starting: asyncio.Task[None]) -> None:
        self._starting = None
        if not starting.cancelled():
            starting.exception()  # its callers raise it, unless they have given up

    def _ended(self, worker: _StoreProcess) -> None:
        self._workers.remove(worker)
        if not worker.killed:
            _log.warning("the process for a store died store=%s why=%r", self.url, worker.end_reason)

    def _parts(self, sizes: Sequence[int], verb: str) -> Iterator[slice]:
        """Splits objects into runs that fit a call. Raises RemoteRefused for an object that is too large."""
        first = nbytes = 0
        for i, size in enumerate(sizes):
            if size > self._hosting.room_bytes:
                reason = f"an object has {size} bytes; it must have at most {self._hosting.room_bytes}"
                raise RemoteRefused(f"{self.url}: {verb}: {reason}")
            if nbytes + size > self._hosting.room_bytes:
                yield slice(first, i)
                first, nbytes = i, 0
            nbytes += size
        yield slice(first, len(sizes))
