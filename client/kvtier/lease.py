"""Leases: a client's hold on slots, and the views of their bytes."""

from __future__ import annotations

import asyncio
import warnings
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final, Protocol, Self
from weakref import WeakSet

import numpy as np

from kvtier import buffers, errors
from kvtier.abi.attach import lease_secret
from kvtier.abi.attention import Needed
from kvtier.abi.keys import KEY_BYTES
from kvtier.abi.spec import CacheSpec
from kvtier.arena import UNHEARD, Binder, Binding, MappedArena
from kvtier.chains import ChainPart, Telling, parents_of
from kvtier.deadline import PASSED, Deadline, Fence, Stream
from kvtier.memory.gpu import fence_over, passing
from kvtier.memory.tiers import CpuMemory, Memory, View
from kvtier.retention import BlockRetention, Retention, block_retention, chain_message
from kvtier.transport import Link, send
from kvtier.types import BlockResult, LeaseTicket, ReadTicket, Tier, WriteTicket
from kvtier.v1 import blocks_pb2
from kvtier.wire import Keys, granted, packed_keys, split_keys, tier_to_wire

if TYPE_CHECKING:
    import torch

STAYS_BLANK: Final = frozenset({BlockResult.PARENT_MISSING, BlockResult.PARENT_CONFLICT})


class Owner(Protocol):
    """The cache of a lease, in one window group."""

    @property
    def group(self) -> int: ...
    @property
    def spec(self) -> CacheSpec: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def session_number(self) -> int: ...
    def slots(self, tier: Tier) -> int: ...
    async def release(self, *leases: Hold, stream: Stream | None = None, timeout: float | None = None) -> None: ...


