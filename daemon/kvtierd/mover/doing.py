"""Threads that read or write slots for a session, and what has to wait for them. Loop thread only."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

from kvtierd.core.ids import CacheId, LeaseId, SessionId
from kvtierd.mover.work import Unaccounted

T = TypeVar("T")

Holder = SessionId | tuple[CacheId, LeaseId]
"""Whose slots a thread is at: it may be looked for by the session or by the lease."""


THREADS: Final = 4
"""Of their own: should the device hang, and they with it, others still find threads."""


class Doing:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="kvtierd-slot-bytes")
        self._under_way: Counter[Holder] = Counter()
        self._afterwards: defaultdict[Holder, list[Callable[[], None]]] = defaultdict(list)
        self._threads: set[asyncio.Future[Any]] = set()

    async def run(self, holders: Sequence[Holder], work: Callable[[], T]) -> T:
        """``work`` in a thread. It goes on whatever becomes of the caller; if it is :class:`Unaccounted`, for ever."""
        self._under_way.update(holders)
        doing = self._loop.run_in_executor(self._pool, work)
        self._threads.add(doing)
        doing.add_done_callback(partial(self._done, holders))
        return await asyncio.shield(doing)

    def after(self, holder: Holder, action: Callable[[], None]) -> bool:
        """Does it once nothing is under way for the holder. Whether that was now."""
        if self._under_way[holder]:
            self._afterwards[holder].append(action)
            return False
        action()
        return True

    async def idle(self) -> None:
        """Returns when no thread is at anything."""
        while self._threads:
            await asyncio.wait(self._threads)

    def close(self) -> None:
        """No thread is begun any more; those that are there end with what they do."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _done(self, holders: Sequence[Holder], doing: asyncio.Future[Any]) -> None:
        self._threads.discard(doing)
        if doing.cancelled() or isinstance(doing.exception(), Unaccounted):
            return
        self._under_way.subtract(holders)
        for holder in holders:
            if not self._under_way[holder]:
                del self._under_way[holder]
                for action in self._afterwards.pop(holder, ()):
                    action()
