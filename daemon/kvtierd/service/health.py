"""What is wrong, in words for an operator: ``kvtier status`` shows it and a metric counts it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from kvtierd.event_log import EventLog
from kvtierd.mover.engine import Engine
from kvtierd.service.catalog import Catalog
from kvtierd.service.entries import Cache
from kvtierd.service.sessions import SessionRegistry

OLD_LEASE_S: Final = 3600
"""A request of an engine takes seconds; a lease this old is more likely forgotten than needed, and health names it."""


class Health:
    def __init__(
        self,
        engine: Engine,
        catalog: Catalog,
        sessions: SessionRegistry,
        config_problems: Callable[[], Sequence[str]],
        log: EventLog | None,
    ) -> None:
        self._engine: Final = engine
        self._catalog: Final = catalog
        self._sessions: Final = sessions
        self._config_problems: Final = config_problems
        self._log: Final = log

    def problems(self, caches: Sequence[Cache]) -> list[str]:
        """Of the daemon and of these caches; empty when all is well."""
        return [
            *self._catalog.problems(),
            *self._engine.problems(),
            *self._degraded(caches),
            *self._pageable(caches),
            *self._old_leases(caches),
            *self._unlogged(),
            *self._config_problems(),
        ]

    def _unlogged(self) -> Iterator[str]:
        if self._log is not None and (failing := self._log.status().failing) is not None:
            yield f"events are not logged: {failing}"

    def _degraded(self, caches: Iterable[Cache]) -> Iterator[str]:
        now = time.time_ns()
        for cache in caches:
            for (src, dst), record in sorted(self._engine.stats(cache.id).edges.items()):
                if (left := (record.degraded_until - now) / 1e9) > 0:
                    again = f"{record.failures} blocks could not be moved; tried again in {left:.1f} s"
                    yield f"cache {cache.name}: {src}>{dst} is not in use: {again}"

    def _pageable(self, caches: Iterable[Cache]) -> Iterator[str]:
        for cache in caches:
            if cache.runtime.cuda is not None and (why := cache.runtime.cuda.locks.problem) is not None:
                yield f"cache {cache.name}: copies to and from the GPU are slower than they could be: {why}"

    def _old_leases(self, caches: Iterable[Cache]) -> Iterator[str]:
        now = time.time_ns()
        for cache in caches:
            for lease in self._engine.leases(cache.id):
                if (age_s := (now - lease.granted_at) // 10**9) >= OLD_LEASE_S:
                    pid, command = self._sessions.owner_of(lease.session)
                    slots = lease.blank_slots + lease.held_blocks
                    owner = f"session {lease.session}, pid {pid} {command}"
                    yield f"cache {cache.name}: {slots} {lease.tier} slots are leased since {age_s} s by {owner}"
