"""A mirror: an index that a snapshot fills and events keep exact. Lost events lead to a new snapshot."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Self

from kvtier.abi.keys import KEY_BYTES
from kvtier.client import AsyncClient
from kvtier.deadline import Backoff
from kvtier.errors import CallerError, ClientClosed, DaemonError, DeadlineExceeded, InvalidArgument, KvtierError
from kvtier.events import Event, Gap, SnapshotEnd, SnapshotSlice, SnapshotStart, WatchItem
from kvtier.mirror.index import ALL_TIERS, MirroredBlock, MirrorIndex
from kvtier.types import TIERS, CacheInfo, Cursor, Tier, fastest
from kvtier.watch import Watch
from kvtier.wire import Keys, Match, packed_keys

DEFAULT_MIRROR_HEARTBEAT_S: Final = 1.0
DEFAULT_MIRROR_TIMEOUT_S: Final = 30.0
_STEADY_S: Final = 5.0
"""A mirror that was exact for this many seconds takes its next snapshot without a back-off."""
_NOWHERE: Final = Cursor(0, 0)
MOST_BLOCKS: Final = 1 << 24
"""Most blocks of a cache in a mirror, whatever capacity the daemon reports. Memory doubles while a new snapshot
arrives."""
_ASK_S: Final = 2.0
"""Seconds that a daemon has to report its capacity."""
_GIVEN_UP_S: Final = 60.0
"""Seconds before a mirror that gave up tries again."""


async def follow(client: AsyncClient, cache: str, take: Callable[[WatchItem], None]) -> None:
    """Passes a snapshot of a cache to ``take``, and the events after it. A gap is passed, too, and a new snapshot
    follows it. Raises the errors of :meth:`kvtier.AsyncClient.watch`."""
    while True:
        async with aclosing(client.watch(snapshot=True, caches=[cache])) as watch:
            async for item in watch:
                take(item)
                if isinstance(item, Gap):
                    break


class MirrorState(StrEnum):
    """How exact a mirror's answers are."""

    SYNCING = "syncing"
    """The first snapshot is not complete: the mirror knows no block."""
    EXACT = "exact"
    """The index is the daemon's at :attr:`MirrorView.cursor`, and follows every change since."""
    STALE = "stale"
    """The index is the daemon's at :attr:`MirrorView.cursor`; the mirror lost the daemon or events, and is catching
    up."""


@dataclass(slots=True)
class MirrorContent:
    """The contents of a mirror, by cache. ``watch``: the stream that keeps them exact; None = there is none now."""

    indexes: dict[str, MirrorIndex]
    cursor: Cursor | None = None
    watch: Watch | None = None
    resyncs: int = 0
    problem: KvtierError | None = None


def empty_indexes(caches: Iterable[str]) -> dict[str, MirrorIndex]:
    return {cache: MirrorIndex() for cache in caches}


def one_of(caches: Sequence[str], cache: str | None) -> str:
    """The name of a followed cache, which may be omitted if it is the only one. Raises :class:`InvalidArgument`."""
    if cache is None and len(caches) == 1:
        return caches[0]
    if cache is None or cache not in caches:
        raise InvalidArgument("cache", cache, f"one of {', '.join(caches)}")
    return cache


class MirrorView:
    """The index of a mirror and its state. Lookups never wait and never call the daemon. Thread-safe."""

    def __init__(self, content: MirrorContent) -> None:
        self.content = content

    def __repr__(self) -> str:
        return f"<mirror of {', '.join(self.caches)}: {self.state}, at {self.cursor}>"

    @property
    def caches(self) -> tuple[str, ...]:
        return tuple(self.content.indexes)

    @property
    def state(self) -> MirrorState:
        watch = self.content.watch
        if watch is not None and watch.live:
            return MirrorState.EXACT
        return MirrorState.SYNCING if self.content.cursor is None else MirrorState.STALE

    @property
    def cursor(self) -> Cursor | None:
        """The event up to which the index is exact, stale or not; None before the first snapshot."""
        return self.content.cursor

    @property
    def lag(self) -> int:
        """Number of events that the index lacks, by the daemon's last message."""
        watch = self.content.watch
        return 0 if watch is None else watch.lag

    @property
    def resyncs(self) -> int:
        """Number of snapshots that replaced an index after lost events."""
        return self.content.resyncs

    @property
    def problem(self) -> KvtierError | None:
        """Why the last attempt to follow the daemon ended; None once the mirror is exact."""
        return self.content.problem

    def __len__(self) -> int:
        """Number of blocks in all window groups of all caches."""
        return sum(map(len, self.content.indexes.values()))

    def longest_prefix(self, keys: Keys, cache: str | None = None, *, tiers: Collection[Tier] = ()) -> int:
        """Number of leading blocks of the chain that the daemon can serve, over all window groups. See
        :meth:`match`."""
        return self.match(keys, cache, tiers=tiers).blocks

    def match(
        self, keys: Keys, cache: str | None = None, *, tiers: Collection[Tier] = (), group: int | None = None
    ) -> Match:
        """Like :meth:`kvtier.Cache.match`, at :attr:`cursor`, without a call.

        Args:
            cache: may be omitted if only one cache is followed.
            tiers: count only blocks in these tiers; empty = in any.
            group: match for this window group only; None = for all groups together.
        """
        cursor = self.content.cursor or _NOWHERE
        bits = sum({tier.bit for tier in tiers}) or ALL_TIERS
        groups = self._index(cache).match(packed_keys(keys), bits, group)
        blocks = groups[0].blocks if groups else 0
        return Match(blocks, groups, cursor)

    def fingerprint(self, cache: str | None = None) -> bytes | None:
        """Fingerprint of the daemon's specification of the cache; None if the cache was never seen."""
        return self._index(cache).fingerprint or None

    def block(self, key: bytes, cache: str | None = None, *, group: int = 0) -> MirroredBlock | None:
        """Residency and effective priority of a block; None = the block is not indexed."""
        if len(key) != KEY_BYTES:
            raise InvalidArgument("key", f"{len(key)} bytes", f"{KEY_BYTES} bytes")
        return self._index(cache).get(group, key)

    def blocks(self, cache: str | None = None, *, group: int = 0) -> Iterator[MirroredBlock]:
        """All present blocks of a window group, unordered."""
        return self._index(cache).blocks(group)

    def _index(self, cache: str | None) -> MirrorIndex:
        return self.content.indexes[one_of(self.caches, cache)]


