"""``kvtier.v1.Blocks``: validate, call the engine, pack the answer."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from hmac import compare_digest
from typing import Final, TypeVar

import grpc
import xxhash

from kvtier.abi.attach import lease_secret
from kvtier.abi.stream import CHECKSUM_BYTES
from kvtier.v1 import blocks_pb2, common_pb2
from kvtierd.core.errors import ForeignLease, UnknownLease
from kvtierd.core.events import Cause
from kvtierd.core.ids import DEVICE, CacheId, GroupId, Key, LeaseId, SessionId, SlotId, Tier
from kvtierd.core.outcome import Grant, GroupGrant, Refusal, RefusalReason
from kvtierd.core.removal import DropResult
from kvtierd.core.transfers import BlockResult, BlockSlots, ChainRequest, GroupResidency, ResetResult
from kvtierd.mover.engine import Engine
from kvtierd.mover.executor import TicketRefused, UnknownCache
from kvtierd.mover.runtime import CacheRuntime, Stretch
from kvtierd.rights import Right
from kvtierd.service import validation, wire
from kvtierd.service.attach import DaemonIdentity
from kvtierd.service.cache import ServedCache
from kvtierd.service.calls import Access
from kvtierd.service.catalog import Catalog
from kvtierd.service.errors import CallRefused, bad_argument, shown
from kvtierd.service.forgotten import Forgotten
from kvtierd.service.hints import Hints
from kvtierd.service.remote.tier import RemoteTier
from kvtierd.service.sessions import ClientSession, SessionRegistry
from kvtierd.tiers.base import Bytes, TierError

PAGE_ROWS: Final = 4096
"""Most rows in a page of a listing: a page costs the loop about a millisecond."""

MEMORY_TIERS: Final = (Tier.DEVICE, Tier.HOST)
"""Tiers whose slots clients can lease."""

FETCH_SHARE: Final = 0.8
"""Share of a call's time for fetching from the remote tier; the rest is for making room in the requested tier."""

K = TypeVar("K")


MAX_LEASES: Final = 65536
"""Most leases of a session, over all caches."""
MAX_HINTS: Final = 256


@dataclass(slots=True, frozen=True, eq=False)
class Caps:
    """The limits of a session. Loop thread only. ``_reserved_fraction``: a session's largest share of a tier's slots of
    a window group."""

    _engine: Engine
    _reserved_fraction: float
    _reserving: Counter[tuple[SessionId, CacheId, GroupId, Tier]] = field(default_factory=Counter, init=False)
    _leasing: Counter[SessionId] = field(default_factory=Counter, init=False)

    @contextmanager
    def reserving(
        self, session: ClientSession, cache: ServedCache, group: GroupId, tier: Tier, count: int
    ) -> Iterator[None]:
        """Counts a reservation during the call. Raises RESOURCE_EXHAUSTED (OVER_CAP)."""
        slots = cache.slots[tier][group]
        allowed = max(1, int(self._reserved_fraction * slots))
        if allowed < slots:
            under_way = self._reserving[session.id, cache.id, group, tier]
            held = cache.runtime.manager.blank_of(session.id, group, tier) + under_way
            if held + count > allowed:
                says = f"{count} {tier} slots of cache {cache.name} wanted, {held} are reserved, {allowed} may be"
                raise _over("max_reserved_fraction", says, session, tier, count, held, allowed)
        self._require_leases(session, 1)
        key = (session.id, cache.id, group, tier)
        with _added(self._leasing, session.id, 1), _added(self._reserving, key, count):
            yield

    @contextmanager
    def leasing(self, session: ClientSession, count: int) -> Iterator[None]:
        """Counts ``count`` leases during the call. Raises RESOURCE_EXHAUSTED (OVER_CAP)."""
        self._require_leases(session, count)
        with _added(self._leasing, session.id, count):
            yield

    def _require_leases(self, session: ClientSession, count: int) -> None:
        held = self._engine.session_leases(session.id) + self._leasing[session.id]
        if held + count > MAX_LEASES:
            says = f"{count} leases wanted, the session has {held}, {MAX_LEASES} may be"
            raise _over("leases", says, session, None, count, held, MAX_LEASES)


