"""What makes a repeated call harmless: each session's last replies, by sequence number."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar, cast

import grpc

from kvtierd.service.errors import CallRefused, bad_argument, refused

REMEMBERED: Final = 128

_NOTHING: Final = object()

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Entry(Generic[T]):
    """A call that may wait is a ``task``, also when it is over; of one that does not only the ``reply`` is kept."""

    digest: bytes
    task: asyncio.Task[T] | None
    reply: T | None = None
    waiting: int = 0
    given_up: bool = False
    """It was recalled before it began, so it never will."""

    @property
    def is_over(self) -> bool:
        return self.task is None or self.task.done()


class ReplyMemory(Generic[T]):
    """The last ``REMEMBERED`` answers. Loop thread only.

    A call runs once, in a task of its own, unless it does not have to wait: whoever repeats it while it runs waits for
    the same task. When the last who waits is cancelled, so is the call. What was cancelled or refused changed nothing
    and is forgotten: a repeat runs anew, for instance after its session has come back.
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[int, _Entry[T]] = OrderedDict()

    async def answer(
        self,
        seq: int,
        digest: bytes,
        call: Callable[[], Coroutine[Any, Any, T]],
        *,
        waits: bool = True,
        at_once: bool = False,
    ) -> T:
        """The reply to the call numbered ``seq``; ``digest`` tells its body from any other. ``waits``: it may.
        ``at_once``: it begins in this turn, and gets its task only where it waits; up to there no task is
        running."""
        entry = self._known(seq, digest)
        if entry is None:
            entry = self._entries[seq] = self._begun(digest, call(), waits, at_once)
            self._forget_old()
        return await self._reply(seq, entry)

    async def recall(self, seq: int, digest: bytes) -> T:
        """The reply to the call numbered ``seq``, which is not begun for it. Raises NOT_FOUND, reason NEVER_BEGAN,
        where there is none; the call, should it still come, is refused then."""
        entry = self._known(seq, digest)
        if entry is None:
            entry = self._entries[seq] = _Entry(digest, None, given_up=True)
            self._forget_old()
        return await self._reply(seq, entry)

    def _known(self, seq: int, digest: bytes) -> _Entry[T] | None:
        entry = self._entries.get(seq)
        if entry is not None and entry.digest != digest:
            raise bad_argument("seq", seq, "a number that no other call of this session had")
        return entry

    async def _reply(self, seq: int, entry: _Entry[T]) -> T:
        if entry.given_up:
            raise _never_began(seq)
        if entry.task is None:
            return cast(T, entry.reply)
        entry.waiting += 1
        try:
            return await asyncio.shield(entry.task)
        finally:
            entry.waiting -= 1
            if not entry.waiting and not entry.task.done():
                entry.task.cancel()
                self._forget(seq, entry)
            elif entry.task.done() and (entry.task.cancelled() or entry.task.exception() is not None):
                self._forget(seq, entry)

    def _begun(self, digest: bytes, call: Coroutine[Any, Any, T], waits: bool, at_once: bool) -> _Entry[T]:
        if waits and not at_once:
            return _Entry(digest, asyncio.create_task(call))
        try:
            waits_for = _first_step(call)
        except StopIteration as end:
            return _Entry(digest, None, end.value)
        if not waits:
            call.close()
            raise AssertionError("a call waits that was said not to")
        _hand_over(waits_for, taken=False)
        return _Entry(digest, asyncio.create_task(_Begun(call, waits_for)))

    def _forget(self, seq: int, entry: _Entry[T]) -> None:
        if self._entries.get(seq) is entry:
            del self._entries[seq]

    def _forget_old(self) -> None:
        # Calls still running are never forgotten: a repeat of one would run beside it.
        while len(self._entries) > REMEMBERED:
            oldest = next((seq for seq, entry in self._entries.items() if entry.is_over), None)
            if oldest is None:
                return
            del self._entries[oldest]


def _never_began(seq: int) -> CallRefused:
    message = f"call {seq} of the session was given up before it began, or has changed nothing"
    return refused(grpc.StatusCode.NOT_FOUND, "NEVER_BEGAN", message)


class _Begun(Coroutine[Any, Any, T]):
    """A coroutine whose first step has been taken. Whoever runs it waits for the same as if they had taken it."""

    __slots__ = ("_steps", "_waits_for")

    def __init__(self, steps: Coroutine[Any, Any, T], waits_for: object) -> None:
        self._steps = steps
        self._waits_for: object = waits_for

    def send(self, value: object) -> Any:
        if self._waits_for is not _NOTHING:
            waits_for, self._waits_for = self._waits_for, _NOTHING
            _hand_over(waits_for, taken=True)
            return waits_for
        return self._steps.send(value)

    def throw(self, *error: Any) -> Any:
        self._waits_for = _NOTHING
        return self._steps.throw(*error)

    def close(self) -> None:
        self._steps.close()

    def __await__(self) -> Generator[Any, Any, T]:
        raise NotImplementedError("it is for a task to run")


def _first_step(call: Coroutine[Any, Any, T]) -> Any:
    """What the call waits for first. No task runs meanwhile: what binds itself to the running one, such as
    ``asyncio.timeout``, must fail here, for the caller's is the wrong one, and the call's own is not yet there."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task(loop)
    if task is None:
        return call.send(None)
    asyncio.tasks._leave_task(loop, task)
    try:
        return call.send(None)
    finally:
        asyncio.tasks._enter_task(loop, task)


def _hand_over(waits_for: Any, *, taken: bool) -> None:
    """A future must know whether a coroutine that yielded it has a task that took it; until then others may wait for
    it."""
    if waits_for is not None:  # what gives up its turn yields nothing
        waits_for._asyncio_future_blocking = taken
