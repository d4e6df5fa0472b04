"""What makes a repeated call harmless: each session's last replies, by sequence number."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from kvtierd.service.errors import bad_argument

REMEMBERED: Final = 128

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Entry(Generic[T]):
    digest: bytes
    task: asyncio.Future[T]
    waiting: int = 0


class ReplyMemory(Generic[T]):
    """The last ``REMEMBERED`` answers. Loop thread only.

    A call runs once, in a task of its own, unless it does not have to wait: whoever repeats it while it runs waits for
    the same task. When the last who waits is cancelled, so is the call. What was cancelled or refused changed nothing
    and is forgotten: a repeat runs anew, for instance after its session has come back.
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[int, _Entry[T]] = OrderedDict()

    async def answer(
        self, seq: int, digest: bytes, call: Callable[[], Coroutine[Any, Any, T]], *, waits: bool = True
    ) -> T:
        """The reply to the call numbered ``seq``; ``digest`` tells its body from any other. ``waits``: it may."""
        entry = self._entries.get(seq)
        if entry is None:
            task = asyncio.create_task(call()) if waits else _ended(call())
            entry = self._entries[seq] = _Entry(digest, task)
            self._forget_old()
        elif entry.digest != digest:
            raise bad_argument("seq", seq, "a number that no other call of this session had")
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

    def _forget(self, seq: int, entry: _Entry[T]) -> None:
        if self._entries.get(seq) is entry:
            del self._entries[seq]

    def _forget_old(self) -> None:
        # Calls still running are never forgotten: a repeat of one would run beside it.
        while len(self._entries) > REMEMBERED:
            oldest = next((seq for seq, entry in self._entries.items() if entry.task.done()), None)
            if oldest is None:
                return
            del self._entries[oldest]


def _ended(call: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
    """Runs a call that never waits: a task would cost it a tenth of a millisecond."""
    ended: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    try:
        call.send(None)
    except StopIteration as end:
        ended.set_result(end.value)
    except Exception as error:  # noqa: BLE001  it is raised where the answer is awaited
        ended.set_exception(error)
    else:
        call.close()
        raise AssertionError("a call waits that was said not to")
    return ended
