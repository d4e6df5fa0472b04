"""Copies between a worker's pages and the daemon's mapped memory, in background threads."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Literal

import numpy as np

from kvtier.abi.keys import KEY_BYTES
from kvtier.deadline import Backoff, Stream
from kvtier.engine.layout import GroupPages, Layout
from kvtier.engine.options import SILENCE_S, Complaints, EngineOptions
from kvtier.engine.work import NO_PAGE, CopyResult, FailedPages, Load, Placed, Save, Work
from kvtier.errors import DaemonUnavailable, DeviceError, KvtierError, RetryableError, SpecMismatch
from kvtier.memory.gpu import fence_over
from kvtier.memory.planes import Pages as Rows
from kvtier.memory.planes import Planes
from kvtier.sync import Client
from kvtier.sync.cache import SyncCache
from kvtier.types import Tier
from kvtier.wire import MAX_KEYS

LEAST_HOST_BLOCKS: Final = 2
"""In each group: a block can be loaded although a slot is reserved for the next save."""
_OPEN_S: Final = 5.0
"""Seconds that an engine's start waits for the open cache."""

_log = logging.getLogger("kvtier.engine")


@dataclass(slots=True, eq=False)
class _Copying:
    """A ticket under way, and the pages that it touches. ``turn``: held while a save reads its pages, and while pages
    are ``given_up``, which the save no longer reads."""

    pages: FailedPages
    is_save: bool
    future: Future[None] | None = None
    turn: threading.Lock = field(default_factory=threading.Lock)
    given_up: FailedPages = field(default_factory=dict)

    def touched(self, pages: Mapping[int, Collection[int]] | None) -> FailedPages:
        """Returns the pages that the copy still touches out of ``pages``; None: out of all pages."""
        left = {group: mine - self.given_up.get(group, frozenset()) for group, mine in self.pages.items()}
        if pages is not None:
            left = {group: mine.intersection(pages.get(group, ())) for group, mine in left.items()}
        return {group: mine for group, mine in left.items() if mine}

    def give_up(self, pages: FailedPages) -> None:
        self.given_up = {
            group: pages.get(group, frozenset()) | self.given_up.get(group, frozenset())
            for group in pages.keys() | self.given_up.keys()
        }


