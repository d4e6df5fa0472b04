"""The loop's side of the mover: calls the core, carries out what it says, answers those who wait.

Loop thread only. Between a call of the core and the last of its outcome there is never an ``await``: whoever else
runs on the loop sees the core, the arena and the events agree.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final, Protocol

from kvtierd.core.check import check
from kvtierd.core.errors import InvariantViolation, UnknownLease
from kvtierd.core.events import Cause, Event, EventSequencer, EventType
from kvtierd.core.ids import CacheId, EventId, GroupId, Key, LeaseId, SessionId, TicketId, Tier
from kvtierd.core.manager import (
    BlockManager,
    BlockResult,
    ChainRequest,
    CommitItem,
    DropReport,
    Listing,
    Location,
    ManagerStats,
    Match,
    ResetReport,
)
from kvtierd.core.outcome import Grant, MoveResult, Outcome, Refusal
from kvtierd.core.tickets import LeaseRecord, LeftLease
from kvtierd.core.verbs import AcrossMatch
from kvtierd.mover.edges import Arrived, Edges
from kvtierd.mover.errors import Refused, ShuttingDown, UnknownCache
from kvtierd.mover.indexing import check_index, follow
from kvtierd.mover.runtime import CacheRuntime
from kvtierd.mover.tickets import Answer, Tickets, Waiting, cancelled
from kvtierd.mover.uses import UseLog
from kvtierd.mover.work import Edge

MOVE_SLICE: Final = 256
"""Blocks of one request that are on the way at a time, in so many parts that come one after another: while one lands
and the next is planned, the others keep the edge busy."""
_PARTS: Final = 8
TICK_S: Final = 0.25
"""How often the core is told the time: degraded edges come back, and what waits for that goes on."""
BROKEN_SHOWN: Final = 8
"""Steps of the core that raised, the latest, kept for health."""


class EventSink(Protocol):
    def publish(self, events: Sequence[Event]) -> None:
        """Takes events in order. Called in the middle of an outcome: must neither wait nor call back."""
        ...


@dataclass(slots=True, eq=False)
class _Open:
    """An open cache. ``closing``: it takes no new tickets. ``removed``: nothing of it may be touched any more.
    ``goes_on``: the core has more to do and is called again in the next turn of the loop."""

    runtime: CacheRuntime
    tickets: Tickets
    uses: UseLog
    closing: bool = False
    removed: bool = False
    goes_on: bool = False

    @property
    def manager(self) -> BlockManager:
        return self.runtime.manager


class Engine:
    """All open caches under one mover. Starts its threads when made; :meth:`shutdown` ends them.

    Calls with a ``cache_id`` raise :class:`UnknownCache` and :class:`ShuttingDown`, and pass on the core's
    ``CallerError``. The awaitable ones wait ``timeout_s`` seconds at most (None: as long as it takes); a caller
    cancelled while it waits, or before it has got its answer, leaves nothing held.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        hub: EventSink,
        sequencer: EventSequencer,
        *,
        clock: Callable[[], int] = time.time_ns,
        debug_checks: bool = False,
        arrived: Arrived | None = None,
    ) -> None:
        """``arrived``: is told of each move that has ended, once. It must not raise."""
        self._loop = loop
        self._hub = hub
        self._sequencer = sequencer
        self._clock = clock
        self._debug_checks = debug_checks
        self._caches: dict[CacheId, _Open] = {}
        self._edges = Edges(loop, self._completed, arrived=arrived)
        self._broken: deque[str] = deque(maxlen=BROKEN_SHOWN)
        self._closing = False
        self._ticker = loop.call_later(TICK_S, self._tick)

    # caches

    def add_cache(self, runtime: CacheRuntime, left: Sequence[LeftLease] = ()) -> None:
        """Opens a cache whose manager has been filled and not been heard of yet. ``left``: leases from before the
        restart."""
        if self._closing:
            raise ShuttingDown
        if runtime.id in self._caches:
            raise ValueError(f"cache {runtime.id} is open already")
        cache = _Open(runtime, Tickets(self._loop), UseLog(runtime))
        self._caches[runtime.id] = cache
        self._apply(cache, runtime.manager.announce(self._clock()))
        for lease in left:
            self._apply(cache, runtime.manager.restore_lease(lease, self._clock()))

    def announce_gone(self, cache_id: CacheId, group: GroupId, cause: Cause) -> None:
        """The event of a cache that is not here any more: none of its blocks is."""
        cleared = Event(self._sequencer.take(), EventType.CLEARED, cause, cache_id, group, self._clock())
        self._hub.publish([cleared])

    async def remove_cache(self, cache_id: CacheId) -> CacheRuntime:
        """Refuses its waiting tickets, lets its moves end and forgets it. Its stores are the caller's to close.

        A call that was cancelled meanwhile can be made again.
        """
        cache = self._find(cache_id)
        cache.closing = True
        self._refuse_waiting(cache)
        await self._rest(cache)
        await cache.uses.finish()
        cache.removed = True
        self._caches.pop(cache_id, None)  # two callers may have waited
        return cache.runtime

    def caches(self) -> tuple[CacheId, ...]:
        """Those open, in the order in which they were added."""
        return tuple(self._caches)

    def runtime(self, cache_id: CacheId) -> CacheRuntime:
        return self._find(cache_id).runtime

    # requests that may wait

    async def reserve(
        self, cache_id: CacheId, session: SessionId, group: GroupId, tier: Tier, count: int, timeout_s: float | None
    ) -> Grant:
        """``count`` blank slots, all or nothing. Raises :class:`Refused`."""
        cache = self._accepting(cache_id)
        ticket, outcome = cache.manager.reserve(session, group, tier, count, self._clock())
        waiting = cache.tickets.open(ticket, session, tier, count)
        await self._answers(cache, [waiting], outcome, timeout_s)
        return _granted(waiting)

    async def acquire(
        self,
        cache_id: CacheId,
        session: SessionId,
        group: GroupId,
        tier: Tier,
        chains: Sequence[ChainRequest],
        timeout_s: float | None,
    ) -> list[Grant | Refusal]:
        """One answer a chain, in order: the longest prefix READY in ``tier`` and held."""
        cache = self._accepting(cache_id)
        tickets, outcome = cache.manager.acquire(session, group, tier, chains, self._clock())
        return await self._acquired(cache, session, tier, chains, tickets, outcome, timeout_s)

    async def acquire_across(
        self,
        cache_id: CacheId,
        session: SessionId,
        tier: Tier,
        chains: Sequence[ChainRequest],
        timeout_s: float | None,
    ) -> list[Grant | Refusal]:
        """The same over all window groups: the longest prefix that every one can serve."""
        cache = self._accepting(cache_id)
        tickets, outcome = cache.manager.acquire_across(session, tier, chains, self._clock())
        return await self._acquired(cache, session, tier, chains, tickets, outcome, timeout_s)

    async def move(
        self,
        cache_id: CacheId,
        session: SessionId,
        group: GroupId,
        to: Tier,
        keys: Sequence[Key],
        timeout_s: float | None,
    ) -> Grant:
        """Makes blocks READY in ``to``; ``Grant.results`` says which are. Raises :class:`Refused`.

        Not all at once: where the time is up, or the caller goes, blocks whose turn has not come stay as they are.
        """
        ends = None if timeout_s is None else self._loop.time() + timeout_s
        step = MOVE_SLICE // _PARTS
        starts = deque(range(0, len(keys) or 1, step))
        results: list[bool] = []
        failed: set[int] = set()
        on_the_way: deque[tuple[_Open, Waiting]] = deque()
        try:
            while True:
                while starts and len(on_the_way) < _PARTS:
                    first = starts.popleft()
                    part = keys[first : first + step]
                    on_the_way.append(self._begin_move(cache_id, session, group, to, part, ends))
                    await asyncio.sleep(0)  # others have their turn in between
                await on_the_way[0][1].wake
                grant = _granted(on_the_way.popleft()[1])
                failed |= {len(results) + place for place in grant.failed}
                results += grant.results
                if ends is not None and self._loop.time() >= ends:
                    starts.clear()
                if not starts and not on_the_way:
                    results += [False] * (len(keys) - len(results))
                    return replace(grant, results=tuple(results), failed=frozenset(failed))
        except BaseException:
            for cache, waiting in on_the_way:
                self._withdraw(cache, [waiting])
            raise

    def _begin_move(
        self,
        cache_id: CacheId,
        session: SessionId,
        group: GroupId,
        to: Tier,
        keys: Sequence[Key],
        ends: float | None,
    ) -> tuple[_Open, Waiting]:
        cache = self._accepting(cache_id)
        ticket, outcome = cache.manager.move(session, group, to, keys, self._clock())
        waiting = cache.tickets.open(ticket, session, to, len(keys))
        left = None if ends is None else max(0.0, ends - self._loop.time())
        self._begin(cache, [waiting], outcome, left)
        return cache, waiting

    # requests that are answered at once

    def commit(
        self,
        cache_id: CacheId,
        session: SessionId,
        lease: LeaseId,
        items: Sequence[CommitItem],
        *,
        release: bool = False,
    ) -> tuple[BlockResult, ...]:
        """``release``: the lease ends with it."""
        cache = self._find(cache_id)
        results, outcome = cache.manager.commit(session, lease, items, self._clock(), release=release)
        self._apply(cache, outcome)
        return results

    def reserve_ahead(
        self, cache_id: CacheId, session: SessionId, group: GroupId, tier: Tier, count: int
    ) -> Grant | None:
        """Blank slots that the session will need soon: at once and without harm to others, or not at all."""
        cache = self._accepting(cache_id)
        ticket, outcome = cache.manager.reserve_ahead(session, group, tier, count, self._clock())
        if ticket is None:
            self._apply(cache, outcome)
            return None
        waiting = cache.tickets.open(ticket, session, tier, count)
        self._apply(cache, outcome)
        if isinstance(waiting.answer, Grant):
            return waiting.answer
        self._withdraw(cache, [waiting])
        return None

    def release(
        self, cache_id: CacheId, session: SessionId, leases: Sequence[LeaseId], first_blocks: Sequence[int] = ()
    ) -> None:
        """``first_blocks``, one a lease: gives back only so many of its first blocks; 0 = all of it."""
        cache = self._find(cache_id)
        self._apply(cache, cache.manager.release(session, leases, self._clock(), first_blocks))

    def touch(self, cache_id: CacheId, group: GroupId, keys: Sequence[Key], misses: int) -> None:
        """Blocks were read without a call, and ``misses`` others were asked for in vain."""
        cache = self._find(cache_id)
        self._apply(cache, cache.manager.touch(group, keys, misses, self._clock()))

    def drop(
        self, cache_id: CacheId, session: SessionId, group: GroupId, keys: Sequence[Key], *, dry_run: bool = False
    ) -> DropReport:
        cache = self._find(cache_id)
        report, outcome = cache.manager.drop(session, group, keys, self._clock(), dry_run=dry_run)
        self._apply(cache, outcome)
        return report

    def set_retention(
        self,
        cache_id: CacheId,
        session: SessionId,
        group: GroupId,
        keys: Sequence[Key],
        priorities: Sequence[int],
        durations_ms: Sequence[int],
    ) -> tuple[BlockResult, ...]:
        cache = self._find(cache_id)
        results, outcome = cache.manager.set_retention(session, group, keys, priorities, durations_ms, self._clock())
        self._apply(cache, outcome)
        return results

    def pin(
        self, cache_id: CacheId, session: SessionId, group: GroupId, tier: Tier, keys: Sequence[Key], *, unpin: bool
    ) -> tuple[BlockResult, ...]:
        cache = self._find(cache_id)
        results, outcome = cache.manager.pin(session, group, tier, keys, self._clock(), unpin=unpin)
        self._apply(cache, outcome)
        return results

    async def reset(self, cache_id: CacheId, session: SessionId, *, force: bool) -> ResetReport:
        """Forgets all blocks that nobody needs, in slices, so that others have their turn in between."""
        cache = self._find(cache_id)
        dropped = kept = 0
        following = None
        while True:
            step, outcome = cache.manager.reset(session, self._clock(), force=force, following=following)
            self._apply(cache, outcome)
            dropped, kept, following = dropped + step.dropped, kept + step.kept, step.following
            if following is None:
                await self.forgotten(cache_id)
                return ResetReport(dropped, kept)
            await asyncio.sleep(0)
            if cache.removed:
                raise UnknownCache(cache_id)

    async def forgotten(self, cache_id: CacheId) -> None:
        """Returns when what was removed by now cannot come back from disk, whatever becomes of the daemon and of the
        system: its records are deleted, and those that were still being written have been deleted after that."""
        for _ in range(2):
            await self._edges.written(cache_id)
        cache = self._caches.get(cache_id)
        if cache is not None and cache.runtime.disk is not None:
            await asyncio.to_thread(cache.runtime.disk.sync)

    async def lose_tier(self, cache_id: CacheId, tier: Tier) -> None:
        """The tier has failed: all that stands there goes, in slices, so that others have their turn in between."""
        cache = self._find(cache_id)
        following = None
        while True:
            following, outcome = cache.manager.lose_tier(tier, Cause.IO_ERROR, self._clock(), following)
            self._apply(cache, outcome)
            if following is None:
                return
            await asyncio.sleep(0)
            if cache.removed:
                raise UnknownCache(cache_id)

    def restore_tier(self, cache_id: CacheId, tier: Tier) -> None:
        """The tier works again; its store has been emptied, with no move of it in flight (:meth:`touches`)."""
        cache = self._find(cache_id)
        self._apply(cache, cache.manager.restore_tier(tier, self._clock()))

    def touches(self, cache_id: CacheId, tier: Tier) -> bool:
        """Whether a move of the cache to or from the tier is in flight."""
        return self._edges.touches(cache_id, tier)

    def reset_plan(self, cache_id: CacheId) -> ResetReport:
        return self._find(cache_id).manager.reset_plan()

    def plan_move(self, cache_id: CacheId, group: GroupId, to: Tier, keys: Sequence[Key]) -> tuple[BlockResult, ...]:
        return self._find(cache_id).manager.plan_move(group, to, keys)

    def match(self, cache_id: CacheId, group: GroupId, keys: Sequence[Key]) -> Match:
        return self._find(cache_id).manager.match(group, keys)

    def match_across(self, cache_id: CacheId, keys: Sequence[Key]) -> AcrossMatch:
        return self._find(cache_id).manager.match_across(keys)

    def locate(self, cache_id: CacheId, group: GroupId, keys: Sequence[Key]) -> list[Location]:
        return self._find(cache_id).manager.locate(group, keys)

    def listing(self, cache_id: CacheId, group: GroupId, page: int, limit: int) -> Listing:
        return self._find(cache_id).manager.listing(group, page, limit)

    def stats(self, cache_id: CacheId) -> ManagerStats:
        return self._find(cache_id).manager.stats()

    def leases(self, cache_id: CacheId) -> list[LeaseRecord]:
        return self._find(cache_id).manager.lease_records()

    # sessions, over all caches

    def orphan_session(self, session: SessionId) -> None:
        """Its connection broke, its process lives: leases stay, requests that wait are cancelled."""
        self._withdraw_session(session, BlockManager.orphan_session)

    def reattach_session(self, session: SessionId) -> None:
        for cache in list(self._caches.values()):
            self._apply(cache, cache.manager.reattach_session(session, self._clock()))

    def end_session(self, session: SessionId) -> None:
        """It said goodbye, or its process is gone: all that it held is given back."""
        self._withdraw_session(session, BlockManager.end_session)

    def session_leases(self, session: SessionId) -> int:
        return sum(cache.manager.session_leases(session) for cache in self._caches.values())

    def held_by(self, session: SessionId) -> int:
        """Slots under its leases, over all caches."""
        return sum(cache.manager.held_by(session) for cache in self._caches.values())

    # how it goes

    @property
    def last_event(self) -> EventId:
        """The last event that what the engine answers in this turn takes in."""
        return self._sequencer.last

    def queues(self) -> dict[Edge, int]:
        """Blocks planned on each edge and not yet reported."""
        return dict(self._edges.queued)

    def problems(self) -> list[str]:
        """What health should show; empty when all is well."""
        unwritten = [cache.uses.problem for cache in self._caches.values() if cache.uses.problem is not None]
        return [*self._broken, *self._edges.problems(), *unwritten]

    def stalled_s(self) -> float:
        """The movers' heartbeat: for how long the slowest of their threads has been in one call."""
        return self._edges.stalled_s()

    async def settle(self) -> None:
        """Returns when no move is in flight, no completion undelivered and nothing postponed."""
        while self._edges.in_flight() or any(cache.goes_on for cache in self._caches.values()):
            for cache in list(self._caches.values()):
                await self._rest(cache)

    async def shutdown(self, deadline_s: float) -> bool:
        """Refuses new and waiting tickets, lets moves end for ``deadline_s``, ends the threads.

        False if moves had to be abandoned or a thread hangs in a call. The stores are the caller's to close afterwards.
        """
        self._closing = True
        self._ticker.cancel()
        for cache in self._caches.values():
            self._refuse_waiting(cache)
        try:
            async with asyncio.timeout(deadline_s):
                await self.settle()
                for cache in self._caches.values():
                    await cache.uses.finish()
            settled = True
        except TimeoutError:
            settled = False
        stopped = await self._edges.stop()
        for cache in self._caches.values():
            cache.removed = True
        self._caches.clear()
        return settled and stopped

    # inside

    async def _rest(self, cache: _Open) -> None:
        """Returns when no move of the cache is in flight and nothing is postponed."""
        await self._edges.idle(cache.runtime.id)
        while cache.goes_on:
            await asyncio.sleep(0)
            await self._edges.idle(cache.runtime.id)

    def _find(self, cache_id: CacheId) -> _Open:
        cache = self._caches.get(cache_id)
        if cache is None:
            raise ShuttingDown if self._closing else UnknownCache(cache_id)
        return cache

    def _accepting(self, cache_id: CacheId) -> _Open:
        if self._closing:
            raise ShuttingDown
        cache = self._find(cache_id)
        if cache.closing:
            raise UnknownCache(cache_id)
        return cache

    def _apply(self, cache: _Open, outcome: Outcome) -> None:
        """All of an outcome, in the order that ``core/outcome.py`` lays down."""
        runtime = cache.runtime
        for ref in outcome.begin_write:
            runtime.begin_write(ref)
        for ownership in outcome.owners:
            runtime.set_owner(ownership)
        if outcome.events:
            self._hub.publish(outcome.events)
        for move in outcome.moves:
            self._edges.submit(runtime, move)
        for content in outcome.contents:
            runtime.note(content)
        for ref in outcome.end_write:
            runtime.end_write(ref)
        follow(runtime.arena, outcome)
        for answer in chain[Answer](outcome.grants, outcome.refusals):
            cache.tickets.answer(answer)
        if outcome.again and not cache.goes_on:
            cache.goes_on = True
            self._loop.call_soon(self._go_on, cache)
        if self._debug_checks:
            check(runtime.manager)
            check_index(runtime.manager, runtime.arena)

    def _go_on(self, cache: _Open) -> None:
        """What the core postponed, so that nobody had to wait for all of it."""
        cache.goes_on = False
        if not cache.removed:
            self._advance(cache, cache.manager.tick)

    async def _answers(
        self,
        cache: _Open,
        waiting: Sequence[Waiting],
        outcome: Outcome,
        timeout_s: float | None,
    ) -> list[Answer]:
        self._begin(cache, waiting, outcome, timeout_s)
        try:
            for one in waiting:
                await one.wake
        except BaseException:
            self._withdraw(cache, waiting)
            raise
        return [one.answer for one in waiting if one.answer is not None]

    async def _acquired(
        self,
        cache: _Open,
        session: SessionId,
        tier: Tier,
        chains: Sequence[ChainRequest],
        tickets: Sequence[TicketId],
        outcome: Outcome,
        timeout_s: float | None,
    ) -> list[Answer]:
        waiting = [
            cache.tickets.open(ticket, session, tier, len(wanted.keys))
            for ticket, wanted in zip(tickets, chains, strict=True)
        ]
        return await self._answers(cache, waiting, outcome, timeout_s)

    def _begin(self, cache: _Open, waiting: Sequence[Waiting], outcome: Outcome, timeout_s: float | None) -> None:
        self._apply(cache, outcome)
        if timeout_s is not None:
            for one in waiting:
                cache.tickets.set_deadline(one, timeout_s, lambda one: self._expire(cache, one))

    def _withdraw(self, cache: _Open, waiting: Sequence[Waiting]) -> None:
        """Nobody will hear the answers. Those given already are undone, the others prevented.

        One ticket's withdrawal may answer the next: each is looked at when its turn has come.
        """
        for one in waiting:
            if cache.removed:
                return
            match one.answer:
                case None:
                    cache.tickets.forget(one)
                    self._apply(cache, cache.manager.cancel(one.ticket, self._clock()))
                case Grant() as grant:
                    for lease in grant.leases:
                        self._return(cache, one.session, lease)

    def _withdraw_session(self, session: SessionId, step: Callable[[BlockManager, SessionId, int], Outcome]) -> None:
        """The core forgets the session's tickets without a word, so their callers are told here."""
        for cache in list(self._caches.values()):
            self._apply(cache, step(cache.manager, session, self._clock()))
            for waiting in cache.tickets.unanswered(session):
                cache.tickets.answer(cancelled(waiting))

    def _return(self, cache: _Open, session: SessionId, lease: LeaseId) -> None:
        try:
            outcome = cache.manager.release(session, [lease], self._clock())
        except UnknownLease:
            return  # it ended with its session: a killed client's call is cancelled too
        self._apply(cache, outcome)

    def _expire(self, cache: _Open, waiting: Waiting) -> None:
        self._advance(cache, lambda now: cache.manager.expire(waiting.ticket, now))

    def _refuse_waiting(self, cache: _Open) -> None:
        for waiting in cache.tickets.unanswered():
            if waiting.answer is None:
                cache.tickets.answer(cancelled(waiting))
                self._apply(cache, cache.manager.cancel(waiting.ticket, self._clock()))

    def _completed(self, runtime: CacheRuntime, results: Sequence[MoveResult]) -> None:
        cache = self._caches[runtime.id]
        self._advance(cache, lambda now: cache.manager.completed(results, now))

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(TICK_S, self._tick)
        for cache in list(self._caches.values()):
            self._advance(cache, cache.manager.tick)
            cache.uses.note()

    def _advance(self, cache: _Open, step: Callable[[int], Outcome]) -> None:
        """A step of the core in a callback of the loop. What it raises is our bug, and has no caller to go to."""
        try:
            self._apply(cache, step(self._clock()))
        except Exception as error:  # noqa: BLE001 - shown in health and by the loop's handler; other caches go on
            message = f"cache {cache.runtime.name}: {type(error).__name__}: {error}"
            self._broken.append(message)
            self._loop.call_exception_handler({"message": message, "exception": error})


def _granted(waiting: Waiting) -> Grant:
    """What a request that is answered got. Raises :class:`Refused`."""
    if not isinstance(waiting.answer, Grant):
        if waiting.answer is None:
            raise InvariantViolation(f"ticket {waiting.ticket} woke its waiter without an answer")
        raise Refused(waiting.answer)
    return waiting.answer
