"""Carries out the decisions of each open cache's core.

Loop thread only. There is never an ``await`` between a call of the core and the last step of its outcome, so other code
on the loop sees the core, the arena and the events agree.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Final, Protocol, TypeVar

from kvtierd.core.check import check
from kvtierd.core.errors import InvariantViolation
from kvtierd.core.events import BlockEvent
from kvtierd.core.ids import CacheId, LeaseId, SessionId, TicketId, Tier
from kvtierd.core.manager import BlockManager
from kvtierd.core.outcome import Grant, MoveResult, Outcome, Refusal, RefusalReason
from kvtierd.mover.disk_io import UseLog
from kvtierd.mover.edges import Edges, lanes_for
from kvtierd.mover.runtime import CacheRuntime, Unaccounted, check_index, follow

T = TypeVar("T")

HolderId = SessionId | tuple[CacheId, LeaseId]
"""A session or a lease whose slots a thread works on."""

TICK_S: Final = 1.0
"""Interval at which the core gets the time, so that degraded edges come back."""
BROKEN_SHOWN: Final = 8
"""Number of the latest failed core steps kept for health."""
THREADS: Final = 4
"""Only for slots of sessions: if the device hangs with these threads, the daemon's other threads go on."""


class EventSink(Protocol):
    def publish(self, events: Sequence[BlockEvent]) -> None:
        """Takes events in order. Called in the middle of an outcome: must neither wait nor call back."""


@dataclass(slots=True, eq=False)
class OpenCache:
    """An open cache. ``closing``: takes no new tickets. ``removed``: must not be touched any more. ``going_on``: the
    loop has a callback for the work that calls have left."""

    runtime: CacheRuntime
    manager: BlockManager
    tickets: Tickets
    uses: UseLog
    closing: bool = False
    removed: bool = False
    going_on: bool = False


