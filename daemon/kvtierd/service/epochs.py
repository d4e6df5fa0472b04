"""A new epoch of the event stream in the midst of a daemon's life.

Ids go on without a hole, so nothing is lost and no gap is told: cursors of the epoch before go on into it. It tells
whoever follows, even if nothing else happens, that something has ended which is older than the epoch: what an arena or
a lease of before says of a device, since lost.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from kvtierd.event_ids import DurableSequencer
from kvtierd.event_log import EventLog
from kvtierd.mover.engine import Engine
from kvtierd.service.attach import DaemonIdentity
from kvtierd.service.hub import EventHub
from kvtierd.state import StateDir

_log = logging.getLogger(__name__)


class Epochs:
    """Everybody who knows the present epoch. ``log``: None where there is none."""

    def __init__(
        self,
        state: StateDir,
        sequencer: DurableSequencer,
        hub: EventHub,
        log: EventLog | None,
        engine: Engine,
        identity: DaemonIdentity,
    ) -> None:
        self._state: Final = state
        self._sequencer: Final = sequencer
        self._hub: Final = hub
        self._log: Final = log
        self._engine: Final = engine
        self._identity: Final = identity

    async def begin(self) -> None:
        """The next event is the first of a new epoch, whose number no other life of the daemon will give to another.
        Raises TierIOError: then nothing has changed."""
        epoch = await asyncio.to_thread(self._state.announce_epoch)
        first = self._sequencer.last + 1
        self._state.begin_epoch(first)
        if self._log is not None:
            self._log.begin_epoch(first)
        self._hub.begin_epoch(epoch)
        self._engine.begin_epoch(epoch)
        self._identity.epoch = epoch
        _log.info("epoch begins epoch=%d first=%d", epoch, first)
