"""The whole stream of events as a watcher follows it: the newest in the hub's ring, older ones in the log.

Ids rise over all epochs, so an id alone says where its event is. Ids that are nowhere are a loss, which has a reason.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvtierd.event_log import EventLog, Run
from kvtierd.service.hub import MESSAGE_BYTES, MESSAGE_EVENTS, EventHub

SLOW: Final = "slow"
UNCLEAN_STOP: Final = "unclean-stop"
COMPACTED: Final = "compacted"
NOT_LOGGED: Final = "not-logged"
UNEXPLAINED: Final = "unexplained"


@dataclass(slots=True, frozen=True)
class Loss:
    """Ids [first, last] of an epoch that nobody has any more. ``then``: the epoch of the id after them."""

    epoch: int
    first: int
    last: int
    reason: str
    then: int


class History:
    """Loop thread only. ``log``: None where there is none."""

    def __init__(self, hub: EventHub, log: EventLog | None) -> None:
        self.hub: Final = hub
        self.log: Final = log
        self.reading: Final = asyncio.Lock()

    async def turn(self, until: float) -> bool:
        """Waits until the caller may read the past: one watcher does so at a time, and the loop has a turn in between.

        Args:
            until: Loop time at which to give up.

        Returns:
            False where the time is up.
        """
        try:
            async with asyncio.timeout_at(until):
                await self.reading.acquire()
        except TimeoutError:
            return False
        try:
            await asyncio.sleep(0)
        finally:
            self.reading.release()
        return True

    @property
    def oldest(self) -> int:
        """The oldest id held; one above the last where nothing is."""
        logged = None if self.log is None else self.log.oldest
        return self.hub.oldest if logged is None else min(logged, self.hub.oldest)

    def epoch_of(self, number: int) -> int:
        """The epoch that an id is of; of one older than all that is known, the oldest that is."""
        epochs = self._epochs()
        return epochs[max(0, bisect_right(epochs, number, key=lambda entry: entry[0]) - 1)][1]

    def begins_after(self, epoch: int) -> int | None:
        """The id after which an epoch begins; None where that is not known."""
        return next((first - 1 for first, number in self._epochs() if number == epoch), None)

    def end_of(self, epoch: int) -> int | None:
        """The last id of an earlier epoch, given out or not; None of the present one."""
        following = self._following(epoch)
        return None if following is None else following[0] - 1

    async def after(self, epoch: int, cursor: int) -> Run | Loss | None:
        """The events after ``cursor``, of one epoch and without a hole; None if there are none yet.

        Args:
            epoch: The epoch that the watcher is in.
        """
        if epoch != self.hub.epoch:
            while (following := self._following(epoch)) is not None and cursor + 1 >= following[0]:
                epoch = following[1]
        if cursor + 1 < self.hub.oldest or epoch < self.hub.epochs[0][1]:
            return await self._older(epoch, cursor)
        run = self.hub.after(cursor)
        if run is None or run.first == cursor + 1:
            return run
        return self._loss(epoch, cursor + 1, run.first - 1, UNEXPLAINED)

    async def since(self, time_ns: int) -> int:
        """The id after which events at or after that time begin: the last id where all that is held is before."""
        found: list[int | None] = [self.hub.since(time_ns)]
        if self.log is not None:
            compacted, compacted_ns = self.log.compacted
            if compacted and compacted_ns >= time_ns:  # some of them are gone: it begins with that loss
                return self.begins_after(self.epoch_of(compacted)) or 0
            found.append(await self.log.since(time_ns))
        return min((first for first in found if first is not None), default=self.hub.last + 1) - 1

    async def _older(self, epoch: int, cursor: int) -> Run | Loss:
        """The events that the ring has no more. All that it dropped is in the log, or lost to it."""
        held_from = self.hub.oldest
        if self.log is not None:
            found = await self.log.after(cursor, MESSAGE_BYTES, MESSAGE_EVENTS)
            if found is not None and found.first <= cursor + 1:
                return found.after(cursor)
            compacted, _ = self.log.compacted
            held_from = held_from if found is None else min(held_from, found.first)
            if cursor < compacted:
                return self._loss(epoch, cursor + 1, min(held_from - 1, compacted), COMPACTED)
        elif epoch >= self.hub.epochs[0][1]:
            return self._loss(epoch, cursor + 1, held_from - 1, SLOW)
        ends = epoch < self.hub.epochs[0][1] and held_from - 1 >= (self.end_of(epoch) or 0)
        return self._loss(epoch, cursor + 1, held_from - 1, UNCLEAN_STOP if ends else NOT_LOGGED)

    def _loss(self, epoch: int, first: int, last: int, reason: str) -> Loss:
        """A loss ends with its epoch."""
        following = self._following(epoch)
        if following is None or last < following[0] - 1:
            return Loss(epoch, first, last, reason, epoch)
        return Loss(epoch, first, following[0] - 1, reason, following[1])

    def _epochs(self) -> Sequence[tuple[int, int]]:
        """First id and number of each that is known, in order."""
        ours = self.hub.epochs
        logged = () if self.log is None else self.log.epochs
        return [*(entry for entry in logged if entry[1] < ours[0][1]), *ours]

    def _following(self, epoch: int) -> tuple[int, int] | None:
        return next((entry for entry in self._epochs() if entry[1] > epoch), None)
