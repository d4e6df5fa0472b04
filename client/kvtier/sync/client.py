"""The synchronous client, its watches and its mirrors."""

from __future__ import annotations

import atexit
import os
import threading
import warnings
import weakref
from collections.abc import Collection
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final, Self, TypeVar

from kvtier import client, watch
from kvtier.abi.spec import CacheSpec
from kvtier.deadline import Stream
from kvtier.errors import ClientClosed
from kvtier.events import WatchItem
from kvtier.mirror import follower
from kvtier.mirror.follower import DEFAULT_MIRROR_HEARTBEAT_S, DEFAULT_MIRROR_TIMEOUT_S, MirrorView
from kvtier.session import DEFAULT_PATIENCE_S
from kvtier.sync.cache import Fact, SyncCache, Twin, like, waits
from kvtier.sync.loop import LoopThread, LoopWork
from kvtier.transport import TlsFiles
from kvtier.types import Cursor

T = TypeVar("T")


class SyncWatch(Twin[watch.Watch]):
    """``for item in client.watch()``. Threads may iterate together; each item goes to one thread. The watch ends when
    any thread closes it."""

    cursor = Fact[Cursor | None]()
    newest = Fact[int | None]()
    lag = Fact[int]()
    live = Fact[bool]()

    def __init__(self, thread: LoopThread, inner: watch.Watch) -> None:
        super().__init__(thread, inner)
        self._turn = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """Ends the stream; a thread that waits for the next item sees the end of the iteration."""
        if not self._closed and not self.thread.forked:
            self._closed = True
            with suppress(ClientClosed):  # and with it the stream
                self.thread.run(self.inner.aclose)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> WatchItem:
        with self._turn:
            if self._closed:
                raise StopIteration
            try:
                return self.thread.run(self.inner.__anext__)
            except StopAsyncIteration:
                raise StopIteration from None
            except ClientClosed:
                if self._closed or not threading.main_thread().is_alive():  # the interpreter ends
                    raise StopIteration from None
                raise

    def __enter__(self) -> Self:
        """Fixes the start of a watch that begins now. Raises :class:`kvtier.errors.DaemonUnavailable`."""
        self.thread.run(self.inner.__aenter__)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Client(Twin[client.AsyncClient]):
    """A synchronous client: ``with kvtier.Client() as client``. ``address``: the runtime directory of the daemon.

    Arguments and errors: see :func:`kvtier.connect`. After :meth:`close`, and in a forked child, verbs raise
    :class:`kvtier.errors.ClientClosed`.
    """

    address = Fact[str]()
    session_id = Fact[int]()
    connected = Fact[bool]()
    closed = Fact[bool]()
    epoch = Fact[int]()

    stats = waits(client.AsyncClient.stats)
    caches = waits(client.AsyncClient.caches)
    leases = waits(client.AsyncClient.leases)
    explain = waits(client.AsyncClient.explain)
    explain_request = waits(client.AsyncClient.explain_request)
    holdings = waits(client.AsyncClient.holdings)
    kick = waits(client.AsyncClient.kick)
    remove_cache = waits(client.AsyncClient.remove_cache)
    resize_cache = waits(client.AsyncClient.resize_cache)
    remote_gc = waits(client.AsyncClient.remote_gc)

    def __init__(
        self,
        address: str | os.PathLike[str] | None = None,
        *,
        tls: TlsFiles | None = None,
        insecure: bool = False,
        timeout: float = client.DEFAULT_TIMEOUT_S,
        wait: float = 0.0,
        patience: float = DEFAULT_PATIENCE_S,
    ) -> None:
        thread = LoopThread("kvtier-client")
        try:
            connected = thread.run(
                client.connect(address, tls=tls, insecure=insecure, timeout=timeout, wait=wait, patience=patience).take,
                lambda connected: connected.close(),
            )
        except BaseException:
            thread.stop(_nothing)
            raise
        super().__init__(thread, connected)
        _open.add(self)

    @like(client.AsyncClient.open_cache)
    def open_cache(self, name: str, spec: CacheSpec | None = None, **wanted: Any) -> SyncCache:
        opened = self.thread.run(lambda: self.inner.open_cache(name, spec, **wanted), lambda opened: opened.close())
        return SyncCache(self.thread, opened)

    @like(client.AsyncClient.watch)
    def watch(self, **wanted: Any) -> SyncWatch:
        return SyncWatch(self.thread, self.inner.watch(**wanted))

    def submit(self, work: LoopWork[T]) -> Future[T]:
        """Begins a verb without waiting: ``client.submit(lambda: cache.inner.get(keys))``, of the asynchronous twin.

        The future can be polled, awaited in a thread and cancelled; the verb owns its arrays until it is done. GPU work
        on streams is not waited for. Raises :class:`kvtier.errors.ClientClosed`.
        """
        return self.thread.submit(work)

    @like(client.AsyncClient.close)
    def close(self, *, stream: Stream | None = None) -> None:
        _open.discard(self)
        if not self.thread.forked:
            work = self.inner.work(stream)
            self.thread.stop(lambda: self.inner.close(stream=work))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        inner = getattr(self, "inner", None)  # None: the client never connected
        if inner is not None and self.thread.running and not self.thread.forked:
            warnings.warn(f"unclosed client of {inner.address}", ResourceWarning, stacklevel=1, source=self)
            # The garbage collector may run this in any thread, including the client's own thread, which cannot wait for
            # itself.
            self.thread.stop_soon(inner.close)


class SyncMirror(MirrorView):
    """A :class:`kvtier.Mirror` for threads: ``with kvtier.sync.SyncMirror(client, ["llama"]) as mirror``. Lookups are
    thread-safe."""

    def __init__(
        self,
        client: Client,
        caches: Collection[str],
        *,
        heartbeat_s: float = DEFAULT_MIRROR_HEARTBEAT_S,
        timeout: float = DEFAULT_MIRROR_TIMEOUT_S,
    ) -> None:
        self.thread: Final = client.thread
        self.inner: Final = follower.Mirror(client.inner, caches, heartbeat_s=heartbeat_s, timeout=timeout)
        super().__init__(self.inner.content)

    synced = waits(follower.Mirror.synced)

    def close(self) -> None:
        """Stops following. The index stays, and is stale. Does nothing if the client is closed."""
        if not self.thread.forked:
            with suppress(ClientClosed):
                self.thread.run(self.inner.aclose)

    def __enter__(self) -> Self:
        self.thread.run(self.inner.__aenter__)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def _nothing() -> None:
    pass


_open: Final[weakref.WeakSet[Client]] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Closes open clients at exit, before their daemon threads die, so that sessions say goodbye."""
    for each in list(_open):
        each.close()
