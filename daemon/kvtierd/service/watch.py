"""A watcher: its filter and rights, its place in the stream, and the batches sent to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kvtier.abi.spec import MAX_GROUPS
from kvtier.v1 import common_pb2, events_pb2
from kvtierd.core.ids import KEY_BYTES
from kvtierd.core.transfers import ListingRow
from kvtierd.event_log import EventRun
from kvtierd.event_log.run import without_tokens
from kvtierd.service import validation
from kvtierd.service.errors import CallRefused, bad_argument, shutting_down
from kvtierd.service.hub import EventHub, Loss

MAX_PREFIXES: Final = 64
"""Most key prefixes in a filter."""
MAX_VALUES: Final = 4096
"""Most values of each other kind in a filter."""

COVER_S: Final = 0.1
COVER_SHARE_S: Final = 0.02
"""Quiet seconds after which filtered ids are covered by a batch: at least, and per watcher."""

BEAT_SHARE_S: Final = 0.002
BEAT_MOST_S: Final = 0.8
"""Least seconds between heartbeats: a share per open watcher, up to a maximum, as clients wait for a second."""

Caches = Callable[[str], bool]


def every_cache(_: str) -> bool:
    return True


def no_cache(_: str) -> bool:
    return False


@dataclass(slots=True)
class _Latest:
    """The last run that was filtered, and its part that passed."""

    run: EventRun | None = None
    passed: bytes = b""


@dataclass(slots=True, frozen=True)
class EventFilter:
    """A filter of events; an empty set lets everything through.

    ``tiers``: numbers of the wire. ``keys``: prefixes. ``visible``: the caches whose events the watcher may see.
    ``private``: the caches whose token ids it may see. Watchers with equal filters share an object, so that each run is
    filtered once for all of them.
    """

    types: frozenset[int] = frozenset()
    causes: frozenset[int] = frozenset()
    caches: frozenset[str] = frozenset()
    tiers: frozenset[int] = frozenset()
    groups: frozenset[int] = frozenset()
    keys: tuple[bytes, ...] = ()
    visible: Caches = every_cache
    private: Caches = no_cache
    _latest: _Latest = field(default_factory=_Latest, init=False, compare=False, repr=False)

    @classmethod
    def of(cls, message: events_pb2.WatchFilter) -> EventFilter:
        """The filter of a request, for all caches, without token ids. Raises INVALID_ARGUMENT that names the field."""
        for name in ("types", "causes", "tiers", "caches", "groups", "key_prefixes"):
            most = MAX_PREFIXES if name == "key_prefixes" else MAX_VALUES
            validation.count(f"filter.{name}", len(getattr(message, name)), 0, most)
        for name, known in (("types", events_pb2.EventType), ("causes", common_pb2.Cause), ("tiers", common_pb2.Tier)):
            for index, value in enumerate(getattr(message, name)):
                if not value or value not in known.values():
                    raise bad_argument(f"filter.{name}[{index}]", value, f"1 to {max(known.values())}")
        for index, cache in enumerate(message.caches):
            validation.cache_name(cache, f"filter.caches[{index}]")
        for index, group in enumerate(message.groups):
            validation.count(f"filter.groups[{index}]", group, 0, MAX_GROUPS - 1)
        for index, prefix in enumerate(message.key_prefixes):
            if not 1 <= len(prefix) <= KEY_BYTES:
                raise bad_argument(f"filter.key_prefixes[{index}]", f"{len(prefix)} bytes", f"1 to {KEY_BYTES} bytes")
        names = ("types", "causes", "caches", "tiers", "groups")
        sets: dict[str, Any] = {name: frozenset(getattr(message, name)) for name in names}
        return cls(**sets, keys=tuple(sorted(set(message.key_prefixes))))

    def allowed(self, visible: Caches, private: Caches) -> EventFilter:
        """The same filter for a watcher with other rights."""
        return replace(self, visible=visible, private=private)

    def wants_cache(self, name: str) -> bool:
        return (not self.caches or name in self.caches) and self.visible(name)

    def wants_group(self, group: int) -> bool:
        return not self.groups or group in self.groups

    def wanted_rows(self, rows: Sequence[ListingRow]) -> Sequence[ListingRow]:
        return [row for row in rows if row.key.startswith(self.keys)] if self.keys else rows

    def look_at(self, run: EventRun) -> bytes:
        """Filters a run. Returns a serialised ``WatchBatch`` of the events that pass, with only their wanted blocks."""
        if self._lets_all_through and (run.private is run.body or self.private in (every_cache, no_cache)):
            return run.body if self.private is no_cache else run.private
        if self._latest.run is not run:
            self._latest.run, self._latest.passed = run, self._passed(run)
        return self._latest.passed

    @property
    def _lets_all_through(self) -> bool:
        some = self.types or self.causes or self.caches or self.tiers or self.groups or self.keys
        return not some and self.visible is every_cache

    def _passed(self, run: EventRun) -> bytes:
        events = events_pb2.WatchBatch.FromString(run.body if self.private is no_cache else run.private).events
        wanted = [event for event in events if self._wants(event)]
        without_tokens(wanted, self.private)
        return events_pb2.WatchBatch(events=wanted).SerializeToString()

    def _wants(self, event: events_pb2.Event) -> bool:
        """Returns whether an event passes, after cutting it to the wanted blocks."""
        return (
            (not self.types or event.type in self.types)
            and (not self.causes or event.cause in self.causes)
            and self.wants_cache(event.cache)
            and self.wants_group(event.group)
            and (not self.keys or not event.keys or _keep(event, self.keys))
            and (not self.tiers or self._touches_tiers(event))
        )

    def _touches_tiers(self, event: events_pb2.Event) -> bool:
        if event.moved_from in self.tiers or event.moved_to in self.tiers:
            return True
        bits = sum(1 << (tier - 1) for tier in self.tiers)
        return event.type == events_pb2.EVENT_TYPE_STORED and any(residency & bits for residency in event.residency)


def _keep(event: events_pb2.Event, prefixes: tuple[bytes, ...]) -> bool:
    """Cuts an event to blocks whose keys begin with a prefix. Returns whether any are left."""
    keys = event.keys  # each access copies them
    if not any(prefix in keys for prefix in prefixes):  # rules out most events without a look at each key
        return False
    count = len(keys) // KEY_BYTES
    places = [place for place in range(count) if keys.startswith(prefixes, place * KEY_BYTES)]
    if not places or len(places) == count:
        return bool(places)
    # All columns with an item per block; ``hub.py`` fills them.
    for name in ("keys", "parents", "residency", "priorities", "event_hashes", "parent_hashes"):
        packed = getattr(event, name)
        width = len(packed) // count
        setattr(event, name, b"".join(packed[place * width : (place + 1) * width] for place in places))
    event.moved_bytes = event.moved_bytes * len(places) // count
    if event.tokens:
        tokens = [event.tokens[place] for place in places]
        event.ClearField("tokens")
        event.tokens.extend(tokens)
    return True


class Watcher:
    """Follows the events from a cursor on.

    ``cursor``: the last id that was sent to this watcher, or need not be sent. ``epoch``: the epoch of the cursor, or
    the epoch that begins after it. ``wanted`` may be replaced at any time, and applies to later batches.
    """

    def __init__(self, hub: EventHub, epoch: int, cursor: int, wanted: EventFilter, heartbeat_s: float) -> None:
        self._hub = hub
        self._epoch = epoch
        self._cursor = cursor
        self._covered = cursor
        """Ids between this id and the cursor were filtered out; the next batch will cover them."""
        self.wanted = wanted
        self._heartbeat_s = heartbeat_s
        self._loop = asyncio.get_running_loop()
        self.quiet_until = self._loop.time() + heartbeat_s
        """Loop time at which the next heartbeat is due."""
        self.refusal: CallRefused | None = None
        """Why the watch must end after a change of rights."""

    def require_allowed(self) -> None:
        """Raises :attr:`refusal`. Call before a batch is sent: a batch covers the ids of events that its watcher may no
        longer see."""
        if self.refusal is not None:
            raise self.refusal

    @property
    def lag(self) -> int:
        """The number of events after the cursor."""
        return self._hub.last - self._cursor

    async def follow(self, snapshot_end: int | None = None) -> AsyncGenerator[bytes, None]:
        """Yields serialised batches without end. The first comes at once; without events it tells the start.

        ``snapshot_end``: the first batch that reaches this id is marked as the snapshot's end. Raises UNAVAILABLE after
        the last event of a closed hub.
        """
        self.quiet_until = self._loop.time()
        if snapshot_end is not None and snapshot_end <= self._cursor:
            yield self._batch(snapshot_end=True)
            self.heard()
            snapshot_end = None
        while True:
            behind = self._hub.readable
            found = await self._hub.after(self._epoch, self._cursor)
            epoch = self._hub.epoch if found is None else found.epoch
            if epoch != self._epoch or (isinstance(found, Loss) and found.then != epoch):
                if self._covered < self._cursor:
                    yield self._batch()
                self._epoch = epoch
            if found is None:
                if not await self._news():
                    yield self.heartbeat()
                continue
            if isinstance(found, Loss):
                yield self._gap(found)
                continue
            past = found.last < behind
            while past and not await self._hub.turn(self.quiet_until):
                yield self.heartbeat()
            self._cursor = found.last
            body = self.wanted.look_at(found)
            ends = snapshot_end is not None and snapshot_end <= self._cursor
            if body or ends or self.is_due:
                yield self._batch(snapshot_end=ends) + body
                self.heard()
            if ends:
                snapshot_end = None
            if not body:
                await asyncio.sleep(0)  # everything was filtered out, perhaps for many runs: give the loop a turn

    def heartbeat(self) -> bytes:
        """Returns a batch without events, and begins the wait for the next heartbeat."""
        self.heard()
        return self._batch()

    @property
    def is_due(self) -> bool:
        return self._loop.time() >= self.quiet_until

    def heard(self) -> None:
        """Begins the wait for the next heartbeat, after a batch was sent."""
        spread_s = min(BEAT_MOST_S, BEAT_SHARE_S * len(self._hub.watchers))
        self.quiet_until = self._loop.time() + max(self._heartbeat_s, spread_s)

    async def _news(self) -> bool:
        """Waits for events. Returns False if a batch without events is due before. The batch is due earlier if it
        covers filtered ids, for which a client may wait."""
        if self._hub.closed:
            raise shutting_down()
        until = self.quiet_until
        if self._covered < self._cursor:
            until = min(until, self._loop.time() + max(COVER_S, COVER_SHARE_S * len(self._hub.watchers)))
        return await self._hub.news(self._cursor, until)

    def _batch(self, *, snapshot_end: bool = False) -> bytes:
        """A batch without events that covers all ids up to the cursor; events may be appended to its bytes."""
        first, self._covered = self._covered + 1, self._cursor
        return events_pb2.WatchBatch(
            epoch=self._epoch, first_id=first, last_id=self._cursor, snapshot_end=snapshot_end, newest_id=self._hub.last
        ).SerializeToString()

    def _gap(self, loss: Loss) -> bytes:
        """A batch with a gap. The batch also covers filtered ids before the gap, but not the ids in the gap. A gap at
        the end of an epoch is in a batch of the next epoch, before its first id."""
        gap = events_pb2.Gap(epoch=loss.epoch, first_id=loss.first, last_id=loss.last, reason=loss.reason)
        batch = events_pb2.WatchBatch(epoch=loss.then, gap=gap, newest_id=self._hub.last)
        if loss.then == loss.epoch:
            batch.first_id, batch.last_id = self._covered + 1, self._cursor
        else:
            batch.first_id, batch.last_id = loss.last + 1, loss.last
        self._epoch = loss.then
        self._cursor = self._covered = loss.last
        return batch.SerializeToString()
