"""A mirror: an index that a snapshot fills and events keep exact, with another snapshot after lost events."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Final, Self

from kvtier.abi.keys import KEY_BYTES
from kvtier.client import AsyncClient
from kvtier.deadline import Backoff
from kvtier.errors import ClientClosed, DaemonError, DeadlineExceeded, InvalidArgument, KvtierError
from kvtier.events import Event, Gap, SnapshotEnd, SnapshotSlice, SnapshotStart
from kvtier.mirror.index import ALL_TIERS, MirroredBlock, MirrorIndex
from kvtier.types import TIERS, CacheInfo, Cursor, Tier, fastest
from kvtier.watch import Watch
from kvtier.wire import GroupSpan, Keys, Match, packed_keys

DEFAULT_MIRROR_HEARTBEAT_S: Final = 1.0
DEFAULT_MIRROR_TIMEOUT_S: Final = 30.0
_STEADY_S: Final = 5.0
"""A mirror that was exact for so long takes its next snapshot without a back-off."""
_NOWHERE: Final = Cursor(0, 0)
MOST_BLOCKS: Final = 1 << 24
"""Blocks that a mirror holds of a cache, whatever capacity its daemon tells: about 2 GB, and as much again while the
next snapshot comes."""
_ASK_S: Final = 2.0
"""How long a daemon may take to tell its capacity."""
_GIVEN_UP_S: Final = 60.0
"""Before a mirror that was given up is tried again."""


class MirrorState(StrEnum):
    """What a mirror's answers are worth."""

    SYNCING = "syncing"
    """Its first snapshot is not complete: it knows no block."""
    EXACT = "exact"
    """It has what the daemon had at :attr:`MirrorView.cursor`, and hears of every change since."""
    STALE = "stale"
    """It has what the daemon had at :attr:`MirrorView.cursor`; it lost the daemon or events, and is catching up."""


@dataclass(slots=True)
class Content:
    """What a mirror knows. ``watch``: the stream that keeps the index exact; None = there is none now."""

    caches: tuple[str, ...]
    index: MirrorIndex = field(default_factory=MirrorIndex)
    cursor: Cursor | None = None
    watch: Watch | None = None
    resyncs: int = 0
    problem: KvtierError | None = None


class MirrorView:
    """The index of a mirror and its state. Looks never wait and never call the daemon; any thread may look."""

    def __init__(self, content: Content) -> None:
        self.content = content

    def __repr__(self) -> str:
        return f"<mirror of {', '.join(self.caches)}: {self.state}, at {self.cursor}>"

    @property
    def caches(self) -> tuple[str, ...]:
        """The names of the caches that it follows."""
        return self.content.caches

    @property
    def state(self) -> MirrorState:
        watch = self.content.watch
        if watch is not None and watch.live:
            return MirrorState.EXACT
        return MirrorState.SYNCING if self.content.cursor is None else MirrorState.STALE

    @property
    def cursor(self) -> Cursor | None:
        """The event up to which the index is exact, even if it is stale; None before the first snapshot."""
        return self.content.cursor

    @property
    def lag(self) -> int:
        """Events that the daemon had given out at its last word and the index does not have."""
        watch = self.content.watch
        return 0 if watch is None else watch.lag

    @property
    def resyncs(self) -> int:
        """How many snapshots have replaced an index that could not be kept exact."""
        return self.content.resyncs

    @property
    def problem(self) -> KvtierError | None:
        """Why the last attempt to follow the daemon ended; None once the mirror is exact."""
        return self.content.problem

    def __len__(self) -> int:
        """Blocks of all window groups of all caches."""
        return len(self.content.index)

    def longest_prefix(self, keys: Keys, cache: str | None = None, *, tiers: Collection[Tier] = ()) -> int:
        """How many leading blocks of the chain the daemon can serve, over all window groups. See :meth:`match`."""
        return self.match(keys, cache, tiers=tiers).blocks

    def match(
        self, keys: Keys, cache: str | None = None, *, tiers: Collection[Tier] = (), group: int | None = None
    ) -> Match:
        """As :meth:`kvtier.groups.AcrossGroups.match` at :attr:`cursor`, without a call.

        Args:
            cache: not needed if only one is followed.
            tiers: counts only blocks that are in one of these; empty = in any.
            group: counts what this window group alone can serve; None = what all can.
        """
        cursor = self.content.cursor or _NOWHERE
        bits = sum({tier.bit for tier in tiers}) or ALL_TIERS
        groups = self.content.index.match(self._named(cache), packed_keys(keys), bits, group)
        blocks = groups[0].blocks if groups else 0
        return Match(blocks, groups, cursor)

    def fingerprint(self, cache: str | None = None) -> bytes | None:
        """Of the cache's specification there; None where it is not known to exist, or to have existed."""
        return self.content.index.fingerprint(self._named(cache))

    def block(self, key: bytes, cache: str | None = None, *, group: int = 0) -> MirroredBlock | None:
        """Where a block is, and its effective priority; None = it is not indexed."""
        if len(key) != KEY_BYTES:
            raise InvalidArgument("key", f"{len(key)} bytes", f"{KEY_BYTES} bytes")
        return self.content.index.get(self._named(cache), group, key)

    def blocks(self, cache: str | None = None, *, group: int = 0) -> Iterator[MirroredBlock]:
        """Every block of a window group as it is now, in no order."""
        return self.content.index.blocks(self._named(cache), group)

    def _named(self, cache: str | None) -> str:
        caches = self.content.caches
        if cache is None and len(caches) == 1:
            return caches[0]
        if cache not in caches:
            raise InvalidArgument("cache", cache, f"one of {', '.join(caches)}")
        return cache


