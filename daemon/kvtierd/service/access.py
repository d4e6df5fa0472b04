"""Which right each method of ``kvtier.v1`` needs, and the one place where it is asked for.

A method that is not in :data:`NEEDS` cannot be served at all: the daemon would not start with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, TypeVar

import grpc

from kvtier.v1 import common_pb2
from kvtierd.core.ids import CacheId, GroupId, SessionId, Tier
from kvtierd.mover.engine import Engine
from kvtierd.rights import Identity, Right, Rights
from kvtierd.service import wire
from kvtierd.service.cache import Cache
from kvtierd.service.catalog import Catalog
from kvtierd.service.errors import CallRefused, shown
from kvtierd.service.sessions import Session


class Over(Enum):
    """What a right must extend to."""

    ID = "the cache of the request's cache_id"
    NAME = "the cache of the request's name"
    SOME = "at least one cache; the verb answers for those where the caller has the right"
    EVERY = "every cache"


@dataclass(slots=True, frozen=True)
class Needs:
    """``right``: None = giving back what one's session holds takes none. ``forced``: the right that the request needs
    instead where its ``force`` is set. ``within``: the part of the request that has the ``cache_id``, where it is not
    the request itself. ``instead``: of ``SOME``, another right that does as well."""

    right: Right | None
    over: Over = Over.ID
    forced: Right | None = None
    within: str | None = None
    instead: Right | None = None


NEEDS: Final[Mapping[str, Needs]] = {
    "kvtier.v1.Caches.Open": Needs(Right.READ, Over.NAME),  # and WRITE where it creates: see CachesService.open
    "kvtier.v1.Caches.Close": Needs(None),
    "kvtier.v1.Caches.List": Needs(Right.READ, Over.SOME),
    "kvtier.v1.Caches.Remove": Needs(Right.ADMIN, Over.NAME),
    "kvtier.v1.Blocks.Match": Needs(Right.READ),
    "kvtier.v1.Blocks.Locate": Needs(Right.READ),
    "kvtier.v1.Blocks.Checksums": Needs(Right.READ),
    "kvtier.v1.Blocks.Touch": Needs(Right.READ),
    "kvtier.v1.Blocks.Reserve": Needs(Right.WRITE),
    "kvtier.v1.Blocks.Commit": Needs(Right.WRITE),
    "kvtier.v1.Blocks.Acquire": Needs(Right.READ),
    "kvtier.v1.Blocks.Release": Needs(None),
    "kvtier.v1.Blocks.Move": Needs(Right.WRITE),
    "kvtier.v1.Blocks.Drop": Needs(Right.WRITE),
    "kvtier.v1.Blocks.SetRetention": Needs(Right.WRITE),
    "kvtier.v1.Blocks.Pin": Needs(Right.WRITE),
    "kvtier.v1.Blocks.Reset": Needs(Right.WRITE, forced=Right.ADMIN),
    "kvtier.v1.Blocks.List": Needs(Right.READ),
    "kvtier.v1.Transfer.Put": Needs(Right.WRITE, within="commit"),  # in its header
    "kvtier.v1.Transfer.Get": Needs(Right.READ, within="acquire"),
    "kvtier.v1.Events.Watch": Needs(Right.WATCH, Over.SOME),
    "kvtier.v1.Admin.Stats": Needs(Right.ADMIN, Over.SOME),
    "kvtier.v1.Admin.Leases": Needs(Right.ADMIN, Over.EVERY),
    "kvtier.v1.Admin.Kick": Needs(Right.ADMIN, Over.EVERY),
    "kvtier.v1.Admin.Explain": Needs(Right.READ, Over.SOME, instead=Right.WATCH),
}


class Access:
    """Rights, asked for sessions."""

    def __init__(self, rights: Rights, catalog: Catalog) -> None:
        self.rights = rights
        """May be replaced at any time: they are asked for at every call."""
        self._catalog: Final = catalog

    def admits(self, who: Identity) -> bool:
        """Whether any rule names them."""
        return bool(self.rights.somewhere(who))

    def may(self, session: Session, right: Right, cache: str) -> bool:
        return right in self.rights.on(session.peer.identity, cache)

    def may_everywhere(self, session: Session, right: Right) -> bool:
        """On every cache there is or will be."""
        return right in self.rights.everywhere(session.peer.identity)

    def require(self, session: Session, needs: Needs, request: Any) -> None:
        """Before a verb runs. Raises PERMISSION_DENIED."""
        right = needs.forced if needs.forced is not None and request.force else needs.right
        if right is None:
            return
        match needs.over:
            case Over.SOME:
                if {right, needs.instead}.isdisjoint(self.rights.somewhere(session.peer.identity)):
                    raise denied(right, "any cache", session.peer.identity)
            case Over.EVERY:
                if not self.may_everywhere(session, right):
                    raise denied(right, "every cache", session.peer.identity)
            case Over.NAME:
                self.require_on(session, right, request.name)
            case Over.ID:
                part = getattr(request, needs.within) if needs.within is not None else request
                cache = self._catalog.get(CacheId(part.cache_id))
                if cache is None:
                    return  # the verb says so
                if right not in self.rights.on(session.peer.identity, cache.name):
                    # Names are not for those who only count through the ids.
                    shown_as = cache.name if cache.id in session.caches else f"number {cache.id}"
                    raise denied(right, shown_as, session.peer.identity)

    def require_on(self, session: Session, right: Right, cache: str) -> None:
        """Raises PERMISSION_DENIED."""
        if not self.may(session, right, cache):
            raise denied(right, cache, session.peer.identity)


def denied(right: Right, cache: str, who: Identity) -> CallRefused:
    """PERMISSION_DENIED: who lacks which right on what."""
    detail = common_pb2.ErrorDetail(reason="NO_RIGHT", field=right, value=shown(cache), limit=shown(str(who)))
    where = cache if cache in ("any cache", "every cache") else f"cache {shown(cache)}"
    message = f"the right to {right} on {where} is missing: no rule of the daemon's gives it to {who}"
    return CallRefused(grpc.StatusCode.PERMISSION_DENIED, message, detail)


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
