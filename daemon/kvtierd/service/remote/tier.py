"""The remote tier: the store, the other daemons, and the traffic to and from them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from kvtierd.config.keys import RemoteConfig
from kvtierd.core.ids import GroupId, Key
from kvtierd.mover.engine import Engine
from kvtierd.service.cache import ServedCache
from kvtierd.service.catalog import Catalog
from kvtierd.service.forgotten import Forgotten
from kvtierd.service.hub import EventHub
from kvtierd.service.remote.deleting import BATCH, Deleter
from kvtierd.service.remote.fetching import Fetcher
from kvtierd.service.remote.sources import Known, Source, Sources
from kvtierd.service.remote.telling import Generations, Teller
from kvtierd.service.remote.writing import Writer
from kvtierd.tiers.remote.base import RemoteError, RemoteStore
from kvtierd.tiers.remote.breaker import Counts, Guarded, Operation
from kvtierd.tiers.remote.opening import open_store, require_opens

_log = logging.getLogger(__name__)

END_S: Final = 2.0
"""Seconds that a stop waits for the store."""
PEER_S: Final = 5.0
"""Seconds that a call to a peer may take."""
PROBE_S: Final = 0.5
"""Seconds between probes of a store that fails."""


async def opened_store(config: RemoteConfig) -> RemoteStore:
    """Opens the store. Raises TierConfigError if that is impossible. A store that does not answer is opened later."""
    store = open_store(config.url, group_access=config.group_access)
    try:
        await require_opens(store)
    except BaseException:
        await store.close()
        raise
    return store


class RemoteTier:
    """The store and the peers under the local tiers. Loop thread only.

    Args:
        store: the opened store of ``config``, owned by the tier from now on; None = no store.
        peers: by address.
        generations: returns the generations that peers tell of a cache.
    """

    def __init__(
        self,
        engine: Engine,
        hub: EventHub,
        catalog: Catalog,
        config: RemoteConfig | None,
        store: RemoteStore | None,
        peers: Mapping[str, RemoteStore],
        generations: Generations,
        forgotten: Forgotten,
    ) -> None:
        self.url: Final = "" if config is None else str(config)
        self.known: Final = Known(time.monotonic)
        self._store: Final = None if store is None or config is None else Guarded(store, config.timeout_seconds)
        source = None if self._store is None else Source(self.url, self._store)
        others = [Source(address, Guarded(peer, PEER_S)) for address, peer in peers.items()]
        self.teller: Final = Teller(engine, catalog, forgotten, self._store, generations)
        self.fetcher: Final = Fetcher(engine, Sources(source, self.known, others), forgotten, self.teller)
        pace = 0 if config is None else config.bytes_per_second
        self._writer: Final = (
            None
            if self._store is None
            else Writer(engine, hub, catalog, self._store, self.known, pace, forgotten, self.teller)
        )
        self.deleter: Final = None if self._store is None else Deleter(self._store, self.known, forgotten)
        self._tasks: list[asyncio.Task[None]] = []
        self._deleting: Final[set[asyncio.Task[None]]] = set()

    @property
    def problem(self) -> str | None:
        """The reason why the store is out of service, for health. Absent peers are not a problem."""
        if self._store is None:
            return None
        if why := self._store.problem:
            return f"the remote tier is out of service, what it holds is missed: {why}"
        return f"the remote tier takes no blocks: {why}" if (why := self._store.put_problem) else None

    @property
    def operations(self) -> Mapping[Operation, Counts]:
        return {} if self._store is None else self._store.counts

    @property
    def blocks(self) -> Mapping[str, int]:
        ways = (self.fetcher, self._writer, self.deleter)
        counts = sum((way.counts for way in ways if way is not None), Counter[str]())
        if self._writer is not None and (left := self._writer.left):
            counts["left unwritten"] = left
        return counts

    @property
    def unwritten(self) -> Mapping[str, int]:
        """Blocks that wait for the store, by reason."""
        return {} if self._writer is None else self._writer.unwritten

    def reach(self, cache: ServedCache, group: GroupId, keys: Sequence[Key]) -> int:
        """Length of the prefix that the store is known to have, without a call."""
        names = self.names(cache, group, keys)
        lacking = (number for number, name in enumerate(names.values()) if not self.known.of(name))
        return next(lacking, len(names))

    def names(self, cache: ServedCache, group: GroupId, keys: Sequence[Key]) -> Mapping[Key, str]:
        """Names of the blocks' present or future objects; empty without a store."""
        return {} if self._writer is None else self._writer.names(cache, group, keys)

    def delete(self, objects: Sequence[str]) -> None:
        """Deletes the objects of dropped blocks in the background. No daemon reads them any more."""
        if self._store is not None and objects:
            deleting = asyncio.create_task(self._delete(self._store, objects), name="remote-delete")
            self._deleting.add(deleting)
            deleting.add_done_callback(self._deleting.discard)

    async def _delete(self, store: Guarded, objects: Sequence[str]) -> None:
        with suppress(RemoteError):
            for start in range(0, len(objects), BATCH):
                await store.delete(objects[start : start + BATCH])
        self.known.note(objects, there=False)

    def start(self) -> None:
        self._tasks.append(asyncio.create_task(self.teller.run(), name="remote-teller"))
        if self._writer is not None and self._store is not None:
            self._tasks.append(asyncio.create_task(self._writer.run(), name="remote-writer"))
            self._tasks.append(asyncio.create_task(self._keep_probing(self._store), name="remote-probe"))

    async def stop(self) -> None:
        """Stops writes and deletions. Blocks that have not reached the store yet are not written."""
        if self.deleter is not None:
            self.deleter.stop()
        for task in (*self._tasks, *self._deleting):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await self.teller.stop()

    async def close(self) -> None:
        """Closes the store's connections. No fetch may be running."""
        if self._store is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    await self._store.close()

    async def _keep_probing(self, store: Guarded) -> None:
        """Probes a store that failed, so that an idle daemon notices its return. Logs an outage's start and end."""
        before: str | None = None
        while True:
            await asyncio.sleep(PROBE_S)
            with suppress(RemoteError):
                await store.probe()
            now = self.problem
            if (now is None) != (before is None):
                waiting = sum(self.unwritten.values())
                if now is not None:
                    _log.warning("%s unwritten_blocks=%d", now, waiting)
                else:
                    left = self.blocks.get("left unwritten", 0)
                    _log.info("the remote tier is back in service unwritten_blocks=%d left_unwritten=%d", waiting, left)
            before = now