class Mirror(MirrorView):
    """An exact local index of the blocks of some caches of one daemon::

        async with kvtier.Mirror(client, ["llama"]) as mirror:
            blocks = mirror.longest_prefix(keys)

    Entering it returns once it is exact. It then follows the daemon over restarts and losses: after lost events it
    takes a snapshot; until that is complete it answers from what it knew, marked stale. It ends with its client.
    """

    def __init__(
        self,
        client: AsyncClient,
        caches: Collection[str],
        *,
        heartbeat_s: float = DEFAULT_MIRROR_HEARTBEAT_S,
        timeout: float = DEFAULT_MIRROR_TIMEOUT_S,
    ) -> None:
        """
        Args:
            caches: names of caches, which need not exist yet; takes the right to watch each.
            heartbeat_s: how often the daemon speaks when nothing happens; after four silences the mirror is stale.
            timeout: seconds that entering may take.
        """
        if isinstance(caches, str) or not caches:
            raise InvalidArgument("caches", caches, "a list of at least one name")
        super().__init__(Content(tuple(dict.fromkeys(caches))))
        self._client = client
        self._heartbeat_s = heartbeat_s
        self._timeout = timeout
        self._news = asyncio.Event()
        self._following: asyncio.Task[None] | None = None
        self._exact_at: float | None = None

    async def synced(self, cursor: Cursor | None = None, *, timeout: float | None = None) -> None:
        """Returns once it is exact and has every event up to ``cursor``.

        Args:
            timeout: seconds; 0 only looks, None waits for ever.

        Raises:
            DeadlineExceeded: it is not exact in time.
            ClientClosed: it never will be, because it or its client is closed.
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
        """Begins to follow, and does not wait for the first snapshot."""
        self._following = asyncio.create_task(self._follow())
        self._following.add_done_callback(lambda _: self._news.set())

    async def aclose(self) -> None:
        """Stops following. What it knows stays, and is stale."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])
            if not self._following.cancelled():
                self._following.result()

    async def __aenter__(self) -> Self:
        """Raises :class:`DeadlineExceeded`, :class:`kvtier.errors.PermissionDenied`, or what its first attempt met."""
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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _has(self, cursor: Cursor | None) -> bool:
        return self.state is MirrorState.EXACT and (cursor is None or (self.cursor or _NOWHERE) >= cursor)

    async def _next_news(self) -> None:
        """Raises what has ended the mirror, if nothing will change any more."""
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
                self.content.index, self.content.cursor = MirrorIndex(), None
            self._news.set()
            if self._exact_at is not None and loop.time() - self._exact_at > _STEADY_S:
                backoff = Backoff()
            await asyncio.sleep(_GIVEN_UP_S if given_up else backoff.next())

    async def _mirror(self) -> None:
        """Takes a snapshot and follows the events after it, until one is missing."""
        content, index, rooms = self.content, MirrorIndex(), dict[str, int]()
        async with self._client.watch(
            snapshot=True, caches=self.caches, heartbeats=True, heartbeat_s=self._heartbeat_s
        ) as watch:
            async for item in watch:
                match item:
                    case Event():
                        index.apply(item)
                    case SnapshotStart():
                        index = MirrorIndex()
                    case SnapshotSlice():
                        index.take(item)
                    case SnapshotEnd():
                        content.resyncs += content.cursor is not None
                        content.problem = None
                        content.index, content.cursor, content.watch = index, watch.cursor, watch
                        self._exact_at = asyncio.get_running_loop().time()
                    case Gap():
                        return
                if isinstance(item, (Event, SnapshotSlice)):
                    await self._require_room(index, item.cache, rooms)
                if content.watch is not None:
                    content.cursor = watch.cursor  # after the index, which other threads look into
                    self._news.set()

    async def _require_room(self, index: MirrorIndex, cache: str, rooms: dict[str, int]) -> None:
        """Asks for a cache's capacity when the index passes the one in ``rooms``. Raises :class:`DaemonError` for a
        cache that is not followed, and for more than twice as many blocks as slots: until its end, a snapshot of a full
        cache has blocks that have gone and the blocks in their slots."""
        if cache not in self.caches:
            raise DaemonError(f"an event of cache {cache!r}, which is not followed", reason="BAD_ANSWER")
        if (size := index.size(cache)) <= rooms.get(cache, 0):
            return
        rooms[cache] = await self._room(cache)
        if size > rooms[cache]:
            says = f"given up: {size} blocks of cache {cache}, which has room for {rooms[cache]}"
            raise _TooMany(says, reason="BAD_ANSWER")

    async def _room(self, cache: str) -> int:
        """Returns twice the slots of a cache in all tiers; :data:`MOST_BLOCKS` if that is less, or the daemon does not
        tell this watcher."""
        found: list[CacheInfo] = []
        with suppress(KvtierError):
            found = [each for each in await self._client.caches(timeout=_ASK_S) if each.name == cache]
        slots = (tier.slots for each in found for group in each.groups for tier in group.tiers)
        return min(MOST_BLOCKS, 2 * sum(slots)) if found else MOST_BLOCKS


