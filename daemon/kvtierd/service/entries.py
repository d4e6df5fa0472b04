"""Values of the catalog: an open cache, and what the removal of a cache gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvtier.abi.spec import CacheSpec
from kvtierd.core.ids import CacheId, Tier
from kvtierd.mover.runtime import CacheRuntime
from kvtierd.service.budgets import Slots, TierBudget, slots_of, tier_bytes
from kvtierd.service.errors import bad_argument
from kvtierd.service.options import CacheOptions
from kvtierd.service.wire import CacheHeader


@dataclass(slots=True, frozen=True, eq=False)
class Cache:
    """An open cache. ``slots``: by tier, only tiers it has, and by group."""

    runtime: CacheRuntime
    fingerprint: bytes
    slots: Slots
    options: CacheOptions

    @property
    def id(self) -> CacheId:
        return self.runtime.id

    @property
    def name(self) -> str:
        return self.runtime.name

    @property
    def spec(self) -> CacheSpec:
        return self.runtime.spec

    @property
    def header(self) -> CacheHeader:
        return CacheHeader.of(self.name, self.spec, self.options.event_hash)


@dataclass(slots=True, frozen=True)
class Removal:
    """What went, or would go, with a cache. ``spec``: None where it could not be read."""

    blocks: int
    spec: CacheSpec | None
    slots: Slots

    @property
    def freed(self) -> dict[Tier, int]:
        """Bytes by tier."""
        return {} if self.spec is None else {tier: tier_bytes(self.spec, n) for tier, n in self.slots.items()}


def require_same_spec(cache: Cache, spec: CacheSpec) -> None:
    """Raises INVALID_ARGUMENT where the cache was made with another specification than a caller names."""
    if cache.fingerprint != spec.fingerprint():
        difference = next(name for name in spec.to_dict() if getattr(spec, name) != getattr(cache.spec, name))
        limit = f"{getattr(cache.spec, difference)!r}, as cache {cache.name} has"
        raise bad_argument(f"spec.{difference}", getattr(spec, difference), limit, reason="SPEC_MISMATCH")


def require_same_cache(cache: Cache, spec: CacheSpec, asked: Mapping[Tier, TierBudget]) -> None:
    """Raises INVALID_ARGUMENT where it has another specification, or other budgets, than a caller asks for."""
    require_same_spec(cache, spec)
    for tier, budget in asked.items():
        has = cache.slots.get(tier, ())
        if slots_of(spec, tier, budget) != has:
            limit = f"{tier_bytes(spec, has)} bytes, as cache {cache.name} has; or no budgets at all"
            raise bad_argument(f"budgets[{tier}]", budget.nbytes, limit, reason="BUDGET_MISMATCH")
