"""What a client holds of one cache: leases taken, filled and given back, and which of them are still out.

All window groups of a cache share one :class:`Holdings`, so that closing the cache gives back what any of them took.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from kvtier.abi.keys import KEY_BYTES
from kvtier.binding import Binder, send
from kvtier.errors import DeviceError, InvalidArgument, LeaseError, LeaseLost, RetryableError
from kvtier.fences import Fence, Stream, fence_of, fence_over, passing
from kvtier.lease import Lease, ReadLease, WriteLease
from kvtier.prompt import Prompt
from kvtier.retention import BlockRetention, Retention, block_retention, chain_message
from kvtier.rpc_errors import chain_error
from kvtier.session import Deadline, Link
from kvtier.types import ROOT_PARENT, BlockResult, Tier
from kvtier.v1 import blocks_pb2
from kvtier.wire import Keys, packed_keys, split_keys, tier_to_wire

if TYPE_CHECKING:
    from kvtier.arrays import Piece
    from kvtier.cache import Cache

_log = logging.getLogger(__name__)

_RESULTS: Final = {int(result): result for result in BlockResult}


class Holdings:
    """The leases of one cache object and of what :meth:`kvtier.Cache.in_group` makes of it."""

    def __init__(self, binder: Binder, deadline: Callable[[float | None], Deadline]) -> None:
        self._binder: Final = binder
        self._session: Final = binder.session
        self._deadline: Final = deadline
        self._leases: set[Lease] = set()
        self._ending: set[Lease] = set()
        """A commit was asked to end them, and has not answered."""
        self._in_use: set[Lease] = set()
        """Whose memory may still be touched: until a release is asked for, whether or not the daemon can be told."""
        binder.work = lambda stream: fence_of(list(self._in_use), stream)

    async def reserve(self, cache: Cache, tier: Tier, count: int, timeout: float | None) -> WriteLease:
        """See :meth:`kvtier.Cache.reserve`."""
        seq = self._session.next_seq()
        deadline = self._deadline(timeout)
        # A repeated call must be the same to the byte, so it carries the whole time, not what is left.
        wait_ns = deadline.wait_ns()
        binding, reply = await self._binder.take(
            lambda stubs: stubs.blocks.Reserve,
            lambda binding: blocks_pb2.ReserveRequest(
                cache_id=binding.cache_id,
                group=cache.group,
                tier=tier_to_wire(tier),
                count=count,
                timeout_ns=wait_ns,
                seq=seq,
            ),
            seq,
            deadline,
        )
        lease = WriteLease(cache, self, binding, tier, reply.lease_id, reply.slots)
        self.keep([lease])
        return lease

    async def acquire(
        self,
        cache: Cache,
        packed: Sequence[bytes],
        tier: Tier | None,
        min_blocks: int,
        retention: Retention | None,
        timeout: float | None,
    ) -> list[ReadLease]:
        """See :meth:`kvtier.Cache.acquire_many`."""
        place, seq = cache.lease_tier(tier), self._session.next_seq()
        deadline = self._deadline(timeout)
        wait_ns = deadline.wait_ns()
        wanted = [chain_message(keys, min_blocks, retention, cache.spec.tokens_per_block) for keys in packed]
        binding, reply = await self._binder.take(
            lambda stubs: stubs.blocks.Acquire,
            lambda binding: blocks_pb2.AcquireRequest(
                cache_id=binding.cache_id,
                group=cache.group,
                tier=tier_to_wire(place),
                chains=wanted,
                timeout_ns=wait_ns,
                seq=seq,
            ),
            seq,
            deadline,
        )
        leases = [
            ReadLease(
                cache,
                self,
                binding,
                place,
                chain.lease_id,
                chain.slots,
                keys=split_keys(keys[: len(chain.slots) * KEY_BYTES]),
                generations=chain.generations,
                found_in=chain.found_in,
                matched=chain.matched,
                error=chain_error(chain, min_blocks) if chain.refusal else None,
            )
            for keys, chain in zip(packed, reply.chains, strict=True)
        ]
        self.keep(lease for lease in leases if lease.id)
        return leases

    def keep(self, leases: Iterable[Lease]) -> None:
        """Leases that were just granted: they are out until they are released."""
        for lease in leases:
            self._leases.add(lease)
            self._in_use.add(lease)
            self._session.lend(lease.binding.session)

    async def commit(
        self,
        lease: WriteLease,
        keys: Keys,
        indices: Sequence[int],
        parent: bytes | None,
        parents: Sequence[bytes | None] | None,
        priorities: int | Sequence[int] | None,
        retention: Retention | BlockRetention | None,
        prompt: Prompt | None,
        release: bool,
        stream: Stream | None,
        timeout: float | None,
    ) -> list[BlockResult]:
        """See :meth:`WriteLease.commit`, the way to call it."""
        fence, deadline = fence_of([lease], stream), self._deadline(timeout)
        request = self._request(lease, keys, indices, parent, parents, priorities, retention, prompt, release)
        await passing(fence, deadline)
        lease.require_live()
        return await self._commit(lease, request, deadline)

    async def store(self, lease: WriteLease, piece: Piece, timeout: float | None) -> list[BlockResult]:
        """Commits a piece of a chain in the first slots of a lease, which ends with it."""
        lease.require_live()
        places = range(len(piece.chain))
        keys = b"".join(piece.chain)
        request = self._request(lease, keys, places, piece.parent, None, None, piece.kept, piece.prompt, release=True)
        return await self._commit(lease, request, self._deadline(timeout))

    def _request(
        self,
        lease: WriteLease,
        keys: Keys,
        indices: Sequence[int],
        parent: bytes | None,
        parents: Sequence[bytes | None] | None,
        priorities: int | Sequence[int] | None,
        retention: Retention | BlockRetention | None,
        prompt: Prompt | None,
        release: bool,
    ) -> blocks_pb2.CommitRequest:
        """A commit but for its number. Raises :class:`InvalidArgument`."""
        packed = packed_keys(keys)
        count = len(packed) // KEY_BYTES
        if count > len(indices):
            raise InvalidArgument("keys", f"{count} keys", f"at most {len(indices)}, one a blank slot")
        kept = block_retention(count, lease.cache.spec.tokens_per_block, priorities, retention)
        parents_of_all = _packed_parents(packed, parent, parents)
        told = prompt.told(packed, lease.binding.info.options) if prompt is not None else {}
        return blocks_pb2.CommitRequest(
            cache_id=lease.binding.cache_id,
            lease_id=lease.id,
            slots=[lease.slots[index] for index in indices[:count]],
            keys=packed,
            parents=parents_of_all,
            priorities=kept.priorities,
            durations_ms=kept.durations_ms,
            release=release,
            **told,
        )

    async def _commit(
        self, lease: WriteLease, request: blocks_pb2.CommitRequest, deadline: Deadline
    ) -> list[BlockResult]:
        request.seq = self._session.next_seq()

        async def attempt(link: Link, seconds: float) -> blocks_pb2.CommitResponse:
            if link.session != lease.binding.session:
                message = "the session ended before the blocks were committed: the daemon restarted, or it was kicked"
                raise LeaseLost(message, reason="LEASE_LOST")
            return await send(link, lambda stubs: stubs.blocks.Commit, request, seconds)

        if request.release:
            self._ending.add(lease)
        await self._binder.ahead()
        reply = await self._session.call(attempt, deadline)
        if request.release:
            self._forget([lease])
            self._ending.discard(lease)
        return [_RESULTS[result] for result in reply.results]

    def fence(self, stream: Stream | None) -> Fence:
        """See :meth:`kvtier.Cache.fence`."""
        binding = self._binder.binding
        memories = [] if binding.mapped is None else binding.mapped.memories
        return fence_over(memories, stream)

    @property
    def out(self) -> list[Lease]:
        """What is not released yet."""
        return list(self._leases)

    async def release(self, leases: Iterable[Lease], stream: Stream | None, timeout: float | None) -> None:
        """See :meth:`kvtier.Cache.release`."""
        given = list(leases)
        live, deadline = [lease for lease in given if not lease.released], self._deadline(timeout)
        if not live:
            return
        fence = fence_of(live, stream)
        for lease in live:
            lease.released = True
        self._leases.difference_update(live)
        await self._to_the_end(self._release(live, fence, deadline))

    async def release_all(self, stream: Stream | None, timeout: float | None) -> None:
        """See :meth:`kvtier.Cache.release_all`."""
        await self.release(self.out, stream, timeout)

    async def trim(self, lease: ReadLease, blocks: int, stream: Stream | None, timeout: float | None) -> None:
        """See :meth:`ReadLease.trim`, the way to call it."""
        fence, deadline = fence_of([lease], stream), self._deadline(timeout)
        lease.trimmed += blocks
        await self._to_the_end(self._trim(lease, blocks, fence, deadline))

    async def _to_the_end(self, giving_back: Awaitable[None]) -> None:
        """A cancelled caller's work goes on by itself."""
        work = asyncio.ensure_future(giving_back)
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            self._binder.later(work, "release after its caller was cancelled")
            raise

    async def _release(self, leases: Sequence[Lease], fence: Fence, deadline: Deadline) -> None:
        """What of it fails leaves the leases as they were, to be released again."""
        try:
            await passing(fence, deadline)
            self._untouched(leases)
            await self._tell(leases, deadline)
        except (RetryableError, DeviceError):
            for lease in leases:
                lease.released = False
            self._leases.update(leases)
            raise

    async def _trim(self, lease: ReadLease, blocks: int, fence: Fence, deadline: Deadline) -> None:
        try:
            await passing(fence, deadline)
            await self._binder.release(lease.binding, [lease.id], deadline, first_blocks=[blocks])
        except (RetryableError, DeviceError):
            lease.trimmed -= blocks
            raise

    async def _tell(self, leases: Sequence[Lease], deadline: Deadline) -> None:
        """Those that a commit was asked to end go first and one by one: it may have ended them, though nobody heard the
        answer, and a call that names one unknown lease ends none."""
        ending = [lease for lease in leases if lease in self._ending]
        for lease in ending:
            try:
                await self._binder.release(lease.binding, [lease.id], deadline)
            except LeaseError as error:
                if error.reason != "UNKNOWN_LEASE":
                    raise
        others = [lease for lease in leases if lease not in ending]
        for binding in {lease.binding for lease in others}:
            await self._binder.release(binding, [lease.id for lease in others if lease.binding is binding], deadline)
        self._ending.difference_update(leases)

    def _forget(self, leases: Sequence[Lease]) -> None:
        """They are over, here and for the session."""
        for lease in leases:
            lease.released = True
            self._leases.discard(lease)
        self._untouched(leases)

    def _untouched(self, leases: Sequence[Lease]) -> None:
        """Nothing of this process touches their slots any more."""
        for lease in leases:
            if lease in self._in_use:
                self._in_use.discard(lease)
                self._session.give_back(lease.binding.session)


def _packed_parents(packed: bytes, parent: bytes | None, parents: Sequence[bytes | None] | None) -> bytes:
    """One parent a key: the chain's, or those given."""
    if parents is not None:
        return packed_keys([ROOT_PARENT if each is None else each for each in parents], "parents")
    return packed_keys([ROOT_PARENT if parent is None else parent], "parent") + packed[:-KEY_BYTES]
