"""A cache as one client sees it, in one of its window groups: all verbs."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final, overload

from kvtier.abi.keys import PLAIN, Scope, TokenIds
from kvtier.arena import UNHEARD, Binder, MappedArena
from kvtier.buffers import Blocks
from kvtier.chains import Prompt
from kvtier.deadline import Fence, Stream
from kvtier.errors import CallerError, InvalidArgument, require_kind, require_within
from kvtier.groups import AcrossGroups, ChainVerbs
from kvtier.lease import Lease, LeaseBook, ReadLease, WriteLease
from kvtier.memory.gpu import fence_over
from kvtier.reading import Reader
from kvtier.transport import Link, send
from kvtier.types import AnyTier, BlockResult, CacheInfo, LeaseTicket, ReadTicket, Tier, WriteTicket
from kvtier.v1 import caches_pb2
from kvtier.verbs import GroupVerbs
from kvtier.wire import MAX_COUNT, Held, as_tier


class Cache(ChainVerbs[ReadLease, Blocks, list[BlockResult], list[Any]], GroupVerbs):
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
    def session_number(self) -> int:
        """The session's number. The number rises when the daemon no longer knows the previous session, whose leases are
        lost."""
        return self._binder.session.number

    def slots(self, tier: AnyTier) -> int:
        """Capacity of a tier in blocks; 0 if the cache lacks the tier."""
        place = as_tier(tier)
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

    # -- leases ----------------------------------------------------------------------------------------------------

    def reserve(self, count: int, tier: AnyTier | None = None, *, timeout: float | None = None) -> Held[WriteLease]:
        """``count`` blank slots, all or nothing: ``async with cache.reserve(4) as lease``. Waits while room can be
        made. Raises :class:`TierFull` at once if all slots that are not held could not suffice."""
        return Held(lambda: self._reserve(count, tier, timeout), self.release)

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
            require_kind("ticket", ticket, LeaseTicket)
            if ticket.cache != self.name:
                raise InvalidArgument("ticket.cache", ticket.cache, f"{self.name}, the cache that joins")
            if isinstance(ticket, WriteTicket):
                self._require_writable()
                self._require_mapped(ticket.tier)
            return await self._book.join(self.in_group(ticket.group), ticket, timeout)

        return Held(take, self.release)

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

    async def _reserve(self, count: int, tier: AnyTier | None, timeout: float | None) -> WriteLease:
        require_within("count", count, 1, MAX_COUNT, "1 or more")
        self._require_writable()
        place = self.lease_tier(tier)
        self._require_mapped(place)
        return await self._book.reserve(self, place, count, timeout)
