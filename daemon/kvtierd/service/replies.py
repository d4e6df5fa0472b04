"""What makes a repeated call harmless: each session's last replies, by call number."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import grpc

from kvtierd.service.errors import bad_argument, refused

REMEMBERED: Final = 128
"""Replies that are remembered at most, besides those that are kept."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Call(Generic[T]):
    """``task``: None where the call was given up before it began, or after it ended."""

    digest: bytes
    task: asyncio.Task[T] | None
    waiting: int = 0


class ReplyMemory(Generic[T]):
    """The calls of one session. Loop thread only.

    A call runs once, in a task of its own; a repeat waits for the same task. When the last caller that waits is
    cancelled, the call is cancelled. A call that was cancelled or refused changed nothing and is forgotten.
    """

    def __init__(self) -> None:
        self._calls: dict[int, _Call[T]] = {}

    async def answer(
        self,
        seq: int,
        digest: bytes,
        call: Callable[[], Coroutine[Any, Any, T]],
        kept: Callable[[T], bool] = lambda reply: False,
    ) -> T:
        """The reply to call number ``seq``.

        Args:
            digest: tells the call's body from every other body.
            kept: whether a reply must not be forgotten yet.
        """
        known = self._calls.get(seq)
        if known is None:
            known = self._calls[seq] = _Call(digest, asyncio.create_task(call()))
            self._forget_old(kept)
        if known.task is None:
            raise refused(grpc.StatusCode.NOT_FOUND, "GIVEN_UP", f"call {seq} of the session was given up")
        if known.digest != digest:
            raise bad_argument("seq", seq, "a number that no other call of this session had")
        task = known.task
        known.waiting += 1
        try:
            return await asyncio.shield(task)
        finally:
            known.waiting -= 1
            if not known.waiting and _is_void(task) and known.task is task:
                task.cancel()
                self._calls.pop(seq, None)

    async def give_up(self, seq: int) -> T | None:
        """Ends call number ``seq``, and refuses it should it still come. Its reply, where it had one."""
        call = self._calls.setdefault(seq, _Call(b"", None))
        task, call.task = call.task, None
        if task is None:
            return None
        task.cancel()
        await asyncio.wait([task])
        return None if _is_void(task) else task.result()

    def _forget_old(self, kept: Callable[[T], bool]) -> None:
        """Looks at the two oldest calls for each new one, so at most twice as many are remembered as are kept."""
        for _ in range(2 if len(self._calls) > REMEMBERED else 0):
            seq, call = next(iter(self._calls.items()))
            del self._calls[seq]
            runs = call.task is not None and not call.task.done()
            if runs or (call.task is not None and not _is_void(call.task) and kept(call.task.result())):
                self._calls[seq] = call


def _is_void(task: asyncio.Task[Any]) -> bool:
    """It has no reply: it runs, was cancelled or failed."""
    return not task.done() or task.cancelled() or task.exception() is not None
