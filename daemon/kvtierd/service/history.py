"""The whole stream of events as a watcher follows it: what is new in the hub's ring, what is older in the log.

Ids rise over all epochs, so they alone say where something is. What is nowhere is a loss, and has a reason.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvtierd.event_log import EventLog, LoggedRun
from kvtierd.service.hub import MESSAGE_BYTES, EventHub, Run, without_events_up_to

SLOW: Final = "slow"
UNCLEAN_STOP: Final = "unclean-stop"
COMPACTED: Final = "compacted"
NOT_LOGGED: Final = "not-logged"
UNEXPLAINED: Final = "unexplained"

_log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Passage:
    """The next events, of one epoch and without a hole."""

    epoch: int
    run: Run


@dataclass(slots=True, frozen=True)
class Loss:
    """Ids [first, last] of an epoch that nobody has any more. ``then``: the epoch of the id after them."""

    epoch: int
    first: int
    last: int
    reason: str
    then: int


class History:
    """Loop thread only. ``log``: None where there is none. ``number``: what the state calls this history, which tells
    its ids from those of another state."""

    def __init__(self, hub: EventHub, log: EventLog | None, number: int = 0) -> None:
        self.hub: Final = hub
        self.log: Final = log
        self.number: Final = number
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
        candidates = [self.hub.oldest]
        if self.log is not None:
            extent, waiting = self.log.extent, self.log.waiting_above(0)
            candidates += [extent.oldest] if extent is not None and extent.oldest is not None else []
            candidates += [waiting.first] if waiting is not None else []
        return min(candidates)

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

    async def after(self, epoch: int, cursor: int) -> Passage | Loss | None:
        """What comes after ``cursor``, of which ``epoch`` says where the watcher is; None if there is nothing yet."""
        if epoch != self.hub.epoch:
            epoch = self._epoch_after(epoch, cursor)
        if epoch >= self.hub.epochs[0][1] and cursor + 1 >= self.hub.oldest:  # nearly always
            run = self.hub.after(cursor)
            if run is None:
                return None
            return Passage(epoch, run) if run.first == cursor + 1 else self._hole(epoch, cursor + 1, run.first - 1)
        return await self._older(epoch, cursor)

    def _hole(self, epoch: int, first: int, last: int) -> Loss:
        """Among what the ring holds."""
        end = self.end_of(epoch)
        following = self._following(epoch)
        if end is None or following is None or last < end:
            return Loss(epoch, first, last, UNEXPLAINED, epoch)
        return Loss(epoch, first, end, UNEXPLAINED, following[1])

    async def _older(self, epoch: int, cursor: int) -> Passage | Loss:
        """The ring has it no more."""
        # All that is held above the cursor is from here on in the ring, else still waits for the log, else is in it.
        held_from = self.hub.oldest
        if self.log is not None:
            waiting = self.log.waiting_above(cursor)
            if waiting is not None:
                if waiting.first <= cursor + 1:
                    return Passage(waiting.epoch, _rest(cursor, waiting))
                held_from = min(held_from, waiting.first)
            found = await self.log.after(cursor, MESSAGE_BYTES)
            if found is not None:
                if found.first <= cursor + 1:
                    return Passage(found.epoch, _rest(cursor, found))
                held_from = min(held_from, found.first)
        end = self.end_of(epoch)
        last = held_from - 1 if end is None else min(held_from - 1, end)
        return self._loss(epoch, cursor + 1, last, ends=last == end)

    async def since(self, time_ns: int) -> int:
        """The id after which events at or after that time begin: the last id where all that is held is before."""
        found: list[int | None] = []
        if self.log is not None:
            extent = self.log.extent
            if extent is not None and extent.place.compacted and extent.place.compacted_ns >= time_ns:
                # Some of them are gone: it begins with that loss.
                return self._first_of(self.epoch_of(extent.place.compacted)) - 1
            # What waits may have left the ring, and is in the log only later.
            found += [self.log.waiting_since(time_ns), await self.log.since(time_ns)]
        found.append(self.hub.since(time_ns))
        return min((first for first in found if first is not None), default=self.hub.last + 1) - 1

    def _loss(self, epoch: int, first: int, last: int, *, ends: bool) -> Loss:
        """``ends``: an earlier epoch ends with it."""
        extent = None if self.log is None else self.log.extent
        if extent is not None and first <= extent.place.compacted:
            reason, ends, last = COMPACTED, ends and last <= extent.place.compacted, min(last, extent.place.compacted)
        elif ends and epoch < self.hub.epochs[0][1]:
            reason = UNCLEAN_STOP
        else:
            reason = SLOW if self.log is None else NOT_LOGGED
        following = self._following(epoch)
        return Loss(epoch, first, last, reason, following[1] if ends and following is not None else epoch)

    def _epoch_after(self, epoch: int, cursor: int) -> int:
        """That of the id after ``cursor``, which is of ``epoch``."""
        while (following := self._following(epoch)) is not None and cursor + 1 >= following[0]:
            epoch = following[1]
        return epoch

    def _epochs(self) -> Sequence[tuple[int, int]]:
        """First id and number of each that is known, in order."""
        extent = None if self.log is None else self.log.extent
        logged = () if extent is None else extent.epochs
        ours = self.hub.epochs
        return [*(entry for entry in logged if entry[1] < ours[0][1]), *ours]

    def _following(self, epoch: int) -> tuple[int, int] | None:
        return next((entry for entry in self._epochs() if entry[1] > epoch), None)

    def _first_of(self, epoch: int) -> int:
        return next((first for first, number in self._epochs() if number == epoch), self.hub.epochs[0][0])


def _rest(cursor: int, found: LoggedRun) -> Run:
    run = Run(found.first, found.last, found.body, found.private, found.keyless, found.latest_ns)
    return without_events_up_to(cursor, run)
