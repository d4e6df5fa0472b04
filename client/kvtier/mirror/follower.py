"""Keeping a mirror exact: a snapshot, then events; another snapshot where events were lost."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from kvtier.errors import ClientClosed, DeadlineExceeded, InvalidArgument, KvtierError
from kvtier.events import Event, Gap, SnapshotEnd, SnapshotSlice, SnapshotStart
from kvtier.kinds import is_number, quoted, require_kind
from kvtier.mirror.index import MirrorIndex
from kvtier.mirror.reading import MirrorState, MirrorView
from kvtier.session import Backoff, require_timeout
from kvtier.types import Cursor
from kvtier.watch import Watch, require_heartbeat

if TYPE_CHECKING:
    from kvtier.aio import AsyncClient

DEFAULT_MIRROR_HEARTBEAT_S: Final = 1.0
DEFAULT_MIRROR_TIMEOUT_S: Final = 30.0
_STEADY_S: Final = 5.0
"""Who was exact for so long takes its next snapshot at once: losing events is not its habit."""


class Mirror(MirrorView):
    """An exact local index of the blocks of some caches of one daemon::

        async with kvtier.Mirror(client, caches=["llama"]) as mirror:
            blocks = mirror.longest_prefix(keys)

    Entering it returns once it is exact, or raises what keeps it from that, after ``timeout`` seconds
    :class:`kvtier.errors.DeadlineExceeded`. From then on it follows the daemon over restarts and losses by itself: what
    it has lost it makes up for with a snapshot, and answers from what it knew, marked stale, until that is complete; so
    much memory it takes twice then. It ends with its client, stale.

    ``caches``: by name, whether they exist yet or not; takes the right to watch each. ``heartbeat_s``: how often the
    daemon says that nothing happened; four of these without a word and the mirror is stale.
    """

    def __init__(
        self,
        client: AsyncClient,
        caches: Collection[str],
        *,
        heartbeat_s: float = DEFAULT_MIRROR_HEARTBEAT_S,
        timeout: float = DEFAULT_MIRROR_TIMEOUT_S,
    ) -> None:
        super().__init__(caches)
        require_heartbeat(heartbeat_s)
        require_timeout(timeout)
        self._client = client
        self._heartbeat_s = heartbeat_s
        self._timeout = timeout
        self._news = asyncio.Event()
        self._following: asyncio.Task[None] | None = None
        self._exact_at: float | None = None

    def start(self) -> None:
        """Begins to follow, and waits for nothing."""
        if self._following is None:
            self._following = asyncio.create_task(self._follow())
            self._following.add_done_callback(lambda _: self._news.set())

    async def settled(self, timeout: float) -> None:
        """Returns once it is exact or has met a :attr:`problem`. Raises :class:`kvtier.errors.DeadlineExceeded` where
        it goes on trying."""
        try:
            async with asyncio.timeout(timeout):
                while not self._has(None) and self.problem is None:
                    await self._news_of_it()
        except TimeoutError as error:
            raise DeadlineExceeded(f"no snapshot within {timeout:g} s", reason="MIRROR_BEHIND") from error

    async def synced(self, cursor: Cursor | None = None, *, timeout: float | None = None) -> None:
        """Returns once it is exact, and knows every event up to ``cursor``.

        Raises :class:`kvtier.errors.DeadlineExceeded` after ``timeout`` seconds, and :class:`ClientClosed` where it
        never will be: it was closed, or its client was. ``timeout`` 0 only looks; None waits for ever.
        """
        if cursor is not None:
            require_kind("cursor", cursor, Cursor, "a kvtier.Cursor")
        if timeout is not None and not is_number(timeout, 0, math.inf):
            raise InvalidArgument("timeout", quoted(timeout), "0 seconds or more")
        try:
            async with asyncio.timeout(timeout):
                while not self._has(cursor):
                    await self._news_of_it()
        except TimeoutError as error:
            message = f"the mirror is {self.state} at {self.cursor}, not exact at {cursor or 'any event'}"
            raise DeadlineExceeded(message, reason="MIRROR_BEHIND") from error

    async def aclose(self) -> None:
        """Stops following; what it knows stays, and is stale."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])
            if not self._following.cancelled():
                self._following.result()

    async def __aenter__(self) -> Self:
        try:
            self.start()
            await self.settled(self._timeout)
            if self.problem is not None:
                raise self.problem
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _has(self, cursor: Cursor | None) -> bool:
        exact = self.state is MirrorState.EXACT
        return exact and (cursor is None or (self._cursor is not None and self._cursor >= cursor))

    async def _news_of_it(self) -> None:
        """Raises :class:`ClientClosed`, or the fault that has ended it, where nothing will change any more."""
        if self._following is None or self._following.done():
            if self._following is not None and not self._following.cancelled():
                self._following.result()
            raise ClientClosed("the mirror is closed", reason="CLOSED")
        self._news.clear()
        await self._news.wait()

    async def _follow(self) -> None:
        backoff, loop = Backoff(), asyncio.get_running_loop()
        while not isinstance(self.problem, ClientClosed):
            self._exact_at = None
            try:
                await self._mirror()
            except KvtierError as error:
                self.problem = error
            finally:
                self._watch = None
            self._news.set()
            if self._exact_at is not None and loop.time() - self._exact_at > _STEADY_S:
                backoff = Backoff()
            await asyncio.sleep(backoff.next())

    async def _mirror(self) -> None:
        """Takes a snapshot and follows the events after it, until one is missing."""
        index = MirrorIndex()
        async with self._client.watch(
            snapshot=True, caches=self.caches, heartbeats=True, heartbeat_s=self._heartbeat_s
        ) as watch:
            async for item in watch:
                match item:
                    case Event():
                        index.apply(item)
                    case SnapshotStart():
                        index = MirrorIndex()
                    case SnapshotSlice():
                        index.take(item)
                    case SnapshotEnd():
                        self._show(index, watch)
                    case Gap():
                        return
                if self._watch is not None:
                    self._cursor = watch.cursor  # after the index, which other threads look into
                    self._news.set()

    def _show(self, index: MirrorIndex, watch: Watch) -> None:
        self.resyncs += self._cursor is not None
        self.problem = None
        self._exact_at = asyncio.get_running_loop().time()
        self._index, self._cursor, self._watch = index, watch.cursor, watch
