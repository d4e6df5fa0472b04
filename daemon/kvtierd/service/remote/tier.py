"""The remote tier of a daemon: its store, and both ways to and from it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from kvtierd.config.keys import Remote
from kvtierd.core.ids import GroupId, Key
from kvtierd.mover.engine import Engine
from kvtierd.service.cache import Cache
from kvtierd.service.catalog import Catalog
from kvtierd.service.remote.fetching import Fetcher
from kvtierd.service.remote.known import Known
from kvtierd.service.remote.writing import Writer
from kvtierd.tiers.remote.base import RemoteStore
from kvtierd.tiers.remote.breaker import Counts, Guarded, Operation

END_S: Final = 2.0
"""How long a stop waits for the store."""


class RemoteTier:
    """Loop thread only. ``store``: opened, the tier's from now on."""

    def __init__(self, engine: Engine, catalog: Catalog, config: Remote, store: RemoteStore) -> None:
        self.url: Final = config.url
        self._store: Final = Guarded(store, config.timeout_seconds)
        self.known: Final = Known(time.monotonic)
        self.fetcher: Final = Fetcher(engine, self._store, self.known)
        self._writer: Final = Writer(engine, catalog, self._store, self.known, config.bytes_per_second)
        self._writing: asyncio.Task[None] | None = None

    @property
    def problem(self) -> str | None:
        """For health: why the store is left alone."""
        why = self._store.problem
        return None if why is None else f"the remote tier is out of service, what it holds is missed: {why}"

    @property
    def operations(self) -> Mapping[Operation, Counts]:
        """Calls of the store."""
        return self._store.counts

    @property
    def blocks(self) -> Mapping[str, int]:
        """By what became of them."""
        return self.fetcher.counts + self._writer.counts

    def start(self) -> None:
        self._writing = asyncio.create_task(self._writer.run(), name="remote-writer")

    async def bring(
        self, cache: Cache, group: GroupId | None, chains: Sequence[Sequence[Key]], wait_s: float, recompute_s: float
    ) -> None:
        """See :meth:`Fetcher.bring`, for chains side by side."""
        await asyncio.gather(*(self.fetcher.bring(cache, group, keys, wait_s, recompute_s) for keys in chains))

    async def stop(self) -> None:
        """Writes no more: blocks that have not reached the store have not."""
        if self._writing is not None:
            self._writing.cancel()
            with suppress(asyncio.CancelledError):
                await self._writing

    async def close(self) -> None:
        """Ends the store's connections. Nobody fetches any more."""
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self._store.close()
