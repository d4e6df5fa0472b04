"""Caps on what one session may hold, so that one client's leak is not everybody's outage.

Counted are the leases that a session has and those that its calls under way may still be granted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

import grpc

from kvtier.v1 import common_pb2
from kvtierd.core.ids import CacheId, GroupId, SessionId, Tier
from kvtierd.mover.engine import Engine
from kvtierd.service import wire
from kvtierd.service.entries import Cache
from kvtierd.service.errors import CallRefused, shown
from kvtierd.service.sessions import Session

K = TypeVar("K")


MAX_LEASES: Final = 65536
"""Leases of one session, over all caches."""


class Caps:
    """Loop thread only. ``reserved_fraction``: share of a tier's slots of a window group for one session."""

    def __init__(self, engine: Engine, reserved_fraction: float) -> None:
        self._engine: Final = engine
        self._reserved_fraction: Final = reserved_fraction
        self._reserving: Counter[tuple[SessionId, CacheId, GroupId, Tier]] = Counter()
        self._leasing: Counter[SessionId] = Counter()

    @contextmanager
    def reserving(self, session: Session, cache: Cache, group: GroupId, tier: Tier, count: int) -> Iterator[None]:
        """Around a reservation. Raises RESOURCE_EXHAUSTED (OVER_CAP)."""
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
    def leasing(self, session: Session, count: int) -> Iterator[None]:
        """Around what may grant so many leases. Raises RESOURCE_EXHAUSTED (OVER_CAP)."""
        self._require_leases(session, count)
        with _added(self._leasing, session.id, count):
            yield

    def _require_leases(self, session: Session, count: int) -> None:
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
    cap: str, says: str, session: Session, tier: Tier | None, wanted: int, held: int, allowed: int
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