@contextmanager
def _added(counter: Counter[K], key: K, count: int) -> Iterator[None]:
    counter[key] += count
    try:
        yield
    finally:
        counter[key] -= count
        if not counter[key]:
            del counter[key]


def _over(
    cap: str, says: str, session: ClientSession, tier: Tier | None, wanted: int, held: int, allowed: int
) -> CallRefused:
    holder = common_pb2.Holder(
        session_id=session.id, pid=session.peer.pid, command=shown(session.peer.command), slots=held
    )
    detail = common_pb2.ErrorDetail(
        reason="OVER_CAP",
        field=cap,
        value=str(held + wanted),
        limit=str(allowed),
        tier=wire.TIER_TO_WIRE[tier] if tier is not None else common_pb2.TIER_UNSPECIFIED,
        wanted=wanted,
        free=max(0, allowed - held),
        holders=[holder],
    )
    return CallRefused(grpc.StatusCode.RESOURCE_EXHAUSTED, f"over the cap {cap}: {says}", detail)


@dataclass(slots=True, frozen=True, eq=False)
class BlocksService:
    """The servicer.

    ``_identity``: gives the epoch of the cursors. ``_wait_s``: default of ``timeout_ns``. ``_describe``: detail of a
    refusal, with the holders of the slots. ``_hashing``: serialises the calls that hash blocks.
    """

    _engine: Engine
    _catalog: Catalog
    _sessions: SessionRegistry
    _access: Access
    _identity: DaemonIdentity
    _wait_s: float
    _describe: Callable[[Refusal], common_pb2.ErrorDetail]
    _caps: Caps
    _forgotten: Forgotten
    _remote: RemoteTier | None
    _hints: Hints
    _hashing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def match(self, session: ClientSession, request: blocks_pb2.MatchRequest) -> blocks_pb2.MatchResponse:
        cache = self._catalog.opened(session, request.cache_id)
        groups = validation.groups("groups", cache, request.groups)
        tokens, scope = validation.following(cache, groups, request)
        keys = validation.keys("keys", request.keys, least=not request.tokens)
        store = self._remote if request.remote else None
        remote = 0 if store is None else await store.fetcher.reach(cache, groups, keys)
        manager = self._engine.manager(cache.id)
        found = manager.match(groups, keys, tokens, scope)
        response = blocks_pb2.MatchResponse(
            blocks=found.blocks,
            groups=map(_matched_group, found.groups),
            as_of_event=self._now_cursor(),
            remote_blocks=remote,
        )
        if found.partial is not None:
            response.partial_key, response.partial_tokens = found.partial.key, found.partial.tokens
            response.partial_residency = found.partial.residency
        if not request.counted:
            manager.asked(groups[0], len(keys), found.blocks)
        return response

    async def locate(self, session: ClientSession, request: blocks_pb2.LocateRequest) -> blocks_pb2.LocateResponse:
        cache, group = self._place(session, request.cache_id, request.group)
        found = self._engine.manager(cache.id).locate(group, validation.keys("keys", request.keys))
        slots = {tier: [place.slots[tier] for place in found] for tier in MEMORY_TIERS}
        return blocks_pb2.LocateResponse(
            residency=bytes(place.residency for place in found),
            device_slots=[slot or 0 for slot in slots[Tier.DEVICE]],
            host_slots=[slot or 0 for slot in slots[Tier.HOST]],
            device_generations=_generations(cache, Tier.DEVICE, group, slots[Tier.DEVICE]),
            host_generations=_generations(cache, Tier.HOST, group, slots[Tier.HOST]),
            as_of_event=self._now_cursor(),
        )

    async def checksums(
        self, session: ClientSession, request: blocks_pb2.ChecksumsRequest
    ) -> blocks_pb2.ChecksumsResponse:
        cache, group = self._place(session, request.cache_id, request.group)
        keys = validation.keys("keys", request.keys)
        async with self._hashing:
            told = await of_blocks(self._engine, cache.id, group, keys)
        return blocks_pb2.ChecksumsResponse(checksums=b"".join(told), known=bytes(each != UNKNOWN for each in told))

    async def touch(self, session: ClientSession, request: blocks_pb2.TouchRequest) -> blocks_pb2.TouchResponse:
        cache, group = self._place(session, request.cache_id, request.group)
        keys = validation.keys("keys", request.keys, least=not request.queried)
        found = validation.count("found", request.found, 0, request.queried)
        self._engine.manager(cache.id).asked(group, request.queried, found)
        await self._engine.touch(cache.id, group, keys)
        return blocks_pb2.TouchResponse(as_of_event=self._now_cursor())

    async def reserve(self, session: ClientSession, request: blocks_pb2.ReserveRequest) -> blocks_pb2.ReserveResponse:
        cache, group = self._place(session, request.cache_id, request.group)
        tier = validation.tier("tier", request.tier, leasable(cache))
        wanted = validation.count("count", request.count, 1, cache.slots[tier][group])
        wait_s = validation.timeout_s("timeout_ns", request.timeout_ns, self._wait_s)
        after = validation.keys("after", request.after, max_keys=1, least=0)
        with self._caps.reserving(session, cache, group, tier, wanted):
            grant = await self._engine.reserve(cache.id, session.id, group, tier, wanted, wait_s, *after)
        return blocks_pb2.ReserveResponse(lease_id=grant.lease or 0, slots=grant.slots)

    async def commit(self, session: ClientSession, request: blocks_pb2.CommitRequest) -> blocks_pb2.CommitResponse:
        cache = self._catalog.opened(session, request.cache_id)
        items = validation.commit_items(cache, request, request.slots)
        lease = validation.lease("lease_id", request.lease_id)
        hold, release = not request.let_go, request.release
        owned = cache.runtime.manager.leases.get(lease) if items and release and request.ahead else None
        tag = validation.conversation("conversation", request.conversation)
        results = self._engine.commit(cache.id, session.id, lease, items, hold=hold, release=release, conversation=tag)
        response = blocks_pb2.CommitResponse(results=bytes(results), as_of_event=self._now_cursor())
        if owned is not None:
            place = owned.group, owned.tier
            with suppress(CallRefused), self._caps.reserving(session, cache, *place, request.ahead):
                ahead = self._engine.lease_ahead(cache.id, session.id, *place, request.ahead, items[-1].key)
                if ahead is not None:
                    response.ahead.lease_id, response.ahead.slots[:] = ahead.id, ahead.blank
        return response

    async def acquire(
        self, session: ClientSession, request: blocks_pb2.AcquireRequest, *, bring: bool = True
    ) -> blocks_pb2.AcquireResponse:
        """``bring``: fetch missing blocks from the remote tier; false for a peer, which wants this host's blocks."""
        cache = self._catalog.opened(session, request.cache_id)
        groups = validation.groups("groups", cache, request.groups)
        tier = validation.tier("tier", request.tier, leasable(cache))
        wait_s = validation.timeout_s("timeout_ns", request.timeout_ns, self._wait_s)
        chains = _chains(request.chains)
        with self._caps.leasing(session, len(chains)):
            keys = [chain.keys for chain in chains]
            if bring:
                wait_s = await self._bring(cache, groups, keys, wait_s, request.recompute_ns_per_block / 1e9)
            answers = await self._engine.acquire(cache.id, session.id, groups, tier, chains, wait_s)
        self._require_not_withdrawn(cache, session, answers)
        return blocks_pb2.AcquireResponse(
            chains=[self._acquired(cache, tier, answer) for answer in answers], as_of_event=self._now_cursor()
        )

    async def join(self, session: ClientSession, request: blocks_pb2.JoinRequest) -> blocks_pb2.JoinResponse:
        cache = self._catalog.opened(session, request.cache_id)
        lease = validation.lease("lease_id", request.lease_id)
        wanted = cache.runtime.manager.leases.get(lease)
        owner = None if wanted is None else self._sessions.get(wanted.session)
        if wanted is None or owner is None:
            raise UnknownLease(lease)
        if not compare_digest(request.secret, lease_secret(owner.token, cache.id, lease)):
            raise ForeignLease(lease)
        if wanted.blank:
            self._access.require_on(session, Right.WRITE, cache.name)
        with self._caps.leasing(session, 1):
            joined = self._engine.join(cache.id, session.id, lease)
        held = [copy.slot for copy in joined.held.values()]
        return blocks_pb2.JoinResponse(lease_id=joined.id, blank=joined.blank, held=held)

    async def release(self, session: ClientSession, request: blocks_pb2.ReleaseRequest) -> blocks_pb2.ReleaseResponse:
        cache = self._catalog.opened(session, request.cache_id)
        calls = request.given_up
        validation.count("given_up", len(calls), 0, validation.MAX_LEASES)
        validation.count("lease_ids", len(request.lease_ids), 0 if calls else 1, validation.MAX_LEASES)
        if request.lease_ids:
            leases = [LeaseId(lease) for lease in request.lease_ids]
            self._engine.release(cache.id, session.id, leases, [SlotId(slot) for slot in request.slots])
        for seq in calls:
            for lease in wire.granted_leases(await session.replies.give_up(seq)):
                with suppress(UnknownLease, ForeignLease):  # released before, or of another cache
                    self._engine.release(cache.id, session.id, [lease])
        return blocks_pb2.ReleaseResponse(as_of_event=self._now_cursor())

    async def move(
        self, session: ClientSession, request: blocks_pb2.MoveRequest, cause: Cause | None = None
    ) -> blocks_pb2.MoveResponse:
        cache, group = self._place(session, request.cache_id, request.group)
        to = validation.tier("to", request.to, cache.slots)
        keys = validation.keys("keys", request.keys)
        wait_s = validation.timeout_s("timeout_ns", request.timeout_ns, self._wait_s)
        if request.dry_run:
            planned = self._engine.manager(cache.id).plan_move(group, to, keys)
            return blocks_pb2.MoveResponse(results=bytes(planned), as_of_event=self._now_cursor())
        if to in MEMORY_TIERS:
            wait_s = await self._bring(cache, [group], [keys], wait_s)
        grant = await self._engine.move(cache.id, session.id, group, to, keys, wait_s, cause)
        return blocks_pb2.MoveResponse(
            results=self._move_results(cache, group, keys, grant), as_of_event=self._now_cursor()
        )

    async def drop(self, session: ClientSession, request: blocks_pb2.DropRequest) -> blocks_pb2.DropResponse:
        cache, group = self._place(session, request.cache_id, request.group)
        keys = validation.keys("keys", request.keys)
        drop = partial(self._engine.drop, cache.id, group, keys)
        kept_in_store = False
        if request.dry_run:
            report = await drop(dry_run=True)
        elif self._remote is None:
            report = await drop()
            await self._forgotten_on_disk(cache, report)
        else:
            async with self._forgotten.change(cache.prefix) as before:
                objects = self._remote.names(cache, group, keys)
                self._forgotten.set(cache.prefix, before.after_drop(group, keys))
                report = await drop()
                gone = [key for key, result in zip(keys, report.results, strict=True) if result is not BlockResult.HELD]
                after = before.after_drop(group, gone)
                self._forgotten.set(cache.prefix, after)
                if after.generation > before.generation:  # too many drops to remember: the cache is reset later
                    self._forgotten.keep(cache.prefix, (), due=True)
                await self._forgotten_on_disk(cache, report)
            kept_in_store = not await self._remote.teller.tell(cache.prefix)
            self._remote.delete([objects[key] for key in gone if key in objects])
        return blocks_pb2.DropResponse(
            results=bytes(report.results),
            dropped=report.dropped,
            as_of_event=self._now_cursor(),
            kept_in_store=kept_in_store,
        )

    async def _forgotten_on_disk(self, cache: ServedCache, report: DropResult) -> None:
        if report.dropped:
            await self._engine.forgotten(cache.id)

    async def set_retention(
        self, session: ClientSession, request: blocks_pb2.SetRetentionRequest
    ) -> blocks_pb2.SetRetentionResponse:
        cache, group = self._place(session, request.cache_id, request.group)
        keys = validation.keys("keys", request.keys)
        if not request.priorities:
            raise bad_argument("priorities", "no bytes", f"{len(keys)} bytes, one a key")
        priorities = validation.priorities("priorities", request.priorities, len(keys))
        durations = validation.durations("durations_ms", request.durations_ms, len(keys))
        results = await self._engine.set_retention(cache.id, group, keys, priorities, durations)
        return blocks_pb2.SetRetentionResponse(results=bytes(results), as_of_event=self._now_cursor())

    async def pin(self, session: ClientSession, request: blocks_pb2.PinRequest) -> blocks_pb2.PinResponse:
        cache, group = self._place(session, request.cache_id, request.group)
        tier = validation.tier("tier", request.tier, cache.slots)
        keys = validation.keys("keys", request.keys)
        results = self._engine.pin(cache.id, group, tier, keys, unpin=request.unpin)
        return blocks_pb2.PinResponse(results=bytes(results), as_of_event=self._now_cursor())

    async def hint(self, session: ClientSession, request: blocks_pb2.HintRequest) -> blocks_pb2.HintResponse:
        cache = self._catalog.opened(session, request.cache_id)
        validation.count("hints", len(request.hints), 1, MAX_HINTS)
        move = partial(self.move, cause=Cause.HINT)
        results = [await self._hints.take(session, cache, hint, move) for hint in request.hints]
        return blocks_pb2.HintResponse(results=results, as_of_event=self._now_cursor())

    async def reset(self, session: ClientSession, request: blocks_pb2.ResetRequest) -> blocks_pb2.ResetResponse:
        cache = self._catalog.opened(session, request.cache_id)
        prefix, remote = cache.prefix, self._remote
        if request.dry_run:
            report = self._engine.manager(cache.id).reset_plan()
        elif 0 < request.repeats <= self._forgotten.of(prefix).generation and remote is not None:
            report = ResetResult(0, await remote.teller.let_go(cache))
        else:
            async with self._forgotten.change(prefix) as before:
                self._forgotten.set(prefix, before.after_reset())
                report = await self._engine.reset(cache.id, force=request.force)
                self._forgotten.keep(prefix, () if remote is None else report.roots)
        told = request.dry_run or remote is None or await remote.teller.tell(prefix)
        return blocks_pb2.ResetResponse(
            dropped=report.dropped,
            kept=report.kept,
            as_of_event=self._now_cursor(),
            kept_in_store=not told,
            generation=self._forgotten.of(prefix).generation,
        )

    async def list(
        self, session: ClientSession, request: blocks_pb2.ListBlocksRequest
    ) -> blocks_pb2.ListBlocksResponse:
        cache, group = self._place(session, request.cache_id, request.group)
        page = self._engine.manager(cache.id).listing(group, request.page, min(request.limit or PAGE_ROWS, PAGE_ROWS))
        return blocks_pb2.ListBlocksResponse(
            keys=b"".join(row.key for row in page.rows),
            parents=wire.parents(row.parent for row in page.rows),
            residency=bytes(row.residency for row in page.rows),
            priorities=bytes(row.priority for row in page.rows),
            pinned=bytes(row.pinned for row in page.rows),
            next_page=page.next_page,
            as_of_event=self._now_cursor(),
        )

    async def _bring(
        self,
        cache: ServedCache,
        groups: Sequence[GroupId],
        chains: Sequence[Sequence[Key]],
        wait_s: float,
        recompute_s: float = 0.0,
    ) -> float:
        """Fetches missing blocks of the chains from the remote tier. Returns the remaining seconds of ``wait_s``."""
        if self._remote is None:
            return wait_s
        started, bring = time.monotonic(), self._remote.fetcher.bring
        await asyncio.gather(*(bring(cache, groups, keys, FETCH_SHARE * wait_s, recompute_s) for keys in chains))
        return max(0.0, wait_s - (time.monotonic() - started))

    def _acquired(self, cache: ServedCache, tier: Tier, answer: Grant | Refusal) -> blocks_pb2.AcquiredChain:
        if isinstance(answer, Refusal):
            reason = answer.reason.name
            return blocks_pb2.AcquiredChain(matched=answer.matched, refusal=reason, detail=self._describe(answer))
        parts = [_acquired_group(cache, tier, part) for part in answer.groups]
        return blocks_pb2.AcquiredChain(matched=answer.matched, blocks=answer.blocks, groups=parts)

    def _place(self, session: ClientSession, cache_id: int, group: int) -> tuple[ServedCache, GroupId]:
        cache = self._catalog.opened(session, cache_id)
        return cache, validation.group("group", group, cache)

    def _now_cursor(self) -> blocks_pb2.Cursor:
        return blocks_pb2.Cursor(epoch=self._identity.epoch, id=self._engine.last_event)

    def _require_not_withdrawn(
        self, cache: ServedCache, session: ClientSession, answers: Sequence[Grant | Refusal]
    ) -> None:
        """Refuses the whole call if the session was orphaned while it waited, and releases the chains already granted.

        The client may resume the session and repeat the call. Until then it must hold no lease that it does not know.
        """
        withdrawn = [a for a in answers if isinstance(a, Refusal) and a.reason is RefusalReason.CANCELLED]
        if not withdrawn:
            return
        for answer in answers:
            for lease in answer.leases if isinstance(answer, Grant) else ():
                with suppress(UnknownLease, UnknownCache):  # ended with the session, or with the daemon
                    self._engine.release(cache.id, session.id, [lease])
        raise TicketRefused(withdrawn[0])

    def _move_results(self, cache: ServedCache, group: GroupId, keys: Sequence[Key], grant: Grant) -> bytes:
        """A result per block: from the grant for moved blocks and failed copies, from a lookup for the other blocks."""
        if all(grant.results):
            return bytes([BlockResult.OK]) * len(keys)
        places = self._engine.manager(cache.id).locate(group, keys)
        results = [
            BlockResult.OK if there else BlockResult.NO_ROOM if place.residency else BlockResult.NOT_FOUND
            for there, place in zip(grant.results, places, strict=True)
        ]
        for place in grant.failed:
            if results[place] is BlockResult.NO_ROOM:
                results[place] = BlockResult.FAILED
        return bytes(results)


