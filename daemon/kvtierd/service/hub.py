"""All events of the daemon as a single stream: the newest in memory, older events in the log.

Events are serialised once for all watchers, into runs. Bytes cost the garbage collector nothing, whereas many live
event objects would stop the loop. Publishing never waits for a watcher: a slow watcher reads the log, and is told of
lost ids.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, Final, Self

from kvtier.abi.event_hashes import HASH_BYTES
from kvtier.abi.spec import CacheSpec
from kvtier.v1 import common_pb2, events_pb2
from kvtierd.core.events import STORED, BlockEvent, Cause, EventType
from kvtierd.core.ids import CacheId, GroupId, Label
from kvtierd.core.transfers import ListingRow
from kvtierd.event_log import LEAST_WAITING_BYTES, EventLog, EventRun
from kvtierd.event_log.run import joined
from kvtierd.service.wire import TIER_TO_WIRE, parents

LATEST_EVENTS: Final = 20
RUN_EVENTS: Final = 128
RUN_BLOCKS: Final = 2048
"""Most events, and about the most blocks, of a run: packing a run costs the loop about a millisecond."""

TOKENS_WEIGH: Final = 4
"""The number of blocks as which a block with tokens counts."""

MESSAGE_EVENTS: Final = 1024
MESSAGE_BYTES: Final = 1 << 20
"""Largest message to a watcher, unless it is a single run."""

LINGER_S: Final = 0.002
"""Seconds that an event after a quiet time waits for other events, to be sent with them."""

BUSY_S: Final = 0.004
SHARE_S: Final = 0.002
"""Under load, least seconds between wakes of the watchers, in all and per watcher: each message costs the loop."""

SLOW: Final = "slow"
UNCLEAN_STOP: Final = "unclean-stop"
COMPACTED: Final = "compacted"
NOT_LOGGED: Final = "not-logged"
UNEXPLAINED: Final = "unexplained"

_log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class CacheHeader:
    """The fields of events that describe their cache. ``event_hash``: the hash of blocks besides their keys; "" = none.
    ``shape``: fields of the cache's specification, by name. A cache of an earlier life has only its name."""

    name: str
    event_hash: str = ""
    shape: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, spec: CacheSpec, event_hash: str) -> Self:
        shape: dict[str, Any] = {"tokens_per_block": spec.tokens_per_block, "fingerprint": spec.fingerprint()}
        for each in ("window_tokens", "sink_tokens", "flat"):
            shape[f"all_{each}"] = [getattr(group, each) for group in spec.groups]
        return cls(name, event_hash, shape)

    @property
    def hash_bytes(self) -> int:
        """Bytes of an event hash; 0 = the cache has none."""
        return HASH_BYTES[self.event_hash] if self.event_hash else 0

    def window(self, group: GroupId) -> int:
        """Tokens in the group's window; 0 = full attention, or unknown."""
        windows: Sequence[int] = self.shape.get("all_window_tokens", ())
        return windows[group] if group < len(windows) else 0


@dataclass(slots=True, frozen=True)
class Loss:
    """Lost ids [first, last] of an epoch. ``then``: the epoch of the id after them."""

    epoch: int
    first: int
    last: int
    reason: str
    then: int


