"""All window groups of a cache at once, for callers without an event loop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from kvtier import groups as inner
from kvtier.abi.keys import KEY_BYTES
from kvtier.buffers import Blocks
from kvtier.chains import Prompt
from kvtier.errors import KvtierError
from kvtier.gpu import Stream
from kvtier.groups import AcrossBlocks
from kvtier.retention import Retention
from kvtier.sync.lease import ReadLease
from kvtier.sync.loop import LoopThread
from kvtier.types import BlockResult, Tier
from kvtier.wire import AcrossMatch, Keys, packed_chains, packed_keys

if TYPE_CHECKING:
    from kvtier.sync.cache import Cache


class AcrossLease:
    """A prefix held in every window group; see :class:`kvtier.groups.AcrossLease`."""

    def __init__(self, thread: LoopThread, cache: Cache, lease: inner.AcrossLease) -> None:
        self._thread = thread
        self.inner: Final = lease
        self.groups: Final = tuple(
            ReadLease(thread, cache.in_group(group), part) for group, part in enumerate(lease.groups)
        )
        """One lease a group, in order, which may be empty."""

    @property
    def keys(self) -> tuple[bytes, ...]:
        """The prefix that is held."""
        return self.inner.keys

    @property
    def blocks(self) -> int:
        """Length of the prefix."""
        return self.inner.blocks

    @property
    def matched(self) -> int:
        """Length of the stored prefix at the moment of the match; more than :attr:`blocks` where room was short."""
        return self.inner.matched

    @property
    def error(self) -> KvtierError | None:
        """What ``acquire`` of this chain alone would have raised; None where it was not refused."""
        return self.inner.error

    @property
    def refusal(self) -> str:
        """Why less than ``min_blocks`` was to be had; empty where it was not refused."""
        return self.inner.refusal

    def unchanged(self) -> bool:
        """Whether every slot still holds the block that was acquired. To be asked before and after a copy."""
        return self.inner.unchanged()

    def release(self, *, stream: Stream | None = None, timeout: float | None = None) -> None:
        """Gives the slots of all groups back, in one call; nothing, where that was done before. ``stream``: see
        :meth:`kvtier.Cache.release`."""
        fence = self._thread.fence(self.inner.groups, stream)
        self._thread.run(lambda: self.inner.release(stream=fence, timeout=timeout))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._thread.forked:
            self.release()


class AcrossLeases(list[AcrossLease]):
    """What ``acquire_many`` returns: its leases, released together at the end of a ``with`` block."""

    def __init__(self, thread: LoopThread, cache: Cache, leases: Iterable[inner.AcrossLease]) -> None:
        super().__init__(AcrossLease(thread, cache, lease) for lease in leases)
        self._thread = thread
        self._cache = cache

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._thread.forked:
            self._cache.release(*(part for lease in self for part in lease.groups))


class AcrossGroups:
    """Made by :attr:`Cache.across`. Verbs, arguments and errors are those of :class:`kvtier.groups.AcrossGroups`."""

    def __init__(self, thread: LoopThread, cache: Cache, across: inner.AcrossGroups) -> None:
        self._thread = thread
        self._cache = cache
        self._inner = across

    def match(self, keys: Keys, *, timeout: float | None = None) -> AcrossMatch:
        """See :meth:`kvtier.groups.AcrossGroups.match`."""
        packed = packed_keys(keys)
        self._thread.require_usable()
        found = self._inner.reader.match_across(packed)
        if found is not None:
            return found
        return self._thread.run(lambda: self._inner.match(packed, timeout=timeout))

    def acquire(
        self,
        keys: Keys,
        tier: Tier | None = None,
        *,
        min_blocks: int = 0,
        retention: Retention | None = None,
        timeout: float | None = None,
    ) -> AcrossLease:
        """``with cache.across.acquire(keys) as lease``: see :meth:`kvtier.groups.AcrossGroups.acquire`."""
        held = self._inner.acquire(packed_keys(keys), tier, min_blocks=min_blocks, retention=retention, timeout=timeout)
        return AcrossLease(self._thread, self._cache, self._thread.run(held.take, inner.AcrossLease.release))

    def acquire_many(
        self,
        chains: Iterable[Keys],
        tier: Tier | None = None,
        *,
        min_blocks: int = 0,
        retention: Retention | None = None,
        timeout: float | None = None,
    ) -> AcrossLeases:
        """One lease a chain, in order: see :meth:`kvtier.groups.AcrossGroups.acquire_many`."""
        packed = packed_chains(chains)
        held = self._inner.acquire_many(packed, tier, min_blocks=min_blocks, retention=retention, timeout=timeout)
        leases = self._thread.run(held.take, held.give_back)
        return AcrossLeases(self._thread, self._cache, leases)

    def put(
        self,
        keys: Keys,
        blocks: Mapping[int, Blocks],
        *,
        parent: bytes | None = None,
        tier: Tier | None = None,
        priorities: int | Sequence[int] | None = None,
        retention: Retention | None = None,
        prompt: Prompt | None = None,
        timeout: float | None = None,
    ) -> dict[int, list[BlockResult]]:
        """Stores a chain in several groups: see :meth:`kvtier.groups.AcrossGroups.put`."""
        packed = packed_keys(keys)
        sources = self._inner.sources(blocks, len(packed) // KEY_BYTES, self._cache.lease_tier(tier))
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

    def get(self, keys: Keys, *, tier: Tier | None = None, timeout: float | None = None) -> AcrossBlocks:
        """The longest prefix that all groups can serve, copied out: see :meth:`kvtier.groups.AcrossGroups.get`."""
        packed = packed_keys(keys)
        self._thread.require_usable()
        read = self._inner.begin_get(packed, tier)
        if read is not None:
            read.copy()
            if (found := read.result()) is not None:
                return found
        return self._thread.run(lambda: self._inner.get(packed, tier=tier, timeout=timeout))