class Mover:
    """Copies the pages of one worker. Only :meth:`open`, :meth:`wait_loads`, :meth:`flush` and :meth:`close` wait; only
    the constructor raises."""

    def __init__(self, layout: Layout, options: EngineOptions, pages: Sequence[GroupPages], *, rank: int = 0) -> None:
        """``pages``: one for each group of the layout. Raises :class:`kvtier.errors.InvalidArgument`, also for budgets
        without room for a block."""
        options.require_room(layout.spec, host_blocks=LEAST_HOST_BLOCKS)
        self.layout: Final = layout
        self.options: Final = options
        self.rank: Final = rank
        self.complaints: Final = Complaints(_log)
        by_group = {each.group: each.of(layout, rank) for each in pages}
        self._into: Final = {group: planes for group, (planes, _) in by_group.items() if planes is not None}
        self._out_of: Final = {group: planes for group, (_, planes) in by_group.items() if planes is not None}
        self._name: Final = layout.cache(options.cache)
        self._client: Client | None = None
        self._cache: SyncCache | None = None
        self._fault: Exception | None = None
        """Error of the last attempt to open the cache."""
        self._ready: Final = threading.Event()
        """Set when the cache is open."""
        self._patience, self._save_patience = SILENCE_S, options.load_timeout
        """Seconds that the next load waits for the open cache, and the next save for a silent daemon. Later loads do
        not wait; later saves do once a save has succeeded."""
        self._closing: Final = threading.Event()
        self._loading: Final = ThreadPoolExecutor(options.threads, "kvtier-load")
        self._awaited: Final = ThreadPoolExecutor(options.threads, "kvtier-awaited")
        """For synchronous loads, which the engine waits for: they run beside all other loads."""
        self._saving: Final = ThreadPoolExecutor(1, "kvtier-save")
        self._under_way: Final[dict[int, _Copying]] = {}
        self._synchronous: list[Future[None]] = []
        self._to_save: tuple[Save, ...] = ()
        self._ended: Final[deque[CopyResult]] = deque()
        self._failed: defaultdict[int, set[int]] = defaultdict(set)
        self._lock: Final = threading.Lock()
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        threading.Thread(target=self._open, name="kvtier-open", daemon=True).start()

    def open(self, timeout: float = _OPEN_S) -> None:
        """Waits at an engine's start until the scheduler has made the cache and it is open. Until then copies fail."""
        self._ready.wait(timeout)

    def start(self, work: Work, *, stream: Stream | None = None) -> None:
        """Begins the loads of a step, on a GPU after the present work of ``stream``; :meth:`save` begins the saves.
        Waits for copies that touch flushed pages."""
        if work.flush:
            self.flush(work.flush)
        self._to_save, self._synchronous = work.saves, []
        for load in work.loads:
            into = {group: planes for group, planes in self._into.items() if group in load.pages}
            try:
                rows = {group: self._rows(planes, load.pages[group], stream) for group, planes in into.items()}
            except DeviceError as error:
                self.complaints.add("a load could not begin", error)
                rows = {}
            pool = self._awaited if load.sync else self._loading
            copying = self._begin(pool, load.ticket, load.pages, partial(self._load, load, rows))
            if load.sync and copying.future is not None:
                self._synchronous.append(copying.future)

    def wait_loads(self, timeout: float | None = None) -> None:
        """Waits until the synchronous loads of the last step have ended, with or without success."""
        if self._synchronous:
            wait(self._synchronous, timeout)

    def save(self, *, stream: Stream | None = None) -> None:
        """Begins the saves of the last step, on a GPU after the present work of ``stream``, the forward pass."""
        saves, self._to_save = self._to_save, ()
        for save in saves:
            placed = [(group, each) for group, places in save.places.items() for each in places]
            try:
                rows = [
                    (group, each, self._rows(self._out_of[group], each.pages, stream))
                    for group, each in placed
                    if group in self._out_of
                ]
            except DeviceError as error:
                self.complaints.add("a save could not begin", error)
                rows = None
            pages: defaultdict[int, list[int]] = defaultdict(list)
            for group, each in placed:
                pages[group] += each.pages
            work = partial(self._save, save, rows)
            self._begin(self._saving, save.ticket, pages, work, is_save=True)

    def failed_pages(self) -> dict[int, set[int]]:
        """Returns, by group, the pages whose load failed since the last call."""
        with self._lock:
            failed, self._failed = self._failed, defaultdict(set)
        return dict(failed)

    def poll(self) -> list[CopyResult]:
        """Returns the outcomes since the last call."""
        with suppress(BlockingIOError):
            if self._fd >= 0:
                os.eventfd_read(self._fd)
        ended: list[CopyResult] = []
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    def fileno(self) -> int:
        """Returns a file descriptor that is readable when :meth:`poll` has outcomes."""
        return self._fd

    def flush(self, pages: Mapping[int, Collection[int]] | None = None, *, patience: float = 0.0) -> None:
        """Waits until no copy touches these pages any more; None: all pages. Saves that have not begun after
        ``patience`` seconds give these pages up, and save their other pages."""
        with self._lock:
            touching = [each for each in self._under_way.values() if each.touched(pages)]
        saves = [each.future for each in touching if each.is_save and each.future is not None]
        late = wait(saves, patience).not_done if patience else set(saves)
        for each in touching:
            if each.is_save and each.future in late:
                with each.turn:
                    each.give_up(each.touched(pages))
            elif each.future is not None:
                wait([each.future])
        with self._lock:  # failed loads of flushed pages no longer matter
            for group, failed in self._failed.items():
                failed -= failed if pages is None else set(pages.get(group, ()))

    def close(self, timeout: float = 2.0) -> None:
        """Cancels copies that have not begun, waits for the others, and ends the worker's session."""
        if self._fd < 0:
            return
        with self._lock:
            self._closing.set()
        for pool in (self._loading, self._awaited, self._saving):
            pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            left = [each.future for each in self._under_way.values() if each.future is not None]
        wait(left, timeout)
        if self._client is not None:
            self._client.close()
        with self._lock:
            fd, self._fd = self._fd, -1
        os.close(fd)

    def _begin(
        self,
        pool: ThreadPoolExecutor,
        ticket: int,
        pages: Mapping[int, Sequence[int]],
        work: Callable[[_Copying], None],
        *,
        is_save: bool = False,
    ) -> _Copying:
        touched = {group: frozenset(of_group) - {NO_PAGE} for group, of_group in pages.items()}
        copying = _Copying(touched, is_save)
        with self._lock:
            self._under_way[ticket] = copying
        copying.future = pool.submit(work, copying)
        copying.future.add_done_callback(lambda _: self._forget(ticket))
        return copying

    def _forget(self, ticket: int) -> None:
        with self._lock:
            del self._under_way[ticket]

    def _rows(self, planes: Planes, pages: Sequence[int], stream: Stream | None) -> Rows:
        """Returns the pages to copy, on a GPU after the present work of the engine's stream."""
        rows, cache = planes[pages], self._cache
        if not planes.on_gpu or cache is None:
            return rows
        # If no GPU reaches the slots, pages on a GPU come through the CPU's memory.
        there = rows.within(cache.inner.reach(Tier.HOST))
        if there is None or there.gpu is None or stream is None:
            return there or rows
        return replace(there, after=(fence_over([there.gpu], stream),))

    def _load(self, load: Load, rows: Mapping[int, Rows], copying: _Copying) -> None:
        started, nbytes = time.perf_counter(), 0
        failed: dict[int, frozenset[int]] = {}
        for group in load.keys.keys() & self._into.keys():
            arrived = self._arrived(group, load.keys[group], rows[group]) if rows else 0
            nbytes += arrived * self._into[group].nbytes
            if arrived < len(load.pages[group]):
                failed[group] = frozenset(load.pages[group][arrived:])
        if failed and any(group.window for group in self.layout.groups):
            # A shorter prefix has an earlier window, whose first blocks this load has left out.
            failed = {group: frozenset(pages) for group, pages in load.pages.items()}
        with self._lock:
            for group, missing in failed.items():
                self._failed[group] |= missing
        self._tell(load, "load", failed, nbytes, started)

    def _arrived(self, group: int, keys: bytes, rows: Rows) -> int:
        """Loads blocks of a group. Returns the number of blocks that arrived without a gap from the first on."""
        arrived = 0
        # With more keys in a call, a window group copies the last blocks only.
        step = min(MAX_KEYS, self.layout.spec.attention(group).span or MAX_KEYS)
        try:
            patience, self._patience = self._patience, 0.0
            cache = self._opened(patience).in_group(group)
            for start in range(0, len(rows), step):
                some = rows[start : start + step]
                part = keys[start * KEY_BYTES : (start + len(some)) * KEY_BYTES]
                arrived += len(cache.get(part, some, timeout=self.options.load_timeout))
                if arrived < start + len(some):
                    break
        except Exception as error:  # noqa: BLE001 - the engine waits for an outcome, after any error
            self.complaints.add("a load failed", error)
        return arrived

    def _save(self, save: Save, rows: Sequence[tuple[int, Placed, Rows]] | None, copying: _Copying) -> None:
        started, nbytes, failed = time.perf_counter(), 0, copying.pages
        until, self._save_patience, backoff = started + self._save_patience, 0.0, Backoff()
        while rows is not None:
            try:
                nbytes, failed = self._write(rows, copying)
                self._save_patience = self.options.load_timeout
                break
            except Exception as error:  # noqa: BLE001 - as in _arrived
                again = isinstance(error, RetryableError) and time.perf_counter() < until
                if not again or self._closing.wait(backoff.next()):
                    self.complaints.add("a save failed", error)
                    break
        self._tell(save, "save", failed, nbytes, started)

    def _write(self, rows: Sequence[tuple[int, Placed, Rows]], copying: _Copying) -> tuple[int, FailedPages]:
        """Writes pages into slots. Returns the number of bytes, and the pages that were given up."""
        nbytes = 0
        with ExitStack() as joined:
            # This process holds the slots, too: it keeps them while it writes, even if the scheduler dies.
            cache, wait = self._opened(), self.options.load_timeout
            leases = [joined.enter_context(cache.in_group(at).join(each.lease, timeout=wait)) for at, each, _ in rows]
            with copying.turn:
                lost = copying.given_up
                for lease, (group, placed, pages) in zip(leases, rows, strict=True):
                    kept = [at for at, page in enumerate(placed.pages) if page not in lost.get(group, ())]
                    if kept:
                        slots = [placed.slots[at] for at in kept]
                        lease.arena.write(lease.tier, group, slots, pages[np.array(kept)])
                    nbytes += len(kept) * pages.planes.nbytes
        return nbytes, lost

    def _opened(self, patience: float = 0.0) -> SyncCache:
        if not self._ready.wait(patience) or self._cache is None:
            raise DaemonUnavailable(f"the cache is not open: {self._fault or 'no answer yet'}", reason="NOT_OPEN")
        return self._cache

    def _open(self) -> None:
        """Retries until the daemon answers and the scheduler has made the cache."""
        backoff, client = Backoff(), None
        while not self._closing.is_set():
            try:
                client = client or Client(self.options.address, timeout=self.options.load_timeout, patience=SILENCE_S)
                # A cache that this worker opened first could not get the budgets that the scheduler asks for.
                if not any(each.sessions for each in client.caches() if each.name == self._name):
                    raise DaemonUnavailable("the scheduler has not opened it", reason="NOT_OPEN")
                cache = client.open_cache(self._name)
                if cache.spec.fingerprint() != self.layout.spec.fingerprint():
                    raise SpecMismatch("spec", cache.spec, f"that of the engine's pages, in cache {self._name}")
            except (KvtierError, OSError) as error:
                self._fault = error
                self._closing.wait(backoff.next())
                continue
            cache.inner.reader.mute()  # the scheduler has asked, once for all ranks
            with self._lock:
                if not self._closing.is_set():
                    self._client, self._cache, client = client, cache, None
            self._ready.set()
            break
        if client is not None:
            client.close()

    def _tell(
        self, ticket: Load | Save, kind: Literal["load", "save"], failed: FailedPages, nbytes: int, started: float
    ) -> None:
        seconds = time.perf_counter() - started
        self._ended.append(
            CopyResult(ticket.ticket, ticket.request, kind, self.rank, failed, ticket.blocks, nbytes, seconds)
        )
        with self._lock:
            if self._fd >= 0:  # after a close the number may be another file's
                os.eventfd_write(self._fd, 1)
