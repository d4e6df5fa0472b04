"""The events' side of a replay: what they say happened, and whether it is what the daemon says is so."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from kvtier.aio import AsyncClient
from kvtier.cache import Cache
from kvtier.errors import DaemonError
from kvtier.events import Event, Gap, SnapshotEnd, WatchItem
from kvtier.residency import Mismatch, ResidencyTable
from kvtier.session import Backoff
from kvtier.types import Cursor, EventType

_HEARTBEAT_S: Final = 0.5
_CATCH_UP_S: Final = 60.0
_LISTING_ATTEMPTS: Final = 200


@dataclass(slots=True)
class Moved:
    """Along one edge: blocks, and bytes as their events state them."""

    blocks: int = 0
    bytes: int = 0


class EventAccount:
    """Follows the event stream from a snapshot on and keeps every block's residency by it.

    Enter it before the first request. :attr:`events`, :attr:`gaps`, :attr:`moves` (by "device>host") and
    :attr:`removed` count what came after the snapshot, for the cache alone except for ``gaps``.
    """

    def __init__(self, client: AsyncClient, cache: Cache) -> None:
        self.events = 0
        self.gaps = 0
        self.removed = 0
        self.moves: dict[str, Moved] = {}
        self._cache = cache
        self._watch = client.watch(snapshot=True, heartbeats=True, heartbeat_s=_HEARTBEAT_S)
        self._table = ResidencyTable()
        self._started = False
        self._fence: Cursor | None = None
        self._held: deque[WatchItem] = deque()
        self._news = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None

    async def mismatches(self) -> list[Mismatch]:
        """Blocks whose residency by the events differs from the daemon's listing, at the listing's own event.

        To be asked when the cache is all but quiet: a listing of several pages counts only if nothing happened
        between them. Raises :class:`DaemonError` where it never is, or the stream never gets there.
        """
        backoff = Backoff(most=0.25)
        for _ in range(_LISTING_ATTEMPTS):
            # From here on nothing is applied: the table is never ahead of the listing that is taken next.
            self._move_fence(self._watch.cursor)
            listing = await self._listing()
            if listing is not None:
                listed, as_of = listing
                await self._reach(as_of)
                return self._table.differences(self._cache.name, self._cache.group, listed)
            self._move_fence(None)
            await asyncio.sleep(backoff.next())
        raise DaemonError("the cache never kept still for a listing", reason="NEVER_QUIET")

    async def __aenter__(self) -> Self:
        self._reader = asyncio.create_task(self._read())
        self._reader.add_done_callback(lambda _: self._news.set())
        try:
            await self._until(lambda: self._started)
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def _read(self) -> None:
        async for item in self._watch:
            self._held.append(item)
            self._apply_held()
            self._news.set()

    def _take(self, item: WatchItem) -> None:
        self._table.apply(item)
        match item:
            case SnapshotEnd():
                self._started = True
            case Gap():
                self.gaps += 1
            case Event() if self._started and item.cache == self._cache.name:
                self._count(item)
            case _:
                pass

    def _count(self, event: Event) -> None:
        self.events += 1
        if event.type is EventType.REMOVED:
            self.removed += len(event.keys)
        elif event.moved_from is not None and event.moved_to is not None:
            moved = self.moves.setdefault(f"{event.moved_from}>{event.moved_to}", Moved())
            moved.blocks += len(event.residency)
            moved.bytes += event.moved_bytes

    async def _listing(self) -> tuple[dict[bytes, int], Cursor] | None:
        """All blocks' residency at one event; None where something happened between the pages."""
        listed: dict[bytes, int] = {}
        as_of: Cursor | None = None
        async for page in self._cache.pages():
            if as_of is not None and page.as_of != as_of:
                return None
            as_of = page.as_of
            listed.update((block.key, block.residency) for block in page.blocks)
        return None if as_of is None else (listed, as_of)

    async def _reach(self, cursor: Cursor) -> None:
        """Applies events up to ``cursor`` and none beyond it."""
        self._move_fence(cursor)
        try:
            async with asyncio.timeout(_CATCH_UP_S):
                await self._until(lambda: self._watch.cursor is not None and self._watch.cursor >= cursor)
        except TimeoutError as error:
            message = f"the watch stands at {self._watch.cursor}, the daemon at {cursor}"
            raise DaemonError(message, reason="WATCH_STALLED") from error

    def _move_fence(self, cursor: Cursor | None) -> None:
        """From now on nothing beyond ``cursor`` is applied; None: everything is."""
        self._fence = cursor
        self._apply_held()

    def _apply_held(self) -> None:
        """Takes what came, in its order, as far as the fence."""
        while self._held:
            item = self._held[0]
            if self._fence is not None and isinstance(item, Event) and item.cursor > self._fence:
                return
            self._take(self._held.popleft())

    async def _until(self, reached: Callable[[], bool]) -> None:
        """Waits for the reader; fails as it does."""
        while not reached():
            if self._reader is None or self._reader.done():
                raise DaemonError("the watch has ended", reason="WATCH_ENDED") from _failure(self._reader)
            self._news.clear()
            await self._news.wait()

    async def _stop(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait([self._reader])
        await self._watch.aclose()


def _failure(task: asyncio.Task[None] | None) -> BaseException | None:
    return task.exception() if task is not None and task.done() and not task.cancelled() else None
