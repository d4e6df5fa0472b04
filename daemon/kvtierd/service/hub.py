"""The event hub: the last events of the daemon, serialised once for every watcher.

The ring holds runs of events as the bytes of a ``WatchBatch`` that carries nothing but events. Protobuf messages
concatenate, so what a watcher is sent is a small header of its own followed by runs that were serialised once for all.
Bytes also cost the garbage collector nothing, where 10^5 live event objects would stop the loop for tens of
milliseconds.

Publishing never waits for anybody: a watcher that falls behind the ring finds its next id gone and is told so.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence, Sized
from math import inf
from typing import Final

from kvtier.v1 import events_pb2
from kvtierd.core.events import STORED, Cause, Event, EventType
from kvtierd.event_log import LEAST_WAITING_BYTES, EventLog, Run
from kvtierd.event_log.run import joined
from kvtierd.service import wire
from kvtierd.service.faces import Faces

RUN_EVENTS: Final = 128
RUN_BLOCKS: Final = 2048
"""A run is closed once it has so many events, or blocks: packing one takes about a millisecond of the loop."""

TOKENS_WEIGH: Final = 4
"""A block with tokens counts as so many: packing it takes a microsecond instead of a quarter of one."""

MESSAGE_EVENTS: Final = 1024
"""Most events of a message to a watcher."""

MESSAGE_BYTES: Final = 1 << 20
"""A message is closed once it is so long; a single longer event still goes out whole."""

LINGER_S: Final = 0.002
"""Events after a quiet time wait so long for company, not to be sent one by one."""

BUSY_S: Final = 0.004
SHARE_S: Final = 0.002
"""Under load watchers are woken so far apart at least, and so far for each of them: a message to one costs the daemon
some 0.1 ms, as much as a dozen changes, so however many there are, they take a twentieth of its time."""


_log = logging.getLogger(__name__)


class EventHub:
    """The ring and its wake-up. Loop thread only.

    ``epoch``: the one in which it starts. ``last``: the last id given out before that. ``epoch_first``: the first id of
    the epoch; ids from there to ``last`` were given out by an earlier life of it. ``faces``: of all caches with events.
    ``max_bytes``: of past events. ``log``: None where there is none.
    """

    def __init__(
        self,
        epoch: int,
        last: int,
        epoch_first: int,
        faces: Faces,
        max_bytes: int,
        log: EventLog | None = None,
    ) -> None:
        self._epochs = [(epoch_first, epoch)]
        self.watchers: Sized = ()
        """Those who follow it."""
        self.published: Final[Counter[tuple[EventType, Cause]]] = Counter()
        """Events of this life by type and cause."""
        self._faces = faces
        self._max_bytes = max_bytes
        self._log = log
        self._published = last
        self._packed = last
        self._pending: list[Event] = []
        self._packing: asyncio.Handle | None = None
        self._ring: dict[int, Run] = {}  # by a number that rises by one: the ends of a queue, the lookups of a list
        self._head = 0
        self._bytes = 0
        self._asked: tuple[int, int, int] | None = None
        self._answer: Run | None = None
        self._waiting: dict[asyncio.Future[bool], None] = {}
        """Those who wait for news, in the order in which they came."""
        self._woken = -BUSY_S
        self._closed = False

    @property
    def epochs(self) -> Sequence[tuple[int, int]]:
        """First id and number of each epoch of this life, in order; the last one is the present."""
        return self._epochs

    @property
    def epoch(self) -> int:
        """The present one."""
        return self._epochs[-1][1]

    def begin_epoch(self, epoch: int) -> None:
        """The next id is the first of this epoch; who keeps up is told at once."""
        self._epochs.append((self._published + 1, epoch))
        self._wake()

    @property
    def last(self) -> int:
        """The last id given out, whether or not it can be read yet."""
        return self._published

    @property
    def readable(self) -> int:
        """The last id that :meth:`after` can return."""
        return self._packed

    @property
    def oldest(self) -> int:
        """The oldest id held; one above :attr:`readable` where nothing is."""
        return self._ring[self._head].first if self._ring else self._packed + 1

    @property
    def closed(self) -> bool:
        return self._closed

    def publish(self, events: Sequence[Event]) -> None:
        """Takes events in id order, without a hole. Cheap: they are serialised in a later turn of the loop."""
        if not events:
            return
        self._pending.extend(events)
        self.published.update((event.type, event.cause) for event in events)
        self._published = events[-1].id
        if self._packing is None:
            loop = asyncio.get_running_loop()
            apart = max(BUSY_S, SHARE_S * len(self.watchers))
            self._packing = loop.call_at(max(loop.time() + LINGER_S, self._woken + apart), self._pack_some)

    def after(self, cursor: int) -> Run | None:
        """The oldest events held with ids above ``cursor``, at most a message of them, of one epoch; None if there are
        none yet.

        ``Run.first`` above ``cursor + 1`` means that the ids between are gone.
        """
        if cursor >= self._packed:
            return None
        asked = cursor, self._packed, self._head
        if self._asked != asked:  # those who keep up all ask the same
            self._asked, self._answer = asked, self._from(cursor)
        return self._answer

    def _from(self, cursor: int) -> Run:
        end = self._head + len(self._ring)
        above = bisect_right(range(end), cursor + 1, lo=self._head, key=lambda index: self._ring[index].first)
        index = max(self._head, above - 1)
        if self._ring[index].last <= cursor:  # a hole follows it
            index += 1
        run = self._ring[index].after(cursor)
        runs, count, size = [run], run.last - run.first + 1, len(run.private)
        for following in range(index + 1, end):
            other = self._ring[following]
            if other.first > runs[-1].last + 1 or other.epoch != run.epoch:
                break
            count += other.last - other.first + 1
            size += len(other.private)
            if count > MESSAGE_EVENTS or size > MESSAGE_BYTES:
                break
            runs.append(other)
        return joined(runs)

    def since(self, time_ns: int) -> int | None:
        """The first id of an event at or after that time, held or to be held soon; None where all are before."""
        for run in self._ring.values():
            if run.latest_ns >= time_ns:
                return run.first_at(time_ns)
        return next((event.id for event in self._pending if event.time_ns >= time_ns), None)

    async def news(self, cursor: int, epoch: int | None = None, until: float = inf) -> bool:
        """Returns when :meth:`after` has something above the cursor, when the hub is closed, or when another ``epoch``
        has begun right after the cursor; False where that has not come ``until`` then, by the loop's clock."""
        while self._packed <= cursor and not self._closed and (epoch is None or not self.has_begun(cursor, epoch)):
            loop = asyncio.get_running_loop()
            waiter: asyncio.Future[bool] = loop.create_future()
            timer = None if until == inf else loop.call_at(until, _answer, waiter, False)
            self._waiting[waiter] = None
            try:
                if not await waiter:
                    return False
            finally:
                self._waiting.pop(waiter, None)
                if timer is not None:
                    timer.cancel()
        return True

    def has_begun(self, cursor: int, epoch: int) -> bool:
        """Whether the present epoch is another one and begins right after ``cursor``."""
        return self._epochs[-1][0] == cursor + 1 and self.epoch != epoch

    def _end_of_epoch(self, number: int) -> float:
        """The last id of the epoch that ``number`` is of."""
        return next((first - 1 for first, _ in self._epochs if first > number), inf)

    def close(self) -> None:
        """No more events come: what is pending becomes readable, then watchers are to end."""
        while self._pending:
            self._pack()
        self._closed = True
        self._wake()

    def _pack_some(self) -> None:
        self._packing = None
        self._pack()
        if self._pending:
            self._packing = asyncio.get_running_loop().call_soon(self._pack_some)
        else:
            self._wake()

    def _pack(self) -> None:
        if not self._pending:
            return
        first = self._pending[0].id
        count = int(min(_run_length(self._pending), self._end_of_epoch(first) - first + 1))
        messages = self._messages(self._pending[:count])
        told = max(1, len(messages))
        events, self._pending = self._pending[:told], self._pending[told:]
        if not messages:
            return  # a hole, which a later run shows
        batch = events_pb2.WatchBatch(events=messages)
        keyless = not all(event.blocks.keys for event in events)
        latest_ns = max(event.time_ns for event in events)
        epoch = next(epoch for first, epoch in reversed(self._epochs) if first <= events[0].id)
        run = Run.of(epoch, events[0].id, events[-1].id, batch, keyless=keyless, latest_ns=latest_ns)
        self._ring[self._head + len(self._ring)] = run
        self._packed = events[-1].id
        self._bytes += run.size
        self._make_room(run.last if self._log is None else self._log.offer(run))

    def _messages(self, events: Sequence[Event]) -> list[events_pb2.Event]:
        """Up to the first that cannot be told, which is our bug, and takes no other event along."""
        messages: list[events_pb2.Event] = []
        for event in events:
            try:
                messages.append(wire.event(event, self._faces[event.cache]))
            except Exception:  # noqa: BLE001  the daemon serves on, and its watchers are told of the hole
                if not messages:
                    _log.exception("an event cannot be told id=%d", event.id)
                break
        return messages

    def _make_room(self, settled: int) -> None:
        """Drops the oldest runs. ``settled``: ids above it wait for the log, and go only for want of memory."""
        most = max(self._max_bytes, LEAST_WAITING_BYTES)
        while len(self._ring) > 1 and (
            self._bytes > most or (self._bytes > self._max_bytes and self._ring[self._head].last <= settled)
        ):
            self._bytes -= self._ring.pop(self._head).size
            self._head += 1

    def _wake(self) -> None:
        self._woken = asyncio.get_running_loop().time()
        waiting, self._waiting = self._waiting, {}  # whoever comes from here on waits for the next news
        for waiter in waiting:
            _answer(waiter, True)


def _answer(waiter: asyncio.Future[bool], news: bool) -> None:
    if not waiter.done():
        waiter.set_result(news)


def _run_length(events: Sequence[Event]) -> int:
    blocks = 0
    for count, event in enumerate(events[:RUN_EVENTS], start=1):
        blocks += len(event.blocks.keys) * (TOKENS_WEIGH if _has_tokens(event) else 1)
        if blocks >= RUN_BLOCKS:
            return count
    return min(len(events), RUN_EVENTS)


def _has_tokens(event: Event) -> bool:
    return event.type is STORED and wire.have_tokens(event.blocks.labels)
