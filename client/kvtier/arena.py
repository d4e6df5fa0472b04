"""The mapped arena of a cache, and the cache's binding to the client's current session."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Thread, get_native_id
from types import MappingProxyType
from typing import Any, Final, Protocol, TypeVar
from weakref import ref

import grpc
import numpy as np
from numpy.typing import NDArray

from kvtier import errors
from kvtier.abi import attach, memory
from kvtier.abi.control import HEADER_BYTES, STATE_OFFSET, ArenaState
from kvtier.abi.cuda.errors import CudaError, CudaUnavailable
from kvtier.abi.key_index import IndexReader
from kvtier.abi.layout import ArenaLayout
from kvtier.abi.spec import AbiError, CacheSpec
from kvtier.buffers import Reach, Rows
from kvtier.chains import Asked
from kvtier.deadline import PASSED, Deadline, Fence, Stream
from kvtier.memory.arrays import Bytes, OnGpu
from kvtier.memory.gpu import Gpu
from kvtier.memory.tiers import CpuMemory, Memory, View, map_device
from kvtier.session import Session
from kvtier.transport import Link, Response, Stubs, send
from kvtier.types import MAPPED_TIERS, CacheInfo, CacheOptions, Tier
from kvtier.v1 import blocks_pb2, caches_pb2
from kvtier.wire import Budgets, as_tier, budgets_to_wire, cache_info, message, options_to_wire, spec_to_wire

_STATE_WORD: Final = STATE_OFFSET // 4
_SERVING: Final = int(ArenaState.SERVING)
"""A plain int in a global: every read compares it twice, and a member of an enumeration is slower to reach."""


class MappedArena:
    """The mapped segments of one cache, unmapped when the last array over them is gone; there is no ``close``."""

    def __init__(
        self,
        fds: Mapping[str, int],
        *,
        write: bool,
        spec: CacheSpec,
        device: Callable[[ArenaLayout], Memory] | None = None,
        unmapped: Mapping[Tier, str] = MappingProxyType({}),
    ) -> None:
        """Maps the descriptors; the caller keeps and closes them.

        Args:
            write: as requested over the attach socket.
            device: makes the device tier's memory over the mapping of the ``cuda`` descriptor.
            unmapped: why a tier of the cache is not mapped.

        Raises :class:`DaemonError` if the segments are not the arena of a cache with this specification.
        """
        self._control = _mapped(fds[attach.CONTROL], write=False)
        try:
            self.layout = ArenaLayout.read(self._control, spec)
        except AbiError as error:
            raise errors.DaemonError(f"the daemon's arena cannot be trusted: {error}", reason="BAD_ARENA") from error
        self.writable = write
        self.stale = False
        """True once the cache is open in another session, or cannot be opened there. The client sets it."""
        self.index = IndexReader(self.layout, self._control) if self.layout.index_bytes else None
        """The index of the cache's blocks; None if the daemon keeps no index."""
        self._states = self._control[:HEADER_BYTES].data.cast("I")
        data = {
            tier: _mapped(fds[str(tier)], write=write, at_least=self.layout.data_bytes(tier))
            for tier in MAPPED_TIERS
            if str(tier) in fds
        }
        self._segments: Final = [ref(each) for each in (self._control, *data.values())]
        self._memories: dict[Tier, Memory] = {tier: CpuMemory(self.layout, tier, data[tier]) for tier in data}
        if device is not None:
            self._memories[Tier.DEVICE] = device(self.layout)
        self.unmapped: Final[Mapping[Tier, str]] = MappingProxyType(dict(unmapped))
        """Maps each tier of the cache whose slots are not mapped to the reason."""
        self._generations = {
            (tier, group): self.layout.generations(self._control, tier, group)
            for tier in MAPPED_TIERS
            for group in range(len(self.layout.groups))
        }

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Tiers with mapped slots, the fastest first."""
        return tuple(sorted(self._memories))

    @property
    def current(self) -> bool:
        """Whether index and slots may be read without a call: the arena is not stale, and its daemon has not closed
        it."""
        return not self.stale and self._states[_STATE_WORD] == _SERVING

    def touch(self) -> None:
        """Maps every page in a background thread, so that the first lookups and copies do not fault pages in one by
        one."""
        # A daemon thread, not an executor's: it does not delay the end of the process.
        Thread(target=_touched, args=[self._segments], name="kvtier-touch", daemon=True).start()

    @property
    def memories(self) -> Collection[Memory]:
        return self._memories.values()

    def memory(self, tier: Tier) -> Memory:
        """The memory of a tier. Raises :class:`CallerError` (CANNOT_MAP), with the reason, if its slots are not
        mapped."""
        memory = self._memories.get(tier)
        if memory is None:
            why = self.unmapped.get(tier, f"the cache has no {tier} tier")
            message = f"slots of the {tier} tier are not mapped in this process: {why}"
            raise errors.CallerError(message, reason="CANNOT_MAP")
        return memory

    def reach(self, tier: Tier | None) -> Reach | None:
        """See :meth:`kvtier.cache.Cache.reach`."""
        memories = [memory for each, memory in self._memories.items() if tier is None or each is tier]

        def within(block: OnGpu) -> Gpu | None:
            gpus = {memory.reach(block) for memory in memories}
            return gpus.pop() if len(gpus) == 1 else None

        return within if memories else None

    def view(self, tier: Tier, group: int, slot: int, *, write: bool) -> list[View]:
        """A slot's bytes in place, one view per pool."""
        return [*self.memory(tier).view(group, slot, write=write)]

    def write(self, tier: Tier, group: int, slots: Sequence[int], blocks: Rows) -> None:
        """Copies blocks into slots and returns when the copy has ended. Pages of :class:`kvtier.Planes` that have only
        a part of a block write only that part."""
        self.memory(tier).write(group, slots, blocks)

    def generations(self, tier: Tier, group: int, slots: NDArray[np.integer[Any]]) -> NDArray[np.uint64]:
        now: NDArray[np.uint64] = self._generations[tier, group][slots]
        return now