class Mirror(MirrorView):
    """An exact local index of the blocks of some caches of one daemon::

        async with kvtier.Mirror(client, ["llama"]) as mirror:
            blocks = mirror.longest_prefix(keys)

    Entering returns once the mirror is exact. The mirror then follows the daemon over restarts and losses: after lost
    events it takes a new snapshot, and until that is complete answers from the last index, marked stale. A mirror ends
    with its client.
    """

    def __init__(
        self,
        client: AsyncClient,
        caches: Collection[str],
        *,
        heartbeat_s: float = DEFAULT_MIRROR_HEARTBEAT_S,
        timeout: float = DEFAULT_MIRROR_TIMEOUT_S,
    ) -> None:
        """Prepares a mirror; entering or :meth:`start` begins it.

        Args:
            caches: names of caches, which need not exist yet; requires the right to watch each.
            heartbeat_s: interval of messages without events; after four missing messages the mirror is stale.
            timeout: seconds that entering may take.
        """
        if isinstance(caches, str) or not caches:
            raise InvalidArgument("caches", caches, "a list of at least one name")
        super().__init__(MirrorContent(empty_indexes(caches)))
        self._client = client
        self._heartbeat_s = heartbeat_s
        self._timeout = timeout
        self._news = asyncio.Event()
        self._following: asyncio.Task[None] | None = None
        self._exact_at: float | None = None

    async def synced(self, cursor: Cursor | None = None, *, timeout: float | None = None) -> None:
        """Returns once the mirror is exact and has every event up to ``cursor``.

        Args:
            timeout: seconds; 0 checks once, None waits for ever.

        Raises:
            DeadlineExceeded: the mirror is not exact in time.
            ClientClosed: the mirror or its client is closed.
        """
        if timeout is not None and not timeout >= 0:
            raise InvalidArgument("timeout", timeout, "0 seconds or more")
        try:
            async with asyncio.timeout(timeout):
                while not self._has(cursor):
                    await self._next_news()
        except TimeoutError as error:
            message = f"the mirror is {self.state} at {self.cursor}, not exact at {cursor or 'any event'}"
            raise DeadlineExceeded(message, reason="MIRROR_BEHIND") from error

    def start(self) -> None:
        """Begins to follow, without waiting for the first snapshot."""
        self._following = asyncio.create_task(self._follow())
        self._following.add_done_callback(lambda _: self._news.set())

    async def aclose(self) -> None:
        """Stops following. The index stays, and is stale."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])
            if not self._following.cancelled():
                self._following.result()

    async def __aenter__(self) -> Self:
        """Raises :class:`DeadlineExceeded`, :class:`kvtier.errors.PermissionDenied`, or the error of the first
        attempt."""
        self.start()
        try:
            async with asyncio.timeout(self._timeout):
                while not self._has(None) and self.problem is None:
                    await self._next_news()
            if self.problem is not None:
                raise self.problem
        except TimeoutError as error:
            await self.aclose()
            raise DeadlineExceeded(f"no snapshot within {self._timeout:g} s", reason="MIRROR_BEHIND") from error
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _index(self, cache: str | None) -> MirrorIndex:
        index = super()._index(cache)
        if self._following is None:
            raise CallerError("a mirror answers once it is entered, or started by start()", reason="NOT_STARTED")
        return index

    def _has(self, cursor: Cursor | None) -> bool:
        return self.state is MirrorState.EXACT and (cursor is None or (self.cursor or _NOWHERE) >= cursor)

    async def _next_news(self) -> None:
        """Waits for a change. Raises the error that ended the mirror if no change can come."""
        if self._following is None or self._following.done():
            if self._following is not None and not self._following.cancelled():
                self._following.result()
            raise ClientClosed("the mirror is closed", reason="CLOSED")
        self._news.clear()
        await self._news.wait()

    async def _follow(self) -> None:
        backoff, loop = Backoff(), asyncio.get_running_loop()
        while not isinstance(self.problem, ClientClosed):
            self._exact_at = None
            try:
                await self._mirror()
            except KvtierError as error:
                self.content.problem = error
            except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # in an answer
                self.content.problem = DaemonError(f"an answer without sense: {error!r}", reason="BAD_ANSWER")
            finally:
                self.content.watch = None
            given_up = isinstance(self.content.problem, _TooMany)
            if given_up:
                self.content.indexes, self.content.cursor = empty_indexes(self.caches), None
            self._news.set()
            if self._exact_at is not None and loop.time() - self._exact_at > _STEADY_S:
                backoff = Backoff()
            await asyncio.sleep(_GIVEN_UP_S if given_up else backoff.next())

    async def _mirror(self) -> None:
        """Takes a snapshot and follows the events after it, until an event is lost."""
        content, indexes = self.content, empty_indexes(self.caches)
        async with self._client.watch(
            snapshot=True, caches=self.caches, heartbeats=True, heartbeat_s=self._heartbeat_s
        ) as watch:
            async for item in watch:
                match item:
                    case Event() | SnapshotSlice():
                        await self._apply(indexes, item)
                    case SnapshotStart():
                        indexes = empty_indexes(self.caches)
                    case SnapshotEnd():
                        content.resyncs += content.cursor is not None
                        content.problem = None
                        content.indexes, content.cursor, content.watch = indexes, watch.cursor, watch
                        self._exact_at = asyncio.get_running_loop().time()
                    case Gap():
                        return
                if content.watch is not None:
                    content.cursor = watch.cursor  # set after the index, which other threads read, with no wait between
                    self._news.set()

    async def _apply(self, indexes: Mapping[str, MirrorIndex], item: Event | SnapshotSlice) -> None:
        """Applies an item. Asks first for the cache's capacity if the index, with the item, may exceed the known one:
        two blocks per slot, since before its end a snapshot of a full cache has removed blocks and the new blocks of
        their slots.

        Raises :class:`DaemonError` for a cache that is not followed, and for more blocks than fit.
        """
        if (index := indexes.get(item.cache)) is None:
            raise DaemonError(f"an event of cache {item.cache!r}, which is not followed", reason="BAD_ANSWER")
        if len(index) + len(item.packed_keys) // KEY_BYTES >= index.room:
            index.room = await self._room(item.cache)
        index.apply(item)
        if len(index) > index.room:
            says = f"given up: {len(index)} blocks of cache {item.cache}, which has room for {index.room}"
            raise _TooMany(says, reason="BAD_ANSWER")

    async def _room(self, cache: str) -> int:
        """Twice the slots of a cache in all tiers, at most :data:`MOST_BLOCKS`, which is also the answer if the daemon
        does not report the cache to this watcher."""
        found: list[CacheInfo] = []
        with suppress(KvtierError):
            found = [each for each in await self._client.caches(timeout=_ASK_S) if each.name == cache]
        slots = (tier.slots for each in found for group in each.groups for tier in group.tiers)
        return min(MOST_BLOCKS, 2 * sum(slots)) or MOST_BLOCKS


class _TooMany(DaemonError):
    """The mirror gives up: its daemon reports more blocks than it can hold."""


@dataclass(slots=True, frozen=True)
class Standing:
    """A daemon's part of a chain. ``blocks``: length of its longest prefix.

    ``by_tier``: number of blocks of that prefix, over all window groups, by their fastest tier. ``state`` and ``lag``:
    see :class:`kvtier.MirrorState` and :attr:`kvtier.Mirror.lag`.
    """

    name: str
    blocks: int
    by_tier: Mapping[Tier, int]
    state: MirrorState
    lag: int


def rank_mirrors(
    mirrors: Mapping[str, MirrorView], keys: Keys, cache: str | None = None, *, tiers: Collection[Tier] = ()
) -> list[Standing]:
    """Ranks daemons by their part of the chain, without a call.

    The longest prefix comes first; of equals an exact mirror, then more blocks in faster tiers, then the name. A stale
    mirror keeps its place: its daemon last had these blocks.

    Args:
        mirrors: by name. Other arguments: see :meth:`kvtier.Mirror.match`.
    """
    packed = packed_keys(keys)
    standings = []
    for name, mirror in mirrors.items():
        state, lag = mirror.state, mirror.lag  # read before the match, so that an exact answer was exact when given
        found = mirror.match(packed, cache, tiers=tiers)
        counts = Counter(fastest(residency) for span in found.groups for residency in span.residency)
        standings.append(Standing(name, found.blocks, {tier: counts[tier] for tier in TIERS}, state, lag))
    return sorted(standings, key=_rank)


def _rank(standing: Standing) -> tuple[object, ...]:
    faster_first = [-standing.by_tier[tier] for tier in TIERS]
    return (-standing.blocks, standing.state is not MirrorState.EXACT, faster_first, standing.name)