class Executor:
    """Carries out the decisions of one engine's cores. ``caches``: the open caches, in the order in which they were
    added. Gives each core the time, until :meth:`stop`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        hub: EventSink,
        clock: Callable[[], int],
        *,
        gpus: int,
        debug_checks: bool,
    ) -> None:
        self._loop = loop
        self._hub = hub
        self._clock = clock
        self._debug_checks = debug_checks
        self.caches: dict[CacheId, OpenCache] = {}
        self.edges = Edges(loop, self._completed, lanes_for(gpus))
        self._broken: deque[str] = deque(maxlen=BROKEN_SHOWN)
        self._ticker = loop.call_later(TICK_S, self._tick)

    def open(self, runtime: CacheRuntime) -> OpenCache:
        cache = OpenCache(runtime, runtime.manager, Tickets(self._loop), UseLog(runtime))
        self.caches[runtime.id] = cache
        return cache

    def apply(self, cache: OpenCache, outcome: Outcome) -> None:
        """Carries out a whole outcome, in the order that ``core/outcome.py`` lays down."""
        runtime = cache.runtime
        for changes in outcome.slots:
            runtime.begin(changes)
        if outcome.events:
            self._hub.publish(outcome.events)
        for move in outcome.moves:
            self.edges.submit(runtime, move)
        for changes in outcome.slots:
            runtime.end(changes)
        follow(runtime.arena, outcome)
        for answer in chain[Answer](outcome.grants, outcome.refusals):
            cache.tickets.answer(answer)
        if runtime.manager.behind and not cache.going_on:
            cache.going_on = True
            self._loop.call_soon(self._go_on, cache)
        if self._debug_checks:
            check(runtime.manager)
            check_index(runtime.manager, runtime.arena)

    def advance(self, cache: OpenCache, step: Callable[[int], Outcome]) -> None:
        """Takes a step of the core in a loop callback. An exception is a bug without a caller: it is shown in
        health."""
        try:
            self.apply(cache, step(self._clock()))
        except Exception as error:  # noqa: BLE001 - shown in health and by the loop's handler; other caches go on
            self._show(cache.runtime, error)

    def _go_on(self, cache: OpenCache) -> None:
        """Does a slice of the work that calls have left. Other callbacks run before the next slice."""
        cache.going_on = False
        if not cache.removed:
            self.advance(cache, cache.manager.go_on)

    def problems(self) -> list[str]:
        unwritten = [cache.uses.problem for cache in self.caches.values() if cache.uses.problem is not None]
        return [*self._broken, *self.edges.problems(), *unwritten]

    def stop(self) -> None:
        """Stops giving the cores the time."""
        self._ticker.cancel()

    def _show(self, runtime: CacheRuntime, error: Exception) -> None:
        message = f"cache {runtime.name}: {type(error).__name__}: {error}"
        self._broken.append(message)
        self._loop.call_exception_handler({"message": message, "exception": error})

    def _completed(self, runtime: CacheRuntime, results: Sequence[MoveResult]) -> None:
        cache = self.caches.get(runtime.id)
        if cache is None:  # a bug: a cache is forgotten only when its moves have ended
            self._show(runtime, RuntimeError("its moves have ended after it"))
            return
        self.advance(cache, lambda now: cache.manager.completed(results, now))

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(TICK_S, self._tick)
        for cache in list(self.caches.values()):
            self.advance(cache, cache.manager.tick)
            cache.uses.note()


class SlotThreads:
    """Threads that read or write slots for a session. Loop thread only."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="kvtierd-slot-bytes")
        self._under_way: Counter[HolderId] = Counter()
        self._afterwards: defaultdict[HolderId, list[Callable[[], None]]] = defaultdict(list)
        self._threads: set[asyncio.Future[Any]] = set()

    async def run(self, holders: Sequence[HolderId], work: Callable[[], T]) -> T:
        """Does ``work`` in a thread, even if the caller goes. Work that raises :class:`Unaccounted` counts as running
        for ever."""
        self._under_way.update(holders)
        doing = self._loop.run_in_executor(self._pool, work)
        self._threads.add(doing)
        doing.add_done_callback(partial(self._done, holders))
        return await asyncio.shield(doing)

    def after(self, holder: HolderId, action: Callable[[], None]) -> bool:
        """Does ``action`` when no work runs for the holder. Returns whether that was now."""
        if self._under_way[holder]:
            self._afterwards[holder].append(action)
            return False
        action()
        return True

    async def idle(self) -> None:
        while self._threads:
            await asyncio.wait(self._threads)

    def close(self) -> None:
        """Starts no more threads. Running threads end with their work."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _done(self, holders: Sequence[HolderId], doing: asyncio.Future[Any]) -> None:
        self._threads.discard(doing)
        if doing.cancelled() or isinstance(doing.exception(), Unaccounted):
            return
        self._under_way.subtract(holders)
        for holder in holders:
            if not self._under_way[holder]:
                del self._under_way[holder]
                for action in self._afterwards.pop(holder, ()):
                    action()


Answer = Grant | Refusal


@dataclass(slots=True, eq=False)
class Waiting:
    """A ticket and its waiter. ``answer``: set in the loop turn in which the core gives it, even if the waiter has
    gone. ``wake``: wakes the waiter; cancelled together with it."""

    ticket: TicketId
    session: SessionId
    tier: Tier
    wanted: int
    wake: asyncio.Future[None]
    answer: Answer | None = None
    deadline: asyncio.TimerHandle | None = None


class Tickets:
    """The unanswered tickets of one cache."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: dict[TicketId, Waiting] = {}

    def open(self, ticket: TicketId, session: SessionId, tier: Tier, wanted: int) -> Waiting:
        """Adds a ticket. Call this before the outcome that may hold the ticket's answer is applied."""
        waiting = Waiting(ticket, session, tier, wanted, self._loop.create_future())
        self._waiting[ticket] = waiting
        return waiting

    def set_deadline(self, waiting: Waiting, seconds: float, expire: Callable[[Waiting], None]) -> None:
        if waiting.answer is None:
            waiting.deadline = self._loop.call_later(max(0.0, seconds), expire, waiting)

    def answer(self, answer: Answer) -> None:
        """Passes on an answer. The core answers each ticket once, and no withdrawn ticket."""
        waiting = self._waiting.get(answer.ticket)
        if waiting is None:
            raise InvariantViolation(f"the core answers ticket {answer.ticket}, which has no waiter")
        waiting.answer = answer
        self.forget(waiting)
        if not waiting.wake.done():
            waiting.wake.set_result(None)

    def forget(self, waiting: Waiting) -> None:
        """Forgets a ticket that needs no answer any more."""
        self._waiting.pop(waiting.ticket, None)
        if waiting.deadline is not None:
            waiting.deadline.cancel()

    def unanswered(self, session: SessionId | None = None) -> list[Waiting]:
        """The unanswered tickets of one session, or of all."""
        return [w for w in self._waiting.values() if session is None or w.session == session]


def cancelled(waiting: Waiting) -> Refusal:
    """The answer to a withdrawn ticket whose caller still waits."""
    return Refusal(waiting.ticket, RefusalReason.CANCELLED, waiting.tier, waiting.wanted, free=0)


class MoverError(Exception):
    """Base class of the mover's own errors. The core's errors pass through the mover."""


class TicketRefused(MoverError):
    """The core refused the ticket."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(f"{refusal.tier}: {refusal.reason.value} ({refusal.wanted} wanted, {refusal.free} free)")
        self.refusal = refusal


class UnknownCache(MoverError):
    """The cache is not open, or is being closed."""

    def __init__(self, cache: CacheId) -> None:
        super().__init__(f"cache {cache} is not open")
        self.cache = cache


class ShuttingDown(MoverError):
    """The daemon takes no new requests."""
