"""The peers, each with a mirror of the blocks that the peer holds of the caches here. Loop thread only."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvtier.deadline import Deadline
from kvtier.errors import KvtierError, PermissionDenied
from kvtier.mirror.daemons import Followed
from kvtier.mirror.follower import MirrorState, MirrorView
from kvtier.transport import Link, TlsFiles
from kvtier.v1 import caches_pb2
from kvtierd.core.ids import GroupId, Key
from kvtierd.tiers.remote.base import RemoteRefused, RemoteUnavailable

LOOK_S: Final = 0.5
"""Seconds between looks at the caches that are open here and at the peers' states."""

LIST_S: Final = 1.0
"""Seconds that a peer may take to list its caches."""
STOP_S: Final = 1.0
"""Seconds that a stop waits for peers to hear a goodbye."""
_NO_TIME: Final = 1 << 63
"""Generations are times below this bound."""

Caches = Callable[[], Mapping[str, bytes]]
"""Gives the fingerprint of each cache that is open here, by name."""

_log = logging.getLogger(__name__)


class Peer(Followed):
    """Another daemon. ``history``: this daemon's, which may be among its own configured peers."""

    def __init__(self, address: str, tls: TlsFiles | None, caches: Caches, history: int) -> None:
        super().__init__(address, tls=tls, insecure=tls is None)
        self._caches: Final = caches
        self._history: Final = history
        self._names: tuple[str, ...] = ()
        self._logged = ""
        self._reported_caches: dict[str, caches_pb2.CacheInfo] = {}

    @property
    def status(self) -> str:
        """The ``state`` of ``PeerStats``."""
        if isinstance(self.problem, PermissionDenied):
            return "refused"
        if self.session is None:
            return "away"
        if self._is_itself:
            return "itself"
        return str(self.state) if self._names else "idle"

    @property
    def why(self) -> str:
        """Its problem, for people; empty = none."""
        caches = self._caches().items()
        others = [name for name, print_ in caches if self.view(name).fingerprint() not in (None, print_)]
        other = f"another specification there of cache {', '.join(others)}" if others else ""
        return other if self.problem is None else str(self.problem)

    @property
    def blocks(self) -> int:
        """Blocks that the peer holds of the caches here, if it has them with the same specification."""
        views = (self.known(name, fingerprint) for name, fingerprint in self._caches().items())
        return sum(len(view) for view in views if view is not None)

    def known(self, cache: str, fingerprint: bytes) -> MirrorView | None:
        """The mirror of a cache, perhaps out of date; None = the peer lacks the cache, or has another specification."""
        view = self.view(cache)
        return view if view.fingerprint() == fingerprint else None

    def exact(self, cache: str, fingerprint: bytes) -> MirrorView | None:
        """Like :meth:`known`, but up to date. Raises RemoteUnavailable, RemoteRefused if the mirror is not exact."""
        if cache in self._names and self.view(cache).state is not MirrorState.EXACT:
            kind = RemoteRefused if self.status == "refused" else RemoteUnavailable
            raise kind(f"peer {self.address} is {self.status}: {self.why}")
        return self.known(cache, fingerprint)

    def holding(self, cache: str, fingerprint: bytes, group: GroupId, keys: Sequence[Key]) -> tuple[int, bytes]:
        """The peer's prefix of a chain in its mirror: blocks, and the residencies of the blocks that it needs."""
        view = self.known(cache, fingerprint)
        spans = () if view is None else view.match(keys, group=group).groups
        return (spans[0].blocks, spans[0].residency) if spans else (0, b"")

    def generation(self, cache: str, fingerprint: bytes) -> int | None:
        """The generation that the peer last told of a cache; None = the peer has no cache of this specification."""
        told = self._reported_caches.get(cache)
        return told.generation if told is not None and told.fingerprint == fingerprint else None

    def gives(self, cache: str, fingerprint: bytes, revision: int) -> bool:
        """Whether all blocks of the cache on the peer are of this revision."""
        told = self._reported_caches.get(cache)
        return told is not None and self.generation(cache, fingerprint) == revision and not told.has_old_blocks

    async def look(self) -> None:
        """Asks for the generations of the peer's caches, follows the caches open here, and logs a change of state."""
        if self.session is not None and not self._is_itself:
            with suppress(KvtierError):
                listed = await self.session.call(_list, Deadline(LIST_S), wait=0.0)
                self._reported_caches = {each.name: each for each in listed.caches if each.generation < _NO_TIME}
        names = () if self._is_itself else tuple(self._caches())
        if names != self._names:
            self._names = names
            await self.choose(names)
        status, why = self.status, self.why
        passing = not why and status in (MirrorState.SYNCING, "away")  # it has not been tried yet
        if status != self._logged and not passing:
            self._logged = status
            _log.warning("peer address=%s state=%s why=%r", self.address, status, why)

    @property
    def _is_itself(self) -> bool:
        return self.session is not None and self.session.welcome.history == self._history


async def _list(link: Link) -> caches_pb2.ListCachesResponse:
    return await link.stubs.caches.List(caches_pb2.ListCachesRequest(), metadata=link.metadata)


class Fleet:
    """All peers, by the order of their addresses."""

    def __init__(
        self, addresses: Sequence[str], tls: tuple[Path, Path, Path] | None, caches: Caches, history: int
    ) -> None:
        """``tls``: certificate, key and authorities; None = no TLS. ``history``: see :class:`Peer`."""
        files = None if tls is None else TlsFiles(*tls)
        self._caches: Final = caches
        self.peers: Final = [Peer(address, files, caches, history) for address in sorted(addresses)]
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to follow the peers, without waiting for them."""
        for peer in self.peers:
            peer.start()
        self._looking = asyncio.create_task(self._look(), name="fleet")

    async def stop(self) -> None:
        """Ends within about :data:`STOP_S`, even if peers do not answer."""
        if self._looking is None:
            return
        self._looking.cancel()
        ending = [self._looking, *(asyncio.create_task(peer.aclose()) for peer in self.peers)]
        _, late = await asyncio.wait(ending, timeout=STOP_S)
        for task in late:
            task.cancel()

    def generations(self, cache: str) -> Iterator[int]:
        """The generations that peers tell of a cache, if it has the same specification there."""
        fingerprint = self._caches().get(cache, b"")
        return (told for peer in self.peers if (told := peer.generation(cache, fingerprint)) is not None)

    async def keys_with(self, cache: str, fingerprint: bytes, groups: int, prefix: bytes) -> set[Key]:
        """Keys of the cache's blocks on any peer that begin with ``prefix``."""
        views = [view for peer in self.peers if (view := peer.known(cache, fingerprint)) is not None]

        def look() -> set[Key]:
            blocks = (block for view in views for group in range(groups) for block in view.blocks(group=group))
            return {Key(block.key) for block in blocks if block.key.startswith(prefix)}

        return await asyncio.to_thread(look)  # a mirror may hold millions of blocks

    async def _look(self) -> None:
        while True:
            await asyncio.gather(*map(_look_at, self.peers))
            await asyncio.sleep(LOOK_S)


async def _look_at(peer: Peer) -> None:
    try:
        await peer.look()
    except Exception:  # noqa: BLE001  our bug; the other peers are still looked at
        _log.exception("peer not looked at address=%s", peer.address)
