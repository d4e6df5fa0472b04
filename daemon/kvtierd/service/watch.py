"""One watcher: where it is in the event stream, what it wants to see, and when it must hear something."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

from kvtier.v1 import events_pb2
from kvtierd.event_log import Run
from kvtierd.service.errors import CallRefused, shutting_down
from kvtierd.service.event_filter import EventFilter
from kvtierd.service.history import History, Loss

COVER_S: Final = 0.1
COVER_SHARE_S: Final = 0.02
"""Ids that were filtered away are covered once it is quiet for so long, and so long for each watcher: a message to one
costs some 0.1 ms, so where hidden events trickle in, all of these together take half a percent of the loop."""


class Watcher:
    """Follows the events from a place on. ``cursor``: the last id that this watcher has been told of, or need not be;
    ``epoch``: what it is of, or what begins after it.

    ``wanted`` may be replaced at any time: it holds for what is sent from then on.

    ``covered``: everything up to it stands in batches that were sent; ids between it and the cursor were looked at and
    filtered away, and the next batch will cover them.
    """

    def __init__(self, history: History, epoch: int, cursor: int, wanted: EventFilter, heartbeat_s: float) -> None:
        self._history = history
        self._hub = history.hub
        self._epoch = epoch
        self._cursor = cursor
        self._covered = cursor
        self.wanted = wanted
        self._heartbeat_s = heartbeat_s
        self._loop = asyncio.get_running_loop()
        self.quiet_until = self._loop.time() + heartbeat_s
        """When it must have heard something."""
        self.refusal: CallRefused | None = None
        """Why it may not go on, once its rights have changed."""

    def require_allowed(self) -> None:
        """Raises :attr:`refusal`: to be asked before a batch is sent, since what has become invisible is left out of
        it, though it covers its ids."""
        if self.refusal is not None:
            raise self.refusal

    @property
    def lag(self) -> int:
        """Events that it has not looked at yet."""
        return self._hub.last - self._cursor

    async def follow(self, snapshot_end: int | None = None) -> AsyncGenerator[bytes, None]:
        """Batches without end, serialised; the first comes at once and, if it has no events, says where this starts. An
        epoch that begins while nothing happens is told by one without events.

        ``snapshot_end``: the first batch to reach this id is marked as such. Raises UNAVAILABLE once the hub is closed
        and everything in it was sent.
        """
        self.quiet_until = self._loop.time()
        if snapshot_end is not None and snapshot_end <= self._cursor:
            yield self._batch(snapshot_end=True)
            self.heard()
            snapshot_end = None
        while True:
            behind = self._hub.readable
            found = await self._history.after(self._epoch, self._cursor)
            if found is None:
                if self._hub.has_begun(self._cursor, self._epoch):
                    if self._covered < self._cursor:
                        yield self._batch()
                    self._epoch = self._hub.epoch
                    yield self.heartbeat()
                elif not await self._news(self._cover_at(self.quiet_until)):
                    yield self.heartbeat()
                continue
            if found.epoch != self._epoch or (isinstance(found, Loss) and found.then != found.epoch):
                if self._covered < self._cursor:
                    yield self._batch()
                self._epoch = found.epoch
            if isinstance(found, Loss):
                yield self._gap(found)
                continue
            past = found.last < behind
            while past and not await self._history.turn(self.quiet_until):
                yield self.heartbeat()
            body = self._look_at(found)
            ends = snapshot_end is not None and snapshot_end <= self._cursor
            if body or ends or self.is_due:
                yield self._batch(snapshot_end=ends) + body
                self.heard()
            if ends:
                snapshot_end = None
            if not body:
                await asyncio.sleep(0)  # all filtered away: there may be much of it, and nothing else to wait for

    def heartbeat(self) -> bytes:
        """A batch without events; the next one is due when it has been quiet for long enough again."""
        self.heard()
        return self._batch()

    @property
    def is_due(self) -> bool:
        return self._loop.time() >= self.quiet_until

    def heard(self) -> None:
        """It has just been sent something."""
        self.quiet_until = self._loop.time() + self._heartbeat_s

    def _cover_at(self, quiet_until: float) -> float:
        """When a batch without events is due: earlier where it tells that events were filtered away, for which somebody
        may wait."""
        if self._covered == self._cursor:
            return quiet_until
        apart = max(COVER_S, COVER_SHARE_S * len(self._hub.watchers))
        return min(quiet_until, self._loop.time() + apart)

    async def _news(self, until: float) -> bool:
        """False when it stays quiet until then."""
        if self._hub.closed:
            raise shutting_down()
        return await self._hub.news(self._cursor, self._epoch, until)

    def _look_at(self, run: Run) -> bytes:
        """Moves on over ``run``; what of it this watcher wants."""
        self._cursor = run.last
        return self.wanted.look_at(run)

    def _batch(self, *, snapshot_end: bool = False) -> bytes:
        """A batch without events that covers all ids up to the cursor; events may be appended to its bytes."""
        first, self._covered = self._covered + 1, self._cursor
        return events_pb2.WatchBatch(
            epoch=self._epoch,
            first_id=first,
            last_id=self._cursor,
            snapshot_end=snapshot_end,
            newest_id=self._hub.last,
        ).SerializeToString()

    def _gap(self, loss: Loss) -> bytes:
        """Covers what was filtered away before it, too: the ids of the gap itself are in no batch. One that ends an
        epoch stands in a batch of the next, before its first id."""
        gap = events_pb2.Gap(epoch=loss.epoch, first_id=loss.first, last_id=loss.last, reason=loss.reason)
        batch = events_pb2.WatchBatch(epoch=loss.then, gap=gap, newest_id=self._hub.last)
        if loss.then == loss.epoch:
            batch.first_id, batch.last_id = self._covered + 1, self._cursor
        else:
            batch.first_id, batch.last_id = loss.last + 1, loss.last
        self._epoch = loss.then
        self._cursor = self._covered = loss.last
        return batch.SerializeToString()
