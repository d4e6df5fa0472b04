"""Caches that nobody has open: since when, and what is done about it after a while."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

from kvtierd.core.ids import CacheId, GroupId, SessionId, Tier
from kvtierd.mover.engine import Engine
from kvtierd.mover.errors import MoverError
from kvtierd.service.catalog import Catalog
from kvtierd.service.entries import Cache
from kvtierd.service.sessions import SessionRegistry

LOOK_S: Final = 1.0
"""How often it is looked who has what open; more often where the time to live is short."""
PAGE_BLOCKS: Final = 1024
COPY_BLOCKS: Final = 64
"""Copied down in one go: a session that comes back meanwhile waits for no more than these."""
COPY_TIMEOUT_S: Final = 30.0

_NOBODY: Final = SessionId(0)
"""Whom the copies are for; no session has this number."""

_log = logging.getLogger(__name__)


class IdleCaches:
    """Loop thread only. ``ttl_s``: after which an idle cache cools; 0 = never."""

    def __init__(self, catalog: Catalog, engine: Engine, sessions: SessionRegistry, ttl_s: float) -> None:
        self._catalog: Final = catalog
        self._engine: Final = engine
        self._sessions: Final = sessions
        self._ttl_s: Final = ttl_s
        self._since: dict[CacheId, float] = {}
        self._cooling: CacheId | None = None
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._looking = asyncio.create_task(self._keep_looking(), name="idle-caches")

    async def stop(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])

    def look(self) -> None:
        """Notes which caches nobody has open."""
        in_use = {cache for session in self._sessions for cache in session.caches}
        there = {cache.id for cache in self._catalog} | {cache.id for cache in self._catalog.cold()}
        if self._cooling is not None:
            there.add(self._cooling)  # for a moment it is neither open nor cold
        now = time.monotonic()
        self._since = {cache: self._since.get(cache, now) for cache in there - in_use}

    def idle_ns(self, cache: CacheId) -> int:
        """For how long, as far as was looked; 0 = a session has it open."""
        since = self._since.get(cache)
        return 0 if since is None else max(1, int((time.monotonic() - since) * 1e9))

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(min(LOOK_S, self._ttl_s / 4 or LOOK_S))
            for cache in list(self._catalog):
                if self._is_due(cache):
                    try:
                        await self._cool(cache)
                    except MoverError as error:
                        _log.info("cache not cooled name=%s why=%r", cache.name, str(error))
                    except Exception:  # noqa: BLE001  our bug; the others go on to cool
                        _log.exception("cache not cooled name=%s", cache.name)

    def _is_due(self, cache: Cache) -> bool:
        self.look()
        ttl_s = self._ttl_s
        long_enough = ttl_s > 0 and self.idle_ns(cache.id) >= ttl_s * 1e9
        stays = cache.runtime.manager.pinned_slots() > 0  # a pin keeps its block where it is
        return long_enough and not stays and self._catalog.opens_again(cache)

    async def _cool(self, cache: Cache) -> None:
        if Tier.DISK in cache.slots:
            for group in range(len(cache.spec.groups)):
                await self._copy_down(cache, GroupId(group))
        self._cooling = cache.id
        try:
            await self._catalog.cool(cache, lambda: self._is_due(cache))
        finally:
            self._cooling = None

    async def _copy_down(self, cache: Cache, group: GroupId) -> None:
        """What is worth it, as long as nobody comes back."""
        page = 0
        while True:
            listing = self._engine.listing(cache.id, group, page, PAGE_BLOCKS)
            keys = [row.key for row in listing.rows if cache.runtime.manager.goes_down(group, row, Tier.DISK)]
            for first in range(0, len(keys), COPY_BLOCKS):
                if not self._is_due(cache):
                    return
                piece = keys[first : first + COPY_BLOCKS]
                await self._engine.move(cache.id, _NOBODY, group, Tier.DISK, piece, COPY_TIMEOUT_S)
            page = listing.next_page
            if not page:
                return
