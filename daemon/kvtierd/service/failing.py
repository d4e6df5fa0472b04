"""Disks that fail: when a cache's disk tier is given up, and when it is taken back.

A copy that fails costs nothing: its source stays, its edge is left alone for a while. Where nothing at all has worked
for the grace period, and a probe fails as well, what the disk held is declared lost, so that nobody waits for it. From
then on it is probed, and taken back, empty, when that works.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Final

from kvtierd.core.ids import CacheId, Tier
from kvtierd.mover.engine import Engine
from kvtierd.mover.tickets import MoverError
from kvtierd.service.catalog import Catalog
from kvtierd.service.entries import Cache
from kvtierd.tiers.base import TierIOError

LOOK_S: Final = 1.0
STOP_S: Final = 5.0

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Health:
    """``since``: of the first failure after the last success; None = well. ``lost``: why, from when it is given up."""

    done: int = 0
    failed: int = 0
    since: float | None = None
    lost: str | None = None

    @property
    def problem(self) -> str | None:
        """For people."""
        lost = "the disk tier is out of service, what it held is lost"
        return None if self.lost is None else f"{lost}: {self.lost}"

    def note(self, done: int, failed: int) -> None:
        worked = done > self.done
        if failed > self.failed:  # where both happened, which was last cannot be told: the grace begins anew
            self.since = time.monotonic() if worked or self.since is None else self.since
        elif worked:
            self.since = None
        self.done, self.failed = done, failed


class FailingDisks:
    """Loop thread only. ``grace_s``: how long nothing must have worked."""

    def __init__(self, catalog: Catalog, engine: Engine, grace_s: float) -> None:
        self._catalog: Final = catalog
        self._engine: Final = engine
        self._grace_s: Final = grace_s
        self._health: dict[CacheId, _Health] = {}
        self._looking: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()

    def start(self) -> None:
        self._looking = asyncio.create_task(self._keep_looking(), name="failing-disks")

    async def stop(self) -> bool:
        """False if a probe hangs: then a thread is still in a store."""
        self._stopping.set()
        if self._looking is None:
            return True
        _, late = await asyncio.wait([self._looking], timeout=STOP_S)
        return not late

    async def _keep_looking(self) -> None:
        while not await self._stops_within(min(LOOK_S, self._grace_s / 4)):
            caches = [cache for cache in self._catalog if Tier.DISK in cache.slots]
            self._health = {cache.id: self._health.get(cache.id, _Health()) for cache in caches}
            for cache in caches:
                try:
                    await self._look_at(cache, self._health[cache.id])
                except MoverError as error:  # removed, or the daemon is being stopped
                    _log.info("disk not looked at name=%s why=%r", cache.name, str(error))
                except Exception:  # noqa: BLE001  our bug; the others are looked at
                    _log.exception("disk not looked at name=%s", cache.name)

    async def _stops_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                return await self._stopping.wait()
        except TimeoutError:
            return False

    async def _look_at(self, cache: Cache, health: _Health) -> None:
        health.note(*cache.runtime.manager.carried(Tier.DISK))
        failing = health.since is not None and time.monotonic() - health.since >= self._grace_s
        if not failing and health.lost is None:
            return
        async with self._catalog.holding(cache) as there:
            if there:
                await (self._give_up(cache, health) if health.lost is None else self._take_back(cache, health))
                self._catalog.note(cache, health.problem)

    async def _give_up(self, cache: Cache, health: _Health) -> None:
        try:
            await asyncio.to_thread(cache.runtime.store.probe)
        except TierIOError as error:
            health.lost = str(error)
            _log.warning("disk tier given up name=%s why=%r", cache.name, health.lost)
            await self._engine.lose_disk(cache.id)
        else:
            health.since = None

    async def _take_back(self, cache: Cache, health: _Health) -> None:
        if self._engine.touches(cache.id, Tier.DISK):
            return
        try:
            await asyncio.to_thread(cache.runtime.store.probe)
            await asyncio.to_thread(cache.runtime.store.clear)
        except TierIOError as error:
            health.lost = str(error)
            return
        self._engine.restore_disk(cache.id)
        health.lost = health.since = None
        _log.warning("disk tier taken back, empty name=%s", cache.name)
