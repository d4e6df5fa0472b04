"""Mirrors of several daemons, any of which may be away."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from typing import Final, Self

from kvtier.client import DEFAULT_TIMEOUT_S, AsyncClient
from kvtier.deadline import Backoff
from kvtier.errors import DeadlineExceeded, InvalidArgument, KvtierError
from kvtier.mirror.follower import (
    DEFAULT_MIRROR_HEARTBEAT_S,
    Mirror,
    MirrorContent,
    MirrorState,
    MirrorView,
    Standing,
    empty_indexes,
    one_of,
    rank_mirrors,
)
from kvtier.session import DEFAULT_PATIENCE_S, Session
from kvtier.transport import TlsFiles, transport_to
from kvtier.types import Tier
from kvtier.wire import Keys

_FIRST_TRY_S: Final = 0.1
_LONGEST_TRY_S: Final = 5.0


class Followed:
    """A followed daemon: a session, and a mirror for each cache. Retries for ever; :attr:`problem` tells the last
    error. ``session``: None while not connected, and for a client that the caller passed."""

    def __init__(
        self,
        daemon: AsyncClient | str,
        *,
        tls: TlsFiles | None = None,
        insecure: bool = False,
        heartbeat_s: float = DEFAULT_MIRROR_HEARTBEAT_S,
    ) -> None:
        """``daemon``: a client or an address. Raises :class:`InvalidArgument` for an invalid address."""
        self.address: Final = daemon if isinstance(daemon, str) else daemon.address
        self.session: Session | None = None
        self._client = None if isinstance(daemon, str) else daemon
        if self._client is None:
            transport_to(self.address, tls, insecure=insecure)
        self._tls: Final = tls
        self._insecure: Final = insecure
        self._heartbeat_s: Final = heartbeat_s
        self._away: KvtierError | None = None
        self._mirrors: dict[str, Mirror] = {}
        self._views: dict[str, MirrorView] = {}
        self._connected = asyncio.Event()
        self._following: asyncio.Task[None] | None = None

    @property
    def problem(self) -> KvtierError | None:
        """Why a mirror is not exact; None while all are exact, or none has failed yet."""
        found = (view.problem for view in self._mirrors.values() if view.problem is not None)
        return self._away or next(found, None)

    @property
    def state(self) -> MirrorState:
        """The least exact state of the mirrors."""
        states = {view.state for view in self._views.values()}
        return next((one for one in (MirrorState.SYNCING, MirrorState.STALE) if one in states), MirrorState.EXACT)

    def view(self, cache: str) -> MirrorView:
        """The view of a cache; empty for a cache that is not followed."""
        return self._views[cache] if cache in self._views else MirrorView(MirrorContent(empty_indexes([cache])))

    def start(self) -> None:
        """Begins to connect, without waiting. :meth:`choose` sets the caches to follow."""
        if self._client is None:
            self._following = asyncio.create_task(self._follow(), name=f"follow-{self.address}")
        else:
            self._connect(self._client)

    async def choose(self, caches: Collection[str]) -> None:
        """Follows exactly these caches from now on."""
        self._views = {cache: self.view(cache) for cache in caches}
        gone = [self._mirrors.pop(cache) for cache in [*self._mirrors] if cache not in self._views]
        if self._client is not None and self._connected.is_set():
            self._connect(self._client)
        for mirror in gone:
            await mirror.aclose()

    async def synced(self) -> None:
        """Returns once all mirrors are exact."""
        await self._connected.wait()
        for mirror in list(self._mirrors.values()):
            await mirror.synced()

    async def aclose(self) -> None:
        """Stops following. The index stays, and is stale."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])
        await self._disconnect()

    async def _follow(self) -> None:
        backoff = Backoff(_FIRST_TRY_S, _LONGEST_TRY_S)
        while True:
            session = Session(self.address, self._tls, insecure=self._insecure, patience=DEFAULT_PATIENCE_S)
            try:
                await session.open()
                async with AsyncClient(session, DEFAULT_TIMEOUT_S) as client:
                    await self._attached(session, client)
            except KvtierError as error:
                self._away = error
            await asyncio.sleep(backoff.next())

    async def _attached(self, session: Session, client: AsyncClient) -> None:
        """Follows until the session ends for good. Raises the error that ended it."""
        self.session, self._client = session, client
        try:
            self._connect(client)
            raise await session.given_up()
        finally:
            self.session = self._client = None
            await self._disconnect()

    def _connect(self, client: AsyncClient) -> None:
        self._away = None
        for cache in [cache for cache in self._views if cache not in self._mirrors]:
            mirror = Mirror(client, [cache], heartbeat_s=self._heartbeat_s)
            mirror.content = self._views[cache].content  # answers from the last index until the mirror is exact
            mirror.content.problem = None
            self._views[cache] = self._mirrors[cache] = mirror
            mirror.start()
        self._connected.set()

    async def _disconnect(self) -> None:
        self._connected.clear()
        mirrors, self._mirrors = self._mirrors, {}
        for mirror in mirrors.values():
            await mirror.aclose()


