"""A cache for callers without an event loop."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

from kvtier import buffers
from kvtier import cache as inner
from kvtier.abi.keys import KEY_BYTES, PLAIN, Scope, TokenIds
from kvtier.abi.spec import CacheSpec
from kvtier.arena import Arena
from kvtier.buffers import Blocks
from kvtier.chains import Prompt
from kvtier.errors import ClientClosed
from kvtier.gpu import Fence, Stream
from kvtier.retention import Retention
from kvtier.session import require_timeout
from kvtier.sync.across import AcrossGroups
from kvtier.sync.lease import Lease, Leases, ReadLease, WriteLease
from kvtier.sync.loop import LoopThread
from kvtier.types import BlockResult, CacheInfo, Tier
from kvtier.wire import (
    DropReport,
    Keys,
    ListedBlock,
    Locations,
    Match,
    Page,
    ReadCounts,
    ResetReport,
    packed_chains,
    packed_keys,
    split_keys,
)

T = TypeVar("T")


class Cache:
    """Made by :meth:`kvtier.Client.open_cache`. Verbs, arguments and errors are those of :class:`kvtier.Cache`.

    Arrays are copied, and shared memory is looked up, in the calling thread.
    """

    def __init__(self, thread: LoopThread, cache: inner.Cache) -> None:
        self._thread = thread
        self._inner: Final = cache

    # -- what it is ------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def spec(self) -> CacheSpec:
        return self._inner.spec

    @property
    def group(self) -> int:
        """The window group whose verbs these are."""
        return self._inner.group

    def in_group(self, group: int) -> Cache:
        """The same cache, opened once and closed once, with the verbs of another window group."""
        return Cache(self._thread, self._inner.in_group(group))

    @property
    def across(self) -> AcrossGroups:
        """The verbs over all window groups at once, for sequences that need their blocks in each."""
        return AcrossGroups(self._thread, self, self._inner.across)

    @property
    def block_bytes(self) -> int:
        return self._inner.block_bytes

    @property
    def info(self) -> CacheInfo:
        """As the daemon described it when it was opened last."""
        return self._inner.info

    @property
    def mapped(self) -> bool:
        """Whether its memory is mapped. If not, put and get go through streams, and leases have no views."""
        return self._inner.mapped

    @property
    def unmapped(self) -> Mapping[Tier, str]:
        """By tier, why its slots are not mapped: see :attr:`kvtier.Cache.unmapped`."""
        return self._inner.unmapped

    @property
    def arena(self) -> Arena:
        """Its memory, as mapped last."""
        return self._inner.arena

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers it has, the fastest first."""
        return self._inner.tiers

    @property
    def session_number(self) -> int:
        """Rises when the daemon no longer knows the session before: leases of that one are lost."""
        return self._inner.session_number

    def slots(self, tier: Tier) -> int:
        """Capacity of a tier in blocks; 0 where the cache does not have it."""
        return self._inner.slots(tier)

    def lease_tier(self, tier: Tier | None = None) -> Tier:
        """``tier``, or the fastest one whose slots can be mapped. Raises :class:`InvalidArgument` if there is none."""
        return self._inner.lease_tier(tier)

    def prompt(
        self,
        token_ids: TokenIds,
        scope: Scope = PLAIN,
        extra_ids: TokenIds | None = None,
        *,
        salt_id: int | None = None,
        vocab_size: int | None = None,
    ) -> Prompt:
        """The full blocks of a prompt: see :meth:`kvtier.Cache.prompt`."""
        return self._inner.prompt(token_ids, scope, extra_ids, salt_id=salt_id, vocab_size=vocab_size)

    # -- lookups ---------------------------------------------------------------------------------------------------

    @property
    def lookups(self) -> str:
        """How lookups and gets find blocks now: ``shared memory``, or ``calls`` and why."""
        return self._inner.lookups

    @property
    def reads(self) -> ReadCounts:
        """How they went so far, whichever way."""
        return self._inner.reads

    def prefix_length(self, keys: Keys, *, timeout: float | None = None) -> int:
        """See :meth:`kvtier.Cache.prefix_length`."""
        packed = packed_keys(keys)
        self._thread.require_usable()
        if timeout is not None:
            require_timeout(timeout)
        found = self._inner.reader.prefix_length(packed, self.group)
        if found is not None:
            return found
        return self._thread.run(lambda: self._inner.prefix_length(packed, timeout=timeout))

    def match(self, keys: Keys, *, timeout: float | None = None) -> Match:
        """See :meth:`kvtier.Cache.match`."""
        packed = packed_keys(keys)
        self._thread.require_usable()
        if timeout is not None:
            require_timeout(timeout)
        found = self._inner.reader.match(packed, self.group)
        if found is not None:
            return found
        return self._thread.run(lambda: self._inner.match(packed, timeout=timeout))

    def locate(self, keys: Keys, *, timeout: float | None = None) -> Locations:
        """See :meth:`kvtier.Cache.locate`."""
        packed = packed_keys(keys)
        self._thread.require_usable()
        if timeout is not None:
            require_timeout(timeout)
        found = self._inner.reader.locate(packed, self.group)
        if found is not None:
            return found
        return self._thread.run(lambda: self._inner.locate(packed, timeout=timeout))

    def pages(self, *, page_blocks: int = 0, timeout: float | None = None) -> Iterator[Page]:
        """See :meth:`kvtier.Cache.pages`."""
        return self._iterate(self._inner.pages(page_blocks=page_blocks, timeout=timeout))

    def blocks(self, *, timeout: float | None = None) -> Iterator[ListedBlock]:
        """See :meth:`kvtier.Cache.blocks`."""
        for page in self.pages(timeout=timeout):
            yield from page.blocks

    # -- leases ----------------------------------------------------------------------------------------------------

    def reserve(self, count: int, tier: Tier | None = None, *, timeout: float | None = None) -> WriteLease:
        """``with cache.reserve(4) as lease``: see :meth:`kvtier.Cache.reserve`."""
        held = self._inner.reserve(count, tier, timeout=timeout)
        return WriteLease(self._thread, self, self._thread.run(held.take, self._inner.release))

    def acquire(
        self,
        keys: Keys,
        tier: Tier | None = None,
        *,
        min_blocks: int = 0,
        retention: Retention | None = None,
        timeout: float | None = None,
    ) -> ReadLease:
        """``with cache.acquire(keys) as lease``: see :meth:`kvtier.Cache.acquire`."""
        held = self._inner.acquire(packed_keys(keys), tier, min_blocks=min_blocks, retention=retention, timeout=timeout)
        return ReadLease(self._thread, self, self._thread.run(held.take, self._inner.release))

    def acquire_many(
        self,
        chains: Iterable[Keys],
        tier: Tier | None = None,
        *,
        min_blocks: int = 0,
        retention: Retention | None = None,
        timeout: float | None = None,
    ) -> Leases:
        """One lease a chain, in order: see :meth:`kvtier.Cache.acquire_many`."""
        packed = packed_chains(chains)
        held = self._inner.acquire_many(packed, tier, min_blocks=min_blocks, retention=retention, timeout=timeout)
        leases = self._thread.run(held.take, lambda leases: self._inner.release(*leases))
        return Leases(self._thread, self, leases)

    def release(self, *leases: Lease[Any], stream: Stream | None = None, timeout: float | None = None) -> None:
        """Gives leases back, in one call and in this order: see :meth:`kvtier.Cache.release`."""
        held = [lease.inner for lease in leases]
        fence = self._thread.fence(held, stream)
        self._thread.run(lambda: self._inner.release(*held, stream=fence, timeout=timeout))

    def fence(self, stream: Stream | None = None) -> Fence:
        """The point that a stream has reached: see :meth:`kvtier.Cache.fence`."""
        self._thread.require_usable()
        return self._inner.fence(stream)

    # -- placement -------------------------------------------------------------------------------------------------

    def move(self, keys: Keys, to: Tier, *, dry_run: bool = False, timeout: float | None = None) -> list[BlockResult]:
        """See :meth:`kvtier.Cache.move`."""
        packed = packed_keys(keys)
        return self._thread.run(lambda: self._inner.move(packed, to, dry_run=dry_run, timeout=timeout))

    def drop(self, keys: Keys, *, dry_run: bool = False, timeout: float | None = None) -> DropReport:
        """See :meth:`kvtier.Cache.drop`."""
        packed = packed_keys(keys)
        return self._thread.run(lambda: self._inner.drop(packed, dry_run=dry_run, timeout=timeout))

    # -- upkeep ----------------------------------------------------------------------------------------------------

    def set_retention(
        self,
        keys: Keys,
        priorities: int | Sequence[int],
        durations_s: float | Sequence[float | None] | None = None,
        *,
        timeout: float | None = None,
    ) -> list[BlockResult]:
        """See :meth:`kvtier.Cache.set_retention`."""
        packed = packed_keys(keys)
        return self._thread.run(lambda: self._inner.set_retention(packed, priorities, durations_s, timeout=timeout))

    def pin(self, keys: Keys, tier: Tier, *, timeout: float | None = None) -> list[BlockResult]:
        """See :meth:`kvtier.Cache.pin`."""
        packed = packed_keys(keys)
        return self._thread.run(lambda: self._inner.pin(packed, tier, timeout=timeout))

    def unpin(self, keys: Keys, tier: Tier, *, timeout: float | None = None) -> list[BlockResult]:
        """See :meth:`kvtier.Cache.unpin`."""
        packed = packed_keys(keys)
        return self._thread.run(lambda: self._inner.unpin(packed, tier, timeout=timeout))

    def reset(self, *, force: bool = False, dry_run: bool = False, timeout: float | None = None) -> ResetReport:
        """See :meth:`kvtier.Cache.reset`."""
        return self._thread.run(lambda: self._inner.reset(force=force, dry_run=dry_run, timeout=timeout))

    # -- arrays ----------------------------------------------------------------------------------------------------

    def put(
        self,
        keys: Keys,
        blocks: Blocks,
        *,
        parent: bytes | None = None,
        tier: Tier | None = None,
        priorities: int | Sequence[int] | None = None,
        retention: Retention | None = None,
        prompt: Prompt | None = None,
        timeout: float | None = None,
    ) -> list[BlockResult]:
        """Stores a chain: see :meth:`kvtier.Cache.put`."""
        packed = packed_keys(keys)
        # Here, since it copies what is not contiguous, and waits for what this thread's stream has been given.
        gpu = self._inner.gpu(self._inner.lease_tier(tier))
        sources = buffers.readable(blocks, len(split_keys(packed)), self.block_bytes, gpu)
        return self._thread.run(
            lambda: self._inner.put(
                packed,
                sources,
                parent=parent,
                tier=tier,
                priorities=priorities,
                retention=retention,
                prompt=prompt,
                timeout=timeout,
            )
        )

    def stream_put(
        self,
        keys: Keys,
        blocks: Blocks,
        *,
        parent: bytes | None = None,
        tier: Tier | None = None,
        priorities: int | Sequence[int] | None = None,
        retention: Retention | None = None,
        prompt: Prompt | None = None,
        timeout: float | None = None,
    ) -> list[BlockResult]:
        """Stores a chain through a stream: see :meth:`kvtier.Cache.stream_put`."""
        packed = packed_keys(keys)
        # Here, since it copies what is not contiguous.
        sources = buffers.readable(blocks, len(split_keys(packed)), self.block_bytes)
        return self._thread.run(
            lambda: self._inner.stream_put(
                packed,
                sources,
                parent=parent,
                tier=tier,
                priorities=priorities,
                retention=retention,
                prompt=prompt,
                timeout=timeout,
            )
        )

    def get(
        self,
        keys: Keys,
        out: Blocks | None = None,
        *,
        tier: Tier | None = None,
        verify: bool = False,
        timeout: float | None = None,
    ) -> list[Any]:
        """The longest stored prefix, copied out: see :meth:`kvtier.Cache.get`."""
        packed = packed_keys(keys)
        self._thread.require_usable()
        if timeout is not None:
            require_timeout(timeout)
        read, targets = self._inner.begin_get(packed, out, tier, in_cpu=verify)
        read.copy()
        rows = read.rows
        if not read.done or (verify and rows):
            rows = self._thread.run(lambda: self._inner.end_get(read, targets, tier, verify, timeout))
        return _delivered(out, rows)

    def stream_get(
        self,
        keys: Keys,
        out: Blocks | None = None,
        *,
        tier: Tier | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """The longest stored prefix, through a stream: see :meth:`kvtier.Cache.stream_get`."""
        packed = packed_keys(keys)
        targets = None if out is None else buffers.writable(out, len(packed) // KEY_BYTES, self.block_bytes)
        return _delivered(
            out, self._thread.run(lambda: self._inner.stream_get(packed, targets, tier=tier, timeout=timeout))
        )

    def close(self, *, stream: Stream | None = None, timeout: float | None = None) -> None:
        """Releases this object's leases and gives up its use of the cache, which stays warm. Others are not touched.
        ``stream``: see :meth:`kvtier.Cache.release`."""
        fence = self.fence(stream)
        self._thread.run(lambda: self._inner.close(stream=fence, timeout=timeout))

    def release_all(self, *, stream: Stream | None = None, timeout: float | None = None) -> None:
        """Gives back every lease that this object granted and that is still held. ``stream``: see
        :meth:`kvtier.Cache.release`."""
        fence = self.fence(stream)
        self._thread.run(lambda: self._inner.release_all(stream=fence, timeout=timeout))

    # -- inside ----------------------------------------------------------------------------------------------------

    def _iterate(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        async def step() -> T:
            return await anext(items)

        try:
            while True:
                try:
                    item = self._thread.run(step)
                except StopAsyncIteration:
                    return
                yield item
        finally:
            with suppress(ClientClosed):  # it has closed them
                self._thread.run(items.aclose)


def _delivered(out: Blocks | None, rows: list[Any]) -> list[Any]:
    """What the caller gets. Tensors that cannot be written in place are filled here: those of a GPU after the work of
    this thread's current stream, of which the loop's thread knows nothing."""
    if out is None:
        return rows
    buffers.fill(buffers.late(out, rows))
    return list(out[: len(rows)])