@dataclass(slots=True, eq=False)
class EventHub:
    """The stream of events. Loop thread only.

    Ids rise over all epochs, so an id alone tells the place of its event. A life of the daemon has a single epoch; the
    log knows earlier epochs.

    ``_epoch_first``: the first id of the epoch. ``_headers``: of all caches with events. ``_max_bytes``: of events in
    memory. ``_log``: None without an event log.
    """

    epoch: int
    last: int
    """The last id given out, even if it cannot be read yet; at first that before this life."""
    _epoch_first: int
    _headers: Mapping[CacheId, CacheHeader]
    _max_bytes: int
    _log: EventLog | None = None
    watchers: Sized = field(default=(), init=False)
    """The watchers that follow the events."""
    published: Counter[tuple[EventType, Cause]] = field(default_factory=Counter, init=False)
    """Events of this life by type and cause."""
    _latest: deque[BlockEvent] = field(default_factory=partial(deque, maxlen=LATEST_EVENTS), init=False)
    readable: int = field(init=False)
    """The last id that :meth:`after` can return."""
    closed: bool = field(default=False, init=False)
    reading: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _pending: list[BlockEvent] = field(default_factory=list, init=False)
    _packing: asyncio.Handle | None = field(default=None, init=False)
    _ring: deque[EventRun] = field(default_factory=deque, init=False)
    _bytes: int = field(default=0, init=False)
    _asked: tuple[int, int, int] | None = field(default=None, init=False)
    _answer: EventRun | None = field(default=None, init=False)
    _news: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set with the next news, and replaced."""
    _woken: float = field(default=-BUSY_S, init=False)

    def __post_init__(self) -> None:
        self.readable = self.last

    # -- writing -----------------------------------------------------------------------------------------------------

    def publish(self, events: Sequence[BlockEvent]) -> None:
        """Takes events in id order, without a hole, and serialises them in a later turn of the loop."""
        if not events:
            return
        self._pending.extend(events)
        self.published.update((event.type, event.cause) for event in events)
        self._latest.extend(events[-LATEST_EVENTS:])
        self.last = events[-1].id
        if self._packing is None:
            loop = asyncio.get_running_loop()
            apart = max(BUSY_S, SHARE_S * len(self.watchers))
            self._packing = loop.call_at(max(loop.time() + LINGER_S, self._woken + apart), self._pack_some)

    def close(self) -> None:
        """Makes the pending events readable, then has the watchers end. No event may be published afterwards."""
        while self._pending:
            self._pack()
        self.closed = True
        self._wake()

    def _pack_some(self) -> None:
        self._packing = None
        self._pack()
        if self._pending:
            self._packing = asyncio.get_running_loop().call_soon(self._pack_some)
        else:
            self._wake()

    def _pack(self) -> None:
        """Makes a run of the oldest pending events."""
        if not self._pending:
            return
        count = _run_length(self._pending)
        events, self._pending = self._pending[:count], self._pending[count:]
        first, last = events[0].id, events[-1].id
        try:
            batch = events_pb2.WatchBatch(events=[event_message(event, self._headers[event.cache]) for event in events])
        except Exception:  # noqa: BLE001  our bug: the daemon serves on, and the next run shows the hole
            _log.exception("events cannot be told first=%d last=%d", first, last)
            return
        run = EventRun.of(self.epoch, first, last, batch, latest_ns=max(event.time_ns for event in events))
        self._ring.append(run)
        self.readable = last
        self._bytes += run.size
        self._make_room(run.last if self._log is None else self._log.offer(run))

    def _make_room(self, settled: int) -> None:
        """Drops the oldest runs. ``settled``: ids above it wait for the log, and go only if memory is short."""
        most = max(self._max_bytes, LEAST_WAITING_BYTES)
        while len(self._ring) > 1 and (
            self._bytes > most or (self._bytes > self._max_bytes and self._ring[0].last <= settled)
        ):
            self._bytes -= self._ring.popleft().size

    def _wake(self) -> None:
        self._woken = asyncio.get_running_loop().time()
        self._news.set()
        self._news = asyncio.Event()

    def latest(self) -> list[tuple[BlockEvent, str]]:
        """The latest events of this life, the oldest first, with the names of their caches."""
        return [(event, self._headers[event.cache].name) for event in self._latest]

    # -- reading -----------------------------------------------------------------------------------------------------

    @property
    def oldest(self) -> int:
        """The oldest id held; if none is held, the id after the last."""
        logged = None if self._log is None else self._log.oldest
        return self._oldest_in_memory if logged is None else min(logged, self._oldest_in_memory)

    async def news(self, cursor: int, until: float | None = None) -> bool:
        """Waits for an event above the cursor, or for the hub's close. Returns False if neither came ``until`` then, by
        the loop's clock."""
        while self.readable <= cursor and not self.closed:
            try:
                async with asyncio.timeout_at(until):
                    await self._news.wait()
            except TimeoutError:
                return False
        return True

    async def turn(self, until: float) -> bool:
        """Waits until the caller may read the past. Watchers take turns, and the loop has a turn in between.

        Args:
            until: Loop time at which to give up.

        Returns:
            False if the time is up.
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

    async def after(self, epoch: int, cursor: int) -> EventRun | Loss | None:
        """The events after ``cursor``: at most a message, of a single epoch, without a hole. None = no events yet.

        Args:
            epoch: The watcher's epoch.
        """
        if epoch != self.epoch:
            while (following := self._following(epoch)) is not None and cursor + 1 >= following[0]:
                epoch = following[1]
        if epoch != self.epoch or cursor + 1 < self._oldest_in_memory:
            return await self._older(epoch, cursor)
        run = self._in_memory(cursor)
        if run is None or run.first == cursor + 1:
            return run
        return Loss(epoch, cursor + 1, run.first - 1, UNEXPLAINED, epoch)

    async def since(self, time_ns: int) -> int:
        """The id after which events at or after that time begin; the last id if all events are older."""
        runs = (run.first_at(time_ns) for run in self._ring if run.latest_ns >= time_ns)
        pending = (event.id for event in self._pending if event.time_ns >= time_ns)
        first = next(runs, None) or next(pending, None) or self.last + 1
        if self._log is not None:
            compacted, compacted_ns = self._log.compacted
            if compacted and compacted_ns >= time_ns:  # some of the events are gone: begin with their loss
                return self.begins_after(self.epoch_of(compacted)) or 0
            first = min(first, await self._log.since(time_ns) or first)
        return first - 1

    @property
    def _oldest_in_memory(self) -> int:
        return self._ring[0].first if self._ring else self.readable + 1

    def _in_memory(self, cursor: int) -> EventRun | None:
        """The oldest events in memory above ``cursor``. If the first is above ``cursor + 1``, there is a hole."""
        if cursor >= self.readable:
            return None
        asked = cursor, self.readable, self._ring[0].first
        if self._asked != asked:  # watchers that keep up all ask the same
            self._asked, self._answer = asked, self._message(cursor)
        return self._answer

    def _message(self, cursor: int) -> EventRun:
        index = bisect_right(self._ring, cursor, key=attrgetter("last"))
        runs = [self._ring[index].after(cursor)]
        count, size = len(runs[0]), len(runs[0].private)
        for following in range(index + 1, len(self._ring)):
            run = self._ring[following]
            count, size = count + len(run), size + len(run.private)
            if run.first > runs[-1].last + 1 or count > MESSAGE_EVENTS or size > MESSAGE_BYTES:
                break
            runs.append(run)
        return joined(runs)

    async def _older(self, epoch: int, cursor: int) -> EventRun | Loss:
        """Events that are not in memory. An event that was dropped from memory is in the log, or lost."""
        held_from = self._oldest_in_memory
        if self._log is not None:
            found = await self._log.after(cursor, MESSAGE_BYTES, MESSAGE_EVENTS)
            if found is not None and found.first <= cursor + 1:
                return found.after(cursor)
            compacted, _ = self._log.compacted
            held_from = held_from if found is None else min(held_from, found.first)
            if cursor < compacted:
                return self._loss(epoch, cursor + 1, min(held_from - 1, compacted), COMPACTED)
        elif epoch == self.epoch:
            return self._loss(epoch, cursor + 1, held_from - 1, SLOW)
        ended = epoch != self.epoch and held_from - 1 >= (self.end_of(epoch) or 0)
        return self._loss(epoch, cursor + 1, held_from - 1, UNCLEAN_STOP if ended else NOT_LOGGED)

    def _loss(self, epoch: int, first: int, last: int, reason: str) -> Loss:
        """A loss, which ends at the latest with its epoch."""
        following = self._following(epoch)
        if following is None or last < following[0] - 1:
            return Loss(epoch, first, last, reason, epoch)
        return Loss(epoch, first, following[0] - 1, reason, following[1])

    # -- epochs ------------------------------------------------------------------------------------------------------

    def epoch_of(self, number: int) -> int:
        """The epoch of an id; the oldest known epoch for an older id."""
        epochs = self._epochs()
        return epochs[max(0, bisect_right(epochs, number, key=itemgetter(0)) - 1)][1]

    def begins_after(self, epoch: int) -> int | None:
        """The id after which an epoch begins; None = unknown."""
        return next((first - 1 for first, number in self._epochs() if number == epoch), None)

    def end_of(self, epoch: int) -> int | None:
        """The last id of an earlier epoch, even if it was not given out; None for the present epoch."""
        following = self._following(epoch)
        return None if following is None else following[0] - 1

    def _epochs(self) -> Sequence[tuple[int, int]]:
        """First id and number of each known epoch, in order."""
        logged = () if self._log is None else self._log.epochs
        return [*(entry for entry in logged if entry[1] < self.epoch), (self._epoch_first, self.epoch)]

    def _following(self, epoch: int) -> tuple[int, int] | None:
        return next((entry for entry in self._epochs() if entry[1] > epoch), None)


def _run_length(events: Sequence[BlockEvent]) -> int:
    blocks = 0
    for count, event in enumerate(events[:RUN_EVENTS], start=1):
        has_tokens = event.type is STORED and have_tokens(event.blocks.labels)
        blocks += len(event.blocks.keys) * (TOKENS_WEIGH if has_tokens else 1)
        if blocks >= RUN_BLOCKS:
            return count
    return min(len(events), RUN_EVENTS)


def event_message(value: BlockEvent, header: CacheHeader) -> events_pb2.Event:
    """The message of an event, with its private fields. The type decides the fields; see ``events.proto``."""
    message = events_pb2.Event(
        id=value.id,
        type=events_pb2.EventType.ValueType(value.type),
        cause=common_pb2.Cause.ValueType(value.cause),
        cache=header.name,
        group=value.group,
        time_ns=value.time_ns,
        num_blocks_per_cache_level=[slots for _, slots in value.capacity],
        event_hash=header.event_hash,
        window_tokens=header.window(value.group),
        **(header.shape if value.type is EventType.CREATED else {}),
    )
    blocks = value.blocks
    if blocks.keys:
        stored = value.type is EventType.STORED
        message.keys, message.residency = b"".join(blocks.keys), bytes(blocks.residencies)
        if value.type is not EventType.REMOVED:
            message.priorities = bytes(blocks.priorities)
        if stored:
            message.parents = parents(blocks.parents)
        _add_labels(message, blocks.labels, blocks.parent_labels, header.hash_bytes, stored=stored)
    if value.moved_from is not None:
        message.moved_from = TIER_TO_WIRE[value.moved_from]
    if value.moved_to is not None:
        message.moved_to = TIER_TO_WIRE[value.moved_to]
    if value.moved_bytes:
        message.moved_bytes, message.queue_ns, message.copy_ns = value.moved_bytes, value.queue_ns, value.copy_ns
    return message


def slice_of(
    header: CacheHeader, group: GroupId, rows: Sequence[ListingRow], *, private: bool
) -> events_pb2.SnapshotSlice:
    """A slice of a snapshot. ``private``: with the token ids that the cache keeps."""
    message = events_pb2.SnapshotSlice(
        cache=header.name,
        group=group,
        keys=b"".join(row.key for row in rows),
        parents=parents(row.parent for row in rows),
        residency=bytes(row.residency for row in rows),
        priorities=bytes(row.priority for row in rows),
        event_hash=header.event_hash,
        window_tokens=header.window(group),
        **header.shape,
    )
    labels, parent_labels = [row.label for row in rows], [row.parent_label for row in rows]
    _add_labels(message, labels, parent_labels, header.hash_bytes, stored=True)
    if not private:
        message.ClearField("tokens")
    return message


def _add_labels(
    message: events_pb2.Event | events_pb2.SnapshotSlice,
    labels: Sequence[Label | None],
    parent_labels: Sequence[Label | None],
    hash_bytes: int,
    *,
    stored: bool,
) -> None:
    if hash_bytes:
        message.event_hashes = b"".join([_hash(label, hash_bytes) for label in labels])
    if stored and hash_bytes:
        message.parent_hashes = b"".join([_hash(label, hash_bytes) for label in parent_labels])
    if stored and have_tokens(labels):
        message.tokens.extend([_tokens(label) for label in labels])


def have_tokens(labels: Sequence[Label | None]) -> bool:
    return any(label is not None and label.tokens for label in labels)


def _tokens(label: Label | None) -> events_pb2.BlockTokens:
    if label is None:
        return events_pb2.BlockTokens()
    message = events_pb2.BlockTokens.FromString(label.scope)
    message.token_ids = label.tokens
    return message


def _hash(label: Label | None, size: int) -> bytes:
    return label.event_hash if label is not None and label.event_hash else bytes(size)
