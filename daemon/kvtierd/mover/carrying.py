"""The open caches, and what the core says of each, carried out: in steps that are whole, and shown where they fail.

Loop thread only. Between a call of the core and the last of its outcome there is never an ``await``: whoever else
runs on the loop sees the core, the arena and the events agree.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, Protocol

from kvtierd.core.check import check
from kvtierd.core.events import Event
from kvtierd.core.ids import CacheId
from kvtierd.core.manager import BlockManager
from kvtierd.core.outcome import MoveResult, Outcome
from kvtierd.mover.edges import Edges
from kvtierd.mover.indexing import check_index, follow
from kvtierd.mover.runtime import CacheRuntime
from kvtierd.mover.tickets import Answer, Tickets
from kvtierd.mover.uses import UseLog

TICK_S: Final = 0.25
"""How often the core is told the time: degraded edges come back, and what waits for that goes on."""
BROKEN_SHOWN: Final = 8
"""Steps of the core that raised, the latest, kept for health."""


class EventSink(Protocol):
    def publish(self, events: Sequence[Event]) -> None:
        """Takes events in order. Called in the middle of an outcome: must neither wait nor call back."""
        ...


@dataclass(slots=True, eq=False)
class OpenCache:
    """An open cache. ``closing``: it takes no new tickets. ``removed``: nothing of it may be touched any more."""

    runtime: CacheRuntime
    tickets: Tickets
    uses: UseLog
    closing: bool = False
    removed: bool = False

    @property
    def manager(self) -> BlockManager:
        return self.runtime.manager


class Carrier:
    """Of one engine. ``caches``: those open, in the order in which they were added.

    Tells each core the time, until :meth:`stop`.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        hub: EventSink,
        clock: Callable[[], int],
        *,
        debug_checks: bool,
    ) -> None:
        self._loop = loop
        self._hub = hub
        self._clock = clock
        self._debug_checks = debug_checks
        self.caches: dict[CacheId, OpenCache] = {}
        self.edges = Edges(loop, self._completed)
        self._broken: deque[str] = deque(maxlen=BROKEN_SHOWN)
        self._ticker = loop.call_later(TICK_S, self._tick)

    def open(self, runtime: CacheRuntime) -> OpenCache:
        cache = OpenCache(runtime, Tickets(self._loop), UseLog(runtime))
        self.caches[runtime.id] = cache
        return cache

    def apply(self, cache: OpenCache, outcome: Outcome) -> None:
        """Carries out all of an outcome, in the order that ``core/outcome.py`` lays down."""
        runtime = cache.runtime
        for changes in outcome.slots:
            runtime.begin_write(changes)
        for changes in outcome.slots:
            runtime.set_owners(changes)
        if outcome.events:
            self._hub.publish(outcome.events)
        for move in outcome.moves:
            self.edges.submit(runtime, move)
        for changes in outcome.slots:
            runtime.note(changes)
        for changes in outcome.slots:
            runtime.end_write(changes)
            runtime.restate(changes)
        follow(runtime.arena, outcome)
        for answer in chain[Answer](outcome.grants, outcome.refusals):
            cache.tickets.answer(answer)
        if self._debug_checks:
            check(runtime.manager)
            check_index(runtime.manager, runtime.arena)

    def advance(self, cache: OpenCache, step: Callable[[int], Outcome]) -> None:
        """A step of the core in a callback of the loop. What it raises is our bug, and has no caller to go to."""
        try:
            self.apply(cache, step(self._clock()))
        except Exception as error:  # noqa: BLE001 - shown in health and by the loop's handler; other caches go on
            self._show(cache.runtime, error)

    async def rest(self, cache: OpenCache) -> None:
        """Returns when no move of the cache is in flight."""
        await self.edges.idle(cache.runtime.id)

    def problems(self) -> list[str]:
        """What health should show; empty when all is well."""
        unwritten = [cache.uses.problem for cache in self.caches.values() if cache.uses.problem is not None]
        return [*self._broken, *self.edges.problems(), *unwritten]

    def stop(self) -> None:
        """No core is told the time any more."""
        self._ticker.cancel()

    def _show(self, runtime: CacheRuntime, error: Exception) -> None:
        message = f"cache {runtime.name}: {type(error).__name__}: {error}"
        self._broken.append(message)
        self._loop.call_exception_handler({"message": message, "exception": error})

    def _completed(self, runtime: CacheRuntime, results: Sequence[MoveResult]) -> None:
        cache = self.caches.get(runtime.id)
        if cache is None:  # our bug: it rests before it is forgotten
            self._show(runtime, RuntimeError("its moves have ended after it"))
            return
        self.advance(cache, lambda now: cache.manager.completed(results, now))

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(TICK_S, self._tick)
        for cache in list(self.caches.values()):
            self.advance(cache, cache.manager.tick)
            cache.uses.note()
