"""Devices that are lost: what each of the caches on one had there goes at once, and the other tiers serve on.

A lost device stays lost for this process, unlike a disk that fails: every later call fails as well, so there is no
grace period and nothing is taken back. Nothing of the lost pools is freed while the daemon lives, unless their cache
goes. Copies find out by themselves; that an idle device is lost only a call tells, so a thread makes one now and then.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import suppress
from typing import Any, Final

from kvtierd.core.events import Cause
from kvtierd.core.ids import CacheId, Tier
from kvtierd.mover.engine import Engine
from kvtierd.mover.errors import MoverError
from kvtierd.service.catalog import Catalog
from kvtierd.service.epochs import Epochs
from kvtierd.tiers.base import Device, TierError

LOOK_S: Final = 1.0
"""How often, after a loss, it is looked for what is still to be done."""
PROBE_S: Final = 1.0
SILENT_S: Final = 5.0
"""A probe that takes longer is named as a problem. The device may be well again when it ends."""
STOP_S: Final = 5.0

_log = logging.getLogger(__name__)


class Prober:
    """A thread that asks a device for a sign of life, again and again. A call that never ends holds up nobody."""

    def __init__(self, device: Device) -> None:
        self._device: Final = device
        self._asking_since: float | None = None
        self._stopping: Final = threading.Event()
        self._thread: Final = threading.Thread(target=self._work, name="kvtierd-device-probe", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Does not wait for a call that is under way."""
        self._stopping.set()

    @property
    def silent_s(self) -> float:
        """For how long the device has not answered the present call."""
        since = self._asking_since
        return 0.0 if since is None else time.monotonic() - since

    def _work(self) -> None:
        while self._device.lost is None and not self._stopping.wait(PROBE_S):
            self._asking_since = time.monotonic()
            try:
                self._device.memory()
            except TierError as error:
                if self._device.lost is None:
                    _log.warning("the device does not answer as it should why=%r", str(error))
            finally:
                self._asking_since = None


class LostDevice:
    """Loop thread only. ``device``: of all caches with a device tier. ``tell``: is called once, when it is lost."""

    def __init__(
        self, device: Device, catalog: Catalog, engine: Engine, epochs: Epochs, tell: Callable[[], Awaitable[None]]
    ) -> None:
        self._device: Final = device
        self._catalog: Final = catalog
        self._engine: Final = engine
        self._epochs: Final = epochs
        self._tell: Final = tell
        self._prober: Final = Prober(device)
        self._given_up: set[CacheId] = set()
        self._unfinished: list[Coroutine[Any, Any, None]] = []
        """Of caches of which nothing is given out there any more: the rest of their loss."""
        self._epoch_due = False
        self._epoch_fault: str | None = None
        self._losing: asyncio.Task[None] | None = None

    def start(self) -> None:
        loop = asyncio.get_running_loop()

        def found_out() -> None:
            with suppress(RuntimeError):  # the loop is over, and with it all that the loss could concern
                loop.call_soon_threadsafe(self._begin)

        self._device.on_loss(found_out)
        self._prober.start()

    async def stop(self) -> None:
        self._prober.stop()
        if self._losing is not None:
            self._losing.cancel()
            await asyncio.wait([self._losing], timeout=STOP_S)
        while self._unfinished:
            self._unfinished.pop().close()

    def problems(self) -> Iterator[str]:
        """For people."""
        if self._device.lost is not None:
            then = "other tiers serve on; a restart of kvtierd brings the device tier back, empty"
            yield f"the device is lost, with all that it held: {self._device.lost}; {then}"
        elif (silent_s := self._prober.silent_s) > SILENT_S:
            yield f"the device has not answered for {silent_s:.0f} s"
        if self._epoch_fault is not None:
            yield f"the epoch after the device's loss cannot begin yet: {self._epoch_fault}"

    def _begin(self) -> None:
        """A callback of its own, so that it comes before the reports of copies that the loss has failed: what these
        would make room for is refused instead."""
        self._give_up()
        self._losing = asyncio.create_task(self._lose(), name="lost-device")

    def _give_up(self) -> None:
        self._catalog.device_is_lost()
        for cache in self._catalog:
            if Tier.DEVICE in cache.slots and cache.id not in self._given_up:
                self._given_up.add(cache.id)
                _log.warning("device tier given up name=%s why=%r", cache.name, self._device.lost)
                try:
                    self._unfinished.append(self._engine.lose_tier(cache.id, Tier.DEVICE, Cause.LOST))
                except MoverError as error:  # removed, or the daemon is being stopped
                    _log.info("device tier not given up name=%s why=%r", cache.name, str(error))

    async def _lose(self) -> None:
        await self._tell()
        while True:
            try:
                await self._finish()
            except Exception:  # noqa: BLE001  our bug; the next time may do better
                _log.exception("the device's loss could not be told")
            await asyncio.sleep(LOOK_S)
            self._give_up()  # a cache that was being opened

    async def _finish(self) -> None:
        while self._unfinished:
            self._epoch_due = True
            try:
                await self._unfinished.pop()
            except MoverError as error:
                _log.info("device tier not given up to its last block why=%r", str(error))
        if self._epoch_due:
            await self._begin_epoch()

    async def _begin_epoch(self) -> None:
        try:
            await self._epochs.begin()
        except TierError as error:
            if self._epoch_fault is None:
                _log.warning("no epoch can begin after the device's loss; tried again why=%r", str(error))
            self._epoch_fault = str(error)
        else:
            self._epoch_due, self._epoch_fault = False, None
