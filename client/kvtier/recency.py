"""Telling the daemon what was read without a call, so that eviction takes it for used."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from typing import Any, Final

from grpc.aio import AioRpcError, UsageError

from kvtier.binding import Binder, send
from kvtier.errors import ClientClosed
from kvtier.session import Link
from kvtier.v1 import blocks_pb2

EVERY_S: Final = 0.1
MOST_KEYS: Final = 8_192
"""Of a group, told in one call; where more are read before it goes out, the first of them are forgotten."""
_PATIENCE_S: Final = 1.0
_MAX_COUNT: Final = 2**32 - 1

_log = logging.getLogger(__name__)


class Recency:
    """What was read of one cache since the daemon was last told. Any thread may note; the session's loop tells."""

    def __init__(self, binder: Binder) -> None:
        self._binder: Final = binder
        self._loop: Final = asyncio.get_running_loop()
        self._thread: Final = threading.get_ident()
        """The loop's."""
        self._lock: Final = threading.Lock()
        self._keys: dict[int, dict[bytes, None]] = {}
        """By group, the least recently read first."""
        self._misses: dict[int, int] = {}
        self.due = False
        """It will be told soon what was added so far."""
        binder.ahead = self.ahead

    def note(self, group: int, keys: Iterable[bytes], misses: int) -> None:
        """Blocks were read, the last one last, and so many others were asked for in vain."""
        with self._lock:
            of_group = self._keys.setdefault(group, {})
            for key in keys:
                of_group.pop(key, None)
                of_group[key] = None
            while len(of_group) > MOST_KEYS:
                del of_group[next(iter(of_group))]
            if misses:
                self._misses[group] = min(self._misses.get(group, 0) + misses, _MAX_COUNT)
        if not self.due:
            self._tell_later()

    def _tell_later(self) -> None:
        self.due = True
        with suppress(RuntimeError):  # the loop is closed, and with it the session
            if threading.get_ident() == self._thread:  # which does not have to be woken
                self._loop.call_later(EVERY_S, self._tell_soon)
            else:
                self._loop.call_soon_threadsafe(self._loop.call_later, EVERY_S, self._tell_soon)

    async def tell(self) -> None:
        """Tells now. What the daemon cannot be told is lost: it costs order, never blocks."""
        await asyncio.gather(*self._untold())

    async def ahead(self) -> None:
        """What was read so far is on its way to the daemon before a call that follows: one that makes room there shall
        not take what its own caller has just read."""
        if self.due:
            self._tell_soon()
            await asyncio.sleep(0)

    def _tell_soon(self) -> None:
        for telling in self._untold():
            self._binder.session.spawn(telling)

    def _untold(self) -> list[Coroutine[Any, Any, None]]:
        self.due = False  # before anything is taken: who adds after that sees it
        with self._lock:
            keys, self._keys = self._keys, {}
            misses, self._misses = self._misses, {}
        link = self._binder.session.live_link
        groups = keys.keys() | misses.keys()
        return [self._tell(link, group, list(keys.get(group, ())), misses.get(group, 0)) for group in groups]

    async def _tell(self, link: Link | None, group: int, keys: list[bytes], misses: int) -> None:
        binding = self._binder.bound_to(link)
        if link is None or binding is None:
            _log.debug("%d reads of group %d are not told: the daemon is away", len(keys), group)
            return
        request = blocks_pb2.TouchRequest(cache_id=binding.cache_id, group=group, keys=b"".join(keys), misses=misses)
        try:
            await send(link, lambda stubs: stubs.blocks.Touch, request, _PATIENCE_S)
        except AioRpcError as error:
            _log.debug("%d reads of group %d are not told: %s", len(keys), group, error)
        except (asyncio.CancelledError, UsageError) as error:
            with suppress(ClientClosed):
                closed = self._binder.session.channel_closed_by(error)
                _log.debug("%d reads of group %d are not told: %s", len(keys), group, closed)
