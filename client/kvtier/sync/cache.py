"""The synchronous twins of the client's classes.

A twin has the names, arguments and errors of its asynchronous class, whose docstrings apply. A twin runs a verb on the
client's loop and waits. Arrays are copied, shared memory is looked up, and streams of a GPU are read in the calling
thread.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from functools import wraps
from typing import Any, Concatenate, Final, Generic, ParamSpec, Self, TypeAlias, TypeVar, cast, overload

import numpy as np
from numpy.typing import NDArray

from kvtier import buffers, cache, lease
from kvtier.abi.attention import Needed
from kvtier.abi.keys import KEY_BYTES
from kvtier.abi.spec import CacheSpec
from kvtier.arena import MappedArena
from kvtier.buffers import Blocks
from kvtier.deadline import Fence, Stream, require_timeout
from kvtier.errors import KvtierError, require_kind
from kvtier.groups import AcrossGroups, AcrossLease, ChainVerbs
from kvtier.memory.tiers import Memory
from kvtier.sync.loop import LoopThread
from kvtier.types import AnyTier, BlockResult, CacheInfo, ReadTicket, Tier, WriteTicket
from kvtier.wire import Keys, ListedBlock, Page, ReadCounts, packed_chains, packed_keys

Inner = TypeVar("Inner")
L = TypeVar("L", bound=lease.Lease)
Held = TypeVar("Held", bound="lease.Lease | AcrossLease")
H = TypeVar("H", bound="SyncReadLease | SyncAcrossLease")
P = ParamSpec("P")
T = TypeVar("T")


class Twin(Generic[Inner]):
    """A synchronous object. ``inner``: its asynchronous twin; ``thread``: the thread that runs the twin's
    coroutines."""

    def __init__(self, thread: LoopThread, inner: Inner) -> None:
        self.thread: Final = thread
        self.inner: Final = inner

    def __repr__(self) -> str:
        return repr(self.inner)


class Fact(Generic[T]):
    """An attribute of the asynchronous object, read at access."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, twin: Twin[Any] | None, owner: type) -> T:
        return self if twin is None else getattr(twin.inner, self._name)  # type: ignore[return-value]


def waits(verb: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """A method that awaits the verb on the client's loop. A verb that takes a stream gets its fence from this thread,
    since the loop's thread has other current streams."""
    takes_stream = "stream" in inspect.signature(verb).parameters

    @wraps(verb)
    def waiting(self: Any, *args: Any, **kwargs: Any) -> T:
        if takes_stream:
            kwargs["stream"] = self.fence(kwargs.get("stream"))
        thread: LoopThread = self.thread
        return thread.run(lambda: verb(self.inner, *args, **kwargs))

    return plain(waiting, verb)


def answers(verb: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """A method that calls the verb, which does not wait, in this thread."""

    @wraps(verb)
    def answering(self: Twin[Any], *args: P.args, **kwargs: P.kwargs) -> T:
        return verb(self.inner, *args, **kwargs)

    return plain(answering, verb)


def looks(
    verb: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]], look: Callable[..., T | None]
) -> Callable[Concatenate[Any, P], T]:
    """A method that looks in shared memory, in this thread, and awaits the verb if that gives no answer. ``look``: with
    the twin, packed keys, and further arguments of the verb."""

    @wraps(verb)
    def looking(self: Twin[Any], keys: Keys, *, timeout: float | None = None, **asked: Any) -> T:
        packed, ask = _asked(self.thread, keys, timeout), cast(Any, verb)
        found = look(self.inner, packed, **asked)
        return self.thread.run(lambda: ask(self.inner, packed, timeout=timeout, **asked)) if found is None else found

    return plain(looking, verb)


def like(verb: Callable[Concatenate[Any, P], Any]) -> Callable[[Callable[..., T]], Callable[Concatenate[Any, P], T]]:
    """Gives a method the arguments and the docstring of ``verb``."""

    def decorate(method: Callable[..., T]) -> Callable[Concatenate[Any, P], T]:
        return plain(wraps(verb)(method), verb)

    return decorate


