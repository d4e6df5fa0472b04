"""``kvtier.v1.Events``: the start and the snapshot of a watch. :mod:`kvtierd.service.watch` sends its events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Final

import grpc

from kvtier.v1 import blocks_pb2, events_pb2
from kvtierd.core.ids import GroupId
from kvtierd.mover.engine import Engine
from kvtierd.mover.executor import UnknownCache
from kvtierd.rights import Right
from kvtierd.service import validation
from kvtierd.service.cache import ServedCache
from kvtierd.service.calls import Access
from kvtierd.service.catalog import Catalog
from kvtierd.service.errors import CallRefused, bad_argument, refused
from kvtierd.service.hub import TOKENS_WEIGH, EventHub, slice_of
from kvtierd.service.sessions import ClientSession
from kvtierd.service.watch import Caches, EventFilter, Watcher, every_cache, no_cache

HEARTBEAT_S: Final = 10.0
"""Default interval of a watch's heartbeats."""

MAX_WATCHES: Final = 64

SLICE_BLOCKS: Final = 1024
"""Blocks in a slice of a snapshot: listing a slice costs the loop about a millisecond."""


class EventsService:
    def __init__(self, hub: EventHub, engine: Engine, catalog: Catalog, access: Access) -> None:
        self._hub: Final = hub
        self._engine: Final = engine
        self._catalog: Final = catalog
        self._access: Final = access
        self._watchers: Final[dict[Watcher, ClientSession]] = {}
        self._hub.watchers = self._watchers

    def watching(self) -> list[tuple[ClientSession, int]]:
        """The session and the unsent events of each watcher."""
        return [(session, watcher.lag) for watcher, session in self._watchers.items()]

    def rights_changed(self) -> None:
        """Applies changed rights to the open watches. A watch of a named cache ends if its session may no longer watch
        that cache: it would wait in vain."""
        for watcher, session in self._watchers.items():
            try:
                self._require_named(session, watcher.wanted.caches)
            except CallRefused as refusal:
                watcher.refusal = refusal
            watcher.wanted = self._as_allowed(session, watcher.wanted)

    async def watch(self, session: ClientSession, request: events_pb2.WatchRequest) -> AsyncGenerator[bytes, None]:
        self._require_named(session, request.filter.caches)
        asked = EventFilter.of(request.filter)
        least_ns = validation.MIN_HEARTBEAT_NS
        heartbeat_s = validation.timeout_s("heartbeat_ns", request.heartbeat_ns, HEARTBEAT_S, least_ns)
        epoch, cursor = await self._start(request)
        if list(self._watchers.values()).count(session) >= MAX_WATCHES:
            says = f"the session has {MAX_WATCHES} watches open, and may have no more"
            raise refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_WATCHES", says)
        # No await from here until the watcher is registered, so that no change of rights is missed.
        self._require_named(session, request.filter.caches)
        watcher = Watcher(self._hub, epoch, cursor, self._as_allowed(session, asked), heartbeat_s)
        self._watchers[watcher] = session
        try:
            snapshot_end = None
            if request.snapshot:
                async with aclosing(self._slices(epoch, cursor, watcher)) as slices:
                    async for batch in slices:
                        watcher.require_allowed()
                        yield batch
                snapshot_end = self._hub.last
            async with aclosing(watcher.follow(snapshot_end)) as batches:
                async for batch in batches:
                    watcher.require_allowed()
                    yield batch
        finally:
            del self._watchers[watcher]

    def _require_named(self, session: ClientSession, names: Iterable[str]) -> None:
        """Raises PERMISSION_DENIED for a named cache that the session may not watch. Other caches are filtered."""
        for name in names:
            self._access.require_on(session, Right.WATCH, name)

    def _as_allowed(self, session: ClientSession, asked: EventFilter) -> EventFilter:
        """The filter cut to the session's rights. Watchers with equal filters share one object."""
        wanted = asked.allowed(self._allowed(session, Right.WATCH), self._allowed(session, Right.TOKENS))
        return next((watcher.wanted for watcher in self._watchers if watcher.wanted == wanted), wanted)

    def _allowed(self, session: ClientSession, right: Right) -> Caches:
        if right in self._access.rights.everywhere(session.peer.identity):
            return every_cache
        if right not in self._access.rights.somewhere(session.peer.identity):
            return no_cache
        return lambda name: self._access.may(session, right, name)

    async def _start(self, request: events_pb2.WatchRequest) -> tuple[int, int]:
        """Returns the epoch and the id after which the watch begins. Raises like :meth:`_resume_at`."""
        cursor = self._hub.last
        match request.WhichOneof("start"):
            case "since":
                return self._resume_at(request.since)
            case "since_time_ns":
                cursor = await self._hub.since(request.since_time_ns)
            case "oldest" if request.oldest:
                cursor = self._hub.oldest - 1
        return self._hub.epoch_of(cursor + 1), cursor

    def _resume_at(self, since: blocks_pb2.Cursor) -> tuple[int, int]:
        """Raises INVALID_ARGUMENT for a future id or an id outside the epoch, OUT_OF_RANGE for compacted events."""
        hub, present = self._hub, self._hub.epoch
        if since.epoch > present:
            raise bad_argument("since.epoch", since.epoch, f"at most {present}, the present epoch")
        end = hub.end_of(since.epoch) if since.epoch else None
        most = hub.last if end is None else end
        if since.id > most:
            raise bad_argument("since.id", since.id, f"at most {most}, the last id of the epoch")
        least = hub.begins_after(since.epoch)
        if least is not None and since.id < least:
            raise bad_argument("since.id", since.id, f"at least {least}, after which the epoch begins")
        oldest = hub.oldest
        # Missing events of an earlier epoch are reported as lost if all events after that epoch are held.
        if since.id + 1 < oldest and (end is None or oldest > end + 1):
            code, about = grpc.StatusCode.OUT_OF_RANGE, {"value": str(since.id), "limit": str(oldest)}
            message = f"the events after {since.epoch}:{since.id} are no longer held; the oldest is {oldest}"
            raise refused(code, "CURSOR_COMPACTED", message, field="since.id", **about)
        return since.epoch if end is not None else hub.epoch_of(since.id + 1), since.id

    async def _slices(self, epoch: int, cursor: int, watcher: Watcher) -> AsyncGenerator[bytes, None]:
        """Yields the blocks of the wanted caches. Blocks may change between slices; no batch covers an event id."""
        for cache in list(self._catalog):
            for group in filter(watcher.wanted.wants_group, range(len(cache.spec.groups))):
                async with aclosing(self._slices_of_group(epoch, cursor, cache, GroupId(group), watcher)) as slices:
                    async for batch in slices:
                        yield batch

    async def _slices_of_group(
        self, epoch: int, cursor: int, cache: ServedCache, group: GroupId, watcher: Watcher
    ) -> AsyncGenerator[bytes, None]:
        limit = SLICE_BLOCKS // TOKENS_WEIGH if cache.options.keep_tokens else SLICE_BLOCKS
        page: int | None = 0
        while page is not None:
            while not await self._hub.turn(watcher.quiet_until):
                yield watcher.heartbeat()
            if not watcher.wanted.wants_cache(cache.name):
                return  # the right to watch the cache was revoked
            try:
                listing = self._engine.manager(cache.id).listing(group, page, limit)
            except UnknownCache:
                return  # removed meanwhile; the later events say so
            rows = watcher.wanted.wanted_rows(listing.rows)
            if rows or not page:  # an empty group is sent, too
                part = slice_of(cache.header, group, rows, private=watcher.wanted.private(cache.name))
                yield events_pb2.WatchBatch(
                    epoch=epoch, first_id=cursor + 1, last_id=cursor, slice=part, newest_id=self._hub.last
                ).SerializeToString()
                watcher.heard()
            elif watcher.is_due:
                yield watcher.heartbeat()
            page = listing.next_page or None
