"""The asynchronous client."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Self, cast

import grpc

from kvtier import wire
from kvtier.abi import attach as protocol
from kvtier.abi.spec import CacheSpec
from kvtier.abi.words import KEY_BYTES
from kvtier.deadline import MAX_TIMEOUT_S, Deadline, Fence, Stream, require_timeout
from kvtier.errors import DeadlineExceeded, InvalidArgument, NotFound, PermissionDenied, require_kind, require_within
from kvtier.explanation import (
    IN_MEMORY_S,
    SHORTEST_PREFIX,
    Explanation,
    RequestExplanation,
    explanation_from_wire,
    seconds_a_block,
    tier_runs,
    why_missed,
    with_past,
)
from kvtier.session import DEFAULT_PATIENCE_S, Session
from kvtier.transport import Link, Request, Response, Stubs, TlsFiles, send
from kvtier.types import (
    AnyTier,
    CacheInfo,
    CacheOptions,
    Cause,
    Cursor,
    DaemonStats,
    EventType,
    Holdings,
    KickReport,
    LeaseInfo,
    RemoteGcReport,
    RemovalReport,
    ResizeReport,
    Tier,
)
from kvtier.v1 import admin_pb2, caches_pb2
from kvtier.watch import DEFAULT_HEARTBEAT_S, Start, Watch, watch_filter

if TYPE_CHECKING:
    from kvtier.cache import Cache
    from kvtier.chains import Prompt

DEFAULT_TIMEOUT_S: Final = 30.0
LONG_TIMEOUT_S: Final = 3600.0
"""Seconds to list a large store, or to move the blocks of a large cache."""
MOST_SECONDS: Final = 1e10
"""Maximum age in seconds: about the range of 64 bits of nanoseconds."""
LOG_END_S: Final = 0.25
"""Seconds without events after which the log counts as read to its end."""


def connect(
    address: str | os.PathLike[str] | None = None,
    *,
    tls: TlsFiles | None = None,
    insecure: bool = False,
    timeout: float = DEFAULT_TIMEOUT_S,
    wait: float = 0.0,
    patience: float = DEFAULT_PATIENCE_S,
) -> wire.Held[AsyncClient]:
    """Connects to the daemon whose runtime directory is ``address``: ``async with kvtier.connect() as client``, or
    ``client = await kvtier.connect()``.
    Args:
        address: default ``$KVTIER_ADDRESS``, else ``/run/kvtier``. ``host:port`` or ``tcp://host:port`` connects over
            TCP with ``tls``, or on this host with ``insecure`` if the daemon allows that; no memory is mapped then.
        timeout: default seconds per call.
        wait: seconds that this and each call wait for an absent daemon. ``patience``: seconds without a sign of life
            after which the daemon counts as absent.
    Raises: :class:`kvtier.errors.DaemonUnavailable`, :class:`PermissionDenied`, :class:`InvalidArgument`, and
    :class:`CallerError` (FORKED) in a child process forked while a client existed.
    """
    require_timeout(timeout)
    require_within("patience", patience, 0.01, MAX_TIMEOUT_S, f"0.01 to {MAX_TIMEOUT_S:g} seconds")
    require_within("wait", wait, 0, math.inf, "0 seconds or more")
    require_kind("address", address, str, os.PathLike, type(None))
    found = os.fspath(address) if address is not None else protocol.default_address()

    async def opened() -> AsyncClient:
        session = Session(found, tls, insecure=insecure, wait=wait, patience=patience)
        await session.open()
        return AsyncClient(session, timeout)

    return wire.Held(opened, AsyncClient.close)


class AsyncClient:
    """An asynchronous client, with a session that is restored automatically.

    Broken connections are resumed. After a restart of the daemon the client attaches again and reopens and remaps its
    caches. Only leases are lost with the daemon that granted them.

    Made by :func:`connect`; belongs to the event loop that made it.
    """

    def __init__(self, session: Session, default_timeout: float) -> None:
        self._session = session
        self._default_timeout = default_timeout

    def __repr__(self) -> str:
        state = "closed" if self._session.closed else "connected" if self.connected else "not connected"
        return f"<client of {self.address}: session {self.session_id}, {state}>"

    @property
    def address(self) -> str:
        """The daemon's runtime directory, or its host and port."""
        return self._session.address

    @property
    def session_id(self) -> int:
        """This client's number in the daemon's statistics; a restarted daemon gives a new number."""
        return self._session.welcome.session_id

    @property
    def connected(self) -> bool:
        """Whether the daemon is reachable. While it is not, calls fail at once, mapped memory is still read, and a task
        keeps trying to reconnect. Thread-safe."""
        return self._session.reachable and self._session.live_link is not None

    @property
    def closed(self) -> bool:
        return self._session.closed

    @property
    def epoch(self) -> int:
        """The daemon's epoch at the last attach."""
        return self._session.welcome.epoch

    async def open_cache(
        self,
        name: str,
        spec: CacheSpec | None = None,
        *,
        budgets: wire.Budgets | None = None,
        options: CacheOptions | None = None,
        device: str | None = None,
        write: bool = True,
        mapped: bool = True,
        timeout: float | None = None,
    ) -> Cache:
        """Opens a cache, creating it if it does not exist, and maps its memory.

        Args:
            spec: the meaning of its bytes. None: the cache must exist, also after a restart of the daemon.
            budgets: of a new cache, bytes by tier, or by tier one number per window group; None: a default share. An
                idle cache whose identity names an engine gets them, too, and the write policy.
            device: its configured name, or ``GPU-<uuid>``; None: the cache's device, or the device with most left.
            write: False maps the memory read-only. ``mapped`` False maps none: bytes go through streams.
        Raises: :class:`kvtier.errors.SpecMismatch`, :class:`InvalidArgument`, :class:`NotFound`,
        :class:`PermissionDenied`, :class:`TierFull`.
        """
        from kvtier.arena import Binder  # numpy, for clients that read or write blocks
        from kvtier.cache import Cache

        require_kind("spec", spec, CacheSpec, type(None))
        try:
            if spec is not None:
                spec.validate()
        except InvalidArgument as error:
            raise InvalidArgument(f"spec.{error.field}", error.value, error.limit) from None
        binder = Binder(self._session, name, spec, budgets, options, device or "", write=write, mapped=mapped)
        cache = Cache(binder, self._default_timeout)
        await self._session.call(binder.bind, self._deadline(timeout))
        return cache

    def watch(
        self,
        *,
        since: Cursor | None = None,
        oldest: bool = False,
        snapshot: bool = False,
        since_time_ns: int | None = None,
        types: Collection[EventType] = (),
        causes: Collection[Cause] = (),
        tiers: Collection[AnyTier] = (),
        caches: Collection[str] = (),
        groups: Collection[int] = (),
        keys: Collection[bytes | str] = (),
        heartbeats: bool = False,
        breaks: bool = False,
        heartbeat_s: float = DEFAULT_HEARTBEAT_S,
    ) -> Watch:
        """Follows events, across restarts of the daemon: ``async for item in client.watch()``.

        Starts when entered (``async with``) or first iterated: now, after ``since``, at the ``oldest`` held event, with
        a ``snapshot`` of the present state, or at ``since_time_ns`` (since the Unix epoch). Empty filters pass all
        events; ``keys`` are prefixes of block keys: see :func:`kvtier.watch.watch_filter`. Yields
        :data:`kvtier.events.WatchItem`; ``heartbeats`` and ``breaks`` add items about the stream itself.

        Raises :class:`kvtier.errors.InvalidArgument`, and, while iterating, :class:`kvtier.errors.CursorCompacted` if
        the events after ``since`` are no longer held.
        """
        return Watch(
            self._session,
            Start(since, oldest, snapshot, since_time_ns),
            watch_filter(types=types, causes=causes, tiers=tiers, caches=caches, groups=groups, keys=keys),
            heartbeats=heartbeats,
            breaks=breaks,
            heartbeat_s=heartbeat_s,
        )

    async def stats(self, *, timeout: float | None = None) -> DaemonStats:
        """The daemon's statistics."""
        reply = await self._ask(lambda stubs: stubs.admin.Stats, admin_pb2.StatsRequest(), timeout)
        return wire.same_fields(DaemonStats, reply)

    async def caches(self, *, timeout: float | None = None) -> list[CacheInfo]:
        """All caches, including caches that no session has open, and caches that are not served."""
        reply = await self._ask(lambda stubs: stubs.caches.List, caches_pb2.ListCachesRequest(), timeout)
        return [wire.cache_info(each) for each in reply.caches]

    async def leases(
        self, *, cache: str | None = None, session_id: int | None = None, timeout: float | None = None
    ) -> list[LeaseInfo]:
        """All leases, or the leases of a cache or a session, the oldest first. Raises :class:`kvtier.errors.NotFound`
        if the cache does not exist."""
        number = 0 if session_id is None else wire.session_number(session_id)
        request = wire.message(admin_pb2.LeasesRequest, cache=_name(cache), session_id=number)
        reply = await self._ask(lambda stubs: stubs.admin.Leases, request, timeout)
        return [wire.same_fields(LeaseInfo, each) for each in reply.leases]

    async def explain(
        self, key: bytes | str, *, cache: str | None = None, past: bool = True, timeout: float | None = None
    ) -> Explanation:
        """Locates a block and its holders, in every cache that the caller may read or watch. Not a use of the block.

        ``key``: the whole key, or at least its first 4 bytes, as bytes or in hex. ``cache``: look in this cache only.
        ``past``: add the block's events in the log, if the caller may watch. Raises :class:`kvtier.errors.NotFound` if
        the cache does not exist.
        """
        asked = wire.key_prefix("key", key, SHORTEST_PREFIX)
        request = wire.message(admin_pb2.ExplainRequest, cache=_name(cache), key=asked)
        deadline = self._deadline(timeout)
        reply = await self._session.call(lambda link: send(link, lambda stubs: stubs.admin.Explain, request), deadline)
        now = explanation_from_wire(asked, reply)
        return await self._with_past(now, cache, deadline) if past and len(now.keys) <= 1 else now

    async def _with_past(self, now: Explanation, cache: str | None, deadline: Deadline) -> Explanation:
        log = Watch(
            self._session,
            Start(oldest=True),
            watch_filter(keys=now.keys or [now.asked], caches=[] if cache is None else [cache]),
            heartbeats=True,
            heartbeat_s=LOG_END_S,
        )
        try:
            async with asyncio.timeout_at(deadline.at):
                return await with_past(now, log)
        except PermissionDenied:
            return now
        except TimeoutError:
            raise DeadlineExceeded("the log was not read to its end in time", reason="DEADLINE") from None

    async def explain_request(
        self,
        cache: str,
        keys: wire.Keys | Prompt,
        *,
        variants: Mapping[str, wire.Keys] | None = None,
        past: bool = True,
        timeout: float | None = None,
    ) -> RequestExplanation:
        """Says how much of a request's chain a cache has, in which tiers, and why the first missing block is missing.

        Not a use of the blocks. ``keys``: a chain's keys, or a prompt (see :meth:`kvtier.Cache.prompt`), with which a
        cache that keeps tokens says at which token the nearest stored prompt parts. ``variants``: names other keys
        of the same tokens, for example "without the salt". ``past``: read the log for a block whose departure the
        daemon does not remember. Raises :class:`kvtier.errors.NotFound` for an unknown cache.
        """
        from kvtier.chains import Prompt  # numpy, as for open_cache

        prompt = keys if isinstance(keys, Prompt) else None
        packed = prompt.keys if prompt is not None else wire.packed_keys(cast("wire.Keys", keys))
        asked = len(packed) // KEY_BYTES
        opened = await self.open_cache(cache, write=False, mapped=False, timeout=timeout)
        opened._binder.asked.muted = True  # an explanation is no request
        try:
            found = await opened.across.match(packed, remote=opened.info.remote, timeout=timeout)
            step = opened.spec.tokens_per_block
            parts_at = found.blocks * step, min(found.blocks + 1, asked) * step
            if prompt is not None and opened.info.options.keep_tokens:
                parts_at = ((await opened.across.match_tokens(prompt, timeout=timeout)).tokens,) * 2
            others = (variants or {}).items()
            stored = {name: await opened.across.prefix_length(each, timeout=timeout) for name, each in others}
        finally:
            await opened.close()
        key = packed[found.blocks * KEY_BYTES :][:KEY_BYTES]
        miss = await self.explain(key, past=False, timeout=timeout) if key else None
        if past and miss is not None and all(end.cache != cache for end in miss.endings()):
            miss = await self._with_past(miss, None, self._deadline(timeout))
        span = min(found.groups, key=lambda span: opened.spec.groups[span.group].window_tokens > 0)
        runs = tier_runs(span.residency, IN_MEMORY_S)
        if any(run.load_s is None for run in runs):
            runs = tier_runs(span.residency, await self._costs(cache, opened.spec.block_bytes(span.group), timeout))
        return RequestExplanation(
            cache,
            asked,
            found.blocks,
            max(found.blocks, found.remote_blocks),
            runs,
            parts_at,
            "" if miss is None else why_missed(cache, len(found.groups), miss, stored, found.blocks),
            miss,
        )

    async def _costs(self, cache: str, block_bytes: int, timeout: float | None) -> Mapping[Tier, float]:
        with suppress(PermissionDenied):
            for stats in (await self.stats(timeout=timeout)).caches:
                if stats.name == cache:
                    return seconds_a_block(stats, block_bytes)
        return IN_MEMORY_S

    async def holdings(self, keys: wire.Keys, *, cache: str | None = None, timeout: float | None = None) -> Holdings:
        """How much of a chain the daemon and its peers hold, in every cache that the caller may read or watch.

        The daemon answers without asking its peers. Not a use of the blocks. ``keys``: of a chain, or, as bytes, the
        first 4 to 31 bytes of one key. ``cache``: look in this cache only. Raises :class:`kvtier.errors.NotFound` if it
        does not exist.
        """
        if isinstance(keys, bytes) and 0 < len(keys) < KEY_BYTES:
            asked = wire.key_prefix("keys", keys, SHORTEST_PREFIX)
        else:
            asked = wire.packed_keys(keys)
        request = wire.message(admin_pb2.HoldingsRequest, cache=_name(cache), keys=asked)
        return wire.holdings(await self._ask(lambda stubs: stubs.admin.Holdings, request, timeout))

    async def _ask(
        self,
        method: Callable[[Stubs], grpc.aio.UnaryUnaryMultiCallable[Request, Response]],
        request: Request,
        timeout: float | None,
    ) -> Response:
        return await self._session.call(lambda link: send(link, method, request), self._deadline(timeout))

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline(self._default_timeout if timeout is None else timeout)

    async def kick(self, session_id: int, *, dry_run: bool = False, timeout: float | None = None) -> KickReport:
        """Ends a session, takes its leases and closes its connections.

        For a client that hangs. A client that still runs finds its leases lost (:class:`kvtier.errors.LeaseLost`).
        Blank slots stay out of use until the client's process releases them or ends. ``dry_run`` only reports the
        effect.

        Raises :class:`kvtier.errors.NotFound` if the session does not exist (any more).
        """
        number = wire.session_number(session_id)
        request = wire.message(admin_pb2.KickRequest, session_id=number, dry_run=dry_run, seq=self._session.next_seq())
        boot = self._session.welcome.boot

        async def attempt(link: Link) -> admin_pb2.KickResponse:
            if link.welcome.boot != boot:  # the daemon gives the number to another session
                message = f"session_id = {session_id}: it ended with the daemon, which has restarted"
                raise NotFound(message, reason="NO_SUCH_SESSION")
            return await link.stubs.admin.Kick(request, metadata=link.metadata)

        reply = await self._session.call(attempt, self._deadline(timeout))
        return KickReport(reply.leases, reply.slots)

    async def remove_cache(
        self, name: str, *, force: bool = False, dry_run: bool = False, timeout: float | None = None
    ) -> RemovalReport:
        """Removes a cache: its blocks, its budgets and its bytes on disk. ``dry_run`` only reports the effect.

        ``force`` closes the cache for sessions that have it open without leases, and removes a cache with a damaged
        directory. Raises :class:`kvtier.errors.NotFound`, :class:`CallerError` (CACHE_IN_USE, LEASES_HELD,
        DAMAGED_CACHE).
        """
        request = wire.message(
            caches_pb2.RemoveCacheRequest, name=name, force=force, dry_run=dry_run, seq=self._session.next_seq()
        )
        reply = await self._ask(lambda stubs: stubs.caches.Remove, request, timeout)
        freed = {wire.tier_from_wire(each.tier): each.bytes for each in reply.freed}
        return RemovalReport(reply.blocks, freed, reply.kept_in_store)

    async def resize_cache(self, name: str, *, budgets: wire.Budgets, timeout: float = LONG_TIMEOUT_S) -> ResizeReport:
        """Changes budgets of a cache without a restart; tiers that ``budgets`` does not name keep theirs.

        Blocks that still fit stay. Clients of the cache attach again, as after a restart: their calls wait, and their
        leases are lost, in all caches. Raises :class:`kvtier.errors.NotFound`, :class:`InvalidArgument`,
        :class:`TierFull`, :class:`CallerError` (NO_TIER, GPU_MEMORY, TIER_OFFLINE, STILL_HELD); nothing changes then.
        """
        request = caches_pb2.ResizeCacheRequest(
            name=name, budgets=wire.budgets_to_wire(budgets), seq=self._session.next_seq()
        )
        reply = await self._ask(lambda stubs: stubs.caches.Resize, request, timeout)
        return ResizeReport(reply.took_ns / 1e9, reply.stalled_ns / 1e9, reply.evicted)

    async def remote_gc(
        self,
        *,
        caches: Collection[str] = (),
        older_than: float | None = None,
        keep_bytes: int | None = None,
        dry_run: bool = False,
        timeout: float = LONG_TIMEOUT_S,
    ) -> RemoteGcReport:
        """Deletes blocks of the remote store. ``dry_run`` only reports the effect.

        Args:
            caches: delete only blocks of these caches, by any writer; empty = of all caches.
            older_than: delete blocks written more than this many seconds ago.
            keep_bytes: delete the least recently used of the other blocks while the store has more bytes.
        Raises: InvalidArgument if a value is out of range or both are None. CallerError if there is no store
        (NO_REMOTE), or it refuses or cannot list (REMOTE_REFUSED). TierOffline if the store fails half-way.
        """
        if older_than is not None:
            require_within("older_than", older_than, 1e-9, MOST_SECONDS, "above 0 seconds")
        if isinstance(caches, str):
            raise InvalidArgument("caches", caches, "a list, even of one")
        request = wire.message(
            admin_pb2.RemoteGcRequest,
            caches=caches,
            older_than_ns=0 if older_than is None else int(older_than * 1e9),
            keep_bytes=keep_bytes,
            dry_run=dry_run,
        )
        reply = await self._ask(lambda stubs: stubs.admin.RemoteGc, request, timeout)
        return wire.same_fields(RemoteGcReport, reply)

    async def close(self, *, stream: Stream | None = None) -> None:
        """Says goodbye, which ends the session and its leases. Later calls raise :class:`ClientClosed`.

        While leases on a GPU are held, ``stream`` (see :meth:`kvtier.Cache.fence`) has 5 seconds to do its earlier
        work. If it does not, the client says no goodbye, and the slots go back when this process ends.
        """
        await self._session.close(self.work(stream))

    def work(self, stream: Stream | None) -> Fence:
        """The fence that the goodbye waits for. The synchronous client calls this in its caller's thread, whose streams
        count."""
        return self._session.work(stream)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _name(cache: str | None) -> str:
    """The name on the wire, where an empty one means all caches. Raises :class:`InvalidArgument`."""
    if cache == "":
        raise InvalidArgument("cache", cache, "a cache's name")
    return "" if cache is None else cache
