"""Following the event stream: an async iterator that survives its daemon.

Ids are contiguous inside an epoch, and every batch states its range of ids, so ranges show a loss whatever the filter
lets through. After a break the watch resumes at its cursor. Events that the daemon no longer has come as a
:class:`kvtier.events.Gap`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, Self

import grpc
from grpc.aio import AioRpcError

from kvtier import errors
from kvtier.abi.spec import MAX_GROUPS
from kvtier.deadline import Backoff, Deadline
from kvtier.events import (
    Disconnected,
    Event,
    Gap,
    Heartbeat,
    Reconnected,
    SnapshotEnd,
    SnapshotSlice,
    SnapshotStart,
    WatchItem,
    event_from_wire,
    slice_from_wire,
)
from kvtier.session import Session
from kvtier.transport import Link
from kvtier.types import AnyTier, Cause, Cursor, EventType
from kvtier.v1 import common_pb2, events_pb2
from kvtier.wire import key_prefix, tier_to_wire

DEFAULT_HEARTBEAT_S: Final = 5.0
MAX_KEY_PREFIXES: Final = 64
_MISSED_HEARTBEATS: Final = 4
"""Heartbeats missed before the watch takes the daemon, or the way to it, for hanging."""


def watch_filter(
    *,
    types: Collection[EventType] = (),
    causes: Collection[Cause] = (),
    tiers: Collection[AnyTier] = (),
    caches: Collection[str] = (),
    groups: Collection[int] = (),
    keys: Collection[bytes | str] = (),
) -> events_pb2.WatchFilter:
    """Selects events; an empty set lets everything through. Raises :class:`InvalidArgument`.

    Args:
        tiers: tiers that an event moves from or to, or stores in.
        groups: window groups by number.
        keys: at most 64 prefixes of block keys, bytes or hex, 1 to 32 bytes each. Events and slices shrink to the
            blocks that match; created and cleared concern every key and pass.
    """
    given = {"types": types, "causes": causes, "tiers": tiers, "caches": caches, "groups": groups, "keys": keys}
    for name, values in given.items():
        if isinstance(values, (str, bytes)) or not isinstance(values, Collection):
            raise errors.InvalidArgument(name, values, "a list, even of one")
    for index, type_ in enumerate(types):
        errors.require_kind(f"types[{index}]", type_, EventType)
    for index, cause in enumerate(causes):
        errors.require_kind(f"causes[{index}]", cause, Cause)
    for index, group in enumerate(groups):
        errors.require_within(f"groups[{index}]", group, 0, MAX_GROUPS - 1)
    if len(keys) > MAX_KEY_PREFIXES:
        raise errors.InvalidArgument("keys", f"{len(keys)} prefixes", f"at most {MAX_KEY_PREFIXES}")
    return events_pb2.WatchFilter(
        types=[events_pb2.EventType.ValueType(each) for each in types],
        causes=[common_pb2.Cause.ValueType(each) for each in causes],
        tiers=[tier_to_wire(each) for each in tiers],
        caches=caches,
        groups=groups,
        key_prefixes=[key_prefix(f"keys[{index}]", key) for index, key in enumerate(keys)],
    )


@dataclass(slots=True, frozen=True)
class Start:
    """The beginning of a watch: after a cursor, at the oldest event, with a snapshot, at a time; by default now."""

    since: Cursor | None = None
    oldest: bool = False
    snapshot: bool = False
    since_time_ns: int | None = None

    def __post_init__(self) -> None:
        errors.require_kind("since", self.since, Cursor, type(None))
        given = (self.since is not None, self.oldest, self.snapshot, self.since_time_ns is not None)
        if sum(given) > 1:
            raise errors.InvalidArgument("start", "more than one", "one of since, oldest, snapshot and since_time_ns")
        if self.since_time_ns is not None:
            limit = "nanoseconds since the Unix epoch, 0 or more"
            errors.require_within("since_time_ns", self.since_time_ns, 0, (1 << 64) - 1, limit)


class Watch:
    """A stream of events: ``async for item in watch``. Close it, or use it as a context manager, to end it at once.

    A cancelled ``anext`` loses nothing: the next ``anext`` resumes. :attr:`cursor` is the last id of the items taken,
    :attr:`newest` the daemon's last id as of its last batch; both are None before the first batch.
    """

    def __init__(
        self,
        session: Session,
        start: Start,
        wanted: events_pb2.WatchFilter,
        *,
        heartbeats: bool = False,
        breaks: bool = False,
        heartbeat_s: float = DEFAULT_HEARTBEAT_S,
    ) -> None:
        errors.require_within("heartbeat_s", heartbeat_s, 0.01, 3600.0, "0.01 to 3600 seconds")
        self.cursor: Cursor | None = start.since
        self.newest: int | None = None
        self.live = False
        """Whether the stream is up: true from a batch until its stream breaks."""
        self._session = session
        self._start = start
        self._filter = wanted
        self._heartbeats = heartbeats
        self._breaks = breaks
        self._heartbeat_s = heartbeat_s
        self._snapshot_pending = start.snapshot
        self._closed = False
        self._batch: Iterator[WatchItem] = iter(())
        self._followed = self._follow()
        self._step: asyncio.Future[Iterator[WatchItem]] | None = None
        """Fetches the next batch. A cancelled ``anext`` leaves it running, so that the watch keeps its place."""

    def __repr__(self) -> str:
        return f"<watch of {self._session.address}: at {self.cursor}, {'live' if self.live else 'not live'}>"

    @property
    def lag(self) -> int:
        """Ids after the cursor, as of the last batch; 0 before the first batch."""
        return 0 if self.newest is None or self.cursor is None else max(0, self.newest - self.cursor.id)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> WatchItem:
        while not self._closed:
            if (item := next(self._batch, None)) is not None:
                return item
            if self._step is None:
                self._step = asyncio.ensure_future(anext(self._followed))
                # An abandoned watch ends with its client; only the next ``anext`` raises an error of the step.
                self._step.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            step = self._step
            await asyncio.wait([step])
            if self._step is step:
                self._step = None
            if not self._closed:
                self._batch = step.result()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Ends the stream; a task that waits for the next item sees the end of the iteration."""
        self._closed = True
        if self._step is not None:
            self._step.cancel()
            await asyncio.gather(self._step, return_exceptions=True)
        await self._followed.aclose()

    async def __aenter__(self) -> Self:
        """Begins a watch that starts now. Raises :class:`kvtier.errors.DaemonUnavailable`."""
        elsewhere = self._start.oldest or self._start.since_time_ns is not None or self._snapshot_pending
        if self.cursor is None and not elsewhere:
            await self._session.call(self._pin, Deadline(self._silence_s))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _follow(self) -> AsyncGenerator[Iterator[WatchItem], None]:
        """Yields the items a batch at a time; the cursor moves as the consumer takes them."""
        backoff = Backoff()
        resuming = False
        history: int | None = None
        broken: Link | None = None
        while True:
            link = await self._session.link()
            try:
                if self.cursor is not None and history not in (None, link.welcome.history):
                    yield iter([Gap(self.cursor.epoch, self.cursor.id + 1, self.cursor.id + 1, "lost-state")])
                    self._start, self.cursor = Start(oldest=True), None
                request = await self._request(link)
                if self._snapshot_pending:
                    self.cursor = None
                    yield iter([SnapshotStart()])
                async with aclosing(self._batches(link, request)) as batches:
                    async for batch in batches:
                        backoff, resuming, self.live = Backoff(), True, True
                        history = link.welcome.history
                        if broken is not None:
                            restarted = link.welcome.boot != broken.welcome.boot
                            broken = None
                            yield iter([Reconnected(link.welcome.epoch, link.welcome.boot, restarted)])
                        events = [event_from_wire(batch.epoch, message) for message in batch.events]
                        slice_ = slice_from_wire(batch.slice) if batch.HasField("slice") else None
                        yield self._taken(batch, events, slice_)
                reason = "the stream ended"
            except TimeoutError:
                link.attach.close()  # so that the session attaches again
                reason = f"nothing was heard for {self._silence_s:g} seconds"
            except AioRpcError as error:
                fault = errors.fault_of(error)
                reason = fault.message or fault.reason
                if fault.code is grpc.StatusCode.UNAUTHENTICATED:
                    link.attach.close()  # so that the session attaches again
                elif not errors.link_is_broken(fault):
                    failure = errors.error_of(fault)
                    brought = not resuming and self._start.since is not None
                    if brought or not isinstance(failure, errors.CursorCompacted):
                        raise failure from error
                    yield iter([self._skip(failure)])
            except (asyncio.CancelledError, grpc.aio.UsageError) as error:
                reason = str(self._session.channel_closed_by(error))
            finally:
                self.live = False
            if self._breaks and broken is None:
                broken = link
                yield iter([Disconnected(reason)])
            await asyncio.sleep(backoff.next())

    async def _request(self, link: Link) -> events_pb2.WatchRequest:
        request = events_pb2.WatchRequest(filter=self._filter, heartbeat_ns=int(self._heartbeat_s * 1e9))
        if self._snapshot_pending:
            request.snapshot = True
        elif self.cursor is None and self._start.oldest:
            request.oldest = True
        elif self.cursor is None and self._start.since_time_ns is not None:
            request.since_time_ns = self._start.since_time_ns
        else:
            cursor = self.cursor or await self._pin(link)
            request.since.epoch, request.since.id = cursor.epoch, cursor.id
        return request

    async def _pin(self, link: Link) -> Cursor:
        """Ties "now" to an id, so that a break before the first batch loses nothing. Needs only the right to watch.
        Raises :class:`TimeoutError`."""
        request = events_pb2.WatchRequest(filter=self._filter, heartbeat_ns=int(self._heartbeat_s * 1e9))
        async with aclosing(self._batches(link, request)) as batches:
            first = await anext(batches, None)
        if first is None:
            raise errors.DaemonError("a watch ended without a word", reason="BAD_ANSWER")
        self.cursor = Cursor(first.epoch, first.first_id - 1)
        return self.cursor

    async def _batches(
        self, link: Link, request: events_pb2.WatchRequest
    ) -> AsyncGenerator[events_pb2.WatchBatch, None]:
        """Yields the batches of one stream. Raises :class:`TimeoutError` if even heartbeats stop."""
        stream = link.stubs.events.Watch(request, metadata=link.metadata)
        try:
            while True:
                async with asyncio.timeout(self._silence_s):
                    batch = await stream.read()
                if not isinstance(batch, events_pb2.WatchBatch):  # grpc.aio.EOF
                    return
                yield batch
        finally:
            stream.cancel()

    @property
    def _silence_s(self) -> float:
        return max(1.0, _MISSED_HEARTBEATS * self._heartbeat_s)

    def _taken(
        self, batch: events_pb2.WatchBatch, events: Sequence[Event], slice_: SnapshotSlice | None
    ) -> Iterator[WatchItem]:
        """Yields the items of a batch, and moves the cursor with each."""
        self.newest = batch.newest_id or batch.last_id  # an older daemon does not say
        covers = batch.first_id <= batch.last_id
        if covers and self.cursor is not None:  # ids join over epochs, too: what an epoch's end lost is a gap
            expected = self.cursor.id + 1
            if batch.first_id > expected:
                yield Gap(batch.epoch, expected, batch.first_id - 1, "unexplained")
        for event in events:
            self.cursor = event.cursor
            yield event
        if slice_ is None:
            self.cursor = Cursor(batch.epoch, batch.last_id)
        else:
            yield slice_
        if batch.HasField("gap"):
            yield self._gap(batch)
        if batch.snapshot_end:
            self._snapshot_pending = False
            yield SnapshotEnd(Cursor(batch.epoch, batch.last_id))
        ends_with_event = bool(batch.events) and batch.events[-1].id == batch.last_id  # not with filtered ids
        if self._heartbeats and slice_ is None and not (covers and ends_with_event):
            yield Heartbeat(Cursor(batch.epoch, batch.last_id))

    def _gap(self, batch: events_pb2.WatchBatch) -> Gap:
        gap = batch.gap
        # The lost end of an earlier epoch leaves the cursor where the batch puts it: before the new epoch's first.
        if gap.epoch == batch.epoch:
            self.cursor = Cursor(gap.epoch, gap.last_id)
        return Gap(gap.epoch, gap.first_id, gap.last_id, gap.reason)

    def _skip(self, failure: errors.CursorCompacted) -> Gap:
        """Moves the cursor to the oldest event of the daemon, which lacks the events after the cursor."""
        if self.cursor is None:
            raise errors.DaemonError("a watch without a cursor was told that it is compacted", reason="BAD_ANSWER")
        first = self.cursor.id + 1
        lost = Gap(self.cursor.epoch, first, failure.oldest - 1, "compacted")
        # The oldest event may be of a later epoch than the cursor; epoch 0 lets the daemon choose.
        self.cursor = Cursor(0, failure.oldest - 1)
        return lost
