"""A watch that is read beside the test."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self

from kvtier import Cursor, Watch
from kvtier.events import WatchItem
from tests.integration.waiting import PATIENCE_S


class Following(ABC):
    """``async with``. What goes wrong while an item is taken is raised by the next wait."""

    def __init__(self, watch: Watch) -> None:
        self.cursor = Cursor(0, 0)
        self._watch = watch
        self._news = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._reader = asyncio.create_task(self._read())
        self._reader.add_done_callback(lambda _: self._news.set())
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        assert self._reader is not None
        self._reader.cancel()
        await asyncio.wait([self._reader])
        await self._watch.aclose()

    async def until(self, reached: Callable[[], bool]) -> None:
        """Waits as long as there is news of anything."""
        while not reached():
            assert self._reader is not None
            if self._reader.done():
                self._reader.result()
            self._news.clear()
            async with asyncio.timeout(PATIENCE_S):
                await self._news.wait()

    async def reach(self, cursor: Cursor) -> None:
        """Returns once everything up to ``cursor`` has been told."""
        await self.until(lambda: self.cursor >= cursor)

    @abstractmethod
    def take(self, item: WatchItem) -> None:
        """Called with every item, in order."""

    async def _read(self) -> None:
        async for item in self._watch:
            self.take(item)
            self._news.set()