def _touched(segments: Sequence[ref[Bytes]]) -> None:
    os.setpriority(os.PRIO_PROCESS, get_native_id(), 19)
    for segment in segments:
        memory.touch(segment)


def _mapped(fd: int, *, write: bool, at_least: int = HEADER_BYTES) -> Bytes:
    size = os.fstat(fd).st_size
    if size < at_least:
        raise errors.DaemonError(f"a segment of {size} bytes: the layout says {at_least}", reason="BAD_ARENA")
    return memory.mapped(fd, size, write=write)


_GIVE_BACK_S: Final = 1.0
"""Seconds for one attempt to give leases back; attempts repeat while the daemon does not answer."""
UNHEARD: Final = (asyncio.CancelledError, errors.DeadlineExceeded, errors.DaemonUnavailable)
"""Errors after which the daemon may have carried out the call although the client got no answer."""
_FOLLOW_S: Final = 60.0
"""Seconds that a restarted daemon has to open a cache. After that, reads without calls end."""

_log = logging.getLogger(__name__)


class OfCache(Protocol):
    """A message about a cache."""

    cache_id: int


Asking = TypeVar("Asking", bound=OfCache)
Granting = TypeVar("Granting", blocks_pb2.ReserveRequest, blocks_pb2.AcquireRequest, blocks_pb2.JoinRequest)


@dataclass(slots=True, frozen=True, eq=False)
class Binding:
    """A cache in one session. ``mapped`` is None if its memory is not mapped."""

    session: int
    cache_id: int
    mapped: MappedArena | None
    info: CacheInfo

    @property
    def arena(self) -> MappedArena:
        """The mapped arena. Raises :class:`kvtier.errors.CallerError` (CANNOT_MAP) if the memory is not mapped."""
        if self.mapped is None:
            message = f"cache {self.info.name}: its memory is not mapped; put and get go without"
            raise errors.CallerError(message, reason="CANNOT_MAP")
        return self.mapped