class _TooMany(DaemonError):
    """A mirror is given up: its daemon tells of more blocks than it can have."""


@dataclass(slots=True, frozen=True)
class Standing:
    """What one daemon has of a chain. ``blocks``: of its longest prefix.

    ``by_tier``: how many of the blocks of that prefix, over all window groups, have each tier as their fastest.
    ``state`` and ``lag``: see :class:`kvtier.MirrorState` and :attr:`kvtier.Mirror.lag`.
    """

    name: str
    blocks: int
    by_tier: Mapping[Tier, int]
    state: MirrorState
    lag: int


def rank_mirrors(
    mirrors: Mapping[str, MirrorView], keys: Keys, cache: str | None = None, *, tiers: Collection[Tier] = ()
) -> list[Standing]:
    """What each daemon has of the chain, without a call.

    The longest prefix comes first; of equals an exact mirror, then the one with more in faster tiers, then by name. A
    stale mirror keeps its place: its daemon had these blocks when it was last heard.

    Args:
        mirrors: by name. Other arguments as of :meth:`kvtier.Mirror.match`.
    """
    packed = packed_keys(keys)
    standings = []
    for name, mirror in mirrors.items():
        state, lag = mirror.state, mirror.lag  # before the look, so that an exact answer was exact when it was given
        found = mirror.match(packed, cache, tiers=tiers)
        standings.append(Standing(name, found.blocks, _by_tier(found.groups), state, lag))
    return sorted(standings, key=_rank)


def _by_tier(groups: tuple[GroupSpan, ...]) -> dict[Tier, int]:
    counts = Counter(fastest(residency) for span in groups for residency in span.residency)
    return {tier: counts[tier] for tier in TIERS}


def _rank(standing: Standing) -> tuple[object, ...]:
    faster_first = [-standing.by_tier[tier] for tier in TIERS]
    return (-standing.blocks, standing.state is not MirrorState.EXACT, faster_first, standing.name)
