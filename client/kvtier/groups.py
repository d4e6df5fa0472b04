"""All window groups of a cache at once: what a model with several attention windows asks and holds for one sequence.

Keys name blocks of tokens, so a block of a sequence has the same key in every group. Full-attention groups need the
blocks from the first on, a sliding one only those that its window covers at the end of the prefix.
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
from kvtier.chains import Piece, Prompt
from kvtier.copies import copied_out
from kvtier.deadline import in_turn
from kvtier.errors import InvalidArgument, TooShort
from kvtier.lease import Holdings, Owner, ReadLease
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
    """A prefix of ``blocks`` blocks: by window group, the arrays of its last ``len(groups[group])`` blocks, or the
    numbers of the pages that were filled; None between the sinks of a window and the window."""

    blocks: int
    groups: Mapping[int, list[Any]]

    def given(self, out: Mapping[int, Blocks] | None, group: int) -> Blocks | None:
        """What the caller gave for the blocks of a group; None: nothing."""
        if out is None or group not in out:
            return None
        return out[group][self.blocks - len(self.groups[group]) : self.blocks]


@dataclass(slots=True, frozen=True)
class AcrossRead:
    """A prefix of ``blocks`` of the blocks of a chain, being copied out of mapped slots of every group."""

    reader: Reader
    keys: bytes
    blocks: int
    reads: Sequence[Read]

    def copy(self) -> None:
        for read in self.reads:
            read.copy()

    def result(self) -> AcrossBlocks | None:
        """None: ask the daemon."""
        if not all_whole(self.reads):
            return None
        self.reader.count(misses=len(self.keys) // KEY_BYTES - self.blocks)
        self.reader.answered(self.keys, 0, self.blocks)
        nothing: dict[int, list[Any]] = {group: [] for group in range(len(self.reader.spec.groups))}
        return AcrossBlocks(self.blocks, nothing | {read.group: _tail(read.rows) for read in self.reads})


def all_whole(reads: Iterable[Read]) -> bool:
    return all(read.whole for read in reads)


class Group(Owner, Protocol):
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

    :attr:`groups` has one lease a group, in order, which may be empty. They are ordinary ones: views, generations,
    and :meth:`ReadLease.give_back` for what a sequence has left behind its window.
    """

    def __init__(self, packed: bytes, groups: Sequence[ReadLease]) -> None:
        self.groups: Final = tuple(groups)
        first = self.groups[0]
        self.keys: Final = tuple(split_keys(packed[: first.prefix_length * KEY_BYTES]))
        """The prefix that is held."""
        self.matched: Final = first.matched
        """Length of the stored prefix at the moment of the match; more than :attr:`blocks` where room was short."""
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
        """Why less than ``min_blocks`` was to be had; empty where it was not refused."""
        return "" if self.error is None else self.error.reason

    def unchanged(self) -> bool:
        """Whether every slot still holds the block that was acquired. To be asked before and after a copy."""
        return all(lease.unchanged() for lease in self.groups)

    async def release(self, *, stream: Stream | None = None, timeout: float | None = None) -> None:
        """Gives the slots of all groups back, in one call; nothing, where that was done before. ``stream``: see
        :meth:`kvtier.Cache.release`."""
        await self.groups[0].cache.release(*self.groups, stream=stream, timeout=timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.release()


class AcrossGroups(PrefixVerbs):
    """Made by :attr:`kvtier.Cache.across`; verbs, arguments and errors as those of one group."""

    def __init__(
        self, caches: Sequence[Group], binder: Binder, holdings: Holdings, reader: Reader, default_timeout: float
    ) -> None:
        super().__init__(binder, reader, range(len(caches)), default_timeout)
        self._caches: Final = caches
        self._holdings: Final = holdings

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
        """The longest such prefix that can be had, READY in a tier and held in every group.

        ``async with cache.across.acquire(keys) as lease``. Arguments and errors as of :meth:`kvtier.Cache.acquire`.
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
        """One lease a chain, in order: see :meth:`kvtier.Cache.acquire_many`."""

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
        """Stores a chain in several groups: by group, one result an array.

        ``blocks``: by group, the arrays of the last ``len(blocks[group])`` keys; a group that is absent gets nothing. A
        sliding group wants only the last ones of a sequence, a full one all that are not stored yet. For the rest see
        :meth:`kvtier.Cache.put`.

        The groups are stored one after another, full-attention groups first. Where one raises (:class:`TierFull`), what
        the groups before it have stored stays; no match over all groups takes that for more than is there.
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
            piece = Piece.whole(chain[first:], rows, chain[first - 1] if first else parent, kept, prompt)
            way = cache.way(place)
            results[group] = await copies.put(cache.slots(place), way, place, piece, cache.absent, timeout)
        return results

    def sources(self, blocks: Mapping[int, Blocks], count: int, tier: Tier) -> dict[int, Rows]:
        """The bytes of what is put of a chain of so many keys: for the synchronous client, whose caller's streams are
        another thread's. Raises :class:`InvalidArgument`."""
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
        """The longest prefix that all groups can serve, copied out of a tier into fresh uint8 arrays, or into ``out``.

        Without a call where all of it is in mapped slots, or in ``tier`` if it is given. Else in one piece, so what is
        longer than the tier has room for comes shorter. ``out``: by group, a block a key, as :meth:`kvtier.Cache.get`
        takes them; those before a window stay as they are. Raises :class:`TierFull`, :class:`StaleRead`.
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
        """Where the caller wants so many blocks, by group. Raises :class:`InvalidArgument`."""
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
        """A get that holds the blocks while it copies them."""
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
        """A get without a call, to be tried. None: only the daemon can tell."""
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
        found = await self._holdings.acquire(self._caches, packed, place, min_blocks, retention, timeout, recompute_ns)
        return [AcrossLease(keys, leases) for keys, leases in zip(packed, found, strict=True)]


def _tail(rows: Sequence[Any]) -> list[Any]:
    """From the first that is there on."""
    return list(dropwhile(lambda row: row is None, rows))
