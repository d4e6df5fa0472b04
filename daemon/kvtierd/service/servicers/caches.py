"""``kvtier.v1.Caches``: opens, closes, lists and removes caches."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import grpc

from kvtier.abi.spec import CacheSpec, SpecError
from kvtier.v1 import caches_pb2
from kvtierd.core.ids import Tier
from kvtierd.rights import Right
from kvtierd.service import validation, wire
from kvtierd.service.budgets import BudgetExhausted, Slots, TierBudget
from kvtierd.service.cache import ServedCache, wanted
from kvtierd.service.calls import Access
from kvtierd.service.catalog import Catalog
from kvtierd.service.errors import CallRefused, bad_argument, refused, unknown
from kvtierd.service.forgotten import Forgotten
from kvtierd.service.remote.tier import RemoteTier
from kvtierd.service.sessions import ClientSession, SessionRegistry, account, require_attached


@dataclass(slots=True, frozen=True, eq=False)
class CachesService:
    """``_tiers``: the configured tiers."""

    _catalog: Catalog
    _sessions: SessionRegistry
    _access: Access
    _tiers: tuple[Tier, ...]
    _forgotten: Forgotten
    _remote: RemoteTier | None

    async def open(self, session: ClientSession, request: caches_pb2.OpenRequest) -> caches_pb2.OpenResponse:
        name = validation.cache_name(request.name)
        spec = _valid(CacheSpec.of(request.spec)) if request.HasField("spec") else None
        may_create = self._access.may(session, Right.WRITE, name)
        if spec is not None and not may_create and not self._catalog.exists(name):
            self._access.require_on(session, Right.WRITE, name)
        named = wanted(request.options)
        budgets = self._budgets(request)

        def last_open(other: ServedCache) -> float | None:
            may = self._access.may(session, Right.WRITE, other.name)
            return self._sessions.last_open(other.id) if may else None

        try:
            opening = await self._catalog.open(
                name, spec, budgets, named, request.device, create=may_create, last_open=last_open
            )
        except BudgetExhausted as refusal:
            refusal.tell(lambda other: self._access.may(session, Right.READ, other), self._idle_s)
            raise
        require_attached(session)
        cache = opening.cache
        if self._catalog.get(cache.id) is not cache:
            raise unknown("name", name)  # removed meanwhile
        session.caches[cache.id] += 1
        self._sessions.users[cache.id] = account(session.peer.identity)
        return caches_pb2.OpenResponse(
            cache_id=cache.id, created=opening.created, info=self._info(cache), kept=opening.kept
        )

    async def close(self, session: ClientSession, request: caches_pb2.CloseRequest) -> caches_pb2.CloseResponse:
        cache = self._catalog.opened(session, request.cache_id)
        leases = cache.runtime.manager.session_leases(session.id)
        if leases and session.caches[cache.id] == 1:
            code, about = grpc.StatusCode.FAILED_PRECONDITION, {"field": "cache_id", "value": str(cache.id)}
            message = f"cache {cache.name}: the session holds {leases} leases there; release them first"
            raise refused(code, "LEASES_HELD", message, **about)
        session.caches[cache.id] -= 1
        if session.caches[cache.id] == 0:
            del session.caches[cache.id]
            self._sessions.left[cache.id] = time.monotonic()
        return caches_pb2.CloseResponse()

    async def list(
        self, session: ClientSession, request: caches_pb2.ListCachesRequest
    ) -> caches_pb2.ListCachesResponse:
        await self._catalog.loaded()
        readable = (cache for cache in self._catalog if self._access.may(session, Right.READ, cache.name))
        infos = [self._info(cache) for cache in readable]
        infos += [
            caches_pb2.CacheInfo(name=name, not_served=why)
            for name, why in self._catalog.unserved.items()
            if self._access.may(session, Right.READ, name)
        ]
        return caches_pb2.ListCachesResponse(caches=sorted(infos, key=lambda info: info.name))

    async def remove(
        self, session: ClientSession, request: caches_pb2.RemoveCacheRequest
    ) -> caches_pb2.RemoveCacheResponse:
        name = validation.cache_name(request.name)
        removal = await self._catalog.remove(
            name, lambda cache: self._require_unused(cache, request), force=request.force, dry_run=request.dry_run
        )
        freed = [
            caches_pb2.TierBudget(tier=wire.TIER_TO_WIRE[tier], bytes=nbytes)
            for tier, nbytes in sorted(removal.freed.items())
        ]
        told = request.dry_run or self._remote is None or await self._tell(self._remote, name)
        return caches_pb2.RemoveCacheResponse(blocks=removal.blocks, freed=freed, kept_in_store=not told)

    async def resize(
        self, session: ClientSession, request: caches_pb2.ResizeCacheRequest
    ) -> caches_pb2.ResizeCacheResponse:
        name = validation.cache_name(request.name)

        def end_sessions(cache: ServedCache) -> None:
            for user in [user for user in self._sessions if cache.id in user.caches]:
                self._sessions.kick(user, f"cache {name} is resized")

        try:
            done = await self._catalog.resize(name, self._budgets(request), end_sessions)
        except BudgetExhausted as refusal:
            refusal.tell(lambda other: self._access.may(session, Right.READ, other), self._idle_s)
            raise
        return wire.same_fields(caches_pb2.ResizeCacheResponse, done)

    async def _tell(self, remote: RemoteTier, name: str) -> bool:
        prefixes = [prefix for prefix in self._forgotten.prefixes if prefix.startswith(f"{name}/")]
        return bool(prefixes) and all(await asyncio.gather(*map(remote.teller.tell, prefixes)))

    def _require_unused(self, cache: ServedCache, request: caches_pb2.RemoveCacheRequest) -> None:
        """Raises FAILED_PRECONDITION if the cache must stay. Else, unless in a dry run, closes it in all sessions."""
        users = [session for session in self._sessions if cache.id in session.caches]
        if users and not request.force:
            raise _in_use("CACHE_IN_USE", cache, f"{len(users)} sessions have it open")
        leases = len(cache.runtime.manager.lease_records())
        if leases:
            raise _in_use("LEASES_HELD", cache, f"{leases} leases are held there; they must end first")
        if not request.dry_run:
            for user in users:
                del user.caches[cache.id]
            self._sessions.left.pop(cache.id, None)
            self._sessions.users.pop(cache.id, None)

    def _idle_s(self, name: str) -> int | None:
        cache = self._catalog.named(name)
        return None if cache is None else self._sessions.idle_s(cache.id)

    def _budgets(self, request: caches_pb2.OpenRequest | caches_pb2.ResizeCacheRequest) -> dict[Tier, TierBudget]:
        budgets: dict[Tier, TierBudget] = {}
        for index, budget in enumerate(request.budgets):
            tier = validation.tier(f"budgets[{index}].tier", budget.tier, self._tiers)
            if tier in budgets:
                raise bad_argument(f"budgets[{index}].tier", str(tier), "each tier once")
            budgets[tier] = TierBudget(budget.bytes, tuple(budget.group_bytes))
        return budgets

    def _info(self, cache: ServedCache) -> caches_pb2.CacheInfo:
        return caches_pb2.CacheInfo(
            cache_id=cache.id,
            name=cache.name,
            spec=caches_pb2.CacheSpec(**cache.spec.to_dict()),
            fingerprint=cache.fingerprint,
            groups=[_group_info(cache.spec, cache.slots, group) for group in range(len(cache.spec.groups))],
            options=cache.options.to_wire(),
            blocks=cache.runtime.manager.stats().blocks,
            sessions=sum(cache.id in session.caches for session in self._sessions),
            device=cache.device.id,
            idle_s=self._sessions.idle_s(cache.id) or 0,
            last_user=str(self._sessions.users.get(cache.id, "")),
            remote=self._remote is not None,
            generation=self._forgotten.generation(cache.prefix),
            has_old_blocks=self._forgotten.has_old(cache.prefix),
        )


def _in_use(reason: str, cache: ServedCache, why: str) -> CallRefused:
    code, message = grpc.StatusCode.FAILED_PRECONDITION, f"cache {cache.name}: {why}"
    return refused(code, reason, message, field="name", value=cache.name)


def _group_info(spec: CacheSpec, slots: Slots, group: int) -> caches_pb2.GroupInfo:
    each = spec.record_bytes(group)
    tiers = [
        caches_pb2.GroupTierInfo(
            tier=wire.TIER_TO_WIRE[tier],
            slots=counts[group],
            slot_bytes=each,
            tokens=counts[group] * spec.tokens_per_block,
            bytes=counts[group] * each,
        )
        for tier, counts in sorted(slots.items())
    ]
    return caches_pb2.GroupInfo(group=group, window_tokens=spec.groups[group].window_tokens, tiers=tiers)


def _valid(spec: CacheSpec) -> CacheSpec:
    try:
        spec.validate()
    except SpecError as error:
        raise bad_argument(f"spec.{error.field}", error.value, error.limit) from error
    return spec