class Binder:
    """Opens a cache in the link's session, and calls the daemon about it."""

    def __init__(
        self,
        session: Session,
        name: str,
        spec: CacheSpec | None,
        budgets: Budgets | None,
        options: CacheOptions | None,
        device: str,
        *,
        write: bool,
        mapped: bool,
    ) -> None:
        """``spec``: None opens an existing cache and never creates one. ``write``: slots may be filled. ``mapped``: map
        the memory, if the session can."""
        self.session: Final = session
        self.write: Final = bool(write)  # numpy's bool is not JSON
        self.name: Final = name
        self._asked = spec
        self._spec = spec
        self._wanted = {
            "device": device,
            "budgets": budgets_to_wire(budgets),
            "options": None if options is None else options_to_wire(options),
        }
        self._mapped = mapped
        self._binding: Binding | None = None
        self.asked: Final = Asked()
        self._lock = asyncio.Lock()
        self._closed = False
        self.slots_ahead: Final = AheadSlots(self)
        self.returning: Final[set[asyncio.Future[None]]] = set()
        """Releases under way that no caller waits for."""
        self.ahead: Callable[[], Awaitable[None]] = _nothing
        """Sends pending read notes to the daemon. Awaited before every call."""
        session.followers.add(self)
        self.work: Callable[[Stream | None], Fence] = lambda stream: PASSED
        """Fences this process's own work on its leases: see :class:`kvtier.session.Follower`."""
        self.rest: Callable[[], None] = lambda: None
        """Marks that work as over: see :class:`kvtier.session.Follower`."""

    @property
    def unmapped(self) -> Mapping[Tier, str]:
        """Maps each tier of the cache that clients can map, but that is not mapped here, to the reason."""
        binding = self.binding
        if binding.mapped is not None:
            return binding.mapped.unmapped
        why = "the cache was opened without mapping" if self.session.can_map else "memory cannot be mapped over TCP"
        tiers = {info.tier for group in binding.info.groups for info in group.tiers}
        return {tier: why for tier in MAPPED_TIERS if tier in tiers}

    @property
    def maps(self) -> bool:
        return self._mapped and self.session.can_map

    @property
    def spec(self) -> CacheSpec:
        """The specification asked for, or else the daemon's. Raises :class:`ClientClosed` if the cache was never
        opened."""
        return self._spec if self._spec is not None else self.binding.info.spec

    def close(self) -> bool:
        """Refuses all calls from now on. Returns False if it was closed already."""
        was, self._closed = self._closed, True
        return not was

    @property
    def binding(self) -> Binding:
        """The last binding. Raises :class:`ClientClosed` if the cache was never opened."""
        if self._binding is None:
            raise errors.ClientClosed(f"cache {self.name} is not open", reason="CLOSED")
        return self._binding

    @property
    def readable(self) -> Binding | None:
        """The last binding, for reads without a call, also while the daemon is away. None if the cache or client is
        closed, or the cache was never opened."""
        return None if self._closed or self.session.closed else self._binding

    def bound_to(self, link: Link | None) -> Binding | None:
        """The last binding, if it belongs to this link's session."""
        binding = self._binding
        return binding if link is not None and binding is not None and binding.session == link.session else None

    def session_changed(self, session: int) -> None:
        """Opens the cache in the new session in the background; a daemon that has just started may still be reading it.

        Until then the arena of the last session stays readable. Either the daemon goes on with the same memory, or no
        process writes to it any more.
        """
        binding = self._binding
        if binding is not None and binding.mapped is not None and binding.session != session and not self._closed:
            self.session.spawn(self._follow(binding.mapped))

    async def _follow(self, mapped: MappedArena) -> None:
        try:
            await self.session.call(partial(self.bind, create=False), Deadline(_FOLLOW_S), wait=_FOLLOW_S)
        except (errors.KvtierError, OSError) as error:  # OSError: no memory or descriptor is left for the mapping
            _log.debug("cache %s is not opened again: %s", self.name, error)
            mapped.stale = True  # the next read calls the daemon and gets the error

    async def bind(self, link: Link, *, create: bool = True) -> Binding:
        """The cache's binding in the link's session; opens the cache there if necessary. ``create``: also creates a
        missing cache. Raises :class:`ClientClosed`."""
        async with self._lock:
            if self._closed:
                raise errors.ClientClosed(f"cache {self.name} was closed", reason="CLOSED")
            if self._binding is not None and self._binding.session == link.session:
                return self._binding
            named = self._asked if create else None
            wanted: dict[str, Any] = self._wanted if create else {}
            told = None if named is None else spec_to_wire(named)
            seq = self.session.next_seq()
            request = message(caches_pb2.OpenRequest, name=self.name, spec=told, seq=seq, **wanted)
            reply = await send(link, lambda stubs: stubs.caches.Open, request)
            if reply.kept:
                _log.warning("cache %s keeps its former budgets and write policy: %s", self.name, reply.kept)
            info = cache_info(reply.info)
            spec = self._spec or info.spec
            if named is None and info.spec.fingerprint() != spec.fingerprint():
                raise errors.SpecMismatch("spec", info.spec, f"that of the cache {self.name} that was opened first")
            mapped = await self._map(link, reply.cache_id, spec) if self.maps else None
            before, self._binding = self._binding, Binding(link.session, reply.cache_id, mapped, info)
            self._spec = spec
            if before is not None and before.mapped is not None:
                before.mapped.stale = True
            return self._binding

    async def _map(self, link: Link, cache_id: int, spec: CacheSpec) -> MappedArena:
        segments = await link.attach.map(cache_id, write=self.write)
        told = segments.told
        unmapped = {as_tier(name): why for name, why in told.unmapped.items()}
        try:
            device = None
            if told.HasField("cuda"):
                try:
                    handle = attach.CudaHandle(told.cuda.uuid, told.cuda.nbytes)
                    device = await map_device(segments.fds[attach.CUDA], handle)
                except (CudaUnavailable, CudaError) as error:
                    unmapped[Tier.DEVICE] = str(error)
            arena = MappedArena(segments.fds, write=self.write, spec=spec, device=device, unmapped=unmapped)
        finally:
            segments.close()
        arena.touch()
        return arena

    async def call(
        self,
        method: Callable[[Stubs], grpc.aio.UnaryUnaryMultiCallable[Asking, Response]],
        request: Asking,
        deadline: Deadline,
    ) -> Response:
        """Makes a call that may run again in another session: a lookup, or a call that leaves the same state when
        repeated. Sets ``cache_id`` of ``request``, which differs between sessions."""

        async def attempt(link: Link) -> Response:
            request.cache_id = (await self.bind(link)).cache_id
            return await send(link, method, request)

        await self.ahead()
        return await self.session.call(attempt, deadline)

    async def take(
        self,
        method: Callable[[Stubs], grpc.aio.UnaryUnaryMultiCallable[Granting, Response]],
        request: Granting,
        deadline: Deadline,
    ) -> tuple[Binding, Response]:
        """A :meth:`call` that grants leases; sets ``seq`` of ``request``. If the answer does not reach the caller, the
        granted leases are released.

        A call refused for lack of room is repeated once, after this client's pending releases are done.
        """
        sent: list[Binding] = []
        request.seq = self.session.next_seq()

        async def attempt(link: Link) -> tuple[Binding, Response]:
            binding = await self.bind(link)
            sent[:] = [binding]
            request.cache_id = binding.cache_id
            return binding, await send(link, method, request)

        await self.ahead()
        try:
            try:
                return await self.session.call(attempt, deadline)
            except errors.TierFull:
                if not await self.settle(deadline):
                    raise
                return await self.session.call(attempt, deadline)
        except UNHEARD:
            for binding in sent:
                self.give_up(binding, request.seq)
            raise

    def give_up(self, binding: Binding, seq: int) -> None:
        """Begins to give back the leases that a call without an answer may have granted."""
        release = blocks_pb2.ReleaseRequest(cache_id=binding.cache_id, given_up=[seq], seq=self.session.next_seq())
        self.later(self._until_answered(binding, release))

    async def release(
        self, binding: Binding, lease_ids: Sequence[int], deadline: Deadline, slots: Sequence[int] = ()
    ) -> None:
        """Ends leases of a binding, in this order. In any other session they have ended already.

        ``slots``: gives back only these slots of a single lease. If the daemon is away or does not answer by the
        deadline, the release goes on in the background.
        """
        if not lease_ids:
            return
        request = blocks_pb2.ReleaseRequest(
            cache_id=binding.cache_id, lease_ids=lease_ids, seq=self.session.next_seq(), slots=slots
        )
        if self.session.reachable:
            with suppress(errors.DeadlineExceeded, errors.DaemonUnavailable):
                return await self.session.call(_releasing(binding, request), deadline)
        self.later(self._until_answered(binding, request))

    def later(
        self, work: Coroutine[Any, Any, None] | asyncio.Future[None], what: str = "giving back what nobody heard of"
    ) -> None:
        """Keeps ``work``, a release that no caller waits for, alive to its end, and logs its errors. Drops work that
        has not begun if the loop would not end it."""
        if isinstance(work, Coroutine) and self.session.torn_down:
            return work.close()
        begun = asyncio.ensure_future(work)
        self.returning.add(begun)
        begun.add_done_callback(self.returning.discard)
        self.session.spawn(_logged(begun, what))

    async def settle(self, deadline: Deadline) -> bool:
        """Waits for the releases under way. Returns False if there were none."""
        returning = list(self.returning)
        if returning:
            await asyncio.wait(returning, timeout=deadline.left())
        return bool(returning)

    async def _until_answered(self, binding: Binding, request: blocks_pb2.ReleaseRequest) -> None:
        try:
            await self.until_answered(_releasing(binding, request))
        except errors.LeaseError as error:
            if error.reason != "UNKNOWN_LEASE":
                raise  # otherwise a commit ended the lease, and its answer was lost

    async def until_answered(self, attempt: Callable[[Link], Awaitable[None]]) -> None:
        """Repeats the attempt until the daemon answers or the client is closed. A long-lived process would otherwise
        keep the slots: no other party gives them back."""
        while True:
            try:
                return await self.session.call(attempt, Deadline(_GIVE_BACK_S), wait=_GIVE_BACK_S)
            except errors.ClientClosed:
                return
            except (errors.DeadlineExceeded, errors.DaemonUnavailable) as error:
                _log.debug("not given back yet: %s", error)