class Hold:
    """A lease, or leases that are held together, until :meth:`release` or the end of the ``async with`` block."""

    @property
    def groups(self) -> Sequence[Lease]:
        """The lease in each window group."""
        raise NotImplementedError

    async def release(self, *, stream: Stream | None = None, timeout: float | None = None) -> None:
        """Releases the slots: see :meth:`kvtier.Cache.release`. Raises :class:`LeaseError` for a released lease; does
        nothing for an empty one."""
        if all(lease.released for lease in self.groups) and any(lease.id for lease in self.groups):
            raise errors.LeaseError("the lease is released", reason="RELEASED")
        await self.groups[0].cache.release(self, stream=stream, timeout=timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.groups[0].cache.release(self)


class Lease(Hold):
    """Slots of one tier. A lease ends with its session: it survives a broken connection, not a restart of the
    daemon."""

    _starts_blank: ClassVar[bool] = False

    def __init__(
        self, cache: Owner, book: LeaseBook, binding: Binding, tier: Tier, lease_id: int, slots: Sequence[int]
    ) -> None:
        self.cache = cache
        self.tier = tier
        self.id = lease_id
        self._slots = tuple(slots)
        self._exposed = False
        """Whether the caller has seen the slots, and may use them without this object."""
        self.binding = binding
        mapped = binding.mapped
        self.memory: Final = mapped.memory(tier) if mapped is not None and tier in mapped.tiers else None
        """The mapped memory of the slots; None if they are not mapped."""
        self.released = lease_id == 0
        self._book = book
        self._blank = [self._starts_blank] * len(slots)
        self._given_back: set[int] = set()

    def __repr__(self) -> str:
        what = f"{type(self).__name__} {self.id} of cache {self.binding.info.name}"
        return f"<{what}: {len(self)} {self.tier} slots, {'released' if self.released else 'held'}>"

    def __del__(self) -> None:
        # Exposed slots may be in use: only the close of the cache releases them now.
        if not self.released and self._book.keep_forgotten(self):
            warnings.warn(f"not released: {self!r}", ResourceWarning, stacklevel=1, source=self)

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def slots(self) -> tuple[int, ...]:
        """Numbers of the slots in the tier."""
        self._exposed = True
        return self._slots

    @property
    def groups(self) -> tuple[Self]:
        return (self,)

    @property
    def arena(self) -> MappedArena:
        return self.binding.arena

    def view(self, index: int) -> list[View]:
        """The bytes of a slot in place, one view per pool, read-only unless the slot is blank.

        A view is a 1-D uint8 array, or in GPU memory a :class:`kvtier.abi.cuda.views.DeviceView`, which torch, CuPy and
        others take by its ``__cuda_array_interface__``. Do not use views after the release: the slot may belong to
        others.

        Raises :class:`LeaseError` for a released lease or a slot that a commit gave back, :class:`LeaseLost` if the
        lease died with its daemon, :class:`kvtier.errors.CallerError` (CANNOT_MAP) if the tier is not mapped in this
        process.
        """
        self.require_live()
        self._require_index("index", index)
        self._require_held(index)
        return self.arena.view(self.tier, self.cache.group, self.slots[index], write=self._blank[index])

    def _require_index(self, field: str, index: int) -> None:
        errors.require_within(field, index, 0, len(self) - 1)

    def tensors(self, index: int) -> list[torch.Tensor]:
        """Like :meth:`view`, as 1-D torch tensors of the cache's dtype, not copied: on the GPU for a tier of GPU
        memory. Imports torch.

        torch has no read-only tensors. Do not write to a tensor whose slot is not blank: writing spoils the block for
        all readers, or, in a cache opened with ``write`` False, ends the process (SIGSEGV).
        """
        return [buffers.over(part, self.cache.spec.dtype) for part in self.view(index)]

    def require_live(self) -> None:
        """Raises :class:`LeaseError` or :class:`LeaseLost` if the slots are no longer held."""
        if self.released:
            raise errors.LeaseError("the lease is released", reason="RELEASED")
        if self.cache.session_number != self.binding.session:
            message = "the lease ended with the session it was granted in: the daemon restarted, or it was kicked"
            raise errors.LeaseLost(message, reason="LEASE_LOST")

    async def give_back(self, at: Sequence[int], *, stream: Stream | None = None, timeout: float | None = None) -> None:
        """Gives some slots back: blank slots become free, blocks lose this hold. The lease goes on; indices do not
        change.

        Args:
            at: indices of the slots. ``stream``: see :meth:`kvtier.Cache.release`.
        Raises: :class:`InvalidArgument`, :class:`LeaseError`, :class:`LeaseLost`.
        """
        self.require_live()
        places = self._places(at)
        for index in places:
            self._require_held(index)
        if places:
            await self._book.give_back(self, places, stream, timeout)

    def _places(self, at: Sequence[int]) -> list[int]:
        errors.require_kind("at", at, Iterable)
        for number, index in enumerate(at):
            self._require_index(f"at[{number}]", index)
        return list(at)

    def _require_held(self, index: int) -> None:
        if index in self._given_back:
            why = "it was given back, or its key was stored already"
            raise errors.LeaseError(f"slot {index} of the lease is not held any more: {why}", reason="GIVEN_BACK")

    def _set_given_back(self, indices: Iterable[int], given_back: bool) -> None:
        change = self._given_back.update if given_back else self._given_back.difference_update
        change(indices)

    def _shown(self) -> tuple[str, int, Tier, int, bytes, tuple[int, ...]]:
        self.require_live()
        secret = self._book.secret_of(self)
        return self.binding.info.name, self.cache.group, self.tier, self.id, secret, self.slots


class WriteLease(Lease):
    """Reserved slots, to be filled through their views and committed."""

    _starts_blank = True

    @property
    def blank(self) -> list[int]:
        """Indices of the slots that are not committed yet."""
        return [index for index, blank in enumerate(self._blank) if blank and index not in self._given_back]

    async def commit(
        self,
        keys: Keys,
        *,
        parent: bytes | None = None,
        parents: Sequence[bytes | None] | None = None,
        priorities: int | Sequence[int] | None = None,
        retention: Retention | BlockRetention | None = None,
        prompt: Telling | None = None,
        at: Sequence[int] | None = None,
        hold: bool = True,
        release: bool = False,
        stream: Stream | None = None,
        timeout: float | None = None,
    ) -> list[BlockResult]:
        """Commits slots as blocks: immutable, reusable, still held. Returns one result per key; the slot of an EXISTS
        goes back. If several processes hold the slots, one of them commits when all have written.

        Args:
            parent: of the first key, as in ``put``; later keys follow each other. ``parents``: one per key instead.
            priorities: 0 to 100, for all or one per key. ``retention``: instead. ``prompt``: the prompt of the keys.
            at: indices of the slots; default: the first blank slots. ``hold``: False drops the hold on the new blocks.
            release: ends the lease with the call; else PARENT_MISSING and PARENT_CONFLICT leave the slot blank.
            stream: on a GPU, the call is sent once this has passed. After that, giving up may leave new blocks.
        Raises: :class:`InvalidArgument`, :class:`LeaseError`, :class:`LeaseLost`, :class:`kvtier.errors.DeviceError`.
        """
        self.require_live()
        indices, chain = self.blank if at is None else self._places(at), split_keys(packed_keys(keys))
        if len(chain) > len(indices):
            raise errors.InvalidArgument("keys", f"{len(chain)} keys", f"at most {len(indices)}, one a blank slot")
        kept = block_retention(len(chain), self.cache.spec.tokens_per_block, priorities, retention)
        part = ChainPart(chain, [], parents_of(chain, parent, parents, prompt), kept, prompt)
        slots = [self.slots[index] for index in indices[: len(chain)]]
        request = part.commit(self.binding.info.options, slots=slots, release=release, let_go=not hold)
        results = await self._book.commit(self, request, stream, timeout)
        for index, result in zip(indices, results, strict=False):
            self._blank[index] = result in STAYS_BLANK
            self._set_given_back([index], not self._blank[index] and (result is BlockResult.EXISTS or not hold))
        return results

    def ticket(self) -> WriteTicket:
        """A ticket with which another process of this daemon joins the held lease: see :meth:`kvtier.Cache.join`.
        Raises :class:`LeaseError`, :class:`LeaseLost`."""
        return WriteTicket(*self._shown())

    def _set_blank(self, indices: Iterable[int], blank: bool) -> None:
        for index in indices:
            self._blank[index] = blank


class ReadLease(Lease):
    """Acquired blocks, READY in one tier, where the lease keeps them."""

    def __init__(
        self,
        cache: Owner,
        book: LeaseBook,
        binding: Binding,
        tier: Tier,
        lease_id: int,
        slots: Sequence[int],
        *,
        keys: Sequence[bytes],
        generations: Sequence[int],
        found_in: bytes,
        matched: int,
        error: errors.KvtierError | None,
        needed: Needed,
    ) -> None:
        super().__init__(cache, book, binding, tier, lease_id, slots)
        self.keys = tuple(keys)
        self.needed = needed
        """Places of the held blocks in the chain: its sinks, and from ``first`` on, which is above 0 only in a sliding
        group."""
        self.generations = np.array(generations, dtype=np.uint64)
        self.found_in = found_in
        """Residency set at the match, one byte per key."""
        self.matched = matched
        """Length of the stored prefix at the match; more than :attr:`prefix_length` if the tier was short of room."""
        self.error = error
        """The error that ``acquire`` of this chain alone would have raised; None if the chain was not refused."""

    @property
    def refusal(self) -> str:
        """Why fewer than ``min_blocks`` were available; empty if the chain was not refused."""
        return "" if self.error is None else self.error.reason

    @property
    def blocks(self) -> int:
        """Number of held blocks."""
        return len(self) - len(self._given_back)

    @property
    def prefix_length(self) -> int:
        """Length of the acquired prefix."""
        return self.needed.stop

    def ticket(self) -> ReadTicket:
        """See :meth:`WriteLease.ticket`."""
        told = tuple(self.generations.tolist()), self.found_in, self.matched, self.needed
        return ReadTicket(*self._shown(), self.keys, *told)

    def unchanged(self) -> bool:
        """Whether every held slot still has the acquired block. Check before and after a copy."""
        held = np.delete(np.arange(len(self.slots)), [*self._given_back])
        now = self.arena.generations(self.tier, self.cache.group, np.array(self.slots, dtype=np.intp)[held])
        return bool(np.array_equal(now, self.generations[held]))


_touched: Final[Counter[Memory | None]] = Counter()
"""Per memory, the number of leases that kernels may still touch. The memory stays mapped after its cache is garbage, to
the end of the process if the end of the kernels is never confirmed."""


class LeaseBook:
    """The leases of one cache object and its :meth:`kvtier.Cache.in_group` copies."""

    def __init__(self, binder: Binder, deadline: Callable[[float | None], Deadline]) -> None:
        self._binder: Final = binder
        self._session: Final = binder.session
        self._loop: Final = asyncio.get_running_loop()
        self._deadline: Final = deadline
        self._leases: WeakSet[Lease] = WeakSet()
        self._forgotten: set[Lease] = set()
        """Leases that the caller dropped without a release."""
        self._ending: set[Lease] = set()
        """Leases that an unanswered commit is to end."""
        self._in_use: WeakSet[Lease] = WeakSet()
        """Leases whose memory may still be touched: until their release is requested, even if it cannot reach the
        daemon."""
        binder.work = lambda stream: fence_of(list(self._in_use), stream)
        binder.rest = lambda: self._untouched(list(self._in_use))

    async def reserve(
        self, cache: Owner, tier: Tier, count: int, timeout: float | None, after: bytes = b""
    ) -> WriteLease:
        """``after``, for a put: the block that its blocks will follow; no room is made by dropping its chain."""
        deadline = self._deadline(timeout)
        # A repeated call must be identical to the byte, so it carries the whole time, not the rest.
        request = blocks_pb2.ReserveRequest(
            group=cache.group, tier=tier_to_wire(tier), count=count, timeout_ns=deadline.wait_ns(), after=after
        )
        ahead = self._binder.slots_ahead.take(cache.group, tier, count) if after else None
        binding, reply = ahead or await self._binder.take(lambda stubs: stubs.blocks.Reserve, request, deadline)
        lease = WriteLease(cache, self, binding, tier, reply.lease_id, reply.slots[:count])
        self.keep([lease])
        return lease

    async def acquire(
        self,
        owners: Sequence[Owner],
        packed: Sequence[bytes],
        tier: Tier,
        min_blocks: int,
        retention: Retention | None,
        timeout: float | None,
        recompute_ns: int = 0,
        *,
        for_read: bool = False,
    ) -> list[list[ReadLease]]:
        """Holds a prefix of each chain in the window groups of ``owners``: see :meth:`kvtier.Cache.acquire_many`.

        Args:
            for_read: the acquire is part of a read, which counts itself.
        Returns: A list per chain, with a lease per group.
        """
        deadline = self._deadline(timeout)
        chains = [chain_message(keys, min_blocks, retention, owners[0].spec.tokens_per_block) for keys in packed]
        request = blocks_pb2.AcquireRequest(
            groups=[owner.group for owner in owners],
            tier=tier_to_wire(tier),
            chains=[chain for chain in chains if chain.keys],
            timeout_ns=deadline.wait_ns(),
            recompute_ns_per_block=recompute_ns,
        )
        for chain in request.chains:
            chain.counted = for_read or not self._binder.asked.read(chain.keys)
        binding, reply = self._binder.binding, blocks_pb2.AcquireResponse()
        if request.chains or not chains:
            binding, reply = await self._binder.take(lambda stubs: stubs.blocks.Acquire, request, deadline)
        answers = iter(reply.chains)
        none = blocks_pb2.AcquiredChain(refusal="TOO_SHORT" if min_blocks else "")  # of a prompt shorter than a block
        acquired = []
        for keys in packed:
            answer = next(answers) if keys else none
            error = errors.chain_error(answer, min_blocks) if answer.refusal else None
            parts = answer.groups or [blocks_pb2.AcquiredGroup() for _ in owners]
            leases = [
                ReadLease(
                    *(owner, self, binding, tier, part.lease_id, part.slots),
                    needed=(needed := granted(answer, part)),
                    keys=split_keys(needed.cut(keys, KEY_BYTES)),
                    generations=part.generations,
                    found_in=part.found_in,
                    matched=answer.matched,
                    error=error,
                )
                for owner, part in zip(owners, parts, strict=True)
            ]
            self.keep(lease for lease in leases if lease.id)
            acquired.append(leases)
        return acquired

    async def join(self, cache: Owner, ticket: LeaseTicket, timeout: float | None) -> Lease:
        request = blocks_pb2.JoinRequest(lease_id=ticket.lease_id, secret=ticket.secret)
        binding, reply = await self._binder.take(lambda stubs: stubs.blocks.Join, request, self._deadline(timeout))
        hold = cache, self, binding, ticket.tier, reply.lease_id, ticket.slots
        lease: Lease
        if isinstance(ticket, ReadTicket):
            names = ("keys", "generations", "found_in", "matched", "needed")
            lease = ReadLease(*hold, error=None, **{name: getattr(ticket, name) for name in names})
        else:
            lease = WriteLease(*hold)
        lease._exposed = True  # in its ticket
        blank = frozenset(reply.blank)
        held = blank.union(reply.held)
        lease._blank = [slot in blank for slot in ticket.slots]
        lease._set_given_back([index for index, slot in enumerate(ticket.slots) if slot not in held], True)
        self.keep([lease])
        return lease

    def secret_of(self, lease: Lease) -> bytes:
        """The proof that this session, the lease's owner, made a ticket."""
        return lease_secret(self._session.welcome.token, lease.binding.cache_id, lease.id)

    def keep(self, leases: Iterable[Lease]) -> None:
        """Keeps newly granted leases until they are released."""
        for lease in leases:
            self._leases.add(lease)
            self._in_use.add(lease)
            _touched[lease.memory] += 1
            self._session.lend(lease.binding.session)

    def keep_forgotten(self, lease: Lease) -> bool:
        """Keeps a lease that is about to be garbage until its release, which begins now unless its slots are exposed.
        Returns whether the daemon still holds it. Called in any thread."""
        if self._session.closed:
            return False
        for known in (self._forgotten, self._leases, self._in_use):
            known.add(lease)
        if not lease._exposed:
            with suppress(RuntimeError):  # the loop is closed
                what, release = "release of a forgotten lease", partial(self.release, [lease], PASSED, None)
                self._loop.call_soon_threadsafe(lambda: self._binder.later(release(), what))
        return self._session.number == lease.binding.session

    async def commit(
        self, lease: WriteLease, request: blocks_pb2.CommitRequest, stream: Stream | None, timeout: float | None
    ) -> list[BlockResult]:
        """See :meth:`WriteLease.commit`."""
        if not request.keys and not request.release:
            return []
        deadline = self._deadline(timeout)
        await passing(fence_of([lease], stream), deadline)
        lease.require_live()
        return await self._commit(lease, request, deadline)

    async def store(self, lease: WriteLease, part: ChainPart, timeout: float | None) -> list[BlockResult]:
        """Commits a piece of a chain in the first slots of a lease, and ends the lease."""
        lease.require_live()
        ahead = self._binder.slots_ahead.wanted(lease.cache.group, lease.tier, len(part.chain))
        slots = lease.slots[: len(part.chain)]
        request = part.commit(lease.binding.info.options, slots=slots, release=True, ahead=ahead)
        return await self._commit(lease, request, self._deadline(timeout))

    async def _commit(
        self, lease: WriteLease, request: blocks_pb2.CommitRequest, deadline: Deadline
    ) -> list[BlockResult]:
        request.cache_id, request.lease_id, request.seq = lease.binding.cache_id, lease.id, self._session.next_seq()
        self._binder.asked.stored(request.keys)
        if isinstance(memory := lease.memory, CpuMemory) and lease.binding.info.options.checksum == "commit":
            request.checksums = await memory.checksums(lease.cache.group, request.slots)

        async def attempt(link: Link) -> blocks_pb2.CommitResponse:
            if link.session != lease.binding.session:
                message = "the session ended before the blocks were committed: the daemon restarted, or it was kicked"
                raise errors.LeaseLost(message, reason="LEASE_LOST")
            lease._set_blank(blank, False)  # from now on these slots may be blocks, even if the answer is lost
            lease._set_given_back(blank, request.let_go)
            return await send(link, lambda stubs: stubs.blocks.Commit, request)

        if request.release:
            self._ending.add(lease)
        await self._binder.ahead()
        slots = set(request.slots)
        blank = [index for index in lease.blank if lease._slots[index] in slots]
        try:
            reply = await self._session.call(attempt, deadline)
        except (*UNHEARD, errors.KvtierError) as error:
            if isinstance(error, UNHEARD):
                if request.ahead:
                    self._binder.give_up(lease.binding, request.seq)
            elif not isinstance(error, errors.DaemonError):  # the daemon refused, which changes nothing
                lease._set_blank(blank, True)
                lease._set_given_back(blank, False)
            raise
        if request.release:
            lease.released = True
            self._untouched([lease])
            self._ending.discard(lease)
        if reply.HasField("ahead"):
            self._binder.slots_ahead.keep(lease.cache.group, lease.tier, lease.binding, reply.ahead)
        return [BlockResult(result) for result in reply.results]

    @property
    def out(self) -> list[Lease]:
        """Leases that are not released yet."""
        return [lease for lease in self._leases if not lease.released]

    async def release(self, leases: Iterable[Hold], stream: Stream | None, timeout: float | None) -> None:
        live = [part for lease in leases for part in lease.groups if not part.released]
        if not live:
            return
        fence, deadline = fence_of(live, stream), self._deadline(timeout)
        ending = self._ending.intersection(live)  # read now: an answered commit forgets its lease

        def mark(released: bool) -> None:
            for lease in live:
                lease.released = released

        async def tell() -> None:
            self._untouched(live)
            await self._tell(live, ending, deadline)
            self._forgotten.difference_update(live)

        await self._to_the_end(mark, tell, fence, deadline)

    async def give_back(
        self, lease: Lease, places: Sequence[int], stream: Stream | None, timeout: float | None
    ) -> None:
        """See :meth:`Lease.give_back`, which is the way to call this."""
        fence, deadline = fence_of([lease], stream), self._deadline(timeout)
        slots = [lease.slots[index] for index in places]
        tell = partial(self._binder.release, lease.binding, [lease.id], deadline, slots)
        await self._to_the_end(partial(lease._set_given_back, places), tell, fence, deadline)

    async def _to_the_end(
        self, mark: Callable[[bool], None], tell: Callable[[], Awaitable[None]], fence: Fence, deadline: Deadline
    ) -> None:
        """Gives slots back, also if the caller is cancelled. After a failure they are as they were, to be given back
        again."""

        async def give_back() -> None:
            try:
                await passing(fence, deadline)
                await tell()
            except (errors.RetryableError, errors.DeviceError):
                mark(False)
                raise

        mark(True)
        work = asyncio.ensure_future(give_back())
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            self._binder.later(work, "release after its caller was cancelled")
            raise

    async def _tell(self, leases: Sequence[Lease], ending: Collection[Lease], deadline: Deadline) -> None:
        """Releases leases in the daemon: first, one by one, the leases in ``ending``. Their commit may have ended them
        although its answer was lost, and a call that names an unknown lease ends none."""
        for lease in ending:
            try:
                await self._binder.release(lease.binding, [lease.id], deadline)
            except errors.LeaseError as error:
                if error.reason != "UNKNOWN_LEASE":
                    raise
        others = [lease for lease in leases if lease not in ending]
        for binding in {lease.binding for lease in others}:
            await self._binder.release(binding, [lease.id for lease in others if lease.binding is binding], deadline)
        self._ending.difference_update(leases)

    def _untouched(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            if lease in self._in_use:
                self._in_use.discard(lease)
                _touched[lease.memory] -= 1
                if not _touched[lease.memory]:
                    del _touched[lease.memory]
                self._session.give_back(lease.binding.session)


def fence_of(leases: Iterable[Lease], stream: Stream | None) -> Fence:
    """The point that ``stream`` has reached, for the leases in mapped GPU memory: see :func:`fence_over`."""
    return fence_over({id(memory): memory for lease in leases if (memory := lease.memory) is not None}.values(), stream)