def plain(method: Callable[..., T], verb: Callable[..., Any]) -> Callable[..., T]:
    """Finishes ``wraps`` and hides the coroutine function, so that inspection sees a function that returns a value."""
    vars(method).pop("__wrapped__")
    method.__signature__ = inspect.signature(verb)  # type: ignore[attr-defined]
    return method


class SyncHold(Twin[Held]):
    """A lease, or the leases of all window groups, held until :meth:`release` or the end of the ``with`` block. The
    parent holds the lease after a fork; the child can neither use nor release it."""

    release = waits(lease.Lease.release)

    def fence(self, stream: Stream | None = None) -> Fence:
        """The point that ``stream`` has reached: see :meth:`kvtier.Cache.fence`."""
        return self.thread.fence([self.inner], stream)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.thread.forked:
            fence = self.fence()
            self.thread.run(lambda: self.inner.groups[0].cache.release(self.inner, stream=fence))


class SyncLease(SyncHold[L]):
    """Slots of one tier."""

    id = Fact[int]()
    tier = Fact[Tier]()
    slots = Fact[tuple[int, ...]]()
    released = Fact[bool]()
    arena = Fact[MappedArena]()
    memory = Fact[Memory | None]()

    @property
    def cache(self) -> SyncCache:
        """The cache in the lease's window group."""
        inner: Any = self.inner.cache
        return SyncCache(self.thread, inner)

    @property
    def groups(self) -> tuple[Self]:
        """See :attr:`kvtier.lease.Lease.groups`."""
        return (self,)

    def __len__(self) -> int:
        return len(self.inner)

    view = answers(lease.Lease.view)
    tensors = answers(lease.Lease.tensors)
    require_live = answers(lease.Lease.require_live)
    give_back = waits(lease.Lease.give_back)


class SyncWriteLease(SyncLease[lease.WriteLease]):
    """Reserved slots: fill their views, then :meth:`commit`."""

    blank = Fact[list[int]]()
    ticket = answers(lease.WriteLease.ticket)
    commit = waits(lease.WriteLease.commit)


class SyncReadLease(SyncLease[lease.ReadLease]):
    """Acquired blocks: READY in one tier, where the lease keeps them."""

    keys = Fact[tuple[bytes, ...]]()
    needed = Fact[Needed]()
    generations = Fact[NDArray[np.uint64]]()
    found_in = Fact[bytes]()
    matched = Fact[int]()
    error = Fact[KvtierError | None]()
    refusal = Fact[str]()
    blocks = Fact[int]()
    prefix_length = Fact[int]()
    ticket = answers(lease.ReadLease.ticket)
    unchanged = answers(lease.ReadLease.unchanged)


class SyncAcrossLease(SyncHold[AcrossLease]):
    """A prefix held in every window group."""

    keys = Fact[tuple[bytes, ...]]()
    blocks = Fact[int]()
    matched = Fact[int]()
    error = Fact[KvtierError | None]()
    refusal = Fact[str]()
    unchanged = answers(AcrossLease.unchanged)

    def __init__(self, thread: LoopThread, inner: AcrossLease) -> None:
        super().__init__(thread, inner)
        self.groups: Final = tuple(SyncReadLease(thread, part) for part in inner.groups)
        """The leases, one per group, in order; a lease may be empty."""


class SyncLeases(list[H]):
    """The leases of an ``acquire_many``, released together at the end of a ``with`` block."""

    def __init__(self, owner: ChainTwin[Any, Any, Any, Any, Any], leases: Iterable[H]) -> None:
        super().__init__(leases)
        self._owner = owner

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._owner.thread.forked:
            self._owner.release(*self)


V = TypeVar("V", bound=ChainVerbs[Any, Any, Any, Any])
Given = TypeVar("Given")
Stored = TypeVar("Stored")
Got = TypeVar("Got")


