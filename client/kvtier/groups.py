"""All window groups of a cache at once: the blocks of one sequence in a model with several attention windows.

A key names a block of tokens, so a block of a sequence has the same key in every group. A full-attention group needs
all blocks from the first on, a sliding group only the blocks in its window at the end of the prefix.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from types import TracebackType
from typing import Any, Final, Protocol, Self

import numpy as np

from kvtier import buffers, copies
from kvtier.abi.keys import KEY_BYTES
from kvtier.arena import Binder
from kvtier.buffers import Blocks, Reach, Rows
from kvtier.chains import ChainPart, Prompt
from kvtier.copies import copied_out
from kvtier.deadline import in_turn
from kvtier.errors import InvalidArgument, TooShort
from kvtier.lease import LeaseBook, Owner, ReadLease
from kvtier.memory.gpu import PASSED, Stream
from kvtier.reading import Read, Reader
from kvtier.retention import Retention, block_retention, each_priority
from kvtier.types import BlockResult, Tier
from kvtier.verbs import PrefixVerbs
from kvtier.wire import (
    Held,
    Keys,
    packed_chains,
    packed_keys,
    recompute_to_wire,
    split_keys,
)


@dataclass(slots=True, frozen=True)
class AcrossBlocks:
    """A prefix of ``blocks`` blocks.

    ``groups``: by window group, the arrays of the last ``len(groups[group])`` blocks, or the numbers of the filled
    pages; None for blocks between the sinks and the window.
    """

    blocks: int
    groups: Mapping[int, list[Any]]

    def given(self, out: Mapping[int, Blocks] | None, group: int) -> Blocks | None:
        """The caller's arrays for these blocks of a group; None if there are none."""
        if out is None or group not in out:
            return None
        return out[group][self.blocks - len(self.groups[group]) : self.blocks]


