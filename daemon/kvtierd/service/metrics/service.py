"""Metrics as a part of the daemon: what counts while it runs, and the endpoint while it serves."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from kvtierd.service.metrics.counting import GcPauses, LoopProbe, MoveCounts, TimedSelector
from kvtierd.service.metrics.reading import Counters, Reading, Subjects

if TYPE_CHECKING:
    from kvtierd.service.metrics.endpoint import MetricsEndpoint

_log = logging.getLogger(__name__)


class Metrics:
    """From :meth:`start` to :meth:`stop`. ``turns``: the running loop's selector, where it is one that counts."""

    def __init__(self, moves: MoveCounts, turns: TimedSelector | None) -> None:
        self._moves: Final = moves
        self._turns: Final = turns
        self._pauses: Final = GcPauses()
        self._probe: LoopProbe | None = None
        self._endpoint: MetricsEndpoint | None = None

    def start(self, host: str, port: int, subjects: Subjects) -> None:
        """Raises :class:`kvtierd.tiers.base.TierConfigError` where the address cannot be had."""
        # Only here: an HTTP server and a library that a daemon without metrics would wait for at its start.
        from kvtierd.service.metrics.endpoint import MetricsEndpoint
        from kvtierd.service.metrics.exposition import LoopCollector

        loop = asyncio.get_running_loop()
        self._probe = LoopProbe(loop)
        self._pauses.start()
        reading = Reading(subjects, Counters(self._moves, self._probe, self._pauses, self._turns))
        self._endpoint = MetricsEndpoint(host, port, LoopCollector(loop, reading.take))
        _log.info("serving metrics address=%s port=%d", host, self._endpoint.port)

    async def stop(self) -> None:
        """Nothing, if it was not started."""
        if self._endpoint is not None:
            await asyncio.to_thread(self._endpoint.stop)
            self._endpoint = None
        if self._probe is not None:
            self._probe.stop()
            self._pauses.stop()
            self._probe = None