class ChainTwin(Twin[V], Generic[V, H, Given, Stored, Got]):
    """The verbs of chains, in one window group or over all: see :attr:`SyncCache.across`."""

    groups = Fact[tuple[int, ...]]()
    spec = Fact[CacheSpec]()
    tiers = Fact[tuple[Tier, ...]]()
    lease_tier = answers(ChainVerbs.lease_tier)
    match = looks(ChainVerbs.match, lambda of, keys, remote=False: None if remote else of.reader.match(keys, of.groups))
    match_tokens = waits(ChainVerbs.match_tokens)
    prefix_length = looks(ChainVerbs.prefix_length, lambda of, keys: of.reader.prefix_length(keys, of.groups))

    def __init__(self, thread: LoopThread, inner: V, lease: type[H]) -> None:
        super().__init__(thread, inner)
        self._lease: Final = lease

    @like(ChainVerbs.acquire)
    def acquire(self, keys: Keys, tier: AnyTier | None = None, **wanted: Any) -> H:
        held = self.inner.acquire(packed_keys(keys), tier, **wanted)
        return self._lease(self.thread, self.thread.run(held.take, held.give_back))

    @like(ChainVerbs.acquire_many)
    def acquire_many(self, chains: Iterable[Keys], tier: AnyTier | None = None, **wanted: Any) -> SyncLeases[H]:
        held = self.inner.acquire_many(packed_chains(chains), tier, **wanted)
        leases = self.thread.run(held.take, held.give_back)
        return SyncLeases(self, (self._lease(self.thread, each) for each in leases))

    def release(self, *leases: SyncHold[Any], stream: Stream | None = None, timeout: float | None = None) -> None:
        """Gives leases back, in one call and in this order: see :meth:`kvtier.Cache.release`."""
        for index, each in enumerate(leases):
            require_kind(f"leases[{index}]", each, SyncHold)
        held = [each.inner for each in leases]
        fence = self.thread.fence(held, stream)
        self.thread.run(lambda: self.inner.release(*held, stream=fence, timeout=timeout))

    @like(ChainVerbs.put)
    def put(self, keys: Keys, blocks: Given, *, tier: AnyTier | None = None, **kept: Any) -> Stored:
        packed = packed_keys(keys)
        sources = self.inner.sources(blocks, len(packed) // KEY_BYTES, self.inner.lease_tier(tier))
        stored: Stored = self.thread.run(lambda: self.inner.put(packed, self.inner.formed(sources), tier=tier, **kept))
        return stored

    @like(ChainVerbs.get)
    def get(
        self,
        keys: Keys,
        out: Given | None = None,
        *,
        tier: AnyTier | None = None,
        verify: bool = False,
        timeout: float | None = None,
    ) -> Got:
        packed, given = _asked(self.thread, keys, timeout), self.inner.by_group("out", out)
        read, targets = self.inner.begin_get(packed, given, tier, in_cpu=verify)
        read.copy()
        found = read.rows
        if verify or not read.done:
            found = self.thread.run(lambda: self.inner.end_get(read, targets, tier, verify, timeout))
        if given:
            found = {group: _delivered(given.get(group), rows) for group, rows in found.items()}
        got: Got = self.inner.formed(found)
        return got


SyncAcrossGroups: TypeAlias = ChainTwin[
    AcrossGroups, SyncAcrossLease, Mapping[int, Blocks], dict[int, list[BlockResult]], dict[int, list[Any]]
]


class SyncCache(ChainTwin[cache.Cache, SyncReadLease, Blocks, list[BlockResult], list[Any]]):
    """A cache, opened by :meth:`kvtier.Client.open_cache`."""

    name = Fact[str]()
    group = Fact[int]()
    block_bytes = Fact[int]()
    info = Fact[CacheInfo]()
    mapped = Fact[bool]()
    unmapped = Fact[Mapping[Tier, str]]()
    arena = Fact[MappedArena]()
    session_number = Fact[int]()
    lookups = Fact[str]()
    reads = Fact[ReadCounts]()

    slots = answers(cache.Cache.slots)
    prompt = answers(cache.Cache.prompt)
    locate = looks(cache.Cache.locate, lambda of, keys: of.reader.locate(keys, of.group))
    probe = looks(cache.Cache.probe, lambda of, keys: of.reader.probe(keys, of.group))

    move = waits(cache.Cache.move)
    drop = waits(cache.Cache.drop)
    set_retention = waits(cache.Cache.set_retention)
    pin = waits(cache.Cache.pin)
    unpin = waits(cache.Cache.unpin)
    hint = waits(cache.Cache.hint)
    keep = waits(cache.Cache.keep)
    reset = waits(cache.Cache.reset)
    release_all = waits(cache.Cache.release_all)
    close = waits(cache.Cache.close)

    def __init__(self, thread: LoopThread, inner: cache.Cache) -> None:
        super().__init__(thread, inner, SyncReadLease)

    @like(cache.Cache.in_group)
    def in_group(self, group: int) -> SyncCache:
        return SyncCache(self.thread, self.inner.in_group(group))

    @property
    def across(self) -> SyncAcrossGroups:
        """The verbs over all window groups at once, for sequences that need their blocks in each group."""
        return SyncAcrossGroups(self.thread, self.inner.across, SyncAcrossLease)

    @like(cache.Cache.pages)
    def pages(self, **asked: Any) -> Iterator[Page]:
        return _each(self.thread, self.inner.pages(**asked))

    @like(cache.Cache.blocks)
    def blocks(self, **asked: Any) -> Iterator[ListedBlock]:
        return _each(self.thread, self.inner.blocks(**asked))

    @like(cache.Cache.reserve)
    def reserve(self, count: int, tier: AnyTier | None = None, *, timeout: float | None = None) -> SyncWriteLease:
        held = self.inner.reserve(count, tier, timeout=timeout)
        return SyncWriteLease(self.thread, self.thread.run(held.take, self.inner.release))

    @overload
    def join(self, ticket: WriteTicket, *, timeout: float | None = None) -> SyncWriteLease: ...
    @overload
    def join(self, ticket: ReadTicket, *, timeout: float | None = None) -> SyncReadLease: ...
    def join(self, ticket: Any, *, timeout: float | None = None) -> Any:
        """See :meth:`kvtier.Cache.join`."""
        held = self.inner.join(ticket, timeout=timeout)
        inner: Any = self.thread.run(held.take, self.inner.release)
        twin = SyncWriteLease if isinstance(inner, lease.WriteLease) else SyncReadLease
        return twin(self.thread, inner)

    @like(cache.Cache.fence)
    def fence(self, stream: Stream | None = None) -> Fence:
        self.thread.require_usable()
        return self.inner.fence(stream)


def _asked(thread: LoopThread, keys: Keys, timeout: float | None) -> bytes:
    """The keys of a lookup. Raises :class:`InvalidArgument`, :class:`ClientClosed`."""
    packed = packed_keys(keys)
    thread.require_usable()
    if timeout is not None:
        require_timeout(timeout)
    return packed


def _each(thread: LoopThread, items: AsyncIterator[T]) -> Iterator[T]:
    async def step() -> T:
        return await anext(items)

    while True:
        try:
            yield thread.run(step)
        except StopAsyncIteration:
            return


def _delivered(out: Blocks | None, rows: list[Any]) -> list[Any]:
    """The blocks as the caller gets them: its own arrays, filled, or else the rows. Tensors on a GPU are filled on this
    thread's current stream, which the loop's thread does not know."""
    if out is None:
        return rows
    buffers.fill(buffers.late(out, rows))
    return [row if row is None else block for block, row in zip(out, rows, strict=False)]
