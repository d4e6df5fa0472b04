"""The verbs of chains, in one window group of a cache or in several at once: put, get, acquire and release.

A key names a block of tokens, so a block of a sequence has the same key in every group. A full-attention group needs
all blocks from the first on, a sliding group only the blocks in its window at the end of the prefix.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any, ClassVar, Final, Generic, TypeVar

from kvtier import buffers, copies, wire
from kvtier.abi.keys import KEY_BYTES
from kvtier.abi.spec import CacheSpec
from kvtier.arena import Binder
from kvtier.buffers import Blocks, GroupRows, PrefixRows, Reach, Rows
from kvtier.chains import ChainPart, Prompt
from kvtier.deadline import Deadline, Stream, in_turn
from kvtier.errors import CallerError, DaemonUnavailable, DeadlineExceeded, InvalidArgument, require_kind
from kvtier.lease import Hold, LeaseBook, Owner, ReadLease
from kvtier.reading import ChainRead, Reader, verified
from kvtier.retention import Retention, block_retention
from kvtier.types import MAPPED_TIERS, AnyTier, BlockResult, Cursor, Tier
from kvtier.v1 import blocks_pb2


class AcrossLease(Hold):
    """A prefix held in every window group.

    :attr:`groups` has one lease per group, in order; a lease may be empty. These are ordinary leases with views,
    generations and :meth:`ReadLease.give_back`, for blocks that have fallen out of a window.
    """

    def __init__(self, packed: bytes, groups: Sequence[ReadLease]) -> None:
        self._groups: Final = tuple(groups)
        first = self.groups[0]
        self.keys: Final = tuple(wire.split_keys(packed[: first.prefix_length * KEY_BYTES]))
        self.matched: Final = first.matched
        """Length of the stored prefix at the match; more than :attr:`blocks` if the tier was short of room."""
        self.error: Final = first.error
        """The error that ``acquire`` of this chain alone would have raised; None where it was not refused."""

    def __repr__(self) -> str:
        name = self.groups[0].binding.info.name
        return f"<AcrossLease of cache {name}: {self.blocks} blocks in {len(self.groups)} groups>"

    @property
    def groups(self) -> tuple[ReadLease, ...]:
        return self._groups

    @property
    def blocks(self) -> int:
        """Length of the prefix."""
        return len(self.keys)

    @property
    def refusal(self) -> str:
        """Why fewer than ``min_blocks`` were available; empty if the chain was not refused."""
        return self.groups[0].refusal

    def unchanged(self) -> bool:
        """Whether every slot still holds the acquired block. Check before and after a copy."""
        return all(lease.unchanged() for lease in self.groups)


L = TypeVar("L", bound="ReadLease | AcrossLease")
Given = TypeVar("Given")
Stored = TypeVar("Stored")
Got = TypeVar("Got")


class ChainVerbs(Generic[L, Given, Stored, Got]):
    """The verbs that look up, hold, store and copy chains, in one window group or over all.

    For one group, blocks and results are sequences, and a lease is a :class:`ReadLease`. For all groups (see
    :attr:`kvtier.Cache.across`) a mapping has the sequence of each group, and a lease is an :class:`AcrossLease`.
    """

    _partly: ClassVar[bool] = False
    """Whether a put may bring fewer blocks than keys: the blocks of the last keys."""

    def __init__(
        self, binder: Binder, book: LeaseBook, reader: Reader, groups: Sequence[int], default_timeout: float
    ) -> None:
        self.groups = tuple(groups)
        """Indices of the window groups."""
        self.reader: Final = reader
        """Reads without a call, of all window groups: for the synchronous client, which does not wait for a loop."""
        self._binder: Final = binder
        self._book: Final = book
        self._default_timeout: Final = default_timeout

    @property
    def spec(self) -> CacheSpec:
        """The specification: the meaning of the cache's bytes."""
        return self._binder.spec

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The cache's tiers, the fastest first."""
        return tuple(info.tier for info in self._binder.binding.info.groups[self.groups[0]].tiers)

    def lease_tier(self, tier: AnyTier | None = None) -> Tier:
        """``tier``, or for None the fastest mapped tier, else the fastest mappable tier. Raises
        :class:`InvalidArgument` if the cache lacks that tier, :class:`CallerError` if it has only disk."""
        mapped = [each for each in self.tiers if each in MAPPED_TIERS]
        if tier is None and mapped:
            unmapped = self._binder.unmapped
            return next((each for each in mapped if each not in unmapped), mapped[0])
        place = None if tier is None else wire.as_tier(tier)
        if place is None or place not in mapped:
            if not mapped:
                says = (
                    "has only disk: start kvtierd with --host-bytes and room for it (see `kvtier status`), or remove it"
                )
                says += " and open it with budgets={Tier.HOST: ...}"
                raise CallerError(f"cache {self._binder.binding.info.name} {says}", reason="NO_MEMORY_TIER")
            raise InvalidArgument("tier", str(tier), " or ".join(str(each) for each in mapped))
        return place

    # -- lookups ---------------------------------------------------------------------------------------------------

    async def prefix_length(self, keys: wire.Keys, *, timeout: float | None = None) -> int:
        """Length of the stored prefix of a chain: :meth:`match` without the residencies. No side effect."""
        packed = wire.packed_keys(keys)
        await in_turn(timeout)
        length = self.reader.prefix_length(packed, self.groups) if packed else 0
        return length if length is not None else (await self._ask_match(packed, timeout)).blocks

    async def match(self, keys: wire.Keys, *, remote: bool = False, timeout: float | None = None) -> wire.Match:
        """The longest stored prefix of a chain that the groups can serve together. No side effect.

        The largest n so that every full-attention group holds blocks [0, n) and every group of a sliding window of w
        tokens its sinks and the blocks of tokens [max(0, n * tokens_per_block - w), n * tokens_per_block).

        Looked up in shared memory where the cache is mapped (see :attr:`lookups`). ``keys`` must be a chain then: each
        block was, or would be, committed under the block before. While the daemon does not answer, only blocks in
        mapped tiers count. ``remote``: asks the remote store, too, by a call.
        """
        packed = wire.packed_keys(keys)
        await in_turn(timeout)
        found = None if remote else self.reader.match(packed, self.groups)
        if found is None and not packed:  # a prompt shorter than a block, which the daemon is not asked for
            found = wire.Match(0, tuple(wire.GroupSpan(group, 0, b"") for group in self.groups), Cursor(0, 0))
        if found is not None:
            return found
        reply = await self._ask_match(packed, timeout, remote=remote)
        spans = (
            wire.GroupSpan(span.group, span.first_block, span.residency, span.sink_blocks) for span in reply.groups
        )
        return wire.Match(reply.blocks, tuple(spans), wire.same_fields(Cursor, reply.as_of_event), reply.remote_blocks)

    async def match_tokens(self, prompt: Prompt, *, timeout: float | None = None) -> wire.TokenMatch:
        """Number of stored tokens of a prompt: the :meth:`match` of its keys, and of the next block the longest start
        that it shares with a stored full or partial block. No side effect.

        The next block is searched, by a call, only in a cache with the option ``keep_tokens``, and only while the
        daemon answers: in full-attention groups, and in sliding windows beside them. Blocks with extra ids or items, or
        of another scope, do not count.
        """
        require_kind("prompt", prompt, Prompt)
        spec, keys = self._binder.spec, prompt.keys
        if prompt.partial_tokens and any(spec.groups[group].window_tokens > 1 for group in self.groups):
            keys = keys[:-KEY_BYTES]  # the window at the end of a partial block may begin a block earlier
        found = await self.match(keys, timeout=timeout)
        keys, tokens = keys[: found.blocks * KEY_BYTES], prompt.tokens(found.blocks)
        partial = tokens % spec.tokens_per_block
        kept = self._binder.binding.info.options.keep_tokens and self._binder.session.reachable
        following = prompt.following(found.blocks)
        if following and kept and not partial and spec.splits(self.groups):
            scope = prompt.scope
            request = blocks_pb2.MatchRequest(
                groups=self.groups,
                keys=keys[-KEY_BYTES:],
                tokens=following,
                lora_id=scope.lora_id,
                cache_salt=scope.salt,
            )
            reply = await self._call_match(request, timeout)
            partial, keys = reply.partial_tokens, keys + reply.partial_key
            tokens += partial
        whole = len(keys) - KEY_BYTES * (partial > 0)
        return wire.TokenMatch(tokens, keys[:whole], partial, keys[whole:])

    async def _ask_match(
        self, packed: bytes, timeout: float | None, *, remote: bool = False
    ) -> blocks_pb2.MatchResponse:
        request = wire.message(blocks_pb2.MatchRequest, groups=self.groups, keys=packed, remote=remote)
        reply = await self._call_match(request, timeout)
        self.reader.looked_up(packed, self.groups[0], reply.blocks)
        return reply

    async def _call_match(self, request: blocks_pb2.MatchRequest, timeout: float | None) -> blocks_pb2.MatchResponse:
        self.reader.count(calls=1)
        request.counted = True
        return await self._binder.call(lambda stubs: stubs.blocks.Match, request, self._deadline(timeout))

    # -- leases ----------------------------------------------------------------------------------------------------

    def acquire(
        self,
        keys: wire.Keys,
        tier: AnyTier | None = None,
        *,
        min_blocks: int = 0,
        retention: Retention | None = None,
        recompute_seconds_per_block: float = 0.0,
        timeout: float | None = None,
    ) -> wire.Held[L]:
        """The longest available prefix, READY in a tier and held: ``async with cache.acquire(keys) as lease``.

        In a sliding group the lease holds only the blocks that the window needs: see :attr:`ReadLease.prefix_length`.

        Args:
            retention: new values for the found blocks, counted from this lease's release.
            recompute_seconds_per_block: blocks come from the remote store only if that is cheaper; 0: always.
        Raises: :class:`TooShort` if fewer than ``min_blocks`` are stored, :class:`TierFull` if the tier has no room for
        ``min_blocks``, or not even for one stored block.
        """

        async def take() -> L:
            packed = wire.packed_keys(keys, "chains[0].keys")
            recompute_ns = wire.recompute_to_wire(recompute_seconds_per_block)
            (lease,) = await self._acquire([packed], tier, min_blocks, retention, timeout, recompute_ns)
            if lease.error is not None:
                raise lease.error
            return lease

        return wire.Held(take, self.release)

    def acquire_many(
        self,
        chains: Iterable[wire.Keys],
        tier: AnyTier | None = None,
        *,
        min_blocks: int = 0,
        retention: Retention | None = None,
        timeout: float | None = None,
    ) -> wire.Held[list[L]]:
        """Acquires one lease per chain, in order. No chain evicts the matches of another chain of the call.

        A chain that cannot have ``min_blocks`` gets an empty lease with its :attr:`ReadLease.refusal`, not an
        exception. ``retention`` applies to each chain.
        """

        async def take() -> list[L]:
            return await self._acquire(wire.packed_chains(chains), tier, min_blocks, retention, timeout)

        return wire.Held(take, lambda leases: self.release(*leases))

    async def _acquire(
        self,
        packed: Sequence[bytes],
        tier: AnyTier | None,
        min_blocks: int,
        retention: Retention | None,
        timeout: float | None,
        recompute_ns: int = 0,
    ) -> list[L]:
        place = self.lease_tier(tier)
        found = await self._book.acquire(self._owners, packed, place, min_blocks, retention, timeout, recompute_ns)
        return [self._lease(keys, parts) for keys, parts in zip(packed, found, strict=True)]

    async def release(self, *leases: Hold, stream: Stream | None = None, timeout: float | None = None) -> None:
        """Gives leases back, in one call and in this order: give the tail of a chain before its head.

        Skips leases that were released before, or lost with their daemon. The release goes on in the background if its
        caller is cancelled or the daemon does not answer in time.

        If the slots are GPU memory, the call is sent once ``stream`` has done its earlier work: see
        :meth:`kvtier.Cache.fence`. If that takes longer than ``timeout``, or the device fails, nothing is sent and the
        leases stay held: release them again. Raises :class:`kvtier.errors.DeviceError`.
        """
        for index, lease in enumerate(leases):
            require_kind(f"leases[{index}]", lease, Hold)
        await self._book.release(leases, stream, timeout)

    # -- arrays ----------------------------------------------------------------------------------------------------

    async def put(
        self,
        keys: wire.Keys,
        blocks: Given,
        *,
        parent: bytes | None = None,
        tier: AnyTier | None = None,
        priorities: int | Sequence[int] | None = None,
        retention: Retention | None = None,
        prompt: Prompt | None = None,
        timeout: float | None = None,
    ) -> Stored:
        """Stores a chain: copies the arrays into slots of a tier and commits them. Returns one result per array.

        A chain above half a tier, or 1,024 blocks, goes in pieces, each with its ``timeout``. A chain too long for its
        tiers is stored as far as it fits, and the rest is NO_ROOM (:meth:`kvtier.Cache.reserve` raises). Several groups
        are stored one after another; if one raises, the blocks of the groups before it stay stored.
        Args:
            blocks: an array, tensor or bytes per key, of :attr:`block_bytes`, or one array whose first axis is blocks.
                For all groups: by group, the arrays of the last keys; a missing group gets nothing.
            parent: key of the block before the first; None: from ``prompt``, else the first block is a root.
            prompt: the prompt of the keys, for more detail in events. ``retention``: instead of ``priorities``.
        Raises: :class:`InvalidArgument`, :class:`TierFull` while others take slots that the chain needs.
        """
        chain, place = wire.split_keys(wire.packed_keys(keys)), self.lease_tier(tier)
        kept = block_retention(len(chain), self.spec.tokens_per_block, priorities, retention)
        self._require_writable()
        results: dict[int, list[BlockResult]] = {}
        for group, rows in self.sources(blocks, len(chain), place).items():
            cache = self._owners[self.groups.index(group)]
            part = ChainPart.whole(chain, rows, parent, kept, prompt)
            results[group] = await copies.put(cache, self.reader, self._way(place), place, part, timeout)
        stored: Stored = self.formed(results)
        return stored

    async def get(
        self,
        keys: wire.Keys,
        out: Given | None = None,
        *,
        tier: AnyTier | None = None,
        verify: bool = False,
        timeout: float | None = None,
    ) -> Got:
        """Copies out the longest stored prefix: an array per block, None for a block that the window does not need.

        Mapped slots are copied without a call; while the daemon is silent, only these. The daemon makes the rest ready
        in ``tier`` (default: the fastest mapped), in pieces, each with its ``timeout``; a sliding window, and a prefix
        of several groups, whole. Bytes that are not mapped, or were evicted during ``verify``, come through a stream.
        Args:
            out: an array or tensor of :attr:`block_bytes` per key; arrays beyond the prefix may be overwritten.
            verify: compares checksums with the daemon's copies in memory.
        Raises: :class:`TierFull` if others hold all slots until the time is up, :class:`StaleRead`, and
        with ``verify`` :class:`DamagedTransfer`.
        """
        await in_turn(timeout)
        given = self.by_group("out", out)
        read, targets = self.begin_get(wire.packed_keys(keys), given, tier, in_cpu=verify)
        await buffers.run_copy(read.copy, read.nbytes, waits=read.waits)
        found = await self.end_get(read, targets, tier, verify, timeout)
        if given:
            found = {group: await copies.delivered(given.get(group), rows) for group, rows in found.items()}
        got: Got = self.formed(found)
        return got

    # -- for the synchronous client, in its caller's thread, whose streams count -------------------------------------

    def sources(self, blocks: Given, count: int, tier: Tier) -> dict[int, Rows]:
        """The bytes of the caller's blocks for ``count`` keys, by group. Raises :class:`InvalidArgument`."""
        reach = self.reach(tier)
        require_kind("blocks", blocks, Sized)
        return {
            group: buffers.readable(
                rows, min(len(rows), count) if self._partly else count, self.spec.block_bytes(group), reach
            )
            for group, rows in self.by_group("blocks", blocks).items()
        }

    def begin_get(
        self, packed: bytes, given: Mapping[int, Blocks], tier: AnyTier | None, *, in_cpu: bool = False
    ) -> tuple[ChainRead, GroupRows]:
        """Begins a get without a call. Returns the read and the caller's targets. ``in_cpu``: the bytes pass through
        the CPU's memory, wherever the targets are. Raises :class:`InvalidArgument`."""
        place = None if tier is None else self.lease_tier(tier)
        reach, count = None if in_cpu else self.reach(place), len(packed) // KEY_BYTES
        targets = {
            group: buffers.writable(out, count, self.spec.block_bytes(group), reach) for group, out in given.items()
        }
        return self.reader.begin_all(packed, self.groups, place, targets), targets

    async def end_get(
        self, read: ChainRead, targets: GroupRows, tier: AnyTier | None, verify: bool, timeout: float | None
    ) -> dict[int, PrefixRows]:
        """Ends a get after :meth:`begin_get` and its copy: fetches the blocks that the daemon must make ready, and
        verifies if asked."""
        rows, first = read.rows, self.groups[0]
        if read.done and not (verify and rows[first]):
            return rows
        place = self.lease_tier(tier)

        async def with_rest(start: int, way: copies.Way) -> dict[int, PrefixRows]:
            into = {group: each[start:] for group, each in targets.items()}
            within = self._default_timeout if timeout is None else timeout
            rest = await copies.get(self._owners, way, place, read.keys[start * KEY_BYTES :], into, within)
            return {group: rows[group][:start] + more for group, more in rest.items()}

        if not read.done:
            self.reader.count(calls=1)
            try:
                rows = await with_rest(read.blocks, self._way(place))
            except (DaemonUnavailable, DeadlineExceeded):
                if not rows[first] or self._binder.session.reachable:  # reachable: the daemon itself has refused
                    raise
            self.reader.answered(read.keys, first, len(rows[first]))
        if verify and rows[first] and self._binder.maps:  # a stream has its own checksums
            good = min([await self._verified(group, read.keys, rows[group], timeout) for group in self.groups])
            if good < len(rows[first]):
                rows = await with_rest(0 if copies.is_whole(self._owners) else good, self._streamed)
        return rows

    async def _verified(self, group: int, packed: bytes, rows: PrefixRows, timeout: float | None) -> int:
        """Length of the prefix whose copied blocks the daemon knows. Raises :class:`DamagedTransfer`."""
        pairs = [(key, row) for key, row in zip(wire.split_keys(packed), rows, strict=False) if row is not None]
        copied: PrefixRows = [row for _, row in pairs]
        keys = b"".join(key for key, _ in pairs)
        known = await verified(self._binder, group, keys, buffers.of_cpu(copied), self._deadline(timeout))
        return len(rows) - len(pairs) + known

    def reach(self, tier: Tier | None) -> Reach | None:
        """Returns the reach of a tier's mapped slots, or of all tiers for None: the GPUs that may hold blocks copied to
        and from the slots. None if no memory is mapped."""
        mapped = self._binder.binding.mapped
        return None if mapped is None else mapped.reach(tier)

    @property
    def _owners(self) -> Sequence[Owner]:
        """The cache in each of the groups."""
        raise NotImplementedError

    def by_group(self, field: str, given: Given | None) -> Mapping[int, Blocks]:
        """The caller's blocks by group, full-attention groups first. Raises :class:`InvalidArgument`."""
        raise NotImplementedError

    def formed(self, by_group: Mapping[int, Any]) -> Any:
        """Values by group, as the caller gets them."""
        raise NotImplementedError

    def _lease(self, packed: bytes, parts: Sequence[ReadLease]) -> L:
        raise NotImplementedError

    def _way(self, tier: Tier) -> copies.Way:
        """Returns the way for bytes to and from slots of a tier: mapped memory or streams."""
        return copies.MappedCopies(self._book) if tier not in self._binder.unmapped else self._streamed

    @property
    def _streamed(self) -> copies.Way:
        return copies.StreamedCopies(self._binder, self._deadline)

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline(self._default_timeout if timeout is None else timeout)

    def _require_writable(self) -> None:
        if not self._binder.write:
            raise InvalidArgument("write", False, "True in open_cache for a cache whose slots are to be filled")


class AcrossGroups(ChainVerbs[AcrossLease, Mapping[int, Blocks], dict[int, list[BlockResult]], dict[int, list[Any]]]):
    """The verbs over all window groups, from :attr:`kvtier.Cache.across`."""

    _partly = True

    def __init__(
        self, caches: Sequence[Owner], binder: Binder, book: LeaseBook, reader: Reader, default_timeout: float
    ) -> None:
        super().__init__(binder, book, reader, range(len(caches)), default_timeout)
        self._each: Final = caches

    @property
    def _owners(self) -> Sequence[Owner]:
        return self._each

    def by_group(self, field: str, given: Mapping[int, Blocks] | None) -> Mapping[int, Blocks]:
        given = {} if given is None else given
        require_kind(field, given, Mapping)
        for group in given:
            if group not in self.groups:
                raise InvalidArgument(field, group, f"groups 0 to {len(self.groups) - 1}")
        full_first = sorted(given, key=lambda group: self.spec.groups[group].window_tokens > 0)
        return {group: given[group] for group in full_first}

    def formed(self, by_group: Mapping[int, Any]) -> Any:
        return by_group

    def _lease(self, packed: bytes, parts: Sequence[ReadLease]) -> AcrossLease:
        return AcrossLease(packed, parts)
