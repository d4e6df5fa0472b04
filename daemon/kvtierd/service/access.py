"""Which right each method of ``kvtier.v1`` needs, and the one place where it is asked for.

A method that is not in :data:`NEEDS` cannot be served at all: the daemon would not start with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import grpc

from kvtier.v1 import common_pb2
from kvtierd.core.ids import CacheId
from kvtierd.rights import Identity, Right, Rights
from kvtierd.service.catalog import Catalog
from kvtierd.service.entries import Cache
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
        return self.rights.may(session.identity, right, cache)

    def may_everywhere(self, session: Session, right: Right) -> bool:
        """On every cache there is or will be."""
        return right in self.rights.everywhere(session.identity)

    def require(self, session: Session, needs: Needs, request: Any) -> None:
        """Before a verb runs. Raises PERMISSION_DENIED."""
        right = needs.forced if needs.forced is not None and request.force else needs.right
        if right is None:
            return
        match needs.over:
            case Over.SOME:
                if {right, needs.instead}.isdisjoint(self.rights.somewhere(session.identity)):
                    raise denied(right, "any cache", session.identity)
            case Over.EVERY:
                if not self.may_everywhere(session, right):
                    raise denied(right, "every cache", session.identity)
            case Over.NAME:
                self.require_on(session, right, request.name)
            case Over.ID:
                part = getattr(request, needs.within) if needs.within is not None else request
                cache = self._catalog.get(CacheId(part.cache_id))
                if cache is not None:  # where there is none, the verb says so
                    self._require_on_open(session, right, cache)

    def require_on(self, session: Session, right: Right, cache: str) -> None:
        """Raises PERMISSION_DENIED."""
        if not self.may(session, right, cache):
            raise denied(right, cache, session.identity)

    def _require_on_open(self, session: Session, right: Right, cache: Cache) -> None:
        if not self.may(session, right, cache.name):
            # Names are not for those who only count through the ids.
            raise denied(right, cache.name if cache.id in session.caches else f"number {cache.id}", session.identity)


def denied(right: Right, cache: str, who: Identity) -> CallRefused:
    """PERMISSION_DENIED: who lacks which right on what."""
    detail = common_pb2.ErrorDetail(reason="NO_RIGHT", field=right, value=shown(cache), limit=shown(str(who)))
    where = cache if cache in ("any cache", "every cache") else f"cache {shown(cache)}"
    message = f"the right to {right} on {where} is missing: no rule of the daemon's gives it to {who}"
    return CallRefused(grpc.StatusCode.PERMISSION_DENIED, message, detail)
