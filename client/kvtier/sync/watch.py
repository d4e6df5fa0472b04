"""Events, one after another, for a thread that waits for them."""

from __future__ import annotations

import asyncio
import threading
from typing import Self

from kvtier import watch
from kvtier.errors import ClientClosed
from kvtier.events import WatchItem
from kvtier.sync.loop import LoopThread
from kvtier.types import Cursor


class Watch:
    """``for item in watch``: see :class:`kvtier.watch.Watch`. Of several threads that iterate, each gets other items.

    It ends when it is closed, by whichever thread.
    """

    def __init__(self, thread: LoopThread, inner: watch.Watch) -> None:
        self._thread = thread
        self._inner = inner
        self._turn = threading.Lock()
        self._closed = False
        self._pulling: asyncio.Task[WatchItem] | None = None

    @property
    def cursor(self) -> Cursor | None:
        """The last id that it has been told of, None before the first."""
        return self._inner.cursor

    @property
    def newest(self) -> int | None:
        """The last id that the daemon had given out when it sent its last batch, None before the first."""
        return self._inner.newest

    @property
    def lag(self) -> int:
        """Ids that it has not been told of yet, as of the last batch; 0 before the first."""
        return self._inner.lag

    @property
    def live(self) -> bool:
        """Whether the stream goes on: from a batch until the stream that it came by breaks."""
        return self._inner.live

    def close(self) -> None:
        """Ends the stream; a thread that waits for the next item sees the end of the iteration."""
        if not self._closed and not self._thread.forked:
            self._closed = True
            try:
                self._thread.run(self._end)
            except ClientClosed:
                return  # and with it the stream

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> WatchItem:
        with self._turn:
            if self._closed:
                raise StopIteration
            try:
                return self._thread.run(self._pull)
            except StopAsyncIteration:
                raise StopIteration from None
            except ClientClosed:
                if self._closed:
                    raise StopIteration from None
                raise

    def __enter__(self) -> Self:
        """Of a watch that begins now, now is this moment. Raises :class:`kvtier.errors.DaemonUnavailable`."""
        self._thread.run(self._inner.__aenter__)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _pull(self) -> WatchItem:
        self._pulling = asyncio.current_task()
        try:
            return await anext(self._inner)
        finally:
            self._pulling = None

    async def _end(self) -> None:
        if self._pulling is not None:
            self._pulling.cancel()
            await asyncio.wait([self._pulling])
        await self._inner.aclose()
