"""Tiers that fail while the daemon runs. A disk is taken back when it works again, a GPU only after a restart."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from kvtierd.core.explain import carried
from kvtierd.core.ids import CacheId, Tier
from kvtierd.mover.engine import Engine
from kvtierd.mover.executor import MoverError
from kvtierd.service.cache import ServedCache
from kvtierd.service.catalog import Catalog
from kvtierd.service.devices import Devices
from kvtierd.service.recovery import Keeper
from kvtierd.tiers.base import TierIOError

LOOK_S: Final = 1.0
"""Seconds between looks at failing disks."""

PROBE_ENDS_S: Final = 5.0
"""Seconds that a stop waits for the probe of a failing disk."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Health:
    """``since``: time of the first failure after the last success; None = it works. ``lost``: why the disk was given
    up."""

    done: int = 0
    failed: int = 0
    since: float | None = None
    lost: str | None = None

    @property
    def problem(self) -> str | None:
        lost = "the disk tier is out of service, what it held is lost"
        return None if self.lost is None else f"{lost}: {self.lost}"

    def note(self, done: int, failed: int) -> None:
        worked = done > self.done
        if failed > self.failed:  # after a success and a failure of unknown order, the grace period begins anew
            self.since = time.monotonic() if worked or self.since is None else self.since
        elif worked:
            self.since = None
        self.done, self.failed = done, failed


class FailingDisks:
    """Gives up a cache's failing disk tier, and takes it back when it works. Loop thread only.

    A failed copy costs nothing: its source stays, and its edge rests for a while. If no copy has worked for ``grace_s``
    and a probe fails as well, the blocks on the disk are declared lost. The disk is then probed, and taken back, empty,
    when a probe works.
    """

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
        """Ends the looks. Returns False if a probe hangs: a thread is then still in a store."""
        self._stopping.set()
        if self._looking is None:
            return True
        _, late = await asyncio.wait([self._looking], timeout=PROBE_ENDS_S)
        return not late

    async def _keep_looking(self) -> None:
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), min(LOOK_S, self._grace_s / 4))
                return
            caches = [cache for cache in self._catalog if Tier.DISK in cache.slots]
            self._health = {cache.id: self._health.get(cache.id, _Health()) for cache in caches}
            for cache in caches:
                try:
                    await self._look_at(cache, self._health[cache.id])
                except MoverError as error:  # removed, or the daemon is being stopped
                    _log.info("disk not looked at name=%s why=%r", cache.name, str(error))
                except Exception:  # noqa: BLE001  our bug; other disks are still looked at
                    _log.exception("disk not looked at name=%s", cache.name)

    async def _look_at(self, cache: ServedCache, health: _Health) -> None:
        health.note(*carried(cache.runtime.manager.windows.values(), Tier.DISK))
        failing = health.since is not None and time.monotonic() - health.since >= self._grace_s
        if not failing and health.lost is None:
            return
        async with self._catalog.holding(cache) as there:
            if there:
                await (self._give_up(cache, health) if health.lost is None else self._take_back(cache, health))
                self._catalog.note(cache, Tier.DISK, health.problem)

    async def _give_up(self, cache: ServedCache, health: _Health) -> None:
        try:
            await asyncio.to_thread(cache.runtime.store.probe)
        except TierIOError as error:
            health.lost = str(error)
            _log.warning("disk tier given up name=%s why=%r", cache.name, health.lost)
            await self._engine.lose_tier(cache.id, Tier.DISK)
        else:
            health.since = None

    async def _take_back(self, cache: ServedCache, health: _Health) -> None:
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


class LostGpus:
    """Takes the device tiers of a lost GPU out of service; the other tiers of their caches stay. The context of a lost
    GPU is gone for this process, so only a restart can take the GPU back. Loop thread only."""

    def __init__(self, catalog: Catalog, devices: Devices, keeper: Keeper) -> None:
        self._catalog: Final = catalog
        self._devices: Final = devices
        self._keeper: Final = keeper
        self._lost = asyncio.Event()
        self._working: asyncio.Task[None] | None = None

    def start(self) -> None:
        loop = asyncio.get_running_loop()

        def tell() -> None:
            """Called by the thread that notices the loss."""
            with suppress(RuntimeError):  # the loop has ended, and the daemon with it
                loop.call_soon_threadsafe(self._lost.set)

        for gpu in self._devices.gpus:
            gpu.on_loss(tell)
            gpu.watch()
        self._working = asyncio.create_task(self._work(), name="lost-gpus")

    async def stop(self) -> None:
        if self._working is not None:
            self._working.cancel()
            await asyncio.wait([self._working])

    async def _work(self) -> None:
        while await self._lost.wait():
            self._lost.clear()
            for gpu in self._devices.gpus:
                if gpu.lost is not None:
                    self._keeper.forget_gpu(gpu.driver.uuid.hex())
            for cache in [cache for cache in self._catalog if Tier.DEVICE in cache.slots]:
                if (why := cache.device.lost) is not None:
                    with suppress(MoverError):  # it is being removed, or the daemon is being stopped
                        await self._catalog.lose_device(cache, why)
