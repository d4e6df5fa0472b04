"""The calls of the service: each call goes to the core of its cache and waits for the core's answer.

Loop thread only. The executor carries out the core's decisions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

from kvtierd.core.conversations import Kept
from kvtierd.core.errors import InvariantViolation, UnknownLease
from kvtierd.core.events import BlockEvent, Cause, EventSequencer, EventType
from kvtierd.core.ids import CacheId, EventId, GroupId, Key, LeaseId, SessionId, SlotId, Tier
from kvtierd.core.leases import LeftLease, SlotLease
from kvtierd.core.manager import BlockManager
from kvtierd.core.outcome import Grant, GroupGrant, Outcome, Refusal
from kvtierd.core.removal import DropResult
from kvtierd.core.transfers import BlockResult, ChainRequest, CommitItem, ResetResult
from kvtierd.mover.edges import Trace
from kvtierd.mover.executor import (
    Answer,
    EventSink,
    Executor,
    OpenCache,
    ShuttingDown,
    SlotThreads,
    TicketRefused,
    UnknownCache,
    Waiting,
    cancelled,
)
from kvtierd.mover.runtime import CacheRuntime
from kvtierd.mover.work import Edge

_log = logging.getLogger(__name__)

MOVE_SLICE: Final = 256
"""Blocks of one request on their way at a time, in ``_PARTS`` parts. While one part arrives and the next is planned,
the other parts keep the edge busy."""
_PARTS: Final = 8
KEYS_A_TURN: Final = 1_024
"""Limit of blocks that are touched, or get a new retention, in one loop turn."""

T = TypeVar("T")


class Engine:
    """All open caches of one mover. The constructor starts its threads; :meth:`shutdown` ends them.

    Calls with a ``cache_id`` raise :class:`UnknownCache` and :class:`ShuttingDown`, and pass on the core's
    ``RequestError``. Awaitable calls wait at most ``timeout_s`` seconds (None: without limit). A caller that is
    cancelled before it has its answer leaves nothing held.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        hub: EventSink,
        sequencer: EventSequencer,
        *,
        clock: Callable[[], int] = time.time_ns,
        gpus: int = 0,
        debug_checks: bool = False,
    ) -> None:
        self._loop = loop
        self._hub = hub
        self._sequencer = sequencer
        self._clock = clock
        self._executor = Executor(loop, hub, clock, gpus=gpus, debug_checks=debug_checks)
        self._threads = SlotThreads(loop)
        self._closing = False

    # caches

    def add_cache(self, runtime: CacheRuntime, left: Sequence[LeftLease] = ()) -> None:
        """Opens a cache whose manager is filled and not yet announced. ``left``: leases from before the restart."""
        if self._closing:
            raise ShuttingDown
        if runtime.id in self._executor.caches:
            raise ValueError(f"cache {runtime.id} is open already")
        cache = self._executor.open(runtime)
        self._executor.apply(cache, runtime.manager.announce(self._clock()))
        for lease in left:
            self._executor.apply(cache, runtime.manager.restore_lease(lease, self._clock()))

    def announce_gone(self, cache_id: CacheId, group: GroupId, cause: Cause) -> None:
        """Publishes that all blocks of a removed cache are gone."""
        cleared = BlockEvent(self._sequencer.take(), EventType.CLEARED, cause, cache_id, group, self._clock())
        self._hub.publish([cleared])

    async def remove_cache(self, cache_id: CacheId) -> CacheRuntime:
        """Refuses a cache's waiting tickets, waits for its moves and forgets it. The caller closes its stores. A
        cancelled call can be made again."""
        cache = self._find(cache_id)
        cache.closing = True
        self._refuse_waiting(cache)
        await self._executor.edges.idle(cache_id)
        await cache.uses.finish()
        await self._executor.edges.idle(cache_id)  # the end of a session may have begun more moves
        cache.removed = True
        self._executor.caches.pop(cache_id, None)  # two callers may have waited
        return cache.runtime

    def runtime(self, cache_id: CacheId) -> CacheRuntime:
        return self._find(cache_id).runtime

    def manager(self, cache_id: CacheId) -> BlockManager:
        """The cache's manager, for questions only: every call that returns an outcome goes through the engine."""
        return self._find(cache_id).manager

    # requests that may wait

    async def reserve(
        self,
        cache_id: CacheId,
        session: SessionId,
        group: GroupId,
        tier: Tier,
        count: int,
        timeout_s: float | None,
        after: Key | None = None,
    ) -> GroupGrant:
        """See :meth:`BlockManager.reserve`. Raises :class:`TicketRefused`."""
        cache = self._accepting(cache_id)
        ticket, outcome = cache.manager.reserve(session, group, tier, count, self._clock(), after)
        waiting = cache.tickets.open(ticket, session, tier, count)
        self._begin(cache, [waiting], outcome, timeout_s)
        await self._answers(cache, [waiting])
        return _granted(waiting).only

    async def acquire(
        self,
        cache_id: CacheId,
        session: SessionId,
        groups: Sequence[GroupId],
        tier: Tier,
        chains: Sequence[ChainRequest],
        timeout_s: float | None,
    ) -> list[Grant | Refusal]:
        """Returns an answer per chain, in order: the longest prefix that ``groups`` (none = all) can serve, READY in
        ``tier`` and held."""
        cache = self._accepting(cache_id)
        tickets, outcome = cache.manager.acquire(session, groups, tier, chains, self._clock())
        waiting = [
            cache.tickets.open(ticket, session, tier, len(wanted.keys))
            for ticket, wanted in zip(tickets, chains, strict=True)
        ]
        self._begin(cache, waiting, outcome, timeout_s)
        return await self._answers(cache, waiting)

    async def move(
        self,
        cache_id: CacheId,
        session: SessionId,
        group: GroupId,
        to: Tier,
        keys: Sequence[Key],
        timeout_s: float | None,
        cause: Cause | None = None,
    ) -> Grant:
        """Makes blocks READY in ``to``. ``Grant.results`` says which blocks are READY. Raises :class:`TicketRefused`.
        Blocks move in slices. When the time is up, or the caller goes, the remaining blocks stay where they are."""
        ends = None if timeout_s is None else self._loop.time() + timeout_s
        step = MOVE_SLICE // _PARTS
        starts = deque(range(0, len(keys) or 1, step))
        results: list[bool] = []
        failed: set[int] = set()
        on_the_way: deque[tuple[OpenCache, Waiting]] = deque()
        try:
            while True:
                while starts and len(on_the_way) < _PARTS:
                    first = starts.popleft()
                    part = keys[first : first + step]
                    cache = self._accepting(cache_id)
                    ticket, outcome = cache.manager.move(session, group, to, part, self._clock(), cause)
                    waiting = cache.tickets.open(ticket, session, to, len(part))
                    self._begin(cache, [waiting], outcome, None if ends is None else max(0.0, ends - self._loop.time()))
                    on_the_way.append((cache, waiting))
                    await asyncio.sleep(0)  # other calls run in between
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

    # requests that are answered at once

    def commit(
        self,
        cache_id: CacheId,
        session: SessionId,
        lease: LeaseId,
        items: Sequence[CommitItem],
        *,
        hold: bool = True,
        release: bool = False,
        conversation: bytes = b"",
    ) -> tuple[BlockResult, ...]:
        """See :meth:`BlockManager.commit`."""
        cache = self._find(cache_id)
        commit = partial(cache.manager.commit, hold=hold, release=release, conversation=conversation)
        return self._applied(cache, commit(session, lease, items, self._clock()))

    def lease_ahead(
        self, cache_id: CacheId, session: SessionId, group: GroupId, tier: Tier, count: int, after: Key
    ) -> SlotLease | None:
        """Leases slots for the session's next blocks, at once or not at all. See :meth:`WindowManager.lease_ahead`."""
        cache = self._find(cache_id)
        return self._applied(cache, cache.manager.lease_ahead(session, group, tier, count, after, self._clock()))

    def take_in(
        self,
        cache_id: CacheId,
        session: SessionId,
        group: GroupId,
        lease: LeaseId,
        items: Sequence[CommitItem],
        copy_ns: int,
    ) -> tuple[BlockResult, ...]:
        """Commits blocks that came from the remote store, and ends the lease."""
        cache = self._find(cache_id)
        commit = partial(cache.manager.commit, release=True, cause=Cause.REMOTE)
        results = self._applied(cache, commit(session, lease, items, self._clock()))
        came = [item.key for item, result in zip(items, results, strict=True) if result is BlockResult.OK]
        self.travelled(cache_id, group, came, Tier.REMOTE, Tier.HOST, copy_ns)
        return results

    def travelled(
        self, cache_id: CacheId, group: GroupId, keys: Sequence[Key], src: Tier, dst: Tier, copy_ns: int
    ) -> None:
        """Reports that blocks went to the remote store or came from it."""
        cache = self._find(cache_id)
        self._executor.apply(cache, cache.manager.remote.travelled(group, keys, src, dst, copy_ns, self._clock()))

    def tell_damaged(self, cache_id: CacheId, group: GroupId, key: Key) -> None:
        """Reports that the remote store's copy of a block is corrupt."""
        cache = self._find(cache_id)
        self._executor.apply(cache, cache.manager.remote.damaged(group, key, self._clock()))

    def join(self, cache_id: CacheId, session: SessionId, lease: LeaseId) -> SlotLease:
        """Makes a lease of the session over the slots and blocks of another lease."""
        cache = self._accepting(cache_id)
        return self._applied(cache, cache.manager.join(session, lease, self._clock()))

    def release(
        self, cache_id: CacheId, session: SessionId, leases: Sequence[LeaseId], slots: Collection[SlotId] = ()
    ) -> None:
        """Releases leases. ``slots``: only these slots of a single lease, which goes on."""
        cache = self._find(cache_id)
        self._executor.apply(cache, cache.manager.release(session, leases, self._clock(), slots))

    async def touch(self, cache_id: CacheId, group: GroupId, keys: Sequence[Key]) -> None:
        """Reports that blocks were read without a call."""
        cache = self._find(cache_id)
        for start in range(0, len(keys), KEYS_A_TURN):
            if start:
                await self._others(cache)
            few = keys[start : start + KEYS_A_TURN]
            self._executor.apply(cache, cache.manager.touch(group, few, self._clock()))

    def lose_bytes(self, cache_id: CacheId, group: GroupId, key: Key, tier: Tier, slot: SlotId) -> None:
        """Reports that a block's bytes in a memory slot differ from the committed bytes."""
        cache = self._find(cache_id)
        says = "bytes in memory have changed cache=%s tier=%s slot=%d key=%s"
        _log.warning(says, cache.runtime.name, tier, slot, key.hex())
        self._executor.apply(cache, cache.manager.lose_bytes(group, key, tier, slot, self._clock()))

    async def drop(
        self, cache_id: CacheId, group: GroupId, keys: Sequence[Key], *, dry_run: bool = False
    ) -> DropResult:
        """Drops blocks with their subtrees, in slices: other calls run in between. If the caller goes, a subtree may be
        dropped in part."""
        cache = self._find(cache_id)
        step = partial(cache.manager.drop, group, keys, dry_run=dry_run)
        drop = self._applied(cache, step(self._clock()))
        while drop.report is None:
            await self._others(cache)
            drop = self._applied(cache, step(self._clock(), following=drop))
        return drop.report

    async def set_retention(
        self,
        cache_id: CacheId,
        group: GroupId,
        keys: Sequence[Key],
        priorities: Sequence[int],
        durations_ms: Sequence[int],
        cause: Cause = Cause.EXPLICIT,
    ) -> tuple[BlockResult, ...]:
        """Sets the retention of blocks, in slices: other calls run in between."""
        cache = self._find(cache_id)
        told: list[BlockResult] = []
        for start in range(0, len(keys), KEYS_A_TURN):
            if start:
                await self._others(cache)
            few = slice(start, start + KEYS_A_TURN)
            given = keys[few], priorities[few], durations_ms[few]
            told += self._applied(cache, cache.manager.set_retention(group, *given, self._clock(), cause))
        return tuple(told)

    def pin(
        self, cache_id: CacheId, group: GroupId, tier: Tier, keys: Sequence[Key], *, unpin: bool
    ) -> tuple[BlockResult, ...]:
        cache = self._find(cache_id)
        return self._applied(cache, cache.manager.pin(group, tier, keys, self._clock(), unpin=unpin))

    def keep(self, cache_id: CacheId, conversation: bytes, kept: Kept) -> None:
        """See :meth:`BlockManager.keep`."""
        cache = self._find(cache_id)
        self._executor.advance(cache, lambda now: cache.manager.keep(conversation, kept, now))

    async def end(self, cache_id: CacheId, keys: Sequence[Key]) -> int:
        """Lets blocks leave first, in slices: see :meth:`BlockManager.end`."""
        cache, ended = self._find(cache_id), 0
        for start in range(0, len(keys), KEYS_A_TURN):
            if start:
                await self._others(cache)
            ended += self._applied(cache, cache.manager.end(keys[start : start + KEYS_A_TURN], self._clock()))
        return ended

    async def reset(self, cache_id: CacheId, *, force: bool) -> ResetResult:
        """Removes all blocks that are not in use, in slices: other calls run in between."""
        cache = self._find(cache_id)
        dropped = kept = 0
        roots: list[tuple[GroupId, Key]] = []
        following = None
        while True:
            step = self._applied(cache, cache.manager.reset(self._clock(), force=force, following=following))
            dropped, kept, following = dropped + step.dropped, kept + step.kept, step.following
            roots += step.roots
            if following is None:
                await self.forgotten(cache_id)
                return ResetResult(dropped, kept, roots=tuple(roots))
            await self._others(cache)

    async def _others(self, cache: OpenCache) -> None:
        """Lets other calls run. Raises :class:`UnknownCache` if a call has removed the cache."""
        await asyncio.sleep(0)
        if cache.removed:
            raise UnknownCache(cache.runtime.id)

    async def forgotten(self, cache_id: CacheId) -> None:
        """Returns when no crash, of the daemon or the system, can bring a removed block back from disk. The block's
        record is then deleted, even if it was still being written."""
        for _ in range(2):
            await self._executor.edges.written(cache_id)
        cache = self._executor.caches.get(cache_id)
        if cache is not None and cache.runtime.disk is not None:
            await asyncio.to_thread(cache.runtime.disk.sync)

    async def lose_tier(self, cache_id: CacheId, tier: Tier) -> None:
        """Takes a failed tier out of service: no slot there is granted from now on. Its blocks go in slices, between
        other calls."""
        cache = self._find(cache_id)
        self._executor.apply(cache, cache.manager.lose_tier(tier, self._clock()))
        while cache.manager.behind:
            await self._others(cache)
            self._executor.apply(cache, cache.manager.go_on(self._clock()))

    def restore_disk(self, cache_id: CacheId) -> None:
        """Puts the disk back in service. Its store has been emptied while no move touched it (:meth:`touches`)."""
        cache = self._find(cache_id)
        self._executor.apply(cache, cache.manager.restore_disk(self._clock()))

    def touches(self, cache_id: CacheId, tier: Tier) -> bool:
        """Whether a move of the cache to or from the tier is in flight."""
        return self._executor.edges.touches(cache_id, tier)

    # sessions, over all caches

    def orphan_session(self, session: SessionId) -> None:
        """Orphans a session whose connection broke while its process lives: leases stay, waiting requests are
        cancelled."""
        self._withdraw_session(session, BlockManager.orphan_session)

    def reattach_session(self, session: SessionId) -> None:
        for cache in list(self._executor.caches.values()):
            self._executor.apply(cache, cache.manager.reattach_session(session, self._clock()))

    def end_session(self, session: SessionId) -> None:
        """Ends a session that said goodbye, or whose process is gone: releases all its leases, once no thread works on
        its slots (:meth:`while_held`)."""
        self._end_session(session, BlockManager.end_session)

    def disown_session(self, session: SessionId) -> None:
        """Like :meth:`end_session`, but the process lives and may still write: blank slots are orphaned."""
        self._end_session(session, BlockManager.disown_session)

    async def while_held(self, cache_id: CacheId, session: SessionId, lease: LeaseId, work: Callable[[], T]) -> T:
        """Does ``work`` on slots of a lease in a thread. The slots are not granted again before the work is done, even
        if the session ends or the caller goes; never, if the work raises :class:`Unaccounted`. Release the lease with
        :meth:`afterwards`."""
        return await self._threads.run((session, (cache_id, lease)), work)

    async def beside(self, work: Callable[[], T]) -> T:
        """Does ``work`` on slots that are not leased, in one of the same threads. The work goes on if the caller
        goes."""
        if self._closing:
            raise ShuttingDown
        return await self._threads.run((), work)

    def afterwards(self, cache_id: CacheId, lease: LeaseId, action: Callable[[], None]) -> None:
        """Does ``action`` when no thread works on the lease's slots, perhaps at once."""
        self._threads.after((cache_id, lease), action)

    def session_leases(self, session: SessionId) -> int:
        return sum(cache.manager.session_leases(session) for cache in self._executor.caches.values())

    def held_by(self, session: SessionId) -> int:
        """Number of slots under the session's leases, over all caches."""
        return sum(cache.manager.held_by(session) for cache in self._executor.caches.values())

    # health and shutdown

    def trace_moves(self, trace: Trace) -> None:
        self._executor.edges.trace = trace

    @property
    def last_event(self) -> EventId:
        """The last event whose effect the answers of this turn include."""
        return self._sequencer.last

    def queues(self) -> dict[Edge, int]:
        """Number of blocks planned on each edge and not yet reported."""
        return self._executor.edges.queued()

    def problems(self) -> list[str]:
        return self._executor.problems()

    def stalled_s(self) -> float:
        """Heartbeat: time that the slowest thread has spent in one batch."""
        return self._executor.edges.stalled_s()

    async def settle(self) -> None:
        """Returns when no move is in flight and all completions are delivered."""
        await self._executor.edges.idle()

    async def shutdown(self, deadline_s: float) -> bool:
        """Refuses new and waiting tickets, lets moves end for ``deadline_s`` seconds, and ends the threads. False if
        moves were abandoned or a thread hangs in a call. The caller closes the stores afterwards."""
        self._closing = True
        self._executor.stop()
        for cache in self._executor.caches.values():
            self._refuse_waiting(cache)
        try:
            async with asyncio.timeout(deadline_s):
                await self.settle()
                await self._threads.idle()
                for cache in self._executor.caches.values():
                    await cache.uses.finish()
            settled = True
        except TimeoutError:
            settled = False
        self._threads.close()
        stopped = await self._executor.edges.stop()
        for cache in self._executor.caches.values():
            cache.removed = True
        self._executor.caches.clear()
        return settled and stopped

    # internals

    def _find(self, cache_id: CacheId) -> OpenCache:
        cache = self._executor.caches.get(cache_id)
        if cache is None:
            raise ShuttingDown if self._closing else UnknownCache(cache_id)
        return cache

    def _accepting(self, cache_id: CacheId) -> OpenCache:
        if self._closing:
            raise ShuttingDown
        cache = self._find(cache_id)
        if cache.closing:
            raise UnknownCache(cache_id)
        return cache

    def _end_session(self, session: SessionId, step: Callable[[BlockManager, SessionId, int], Outcome]) -> None:
        if not self._threads.after(session, partial(self._withdraw_session, session, step)):
            self._withdraw_session(session, BlockManager.orphan_session)

    def _withdraw_session(self, session: SessionId, step: Callable[[BlockManager, SessionId, int], Outcome]) -> None:
        """Withdraws the session's tickets. The core forgets tickets without an answer, so their callers are answered
        here."""
        for cache in list(self._executor.caches.values()):
            self._executor.apply(cache, step(cache.manager, session, self._clock()))
            for waiting in cache.tickets.unanswered(session):
                cache.tickets.answer(cancelled(waiting))

    def _applied(self, cache: OpenCache, step: tuple[T, Outcome]) -> T:
        """Applies the outcome of a step of the core. Returns its result."""
        result, outcome = step
        self._executor.apply(cache, outcome)
        return result

    async def _answers(self, cache: OpenCache, waiting: Sequence[Waiting]) -> list[Answer]:
        """Waits for the answers of all tickets. Returns them in order."""
        try:
            for one in waiting:
                await one.wake
        except BaseException:
            self._withdraw(cache, waiting)
            raise
        return [one.answer for one in waiting if one.answer is not None]

    def _begin(self, cache: OpenCache, waiting: Sequence[Waiting], outcome: Outcome, timeout_s: float | None) -> None:
        """Applies the outcome that came with the tickets, and sets their deadlines."""
        self._executor.apply(cache, outcome)
        if timeout_s is not None:
            for one in waiting:
                cache.tickets.set_deadline(one, timeout_s, lambda one: self._expire(cache, one))

    def _withdraw(self, cache: OpenCache, waiting: Sequence[Waiting]) -> None:
        """Withdraws the tickets of a caller that has gone: undoes given answers and prevents the others. Withdrawing a
        ticket may answer the next, so each ticket's answer is looked at in its turn."""
        for one in waiting:
            if cache.removed:
                return
            match one.answer:
                case None:
                    cache.tickets.forget(one)
                    self._executor.apply(cache, cache.manager.cancel(one.ticket, self._clock()))
                case Grant() as grant:
                    for lease in grant.leases:
                        self._return(cache, one.session, lease)

    def _refuse_waiting(self, cache: OpenCache) -> None:
        for waiting in cache.tickets.unanswered():
            if waiting.answer is None:
                cache.tickets.answer(cancelled(waiting))
                self._executor.apply(cache, cache.manager.cancel(waiting.ticket, self._clock()))

    def _return(self, cache: OpenCache, session: SessionId, lease: LeaseId) -> None:
        try:
            outcome = cache.manager.release(session, [lease], self._clock())
        except UnknownLease:
            return  # the lease ended with its session: a killed client's call is cancelled too
        self._executor.apply(cache, outcome)

    def _expire(self, cache: OpenCache, waiting: Waiting) -> None:
        self._executor.advance(cache, lambda now: cache.manager.expire(waiting.ticket, now))


def _granted(waiting: Waiting) -> Grant:
    if not isinstance(waiting.answer, Grant):
        if waiting.answer is None:
            raise InvariantViolation(f"ticket {waiting.ticket} woke its waiter without an answer")
        raise TicketRefused(waiting.answer)
    return waiting.answer
