"""Mirrors that a thread of the client keeps exact, and any other asks."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Final, Self

from kvtier.answers import AcrossMatch
from kvtier.errors import ClientClosed, DeadlineExceeded, KvtierError
from kvtier.mirror import follower
from kvtier.mirror.follower import DEFAULT_MIRROR_HEARTBEAT_S, DEFAULT_MIRROR_TIMEOUT_S
from kvtier.mirror.index import MirroredBlock
from kvtier.mirror.ranking import Standing, ranked
from kvtier.mirror.reading import MirrorState
from kvtier.sync.loop import LoopThread
from kvtier.types import Cursor, Tier
from kvtier.wire import Keys

if TYPE_CHECKING:
    from kvtier.sync.client import Client


class Mirror:
    """``with client.mirror(["llama"]) as mirror``: see :class:`kvtier.Mirror`. Looks never wait for another thread."""

    def __init__(self, thread: LoopThread, inner: follower.Mirror) -> None:
        self._thread: Final = thread
        self.view: Final = inner
        """What looks go to."""

    @property
    def caches(self) -> tuple[str, ...]:
        """The names that it follows."""
        return self.view.caches

    @property
    def state(self) -> MirrorState:
        return self.view.state

    @property
    def cursor(self) -> Cursor | None:
        """The event up to which the index is exact, stale or not; None before the first snapshot."""
        return self.view.cursor

    @property
    def lag(self) -> int:
        """See :attr:`kvtier.Mirror.lag`."""
        return self.view.lag

    @property
    def resyncs(self) -> int:
        """How many snapshots have replaced an index that could not be kept exact."""
        return self.view.resyncs

    @property
    def problem(self) -> KvtierError | None:
        """Why the last attempt to follow the daemon ended; None once the mirror is exact."""
        return self.view.problem

    def __len__(self) -> int:
        """Blocks of all window groups of all caches."""
        return len(self.view)

    def longest_prefix(self, keys: Keys, cache: str | None = None, *, tiers: Collection[Tier] = ()) -> int:
        """See :meth:`kvtier.Mirror.longest_prefix`."""
        return self.view.longest_prefix(keys, cache, tiers=tiers)

    def match(self, keys: Keys, cache: str | None = None, *, tiers: Collection[Tier] = ()) -> AcrossMatch:
        """See :meth:`kvtier.Mirror.match`."""
        return self.view.match(keys, cache, tiers=tiers)

    def residency(self, key: bytes, cache: str | None = None, *, group: int = 0) -> int:
        """The set of tiers, as bits; 0 = it is not indexed."""
        return self.view.residency(key, cache, group=group)

    def priority(self, key: bytes, cache: str | None = None, *, group: int = 0) -> int | None:
        """The effective one; None = it is not indexed."""
        return self.view.priority(key, cache, group=group)

    def blocks(self, cache: str | None = None, *, group: int = 0) -> Iterator[MirroredBlock]:
        """See :meth:`kvtier.Mirror.blocks`."""
        return self.view.blocks(cache, group=group)

    def synced(self, cursor: Cursor | None = None, *, timeout: float | None = None) -> None:
        """See :meth:`kvtier.Mirror.synced`."""
        self._thread.run(lambda: self.view.synced(cursor, timeout=timeout))

    def close(self) -> None:
        """Stops following; what it knows stays, and is stale. Nothing, where its client is closed."""
        if not self._thread.forked:
            with suppress(ClientClosed):
                self._thread.run(self.view.aclose)

    def __enter__(self) -> Self:
        """Raises :class:`kvtier.errors.PermissionDenied`, or whatever else its first attempt has met."""
        self._thread.run(self.view.__aenter__)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Begins to follow, and waits for nothing."""
        self._thread.run(self._start)

    def settled(self, timeout: float) -> None:
        """See :meth:`kvtier.mirror.Mirror.settled`."""
        self._thread.run(lambda: self.view.settled(timeout))

    async def _start(self) -> None:
        self.view.start()


class Mirrors:
    """``with kvtier.sync.Mirrors({"node-1": one, "node-2": two}, ["llama"]) as mirrors``: see
    :class:`kvtier.Mirrors`."""

    def __init__(
        self,
        clients: Mapping[str, Client],
        caches: Collection[str],
        *,
        heartbeat_s: float = DEFAULT_MIRROR_HEARTBEAT_S,
        timeout: float = DEFAULT_MIRROR_TIMEOUT_S,
    ) -> None:
        self.mirrors: Final[Mapping[str, Mirror]] = MappingProxyType(
            {name: client.mirror(caches, heartbeat_s=heartbeat_s) for name, client in clients.items()}
        )
        """By the names given."""
        self._timeout = timeout

    def best(self, keys: Keys, cache: str | None = None, *, tiers: Collection[Tier] = ()) -> list[Standing]:
        """See :meth:`kvtier.Mirrors.best`."""
        return ranked({name: mirror.view for name, mirror in self.mirrors.items()}, keys, cache, tiers)

    def close(self) -> None:
        """Stops following all of them."""
        for mirror in self.mirrors.values():
            mirror.close()

    def __enter__(self) -> Self:
        until = time.monotonic() + self._timeout
        try:
            for mirror in self.mirrors.values():
                mirror.start()
            for mirror in self.mirrors.values():
                with suppress(DeadlineExceeded):  # its state says so
                    mirror.settled(max(0.0, until - time.monotonic()))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
