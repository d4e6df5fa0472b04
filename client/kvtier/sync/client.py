"""The synchronous client."""

from __future__ import annotations

import atexit
import os
import warnings
import weakref
from collections.abc import Collection
from types import TracebackType
from typing import Final, Self

from kvtier import client as aio
from kvtier.abi.spec import CacheSpec
from kvtier.client import Explanation
from kvtier.gpu import Stream
from kvtier.sync.cache import Cache
from kvtier.sync.loop import LoopThread
from kvtier.sync.watch import Watch
from kvtier.transport import TlsFiles
from kvtier.types import (
    CacheInfo,
    CacheOptions,
    Cause,
    Cursor,
    DaemonStats,
    EventType,
    KickReport,
    LeaseInfo,
    RemovalReport,
    Tier,
)
from kvtier.watch import DEFAULT_HEARTBEAT_S
from kvtier.wire import Budgets


class Client:
    """A synchronous client of the daemon whose runtime directory is ``address``::

        with kvtier.Client() as client:
            cache = client.open_cache("llama", spec)

    ``address``: by default ``$KVTIER_ADDRESS``, else ``/run/kvtier``; ``host:port`` for TCP, with ``tls`` or, on this
    host, ``insecure``. ``timeout``: seconds that a call may take where it does not say itself. ``wait``: seconds to
    keep trying while no daemon answers. Raises :class:`kvtier.errors.DaemonUnavailable`, :class:`PermissionDenied`,
    :class:`InvalidArgument`, and :class:`CallerError` (FORKED) in a child that was forked while there was a client.

    Everything is as with :class:`kvtier.AsyncClient`, without ``await``; see there. A closed client, and one used in a
    forked child, raises :class:`kvtier.errors.ClientClosed`.
    """

    def __init__(
        self,
        address: str | os.PathLike[str] | None = None,
        *,
        tls: TlsFiles | None = None,
        insecure: bool = False,
        timeout: float = aio.DEFAULT_TIMEOUT_S,
        wait: float = 0.0,
    ) -> None:
        self._thread: Final = LoopThread("kvtier-client")
        try:
            self._client: Final = self._thread.run(
                lambda: aio.connect(address, tls=tls, insecure=insecure, timeout=timeout, wait=wait),
                lambda client: client.close(),
            )
        except BaseException:
            self._thread.stop(_nothing)
            raise
        _open.add(self)

    @property
    def address(self) -> str:
        """The daemon's runtime directory, or its host and port."""
        return self._client.address

    @property
    def session_id(self) -> int:
        """This client's number in the daemon's statistics; another one after the daemon has restarted."""
        return self._client.session_id

    @property
    def epoch(self) -> int:
        """The daemon's epoch at the last attach."""
        return self._client.epoch

    def open_cache(
        self,
        name: str,
        spec: CacheSpec | None = None,
        *,
        budgets: Budgets | None = None,
        options: CacheOptions | None = None,
        write: bool = True,
        mapped: bool = True,
        timeout: float | None = None,
    ) -> Cache:
        """See :meth:`kvtier.AsyncClient.open_cache`."""
        cache = self._thread.run(
            lambda: self._client.open_cache(
                name, spec, budgets=budgets, options=options, write=write, mapped=mapped, timeout=timeout
            ),
            lambda cache: cache.close(),
        )
        return Cache(self._thread, cache)

    def watch(
        self,
        *,
        since: Cursor | None = None,
        oldest: bool = False,
        snapshot: bool = False,
        since_time_ns: int | None = None,
        types: Collection[EventType] = (),
        causes: Collection[Cause] = (),
        tiers: Collection[Tier] = (),
        caches: Collection[str] = (),
        groups: Collection[int] = (),
        keys: Collection[bytes | str] = (),
        heartbeats: bool = False,
        breaks: bool = False,
        heartbeat_s: float = DEFAULT_HEARTBEAT_S,
    ) -> Watch:
        """Follows events: ``for item in client.watch()``. See :meth:`kvtier.AsyncClient.watch`.

        Another thread ends it with :meth:`Watch.close`.
        """
        watch = self._client.watch(
            since=since,
            oldest=oldest,
            snapshot=snapshot,
            since_time_ns=since_time_ns,
            types=types,
            causes=causes,
            tiers=tiers,
            caches=caches,
            groups=groups,
            keys=keys,
            heartbeats=heartbeats,
            breaks=breaks,
            heartbeat_s=heartbeat_s,
        )
        return Watch(self._thread, watch)

    def stats(self, *, timeout: float | None = None) -> DaemonStats:
        """What the daemon knows of itself."""
        return self._thread.run(lambda: self._client.stats(timeout=timeout))

    def caches(self, *, timeout: float | None = None) -> list[CacheInfo]:
        """All caches, also those that no session has open."""
        return self._thread.run(lambda: self._client.caches(timeout=timeout))

    def leases(
        self, *, cache: str | None = None, session_id: int | None = None, timeout: float | None = None
    ) -> list[LeaseInfo]:
        """Every lease there is, or those of a cache or a session, the oldest first: see
        :meth:`kvtier.AsyncClient.leases`."""
        return self._thread.run(lambda: self._client.leases(cache=cache, session_id=session_id, timeout=timeout))

    def explain(
        self, key: bytes | str, *, cache: str | None = None, past: bool = True, timeout: float | None = None
    ) -> Explanation:
        """Where a block is, what holds it, and its past: see :meth:`kvtier.AsyncClient.explain`."""
        return self._thread.run(lambda: self._client.explain(key, cache=cache, past=past, timeout=timeout))

    def kick(self, session_id: int, *, dry_run: bool = False, timeout: float | None = None) -> KickReport:
        """Ends a session as if its process were gone: see :meth:`kvtier.AsyncClient.kick`."""
        return self._thread.run(lambda: self._client.kick(session_id, dry_run=dry_run, timeout=timeout))

    def remove_cache(
        self, name: str, *, force: bool = False, dry_run: bool = False, timeout: float | None = None
    ) -> RemovalReport:
        """Forgets a cache, its blocks and its bytes on disk: see :meth:`kvtier.AsyncClient.remove_cache`."""
        return self._thread.run(lambda: self._client.remove_cache(name, force=force, dry_run=dry_run, timeout=timeout))

    def close(self, *, stream: Stream | None = None) -> None:
        """Says goodbye, which ends the session and its leases. Calls under way in other threads, and later ones, raise
        :class:`ClientClosed`. Closing twice is allowed; in a forked child it does nothing. ``stream``: see
        :meth:`kvtier.AsyncClient.close`."""
        _open.discard(self)
        if not self._thread.forked:
            work = self._client.work(stream)
            self._thread.stop(lambda: self._client.close(stream=work))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        client = getattr(self, "_client", None)  # None: it never connected
        if client is not None and self._thread.running and not self._thread.forked:
            warnings.warn(f"unclosed client of {client.address}", ResourceWarning, stacklevel=1, source=self)
            # The garbage collector may run this in any thread, also in the one that would have to be waited for.
            self._thread.stop_soon(client.close)


async def _nothing() -> None:
    pass


_open: Final[weakref.WeakSet[Client]] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A daemon thread dies where it stands: before that, sessions still open say goodbye."""
    for client in list(_open):
        client.close()