@dataclass(slots=True, frozen=True)
class AcrossRead:
    """A running copy of a chain's prefix of ``blocks`` blocks out of mapped slots of every group."""

    reader: Reader
    keys: bytes
    blocks: int
    reads: Sequence[Read]

    def copy(self) -> None:
        for read in self.reads:
            read.copy()

    def result(self) -> AcrossBlocks | None:
        """The copied blocks; None: only the daemon can tell."""
        if not all_whole(self.reads):
            return None
        self.reader.count(misses=len(self.keys) // KEY_BYTES - self.blocks)
        self.reader.answered(self.keys, 0, self.blocks)
        nothing: dict[int, list[Any]] = {group: [] for group in range(len(self.reader.spec.groups))}
        return AcrossBlocks(self.blocks, nothing | {read.group: _tail(read.rows) for read in self.reads})


def all_whole(reads: Iterable[Read]) -> bool:
    return all(read.whole for read in reads)


class GroupCache(Owner, Protocol):
    """A cache in one of its window groups: see :class:`kvtier.Cache`."""

    @property
    def name(self) -> str: ...

    def slots(self, tier: Tier) -> int: ...

    def lease_tier(self, tier: Tier | None = None) -> Tier: ...

    def way(self, tier: Tier) -> copies.Way: ...

    def reach(self, tier: Tier | None) -> Reach | None: ...

    def absent(self, chain: Sequence[bytes]) -> Sequence[int] | None: ...

    async def stream_get(self, keys: Keys, out: Blocks | None = None, *, tier: Tier | None = None) -> list[Any]: ...


class AcrossLease:
    """A prefix held in every window group.

    :attr:`groups` has one lease per group, in order; a lease may be empty. These are ordinary leases with views,
    generations and :meth:`ReadLease.give_back`, for blocks that have fallen out of a window.
    """

    def __init__(self, packed: bytes, groups: Sequence[ReadLease]) -> None:
        self.groups: Final = tuple(groups)
        first = self.groups[0]
        self.keys: Final = tuple(split_keys(packed[: first.prefix_length * KEY_BYTES]))
        """Keys of the held prefix."""
        self.matched: Final = first.matched
        """Length of the stored prefix at the match; more than :attr:`blocks` if the tier was short of room."""
        self.error: Final = first.error
        """The error that ``acquire`` of this chain alone would have raised; None where it was not refused."""

    def __repr__(self) -> str:
        name = self.groups[0].binding.info.name
        return f"<AcrossLease of cache {name}: {self.blocks} blocks in {len(self.groups)} groups>"

    @property
    def blocks(self) -> int:
        """Length of the prefix."""
        return len(self.keys)

    @property
    def refusal(self) -> str:
        """Why fewer than ``min_blocks`` were available; empty if the chain was not refused."""
        return "" if self.error is None else self.error.reason

    def unchanged(self) -> bool:
        """Whether every slot still holds the acquired block. Check before and after a copy."""
        return all(lease.unchanged() for lease in self.groups)

    async def release(self, *, stream: Stream | None = None, timeout: float | None = None) -> None:
        """Releases the slots of all groups in one call; does nothing after the first release. ``stream``: see
        :meth:`kvtier.Cache.release`."""
        await self.groups[0].cache.release(*self.groups, stream=stream, timeout=timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.release()


class AcrossGroups(PrefixVerbs):
    """The verbs over all window groups, from :attr:`kvtier.Cache.across`. Arguments and errors are the same as for one
    group."""

    def __init__(
        self, caches: Sequence[GroupCache], binder: Binder, book: LeaseBook, reader: Reader, default_timeout: float
    ) -> None:
        super().__init__(binder, reader, range(len(caches)), default_timeout)
        self._caches: Final = caches
        self._book: Final = book

    def acquire(
        self,
        keys: Keys,
        tier: Tier | None = None,
        *,
        min_blocks: int = 0,
        retention: Retention | None = None,
        recompute_seconds_per_block: float = 0.0,
        timeout: float | None = None,
    ) -> Held[AcrossLease]:
        """The longest prefix that all groups can serve, READY in a tier and held in every group.

        ``async with cache.across.acquire(keys) as lease``. Arguments and errors: see :meth:`kvtier.Cache.acquire`.
        """

        async def take() -> AcrossLease:
            packed = packed_keys(keys, "chains[0].keys")
            recompute_ns = recompute_to_wire(recompute_seconds_per_block)
            (lease,) = await self._acquire([packed], tier, min_blocks, retention, timeout, recompute_ns)
            if lease.error is not None:
                raise lease.error
            return lease

        return Held(take, AcrossLease.release)

    def acquire_many(
        self,
        chains: Iterable[Keys],
        tier: Tier | None = None,
        *,
        min_blocks: int = 0,
        retention: Retention | None = None,
        timeout: float | None = None,
    ) -> Held[list[AcrossLease]]:
        """Acquires one lease per chain, in order: see :meth:`kvtier.Cache.acquire_many`."""

        async def release(leases: list[AcrossLease]) -> None:
            await self._caches[0].release(*(part for lease in leases for part in lease.groups))

        async def take() -> list[AcrossLease]:
            packed = packed_chains(chains)
            return await self._acquire(packed, tier, min_blocks, retention, timeout)

        return Held(take, release)

    async def put(
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
        """Stores a chain in several groups. Returns, by group, one result per array. See also :meth:`kvtier.Cache.put`.

        ``blocks``: by group, the arrays of the last ``len(blocks[group])`` keys; a missing group gets nothing. A
        sliding group needs only the last blocks of a sequence, a full-attention group all blocks that are not stored
        yet.

        The groups are stored one after another, full-attention groups first. If one raises (:class:`TierFull`), the
        blocks of the groups before it stay stored; a match over all groups is still right.
        """
        chain = split_keys(packed_keys(keys))
        ranks = each_priority(len(chain), priorities) or None
        if not self._binder.write:
            raise InvalidArgument("write", False, "True in open_cache for a cache whose slots are to be filled")
        place = self._caches[0].lease_tier(tier)
        sources = self.sources(blocks, len(chain), place)
        results: dict[int, list[BlockResult]] = {group: [] for group in sources}
        for group in sorted(sources, key=lambda group: self._caches[0].spec.groups[group].window_tokens > 0):
            rows, cache = sources[group], self._caches[group]
            first, step = len(chain) - len(rows), cache.spec.tokens_per_block
            later = retention and retention.after(first, step)
            kept = block_retention(len(rows), step, ranks and ranks[first:], later)
            part = ChainPart.whole(chain[first:], rows, chain[first - 1] if first else parent, kept, prompt)
            way = cache.way(place)
            results[group] = await copies.put(cache.slots(place), way, place, part, cache.absent, timeout)
        return results

    def sources(self, blocks: Mapping[int, Blocks], count: int, tier: Tier) -> dict[int, Rows]:
        """The bytes of the caller's blocks, by group, for a chain of ``count`` keys. The synchronous client calls this
        in its caller's thread, whose streams count. Raises :class:`InvalidArgument`."""
        for group, rows in blocks.items():
            if group not in range(len(self._caches)):
                raise InvalidArgument("blocks", group, f"groups 0 to {len(self._caches) - 1}")
            if len(rows) > count:
                raise InvalidArgument(f"blocks[{group}]", f"{len(rows)} blocks", f"at most {count}, one a key")
        return {
            group: buffers.readable(rows, len(rows), cache.block_bytes, cache.reach(tier))
            for group, rows in blocks.items()
            for cache in [self._caches[group]]
        }

    async def get(
        self,
        keys: Keys,
        out: Mapping[int, Blocks] | None = None,
        *,
        tier: Tier | None = None,
        timeout: float | None = None,
    ) -> AcrossBlocks:
        """Copies the longest prefix that all groups can serve out of a tier, into fresh uint8 arrays or into ``out``.

        Needs no call if the whole prefix is in mapped slots, of ``tier`` if given. Otherwise the prefix is read in one
        piece, shortened to the tier's room. ``out``: by group, a block per key, as in :meth:`kvtier.Cache.get`; blocks
        before a window are left unchanged. Raises :class:`TierFull`, :class:`StaleRead`.
        """
        await in_turn(timeout)
        packed = packed_keys(keys)
        targets = self.targets(out, len(packed) // KEY_BYTES, tier)
        read, found = self.begin_get(packed, targets, tier), None
        if read is not None:
            nbytes, waits = sum(each.nbytes for each in read.reads), any(each.waits for each in read.reads)
            await buffers.run_copy(read.copy, nbytes, waits=waits)
            found = read.result()
        if found is None:
            found = await self.end_get(packed, targets, tier, timeout)
        groups = {group: await copies.delivered(found.given(out, group), rows) for group, rows in found.groups.items()}
        return AcrossBlocks(found.blocks, groups)

    def targets(self, out: Mapping[int, Blocks] | None, count: int, tier: Tier | None) -> dict[int, Rows]:
        """The caller's targets for ``count`` blocks, by group. Raises :class:`InvalidArgument`."""
        self._caches[0].lease_tier(tier)
        for group in out or ():
            if group not in range(len(self._caches)):
                raise InvalidArgument("out", group, f"groups 0 to {len(self._caches) - 1}")
        return {
            group: buffers.writable(blocks, count, cache.block_bytes, cache.reach(tier))
            for group, blocks in (out or {}).items()
            for cache in [self._caches[group]]
        }

    async def end_get(
        self, packed: bytes, targets: Mapping[int, Rows], tier: Tier | None, timeout: float | None
    ) -> AcrossBlocks:
        """Gets the blocks through a lease that holds them during the copy."""
        self.reader.count(calls=1)
        try:
            lease = await self.acquire(packed, tier, min_blocks=1, timeout=timeout)
        except TooShort:
            return AcrossBlocks(0, {group.group: [] for group in self._caches})
        try:
            copied = {part.cache.group: await self._copied(part, targets) for part in lease.groups}
            return AcrossBlocks(lease.blocks, copied)
        finally:
            await lease.release(stream=PASSED, timeout=timeout)

    async def _copied(self, lease: ReadLease, targets: Mapping[int, Rows]) -> list[Any]:
        group = lease.cache.group
        into = buffers.for_needed(targets[group], lease.needed) if group in targets else None
        if not lease.blocks:
            return []
        if lease.memory is None:
            self._binder.asked.looked_up(b"".join(lease.keys), lease.blocks)  # the acquire has counted it
            streamed = await self._caches[group].stream_get(lease.keys, into, tier=lease.tier)
            return _tail(lease.needed.spread(streamed))
        rows: Rows = np.empty((lease.blocks, lease.cache.block_bytes), np.uint8) if into is None else into
        await copied_out(lease, rows)
        return _tail(lease.needed.spread([*rows]))

    def begin_get(self, packed: bytes, targets: Mapping[int, Rows], tier: Tier | None) -> AcrossRead | None:
        """Begins a get without a call. None: only the daemon can tell."""
        match = self.reader.match(packed, self.groups, for_read=True)
        if match is None:
            return None
        reads = [
            self.reader.begin(
                packed[: match.blocks * KEY_BYTES],
                span.group,
                tier,
                targets[span.group][: match.blocks] if span.group in targets else None,
                part=True,
            )
            for span in match.groups
            if match.blocks
        ]
        return AcrossRead(self.reader, packed, match.blocks, reads) if all_whole(reads) else None

    async def _acquire(
        self,
        packed: Sequence[bytes],
        tier: Tier | None,
        min_blocks: int,
        retention: Retention | None,
        timeout: float | None,
        recompute_ns: int = 0,
    ) -> list[AcrossLease]:
        place = self._caches[0].lease_tier(tier)
        found = await self._book.acquire(self._caches, packed, place, min_blocks, retention, timeout, recompute_ns)
        return [AcrossLease(keys, leases) for keys, leases in zip(packed, found, strict=True)]


def _tail(rows: Sequence[Any]) -> list[Any]:
    """The rows from the first that is not None on."""
    return list(dropwhile(lambda row: row is None, rows))
