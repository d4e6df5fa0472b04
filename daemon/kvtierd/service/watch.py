"""One watcher: where it is in the event stream, what it wants to see, and when it must hear something."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

from kvtier.v1 import events_pb2
from kvtierd.service.errors import CallRefused, shutting_down
from kvtierd.service.event_filter import EventFilter
from kvtierd.service.hub import EventHub, Run

SLOW: Final = "slow"
UNCLEAN_STOP: Final = "unclean-stop"


class Watcher:
    """Follows the hub from a cursor on. ``cursor``: the last id that this watcher has been told of, or need not be.

    ``wanted`` may be replaced at any time: it holds for what is sent from then on.

    ``covered``: everything up to it stands in batches that were sent; ids between it and the cursor were looked at and
    filtered away, and the next batch will cover them.
    """

    def __init__(self, hub: EventHub, cursor: int, wanted: EventFilter, heartbeat_s: float) -> None:
        self._hub = hub
        self._cursor = cursor
        self._covered = cursor
        self.wanted = wanted
        self._heartbeat_s = heartbeat_s
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
        """Batches without end, serialised; the first comes at once and, if it has no events, says where this starts.

        ``snapshot_end``: the first batch to reach this id is marked as such. Raises UNAVAILABLE once the hub is closed
        and everything in it was sent.
        """
        loop = asyncio.get_running_loop()
        quiet_until = loop.time()
        if snapshot_end is not None and snapshot_end <= self._cursor:
            yield self._batch(snapshot_end=True)
            quiet_until = loop.time() + self._heartbeat_s
            snapshot_end = None
        while True:
            run = self._hub.after(self._cursor)
            if run is None:
                if not await self._news(quiet_until):
                    yield self._batch()
                    quiet_until = loop.time() + self._heartbeat_s
                continue
            if run.first > self._cursor + 1:
                yield self._gap(run.first - 1)
            body = self._look_at(run)
            ends = snapshot_end is not None and snapshot_end <= self._cursor
            if body or ends or loop.time() >= quiet_until:
                yield self._batch(snapshot_end=ends) + body
                quiet_until = loop.time() + self._heartbeat_s
            if ends:
                snapshot_end = None

    async def _news(self, until: float) -> bool:
        """False when it stays quiet until then."""
        if self._hub.closed:
            raise shutting_down()
        try:
            async with asyncio.timeout_at(until):
                await self._hub.news(self._cursor)
        except TimeoutError:
            return False
        return True

    def _look_at(self, run: Run) -> bytes:
        """Moves on over ``run``; what of it this watcher wants."""
        self._cursor = run.last
        return self.wanted.look_at(run)

    def _batch(self, *, snapshot_end: bool = False) -> bytes:
        """A batch without events that covers all ids up to the cursor; events may be appended to its bytes."""
        first, self._covered = self._covered + 1, self._cursor
        return events_pb2.WatchBatch(
            epoch=self._hub.epoch,
            first_id=first,
            last_id=self._cursor,
            snapshot_end=snapshot_end,
            newest_id=self._hub.last,
        ).SerializeToString()

    def _gap(self, last: int) -> bytes:
        """Covers what was filtered away before it, too: the ids of the gap itself are in no batch."""
        gap = events_pb2.Gap(epoch=self._hub.epoch, first_id=self._cursor + 1, last_id=last, reason=SLOW)
        batch = events_pb2.WatchBatch(
            epoch=self._hub.epoch,
            first_id=self._covered + 1,
            last_id=self._cursor,
            gap=gap,
            newest_id=self._hub.last,
        )
        self._cursor = self._covered = last
        return batch.SerializeToString()


def lost_range(hub: EventHub, epoch: int, after: int) -> bytes:
    """The batch that tells a watcher of an earlier epoch what it will never see: all ids from there to this epoch's."""
    gap = events_pb2.Gap(epoch=epoch, first_id=after + 1, last_id=hub.epoch_first - 1, reason=UNCLEAN_STOP)
    return events_pb2.WatchBatch(
        epoch=hub.epoch,
        first_id=hub.epoch_first,
        last_id=hub.epoch_first - 1,
        gap=gap,
        newest_id=hub.last,
    ).SerializeToString()