_AHEAD_S: Final = 0.1
"""Seconds for which slots leased ahead are kept."""


class AheadSlots:
    """Slots that commits leased for the next put, by group and tier. Unused slots soon go back."""

    def __init__(self, binder: Binder) -> None:
        self._binder: Final = binder
        self._of: Final[dict[tuple[int, Tier], tuple[Binding, blocks_pb2.ReserveResponse, asyncio.TimerHandle]]] = {}
        self._last: Final[dict[tuple[int, Tier], int]] = {}
        """Number of blocks of the last put."""

    def wanted(self, group: int, tier: Tier, count: int) -> int:
        """Number of slots to lease with the commit of ``count`` blocks: the next put is like the last two."""
        last, self._last[group, tier] = self._last.get((group, tier)), count
        return count if last == count else 0

    def keep(self, group: int, tier: Tier, binding: Binding, lease: blocks_pb2.ReserveResponse) -> None:
        self._give_back((group, tier))  # from another put meanwhile
        timer = asyncio.get_running_loop().call_later(_AHEAD_S, self._give_back, (group, tier))
        self._of[group, tier] = binding, lease, timer

    def take(self, group: int, tier: Tier, count: int) -> tuple[Binding, blocks_pb2.ReserveResponse] | None:
        """A lease of ``count`` slots or more; None if there is none."""
        if (group, tier) not in self._of:
            return None
        binding, lease, timer = self._of[group, tier]
        if len(lease.slots) < count or binding.session != self._binder.session.number:
            self._give_back((group, tier))
            return None
        timer.cancel()
        del self._of[group, tier]
        return binding, lease

    def give_back(self) -> None:
        """Begins to give all slots back."""
        for place in list(self._of):
            self._give_back(place)

    def _give_back(self, place: tuple[int, Tier]) -> None:
        if place in self._of:
            binding, lease, timer = self._of.pop(place)
            timer.cancel()
            release = self._binder.release(binding, [lease.lease_id], Deadline(_GIVE_BACK_S))
            self._binder.later(release, "release of slots leased ahead")


def _releasing(binding: Binding, request: blocks_pb2.ReleaseRequest) -> Callable[[Link], Awaitable[None]]:
    async def attempt(link: Link) -> None:
        if link.session == binding.session:
            await send(link, lambda stubs: stubs.blocks.Release, request)

    return attempt


async def _logged(work: asyncio.Future[None], what: str) -> None:
    try:
        await work
    except errors.KvtierError as error:
        _log.warning("%s: %s", what, error)


async def _nothing() -> None:
    pass
