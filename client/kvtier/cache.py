"""A cache as one client sees it, in one of its window groups: all verbs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, overload

from kvtier import wire
from kvtier.abi.keys import KEY_BYTES, PLAIN, Scope, TokenIds
from kvtier.arena import UNHEARD, Binder, MappedArena
from kvtier.buffers import Blocks
from kvtier.chains import Prompt
from kvtier.deadline import Deadline, Fence, Stream, in_turn
from kvtier.errors import CallerError, InvalidArgument, require_kind, require_within
from kvtier.groups import AcrossGroups, ChainVerbs
from kvtier.lease import Lease, LeaseBook, ReadLease, WriteLease
from kvtier.memory.gpu import fence_over
from kvtier.reading import Reader
from kvtier.retention import each_duration_ms, each_priority
from kvtier.transport import Link, Stubs, send
from kvtier.types import AnyTier, BlockResult, CacheInfo, LeaseTicket, ReadTicket, Tier, WriteTicket
from kvtier.v1 import blocks_pb2, caches_pb2
from kvtier.verbs import MAX_HINTS, Hint, HintResult, PagedBlocks, PageIterator


class Cache(ChainVerbs[ReadLease, Blocks, list[BlockResult], list[Any]]):
    """A cache, opened by :meth:`kvtier.AsyncClient.open_cache`.

    Every verb takes ``timeout`` in seconds (default: the client's) and may raise, besides its own errors,
    :class:`kvtier.errors.DeadlineExceeded`, :class:`DaemonUnavailable` and :class:`InvalidArgument`. Keys are packed
    bytes or an iterable of 32-byte keys, at most 16,384 of them.

    Verbs and sizes belong to one window group, initially group 0: see :meth:`in_group` and :attr:`across`.
    """

    def __init__(self, binder: Binder, default_timeout: float) -> None:
        super().__init__(binder, LeaseBook(binder, self._deadline), Reader(binder), [0], default_timeout)
        self.name: Final = binder.name

    def __repr__(self) -> str:
        slots = ", ".join(f"{self.slots(tier)} {tier} slots" for tier in self.tiers)
        return f"<cache {self.name}: group {self.group}, {slots}, {'mapped' if self.mapped else 'not mapped'}>"

    # -- description -----------------------------------------------------------------------------------------------

    def in_group(self, group: int) -> Cache:
        """The verbs of another window group of this cache, which stays opened and closed once."""
        require_within("group", group, 0, len(self.spec.groups) - 1)
        other = copy.copy(self)
        other.groups = (group,)
        return other

    @property
    def across(self) -> AcrossGroups:
        """The verbs over all window groups at once, for sequences that need their blocks in each group."""
        caches = [self.in_group(group) for group in range(len(self.spec.groups))]
        return AcrossGroups(caches, self._binder, self._book, self.reader, self._default_timeout)

    @property
    def group(self) -> int:
        """Index of the window group."""
        return self.groups[0]

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
    def lookups(self) -> str:
        """How lookups and gets find blocks now: ``shared memory``, or ``calls`` and why."""
        return self.reader.way

    @property
    def reads(self) -> wire.ReadCounts:
        """Counts of lookups and gets so far, with and without calls."""
        return self.reader.counts

    @property
    def arena(self) -> MappedArena:
        """The arena of the last open. Raises :class:`CallerError` if the memory is not mapped."""
        return self._binder.binding.arena

    @property
    def session_number(self) -> int:
        """The session's number. The number rises when the daemon no longer knows the previous session, whose leases are
        lost."""
        return self._binder.session.number

    def slots(self, tier: AnyTier) -> int:
        """Capacity of a tier in blocks; 0 if the cache lacks the tier."""
        place = wire.as_tier(tier)
        return next((info.slots for info in self.info.groups[self.group].tiers if info.tier is place), 0)

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

    # -- blocks ----------------------------------------------------------------------------------------------------

    async def probe(self, keys: wire.Keys, *, timeout: float | None = None) -> bytes:
        """The residency of each key by itself, one byte per key, 0 = absent. Keys may repeat. No side effect."""
        packed = wire.packed_keys(keys)
        await in_turn(timeout)
        found = self.reader.probe(packed, self.group)
        if found is not None:
            return found
        each = wire.split_keys(packed)
        once = list(dict.fromkeys(each))
        reply = await self._ask_locate(b"".join(once), timeout)
        residency = dict(zip(once, reply.residency, strict=True))
        return bytes(residency[key] for key in each)

    async def locate(self, keys: wire.Keys, *, timeout: float | None = None) -> list[wire.Location]:
        """Tier, slot and generation of each key. No side effect."""
        packed = wire.packed_keys(keys)
        await in_turn(timeout)
        found = self.reader.locate(packed, self.group)
        if found is not None:
            return found
        reply = await self._ask_locate(packed, timeout)
        on_device = reply.device_slots, reply.device_generations
        return wire.locations(reply.residency, *on_device, reply.host_slots, reply.host_generations)

    def pages(self, *, page_blocks: int = 0, timeout: float | None = None) -> PageIterator:
        """All indexed blocks, parents before children, in pages of ``page_blocks`` (0: the daemon's choice)."""
        require_within("page_blocks", page_blocks, 0, wire.MAX_COUNT, "0 or more")

        async def ask(page: int) -> blocks_pb2.ListBlocksResponse:
            request = blocks_pb2.ListBlocksRequest(group=self.group, limit=page_blocks, page=page)
            return await self._binder.call(lambda stubs: stubs.blocks.List, request, self._deadline(timeout))

        return PageIterator(ask)

    def blocks(self, *, timeout: float | None = None) -> PagedBlocks:
        """All indexed blocks. Other clients may change the cache between the pages: see :meth:`pages`."""
        return PagedBlocks(self.pages(timeout=timeout))

    async def move(
        self, keys: wire.Keys, to: AnyTier, *, dry_run: bool = False, timeout: float | None = None
    ) -> list[BlockResult]:
        """Makes blocks READY in a tier without holding them: up is a prefetch, down frees the copies above.

        Blocks move in portions: when the caller gives up or the time is up, portions that have not begun are dropped. A
        disk copy needs the block's ancestors on disk; a block that lacks more than 1,024 of them there gets NO_ROOM.
        ``dry_run``: only returns the best possible results.
        """
        deadline = self._deadline(timeout)
        request = wire.message(
            blocks_pb2.MoveRequest,
            group=self.group,
            to=wire.tier_to_wire(to, "to"),
            keys=wire.packed_keys(keys),
            timeout_ns=deadline.wait_ns(),
            seq=self._binder.session.next_seq(),
            dry_run=dry_run,
        )
        return await self._results(lambda stubs: stubs.blocks.Move, request, deadline)

    async def drop(self, keys: wire.Keys, *, dry_run: bool = False, timeout: float | None = None) -> wire.DropReport:
        """Drops blocks and all their descendants, in every tier. ``dry_run``: only reports the effect."""
        packed, seq = wire.packed_keys(keys), self._binder.session.next_seq()
        request = wire.message(blocks_pb2.DropRequest, group=self.group, keys=packed, seq=seq, dry_run=dry_run)
        if not packed:
            return wire.DropReport([], 0)
        reply = await self._binder.call(lambda stubs: stubs.blocks.Drop, request, self._deadline(timeout))
        return wire.DropReport([BlockResult(result) for result in reply.results], reply.dropped, reply.kept_in_store)

    async def set_retention(
        self,
        keys: wire.Keys,
        priorities: int | Sequence[int],
        durations_s: float | Sequence[float | None] | None = None,
        *,
        timeout: float | None = None,
    ) -> list[BlockResult]:
        """Sets priorities and durations, for all or one per key. A duration runs from now, or for held blocks from
        their release.

        ``durations_s``: None = for ever. After that time a block's priority is the default of 35 again.
        """
        packed, seq = wire.packed_keys(keys), self._binder.session.next_seq()
        count = len(packed) // KEY_BYTES
        request = blocks_pb2.SetRetentionRequest(
            group=self.group,
            keys=packed,
            priorities=each_priority(count, priorities),
            durations_ms=each_duration_ms(count, durations_s),
            seq=seq,
        )
        return await self._results(lambda stubs: stubs.blocks.SetRetention, request, self._deadline(timeout))

    async def pin(self, keys: wire.Keys, tier: AnyTier, *, timeout: float | None = None) -> list[BlockResult]:
        """Keeps READY copies in a tier, even after the client has gone, until each pin is undone or the daemon ends.
        Results: NOT_READY if there is no READY copy, OVER_CAP if too much of the tier is pinned."""
        return await self._pin(keys, tier, False, timeout)

    async def unpin(self, keys: wire.Keys, tier: AnyTier, *, timeout: float | None = None) -> list[BlockResult]:
        """Undoes one pin of each block. Result NOT_PINNED for a block without a pin."""
        return await self._pin(keys, tier, True, timeout)

    async def hint(self, *hints: Hint, timeout: float | None = None) -> list[HintResult]:
        """Tells the daemon the future of blocks, in every window group. Returns a result per hint.

        A hint that cannot be carried out has an outcome, and changes nothing. Raises :class:`InvalidArgument`.
        """
        require_within("hints", len(hints), 1, MAX_HINTS, f"1 to {MAX_HINTS} hints")
        request = blocks_pb2.HintRequest(hints=[each.message() for each in hints], seq=self._binder.session.next_seq())
        reply = await self._binder.call(lambda stubs: stubs.blocks.Hint, request, self._deadline(timeout))
        return [wire.same_fields(HintResult, each) for each in reply.results]

    async def keep(
        self, keys: wire.Keys, tier: AnyTier, for_s: float = 600.0, *, timeout: float | None = None
    ) -> HintResult:
        """Brings blocks into a tier and keeps them there for a time, as far as the client's bounds allow."""
        packed = wire.packed_keys(keys)
        await self.move(packed, tier, timeout=timeout)
        (result,) = await self.hint(Hint("pin", keys=packed, tier=tier, for_s=for_s), timeout=timeout)
        return result

    async def reset(
        self, *, force: bool = False, dry_run: bool = False, repeats: int = 0, timeout: float | None = None
    ) -> wire.ResetReport:
        """Drops all blocks of the cache, in every window group.

        Raises :class:`kvtier.errors.StillHeld` while blocks are leased or pinned, unless forced: then the other blocks
        go. ``dry_run``: only counts the blocks that a forced reset would drop. ``repeats``: the generation of an
        earlier reset; drops only the blocks that this reset kept.
        """
        seq = self._binder.session.next_seq()
        request = wire.message(blocks_pb2.ResetRequest, force=force, dry_run=dry_run, seq=seq, repeats=repeats)
        reply = await self._binder.call(lambda stubs: stubs.blocks.Reset, request, self._deadline(timeout))
        return wire.ResetReport(reply.dropped, reply.kept, reply.kept_in_store, reply.generation)

    # -- leases ----------------------------------------------------------------------------------------------------

    def reserve(
        self, count: int, tier: AnyTier | None = None, *, timeout: float | None = None
    ) -> wire.Held[WriteLease]:
        """``count`` blank slots, all or nothing: ``async with cache.reserve(4) as lease``. Waits while room can be
        made. Raises :class:`TierFull` at once if all slots that are not held could not suffice."""

        async def take() -> WriteLease:
            require_within("count", count, 1, wire.MAX_COUNT, "1 or more")
            self._require_writable()
            place = self.lease_tier(tier)
            self._require_mapped(place)
            return await self._book.reserve(self, place, count, timeout)

        return wire.Held(take, self.release)

    @overload
    def join(self, ticket: WriteTicket, *, timeout: float | None = None) -> wire.Held[WriteLease]: ...
    @overload
    def join(self, ticket: ReadTicket, *, timeout: float | None = None) -> wire.Held[ReadLease]: ...
    def join(self, ticket: LeaseTicket, *, timeout: float | None = None) -> wire.Held[Any]:
        """Holds the slots of another process's lease: ``async with cache.join(ticket) as lease``.

        A slot goes back when each of its holders has released it or died. A commit by one holder makes the slot a block
        that all hold; the other holders are not notified. A ticket is valid while its own lease is held. Raises
        :class:`LeaseError` if that lease has ended, :class:`PermissionDenied`, :class:`InvalidArgument`.
        """

        async def take() -> Lease:
            require_kind("ticket", ticket, LeaseTicket)
            if ticket.cache != self.name:
                raise InvalidArgument("ticket.cache", ticket.cache, f"{self.name}, the cache that joins")
            if isinstance(ticket, WriteTicket):
                self._require_writable()
                self._require_mapped(ticket.tier)
            return await self._book.join(self.in_group(ticket.group), ticket, timeout)

        return wire.Held(take, self.release)

    def fence(self, stream: Stream | None = None) -> Fence:
        """The point that a stream of this process has reached. Pass it as ``stream`` to a commit or release, which then
        waits for this point and not for later work of the stream.

        ``stream``: a ``CUstream`` as a number, or an object with ``cuda_stream``, as torch's are. None, here and in
        every verb: torch's current stream of this thread on the device if torch has used CUDA, else the legacy default
        stream. The fence has passed already if no tier of the cache is GPU memory mapped here. Raises
        :class:`InvalidArgument`, :class:`kvtier.errors.DeviceError`.
        """
        mapped = self._binder.binding.mapped
        return fence_over([] if mapped is None else mapped.memories, stream)

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
        binding, seq = self._binder.binding, self._binder.session.next_seq()

        async def attempt(link: Link) -> None:
            if link.session == binding.session:
                request = caches_pb2.CloseRequest(cache_id=binding.cache_id, seq=seq)
                await send(link, lambda stubs: stubs.caches.Close, request)

        try:
            await self._binder.session.call(attempt, deadline)
        except UNHEARD:
            self._binder.later(self._binder.until_answered(attempt), "closing")
            raise

    async def release_all(self, *, stream: Stream | None = None, timeout: float | None = None) -> None:
        """Releases every lease that this object granted and that is still held. ``stream``: see :meth:`release`."""
        self._binder.slots_ahead.give_back()
        await self._book.release(self._book.out, stream, timeout)

    @property
    def _owners(self) -> Sequence[Cache]:
        return (self,)

    def by_group(self, field: str, given: Blocks | None) -> Mapping[int, Blocks]:
        return {} if given is None else {self.group: given}

    def formed(self, by_group: Mapping[int, Any]) -> Any:
        return by_group[self.group]

    def _lease(self, packed: bytes, parts: Sequence[ReadLease]) -> ReadLease:
        return parts[0]

    def _require_mapped(self, tier: Tier) -> None:
        why = self.unmapped.get(tier)
        if why is not None:
            message = f"cache {self.name}: its {tier} tier is not mapped ({why}): slots cannot be filled here; put can"
            raise CallerError(message, reason="CANNOT_MAP")

    async def _pin(self, keys: wire.Keys, tier: AnyTier, unpin: bool, timeout: float | None) -> list[BlockResult]:
        packed, seq = wire.packed_keys(keys), self._binder.session.next_seq()
        request = blocks_pb2.PinRequest(
            group=self.group, tier=wire.tier_to_wire(tier), keys=packed, unpin=unpin, seq=seq
        )
        return await self._results(lambda stubs: stubs.blocks.Pin, request, self._deadline(timeout))

    async def _results(self, method: Callable[[Stubs], Any], request: Any, deadline: Deadline) -> list[BlockResult]:
        """A result per key. The daemon refuses a request without keys, which has none."""
        if not request.keys:
            return []
        return [BlockResult(result) for result in (await self._binder.call(method, request, deadline)).results]

    async def _ask_locate(self, packed: bytes, timeout: float | None) -> blocks_pb2.LocateResponse:
        if not packed:
            return blocks_pb2.LocateResponse()
        self.reader.count(calls=1)
        request = blocks_pb2.LocateRequest(group=self.group, keys=packed)
        return await self._binder.call(lambda stubs: stubs.blocks.Locate, request, self._deadline(timeout))