def leasable(cache: ServedCache) -> list[Tier]:
    """The tiers of a cache whose slots clients can lease."""
    return [tier for tier in MEMORY_TIERS if tier in cache.slots]


def _chains(messages: Sequence[blocks_pb2.Chain]) -> list[ChainRequest]:
    validation.count("chains", len(messages), 1, validation.MAX_CHAINS)
    chains = []
    left = validation.MAX_KEYS
    for index, message in enumerate(messages):
        keys = validation.keys(f"chains[{index}].keys", message.keys, max_keys=left)
        left -= len(keys)
        least = validation.count(f"chains[{index}].min_blocks", message.min_blocks, 0, len(keys))
        priorities = message.priorities and validation.priorities(
            f"chains[{index}].priorities", message.priorities, len(keys), some=True
        )
        if message.durations_ms and not priorities:
            raise bad_argument(
                f"chains[{index}].durations_ms", f"{len(message.durations_ms)} values", "none without priorities"
            )
        durations = message.durations_ms and validation.durations(
            f"chains[{index}].durations_ms", message.durations_ms, len(keys)
        )
        tag = validation.conversation(f"chains[{index}].conversation", message.conversation)
        chains.append(ChainRequest(keys, least, priorities, durations, message.counted, tag))
    return chains


def _matched_group(span: GroupResidency) -> blocks_pb2.GroupMatch:
    return blocks_pb2.GroupMatch(
        group=span.group, first_block=span.needed.first, residency=bytes(span.residency), sink_blocks=span.needed.sinks
    )


