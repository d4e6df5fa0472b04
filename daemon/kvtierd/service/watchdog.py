"""The service manager's watchdog: fed only while everything that must move, moves.

The feed runs on the control loop, so a loop that is blocked cannot feed. What the loop cannot notice by standing still,
it asks for: how long a mover's thread has been inside one call.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from kvtierd.notify import Notifier

_FEEDS_PER_INTERVAL: Final = 3
_STALLED_SHARE: Final = 0.5
"""Of the interval: how long a thread may be in a call. The manager acts after another interval at most."""

_log = logging.getLogger(__name__)


class Watchdog:
    """``stalled_s``: for how long the mover's slowest thread has been in one call; infinite for one that died."""

    def __init__(self, notifier: Notifier, interval_s: float, stalled_s: Callable[[], float]) -> None:
        self._notifier: Final = notifier
        self._interval_s: Final = interval_s
        self._stalled_s: Final = stalled_s
        self._fed = True

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._feed()
            await asyncio.sleep(self._interval_s / _FEEDS_PER_INTERVAL)

    def _feed(self) -> None:
        stalled_s = self._stalled_s()
        fresh = stalled_s <= self._interval_s * _STALLED_SHARE
        if fresh:
            self._notifier.alive()
        elif self._fed:
            _log.warning("the watchdog is not fed any more: a mover's thread is stuck seconds=%.1f", stalled_s)
        self._fed = fresh