class Mirrors:
    """Mirrors of some caches of several daemons, for routers::

        async with kvtier.Mirrors(["tcp://a:7411", "tcp://b:7411"], ["llama"], tls=files) as mirrors:
            best, *others = mirrors.rank(keys)

    Entering waits for no daemon. A daemon that is away ranks by its last known blocks, marked stale, and is followed
    again once it answers.
    """

    def __init__(
        self,
        daemons: Iterable[AsyncClient | str],
        caches: Collection[str],
        *,
        tls: TlsFiles | None = None,
        insecure: bool = False,
        heartbeat_s: float = DEFAULT_MIRROR_HEARTBEAT_S,
    ) -> None:
        """Prepares the mirrors; entering starts them.

        Args:
            daemons: clients, which the caller closes, or addresses, with ``tls`` and ``insecure`` as in
                :func:`kvtier.connect`.
            caches: names of caches, which need not exist yet; requires the right to watch each.
            heartbeat_s: see :class:`kvtier.Mirror`.
        """
        if isinstance(caches, str) or not caches:
            raise InvalidArgument("caches", caches, "a list of at least one name")
        self._caches: Final = tuple(dict.fromkeys(caches))
        self._daemons: Final[dict[str, Followed]] = {}
        for number, daemon in enumerate(daemons):
            remote = isinstance(daemon, str)
            one = Followed(daemon, tls=tls if remote else None, insecure=remote and insecure, heartbeat_s=heartbeat_s)
            if self._daemons.setdefault(one.address, one) is not one:
                raise InvalidArgument(f"daemons[{number}]", one.address, "a daemon that is not named before")

    def rank(self, keys: Keys, cache: str | None = None, *, tiers: Collection[Tier] = ()) -> list[Standing]:
        """Each daemon's standing for the chain, the longest prefix first: see :func:`kvtier.rank_mirrors`."""
        wanted = one_of(self._caches, cache)
        return rank_mirrors({name: one.view(wanted) for name, one in self._daemons.items()}, keys, wanted, tiers=tiers)

    @property
    def problems(self) -> Mapping[str, KvtierError]:
        """Maps the address of each daemon whose mirrors are not exact to the error."""
        return {name: one.problem for name, one in self._daemons.items() if one.problem is not None}

    async def synced(self, *, timeout: float | None = None) -> None:
        """Returns once every daemon's mirrors are exact. Raises :class:`DeadlineExceeded` after ``timeout`` seconds."""
        try:
            async with asyncio.timeout(timeout):
                for one in self._daemons.values():
                    await one.synced()
        except TimeoutError as error:
            behind = [name for name, one in self._daemons.items() if one.state is not MirrorState.EXACT]
            raise DeadlineExceeded(f"not exact: {', '.join(behind)}", reason="MIRROR_BEHIND") from error

    async def aclose(self) -> None:
        """Stops following. The index stays, and is stale."""
        await asyncio.gather(*(one.aclose() for one in self._daemons.values()))

    async def __aenter__(self) -> Self:
        for one in self._daemons.values():
            await one.choose(self._caches)
            one.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