def _acquired_group(cache: ServedCache, tier: Tier, part: GroupGrant) -> blocks_pb2.AcquiredGroup:
    return blocks_pb2.AcquiredGroup(
        group=part.group,
        first_block=part.needed.first,
        sink_blocks=part.needed.sinks,
        lease_id=part.lease or 0,
        slots=part.slots,
        generations=_generations(cache, tier, part.group, part.slots),
        found_in=bytes(part.found_in),
    )


def _generations(cache: ServedCache, tier: Tier, group: GroupId, slots: Sequence[SlotId | None]) -> list[int]:
    """Generations of slots; 0 for a missing slot."""
    arena = cache.runtime.arena
    return [0 if slot is None else arena.generation(tier, group, slot) for slot in slots]


UNKNOWN: Final = bytes(CHECKSUM_BYTES)

_Place = tuple[Tier, SlotId]


async def of_blocks(engine: Engine, cache: CacheId, group: GroupId, keys: Sequence[Key]) -> list[bytes]:
    """Checksums of blocks, made in a thread; :data:`UNKNOWN` for a block that is not in memory or has left its slot.

    A copy that differs from its committed checksum is given up, and its block is UNKNOWN. No lease holds the slots: a
    slot whose generation changed during the hashing was reused.

    Raises:
        UnknownCache: The cache was removed.
        TierIOError: The memory failed.
    """
    runtime = engine.runtime(cache)
    places = [_in_memory(block) for block in engine.manager(cache).locate(group, keys)]
    known = [place for place in places if place is not None]
    before = [runtime.arena.generation(tier, group, slot) for tier, slot in known]
    sources = [_source(runtime, group, place) for place in known]
    try:
        digests = await engine.beside(lambda: [_digest(source()) for source in sources])
    except TierError:
        engine.runtime(cache)  # raises UnknownCache if the removal of the cache caused the error
        raise
    engine.runtime(cache)  # a removed cache has no generations to compare
    found = iter(zip(before, digests, strict=True))
    told = []
    for key, place in zip(keys, places, strict=True):
        generation, digest = next(found) if place is not None else (0, UNKNOWN)
        if place is not None and runtime.arena.generation(place[0], group, place[1]) != generation:
            digest = UNKNOWN
        elif place is not None and engine.manager(cache).checksum(group, key) not in (b"", digest):
            engine.lose_bytes(cache, group, key, *place)
            digest = UNKNOWN
        told.append(digest)
    return told


def _source(runtime: CacheRuntime, group: GroupId, place: _Place) -> Callable[[], Sequence[Bytes]]:
    """Returns a reader of a slot's bytes for a thread. The reader keeps the memory mapped if the cache is removed."""
    tier, slot = place
    if tier is DEVICE and runtime.cuda is not None:
        copies, stretch = runtime.cuda, Stretch(slot, 0, runtime.spec.block_bytes(group))
        return lambda: [copies.fetch(group, [stretch])]
    parts = runtime.memory(tier).parts(group, slot)
    return lambda: parts


def _in_memory(block: BlockSlots) -> _Place | None:
    slots = zip((Tier.DEVICE, Tier.HOST), block.slots, strict=False)
    return next(((tier, slot) for tier, slot in slots if slot is not None), None)


def _digest(parts: Sequence[Bytes]) -> bytes:
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part.data)
    return digest.digest()
