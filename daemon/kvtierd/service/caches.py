"""``kvtier.v1.Caches``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import grpc

from kvtier.abi.spec import CacheSpec, SpecError
from kvtier.v1 import caches_pb2, common_pb2
from kvtierd.core.ids import CacheId, Tier
from kvtierd.rights import Right
from kvtierd.service import options, validate, wire
from kvtierd.service.access import Access
from kvtierd.service.budgets import TierBudget
from kvtierd.service.calls import Verb
from kvtierd.service.catalog import Cache, Catalog
from kvtierd.service.errors import CallRefused, bad_argument, cache_not_opened, unknown_cache
from kvtierd.service.sessions import Session, SessionRegistry, require_attached


def opened(catalog: Catalog, session: Session, cache_id: int) -> Cache:
    """The cache, if this session has opened it. Raises NOT_FOUND, FAILED_PRECONDITION."""
    cache = catalog.get(CacheId(cache_id))
    if cache is None:
        raise unknown_cache(cache_id)
    if cache.id not in session.caches:
        raise cache_not_opened(cache_id)
    return cache


class CachesService:
    """``tiers``: that are configured."""

    def __init__(self, catalog: Catalog, sessions: SessionRegistry, access: Access, tiers: tuple[Tier, ...]) -> None:
        self._catalog: Final = catalog
        self._access: Final = access
        self._sessions: Final = sessions
        self._tiers: Final = tiers

    def verbs(self) -> Mapping[str, Verb]:
        return {"Open": self.open, "Close": self.close, "List": self.list}

    async def open(self, session: Session, request: caches_pb2.OpenRequest) -> caches_pb2.OpenResponse:
        name = validate.cache_name(request.name)
        spec = _valid(wire.spec_from_wire(request.spec))
        if self._catalog.named(name) is None:
            self._access.require_on(session, Right.WRITE, name)
        named = options.wanted(request.options)
        cache, created = await self._catalog.open(name, spec, self._budgets(request), named)
        require_attached(session)
        session.caches[cache.id] += 1
        return caches_pb2.OpenResponse(cache_id=cache.id, created=created, info=self._info(cache))

    async def close(self, session: Session, request: caches_pb2.CloseRequest) -> caches_pb2.CloseResponse:
        cache = opened(self._catalog, session, request.cache_id)
        leases = cache.runtime.manager.session_leases(session.id)
        if leases and session.caches[cache.id] == 1:
            detail = common_pb2.ErrorDetail(reason="LEASES_HELD", field="cache_id", value=str(cache.id))
            message = f"cache {cache.name}: the session holds {leases} leases there; release them first"
            raise CallRefused(grpc.StatusCode.FAILED_PRECONDITION, message, detail)
        session.caches[cache.id] -= 1
        if session.caches[cache.id] == 0:
            del session.caches[cache.id]
        return caches_pb2.CloseResponse()

    async def list(self, session: Session, request: caches_pb2.ListCachesRequest) -> caches_pb2.ListCachesResponse:
        readable = (cache for cache in self._catalog if self._access.may(session, Right.READ, cache.name))
        return caches_pb2.ListCachesResponse(caches=[self._info(cache) for cache in readable])

    def _budgets(self, request: caches_pb2.OpenRequest) -> dict[Tier, TierBudget]:
        budgets: dict[Tier, TierBudget] = {}
        for index, budget in enumerate(request.budgets):
            tier = validate.tier(f"budgets[{index}].tier", budget.tier, self._tiers)
            if tier in budgets:
                raise bad_argument(f"budgets[{index}].tier", str(tier), "each tier once")
            budgets[tier] = TierBudget(budget.bytes, tuple(budget.group_bytes))
        return budgets

    def _info(self, cache: Cache) -> caches_pb2.CacheInfo:
        return caches_pb2.CacheInfo(
            cache_id=cache.id,
            name=cache.name,
            spec=wire.spec(cache.spec),
            fingerprint=cache.fingerprint,
            groups=[_group_info(cache, group) for group in range(len(cache.spec.groups))],
            blocks=cache.runtime.manager.stats().blocks,
            sessions=sum(cache.id in session.caches for session in self._sessions),
            options=cache.options.to_wire(),
        )


def _group_info(cache: Cache, group: int) -> caches_pb2.GroupInfo:
    each = cache.spec.record_bytes(group)
    tiers = [
        caches_pb2.GroupTierInfo(
            tier=wire.TIER_TO_WIRE[tier],
            slots=counts[group],
            slot_bytes=each,
            tokens=counts[group] * cache.spec.tokens_per_block,
            bytes=counts[group] * each,
        )
        for tier, counts in sorted(cache.slots.items())
    ]
    return caches_pb2.GroupInfo(group=group, window_tokens=cache.spec.groups[group].window_tokens, tiers=tiers)


def _valid(spec: CacheSpec) -> CacheSpec:
    try:
        spec.validate()
    except SpecError as error:
        raise bad_argument(f"spec.{error.field}", error.value, error.limit) from error
    return spec
