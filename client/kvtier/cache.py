"""A cache as one client sees it: every verb, and put and get of arrays on top.

:mod:`kvtier.lease` takes leases and gives them back.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any, Final, overload

from kvtier import buffers, copies
from kvtier.abi.keys import KEY_BYTES, PLAIN, Scope, TokenIds
from kvtier.abi.spec import CacheSpec
from kvtier.arena import UNHEARD, Binder, MappedArena, send
from kvtier.buffers import Blocks, PrefixRows, Reach, Rows
from kvtier.chains import ChainPart, Prompt
from kvtier.copies import StreamedCopies
from kvtier.deadline import in_turn
from kvtier.errors import CallerError, DaemonUnavailable, DeadlineExceeded, InvalidArgument, require_within
from kvtier.groups import AcrossGroups
from kvtier.lease import Lease, LeaseBook, ReadLease, WriteLease
from kvtier.memory.gpu import Fence, Stream
from kvtier.reading import Read, verified
from kvtier.retention import Retention, block_retention
from kvtier.session import Session
from kvtier.transport import Link
from kvtier.types import (
    MAPPED_TIERS,
    BlockResult,
    CacheInfo,
    CacheOptions,
    LeaseTicket,
    ReadTicket,
    Tier,
    WriteTicket,
)
from kvtier.v1 import caches_pb2
from kvtier.verbs import GroupVerbs
from kvtier.wire import (
    MAX_COUNT,
    Budgets,
    Held,
    Keys,
    packed_chains,
    packed_keys,
    recompute_to_wire,
    split_keys,
)


class Cache(GroupVerbs):
    """A cache, opened by :meth:`kvtier.AsyncClient.open_cache`.

    Every verb takes ``timeout`` in seconds (default: the client's) and may raise, besides its own errors,
    :class:`kvtier.errors.DeadlineExceeded`, :class:`DaemonUnavailable` and :class:`InvalidArgument`. Keys are packed
    bytes or an iterable of 32-byte keys, at most 16,384 of them.

    Verbs and sizes belong to one window group, initially group 0: see :meth:`in_group` and :attr:`across`.
    """

    def __init__(
        self,
        session: Session,
        name: str,
        spec: CacheSpec | None,
        budgets: Budgets | None,
        options: CacheOptions | None,
        device: str | None,
        *,
        write: bool,
        mapped: bool,
        default_timeout: float,
    ) -> None:
        binder = Binder(session, name, spec, budgets or {}, options, device or "", write=write, mapped=mapped)
        super().__init__(binder, 0, default_timeout)
        self.name: Final = name
        self._session = session
        self._book = LeaseBook(binder, self._deadline)

    def __repr__(self) -> str:
        slots = ", ".join(f"{self.slots(tier)} {tier} slots" for tier in self.tiers)
        return f"<cache {self.name}: group {self.group}, {slots}, {'mapped' if self.mapped else 'not mapped'}>"

    # -- description -----------------------------------------------------------------------------------------------

    def in_group(self, group: int) -> Cache:
        """The verbs of another window group of this cache, which stays opened and closed once."""
        require_within("group", group, 0, len(self.spec.groups) - 1)
        other = copy.copy(self)
        other.group, other.groups = group, (group,)
        return other

    @property
    def across(self) -> AcrossGroups:
        """The verbs over all window groups at once, for sequences that need their blocks in each group."""
        caches = [self.in_group(group) for group in range(len(self.spec.groups))]
        return AcrossGroups(caches, self._binder, self._book, self.reader, self._default_timeout)

    @property
    def spec(self) -> CacheSpec:
        """The specification: the meaning of the cache's bytes."""
        return self._binder.spec

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of the group, over all its pools."""
        return self.spec.block_bytes(self.group)

    @property
    def info(self) -> CacheInfo:
        """The daemon's description of the cache at the last open."""
        return self._binder.binding.info

    @property
    def mapped(self) -> bool:
        """Whether the cache's memory is mapped. If not, put and get use streams, and leases have no views."""
        return self._binder.maps

    @property
    def unmapped(self) -> Mapping[Tier, str]:
        """Maps each mappable tier whose slots are not mapped to the reason; empty if all are mapped. Bytes to and from
        these tiers go through streams, and leases there have no views."""
        return self._binder.unmapped

    @property
    def arena(self) -> MappedArena:
        """The arena of the last open. Raises :class:`CallerError` if the memory is not mapped."""
        return self._binder.binding.arena

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The cache's tiers, the fastest first."""
        return tuple(info.tier for info in self.info.groups[self.group].tiers)

    @property
    def session_number(self) -> int:
        """The session's number. The number rises when the daemon no longer knows the previous session, whose leases are
        lost."""
        return self._session.number

    def slots(self, tier: Tier) -> int:
        """Capacity of a tier in blocks; 0 if the cache lacks the tier."""
        return next((info.slots for info in self.info.groups[self.group].tiers if info.tier is tier), 0)

    def lease_tier(self, tier: Tier | None = None) -> Tier:
        """``tier``, or for None the fastest mapped tier, else the fastest mappable tier.

        Raises :class:`InvalidArgument` if the cache lacks that tier or has only disk.
        """
        mapped = [each for each in self.tiers if each in MAPPED_TIERS]
        if tier is None and mapped:
            unmapped = self.unmapped
            return next((each for each in mapped if each not in unmapped), mapped[0])
        if tier is None or tier not in mapped:
            have = " or ".join(str(each) for each in mapped)
            raise InvalidArgument("tier", str(tier), have or "a tier that can be mapped: the cache has only disk")
        return tier

    def prompt(
        self,
        token_ids: TokenIds,
        scope: Scope = PLAIN,
        extra_ids: TokenIds | None = None,
        *,
        salt_id: int | None = None,
        vocab_size: int | None = None,
        partial: bool = False,
    ) -> Prompt:
        """The blocks of a prompt: their keys, as from :func:`kvtier.chain_keys`, and the details that events tell of
        them.

        A cache with the option ``event_hash`` or ``keep_tokens`` needs the prompt in ``put`` and ``commit``. Some
        hashes need ``salt_id`` for a salt, ``vocab_size`` for multimodal items (see :func:`kvtier.event_hashes`).
        ``partial``: the tokens that do not fill a block make a last block of their own. Raises
        :class:`InvalidArgument`.
        """
        step = self.spec.tokens_per_block
        return Prompt(token_ids, step, scope, extra_ids, salt_id=salt_id, vocab_size=vocab_size, partial=partial)

    # -- leases ----------------------------------------------------------------------------------------------------

    def reserve(self, count: int, tier: Tier | None = None, *, timeout: float | None = None) -> Held[WriteLease]:
        """``count`` blank slots, all or nothing: ``async with cache.reserve(4) as lease``.

        Waits while room can be made. Raises :class:`TierFull` at once if all slots that are not held could not suffice.
        """
        return Held(lambda: self._reserve(count, tier, timeout), self.release)

    def acquire(
        self,
        keys: Keys,
        tier: Tier | None = None,
        *,
        min_blocks: int = 0,
        retention: Retention | None = None,
        recompute_seconds_per_block: float = 0.0,
        timeout: float | None = None,
    ) -> Held[ReadLease]:
        """The longest available prefix, READY in a tier and held: ``async with cache.acquire(keys) as lease``.

        In a sliding group the lease holds only the blocks that the window needs: see :attr:`ReadLease.prefix_length`.

        Args:
            retention: new values for the found blocks, counted from this lease's release.
            recompute_seconds_per_block: blocks come from the remote store only if that is cheaper; 0: always.
        Raises: :class:`TooShort` if fewer than ``min_blocks`` are stored, :class:`TierFull` if the tier has no room for
        ``min_blocks``, or not even for one stored block.
        """

        async def take() -> ReadLease:
            packed = packed_keys(keys, "chains[0].keys")
            ((lease,),) = await self._book.acquire(
                [self],
                [packed],
                self.lease_tier(tier),
                min_blocks,
                retention,
                timeout,
                recompute_to_wire(recompute_seconds_per_block),
            )
            if lease.error is not None:
                raise lease.error
            return lease

        return Held(take, self.release)

    def acquire_many(
        self,
        chains: Iterable[Keys],
        tier: Tier | None = None,
        *,
        min_blocks: int = 0,
        retention: Retention | None = None,
        timeout: float | None = None,
    ) -> Held[list[ReadLease]]:
        """Acquires one lease per chain, in order. No chain evicts the matches of another chain of the call.

        A chain that cannot have ``min_blocks`` gets an empty lease with its :attr:`ReadLease.refusal`, not an
        exception. ``retention`` applies to each chain.
        """

        def release(leases: list[ReadLease]) -> Awaitable[None]:
            return self.release(*leases)

        async def take() -> list[ReadLease]:
            packed = packed_chains(chains)
            place = self.lease_tier(tier)
            found = await self._book.acquire([self], packed, place, min_blocks, retention, timeout)
            return [lease for (lease,) in found]

        return Held(take, release)

    @overload
    def join(self, ticket: WriteTicket, *, timeout: float | None = None) -> Held[WriteLease]: ...

    @overload
    def join(self, ticket: ReadTicket, *, timeout: float | None = None) -> Held[ReadLease]: ...

    def join(self, ticket: LeaseTicket, *, timeout: float | None = None) -> Held[Any]:
        """Holds the slots of another process's lease: ``async with cache.join(ticket) as lease``.

        A slot goes back when each of its holders has released it or died. A commit by one holder makes the slot a block
        that all hold; the other holders are not notified. A ticket is valid while its own lease is held. Raises
        :class:`LeaseError` if that lease has ended, :class:`PermissionDenied`, :class:`InvalidArgument`.
        """

        async def take() -> Lease:
            if ticket.cache != self.name:
                raise InvalidArgument("ticket.cache", ticket.cache, f"{self.name}, the cache that joins")
            if isinstance(ticket, WriteTicket):
                self._require_writable()
                self._require_mapped(ticket.tier)
            return await self._book.join(self.in_group(ticket.group), ticket, timeout)

        return Held(take, self.release)

    async def release(self, *leases: Lease, stream: Stream | None = None, timeout: float | None = None) -> None:
        """Gives leases back, in one call and in this order: give the tail of a chain before its head.

        Skips leases that were released before, or lost with their daemon. The release goes on in the background if its
        caller is cancelled or the daemon does not answer in time.

        If the slots are GPU memory, the call is sent once ``stream`` has done its earlier work: see :meth:`fence`. If
        that takes longer than ``timeout``, or the device fails, nothing is sent and the leases stay held: release them
        again. Raises :class:`kvtier.errors.DeviceError`.
        """
        await self._book.release(leases, stream, timeout)

    def fence(self, stream: Stream | None = None) -> Fence:
        """The point that a stream of this process has reached. Pass it as ``stream`` to a commit or release, which then
        waits for this point and not for later work of the stream.

        ``stream``: a ``CUstream`` as a number, or an object with ``cuda_stream``, as torch's are. None, here and in
        every verb: torch's current stream of this thread on the device if torch has used CUDA, else the legacy default
        stream. The fence has passed already if no tier of the cache is GPU memory mapped here. Raises
        :class:`InvalidArgument`, :class:`kvtier.errors.DeviceError`.
        """
        return self._book.fence(stream)

    # -- arrays ----------------------------------------------------------------------------------------------------

    async def put(
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
        """Stores a chain: copies the arrays into slots of a tier and commits them. Returns one result per key.

        Mapped memory: stored blocks are not copied again. A chain above half a tier, or 1,024 blocks, goes in pieces,
        each with its ``timeout``. NO_ROOM: the chain is too long for its tiers, and the block is not stored.

        Args:
            blocks: an array, tensor or bytes per key, of :attr:`block_bytes`, or one array whose first axis is blocks.
            parent: key of the block before the first; None: from ``prompt``, else the first block is a root.
            prompt: the prompt of the keys, for more detail in events. ``retention``: instead of ``priorities``.
        Raises: :class:`InvalidArgument`, :class:`TierFull`.
        """
        chain, place = split_keys(packed_keys(keys)), self.lease_tier(tier)
        way, reach = self.way(place), self.reach(place)
        return await self._put(way, reach, chain, blocks, parent, place, priorities, retention, prompt, timeout)

    async def stream_put(
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
        """Like :meth:`put`, but sends the bytes through a stream even if the memory is mapped.

        Each piece is checked against its checksums and stored whole or not at all. Raises :class:`DamagedTransfer` too.
        """
        chain, place = split_keys(packed_keys(keys)), self.lease_tier(tier)
        way = self._streamed
        return await self._put(way, None, chain, blocks, parent, place, priorities, retention, prompt, timeout)

    async def get(
        self,
        keys: Keys,
        out: Blocks | None = None,
        *,
        tier: Tier | None = None,
        verify: bool = False,
        timeout: float | None = None,
    ) -> list[Any]:
        """Copies out the longest stored prefix: an array per block, None for a block that the window does not need.

        Mapped slots are copied without a call; while the daemon is silent, only these. The daemon makes the rest ready
        in ``tier`` (default: the fastest mapped), in pieces, each with its ``timeout``; a sliding window whole. Bytes
        that are not mapped, or were evicted during ``verify``, come through a stream.

        Args:
            out: an array or tensor of :attr:`block_bytes` per key; arrays beyond the prefix may be overwritten.
            verify: compares checksums with the daemon's copies in memory.
        Raises: :class:`TierFull`, :class:`StaleRead`, and with ``verify`` :class:`DamagedTransfer`.
        """
        await in_turn(timeout)
        read, targets = self.begin_get(packed_keys(keys), out, tier, in_cpu=verify)
        await buffers.run_copy(read.copy, read.nbytes, waits=read.waits)
        return await copies.delivered(out, await self.end_get(read, targets, tier, verify, timeout))

    def begin_get(
        self, packed: bytes, out: Blocks | None, tier: Tier | None, *, in_cpu: bool = False
    ) -> tuple[Read, Rows | None]:
        """Begins a get without a call. Returns the read and the caller's targets. ``in_cpu``: the bytes pass through
        the CPU's memory, wherever the targets are. Raises :class:`InvalidArgument`."""
        if tier is not None:
            self.lease_tier(tier)
        reach = None if in_cpu else self.reach(tier)
        targets = None if out is None else buffers.writable(out, len(packed) // KEY_BYTES, self.block_bytes, reach)
        return self.reader.begin(packed, self.group, tier, targets), targets

    async def end_get(
        self, read: Read, targets: Rows | None, tier: Tier | None, verify: bool, timeout: float | None
    ) -> PrefixRows:
        """Ends a get after :meth:`begin_get` and its copy: fetches the blocks that the daemon must make ready, and
        verifies if asked."""
        rows = read.rows
        if read.done and not (verify and rows):
            return rows
        place = self.lease_tier(tier)

        async def rest(first: int, way: copies.Way) -> PrefixRows:
            into = None if targets is None else targets[first:]
            return await self._get(way, place, split_keys(read.keys)[first:], into, timeout)

        if not read.done:
            self.reader.count(calls=1)
            try:
                rows += await rest(read.blocks, self.way(place))
            except (DaemonUnavailable, DeadlineExceeded):
                if not rows or self._session.reachable:  # reachable: the daemon itself has refused
                    raise
            self.reader.answered(read.keys, self.group, len(rows))
        if verify and rows and self.mapped:  # a stream has its own checksums
            pairs = zip(split_keys(read.keys), rows, strict=False)
            keys = b"".join(key for key, row in pairs if row is not None)
            copied: PrefixRows = [row for row in rows if row is not None]
            good = await verified(self._binder, self.group, keys, buffers.of_cpu(copied), self._deadline(timeout))
            if good < len(copied):
                good = 0 if self._sliding else good
                rows = rows[:good] + await rest(good, self._streamed)
        return rows

    async def stream_get(
        self,
        keys: Keys,
        out: Blocks | None = None,
        *,
        tier: Tier | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Like :meth:`get`, but receives the bytes through a stream even if the memory is mapped.

        The bytes are checked against their checksums. Raises :class:`DamagedTransfer` too.
        """
        chain = split_keys(packed_keys(keys))
        targets = None if out is None else buffers.writable(out, len(chain), self.block_bytes)
        place = self.lease_tier(tier)
        rows = await self._get(self._streamed, place, chain, targets, timeout)
        self.reader.answered(b"".join(chain), self.group, len(rows))
        return await copies.delivered(out, rows)

    async def close(self, *, stream: Stream | None = None, timeout: float | None = None) -> None:
        """Releases this object's leases and closes its use of the cache, which stays warm. Other users are not
        affected.

        If the daemon does not answer in time, the close goes on in the background. ``stream``: see :meth:`release`.
        """
        await self.release_all(stream=stream, timeout=timeout)
        deadline = self._deadline(timeout)
        await self._binder.settle(deadline)  # releases of cancelled calls
        await self.reader.recency.tell()
        if not self._binder.close():
            return
        binding, seq = self._binder.binding, self._session.next_seq()

        async def attempt(link: Link) -> None:
            if link.session == binding.session:
                request = caches_pb2.CloseRequest(cache_id=binding.cache_id, seq=seq)
                await send(link, lambda stubs: stubs.caches.Close, request)

        try:
            await self._session.call(attempt, deadline)
        except UNHEARD:
            self._binder.later(asyncio.ensure_future(self._binder.until_answered(attempt)), "closing")
            raise

    async def release_all(self, *, stream: Stream | None = None, timeout: float | None = None) -> None:
        """Releases every lease that this object granted and that is still held. ``stream``: see :meth:`release`."""
        await self._book.release(self._book.out, stream, timeout)

    async def open(self, timeout: float | None = None) -> None:
        """Opens the cache in the daemon and maps its memory. The client calls this; later calls reopen the cache if
        necessary."""

        async def attempt(link: Link) -> None:
            await self._binder.bind(link)

        await self._session.call(attempt, self._deadline(timeout))

    # -- inside ----------------------------------------------------------------------------------------------------

    def way(self, tier: Tier) -> copies.Way:
        """Returns the way for bytes to and from slots of a tier: mapped memory or streams."""
        return copies.MappedCopies(self, self._book) if tier not in self.unmapped else self._streamed

    def reach(self, tier: Tier | None) -> Reach | None:
        """Returns the reach of a tier's mapped slots, or of all tiers for None: the GPUs that may hold blocks copied to
        and from the slots. None if no memory is mapped."""
        mapped = self._binder.binding.mapped
        return None if mapped is None else mapped.reach(tier)

    @property
    def _streamed(self) -> copies.Way:
        return StreamedCopies(self, self._binder, self._deadline)

    @property
    def _sliding(self) -> bool:
        return self.spec.attention(self.group).span > 0

    async def _get(
        self, way: copies.Way, tier: Tier, chain: Sequence[bytes], targets: Rows | None, timeout: float | None
    ) -> PrefixRows:
        slots = None if self._sliding else self.slots(tier)
        return await copies.get(slots, way, tier, chain, targets, timeout)

    async def _put(
        self,
        way: copies.Way,
        reach: Reach | None,
        chain: Sequence[bytes],
        blocks: Blocks,
        parent: bytes | None,
        tier: Tier,
        priorities: int | Sequence[int] | None,
        retention: Retention | None,
        prompt: Prompt | None,
        timeout: float | None,
    ) -> list[BlockResult]:
        kept = block_retention(len(chain), self.spec.tokens_per_block, priorities, retention)
        self._require_writable()
        sources = buffers.readable(blocks, len(chain), self.block_bytes, reach)
        whole = ChainPart.whole(chain, sources, parent, kept, prompt)
        return await copies.put(self.slots(tier), way, tier, whole, self.absent, timeout)

    def absent(self, chain: Sequence[bytes]) -> Sequence[int] | None:
        """See :data:`kvtier.copies.Absent`."""
        return self.reader.absent(b"".join(chain), self.group)

    def _require_writable(self) -> None:
        if not self._binder.write:
            raise InvalidArgument("write", False, "True in open_cache for a cache whose slots are to be filled")

    def _require_mapped(self, tier: Tier) -> None:
        why = self.unmapped.get(tier)
        if why is not None:
            message = f"cache {self.name}: its {tier} tier is not mapped ({why}): slots cannot be filled here; put can"
            raise CallerError(message, reason="CANNOT_MAP")

    async def _reserve(self, count: int, tier: Tier | None, timeout: float | None) -> WriteLease:
        require_within("count", count, 1, MAX_COUNT, "1 or more")
        self._require_writable()
        place = self.lease_tier(tier)
        self._require_mapped(place)
        return await self._book.reserve(self, place, count, timeout)
