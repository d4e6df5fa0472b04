"""A cache and its options: chosen when it is made, fixed while it is open, stored with it.

The daemon refuses an unknown option.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final, Self

from kvtier.abi.event_hashes import HASH_BYTES
from kvtier.abi.spec import CacheSpec
from kvtier.v1 import caches_pb2
from kvtierd.core.eviction import POLICIES
from kvtierd.core.ids import CHECKSUM_BYTES, CacheId, Tier
from kvtierd.core.policy import NEVER, Policy, WriteMode
from kvtierd.core.returns import LEARNED
from kvtierd.mover.runtime import CacheRuntime
from kvtierd.service.budgets import Slots, TierBudget, slots_of, tier_bytes
from kvtierd.service.devices import Device
from kvtierd.service.errors import bad_argument
from kvtierd.service.hub import CacheHeader
from kvtierd.service.wire import TIER_FROM_WIRE, TIER_TO_WIRE, same_fields

EVICTION_POLICIES: Final = frozenset(POLICIES)
EVENT_HASHES: Final = frozenset(HASH_BYTES)
"""Hashes that events can have beside the keys."""
_NAMES: Final[Mapping[str, frozenset[str]]] = {
    "eviction": EVICTION_POLICIES,
    "event_hash": EVENT_HASHES,
    "checksum": frozenset({"disk", "commit"}),
}
"""The known values of each option with names."""

_BYTES_A_TOKEN: Final = 4 + 8
_OTHER_BYTES: Final = 128
_WRITE_POLICIES: Final[Mapping[int, WriteMode]] = {
    caches_pb2.WRITE_POLICY_BACK: WriteMode.BACK,
    caches_pb2.WRITE_POLICY_THROUGH: WriteMode.THROUGH,
    caches_pb2.WRITE_POLICY_SELECTIVE: WriteMode.SELECTIVE,
}
_TO_WIRE: Final = {policy: value for value, policy in _WRITE_POLICIES.items()}


@dataclass(slots=True, frozen=True)
class CacheSettings:
    """Options of a cache.

    Args:
        event_hash: Name of a hash that events have beside the keys; "" = none.
        thresholds: (from, to, least priority) of edges with their own threshold, in order.
        checksum: Since when a block's bytes are checked: "disk" or "commit".
        resized: Whether an operator has chosen the budgets, so that clients that open the cache with others get these.
    """

    write_policy: WriteMode = WriteMode.BACK
    eviction: str = LEARNED
    event_hash: str = ""
    keep_tokens: bool = False
    thresholds: tuple[tuple[int, int, int], ...] = ()
    checksum: str = "disk"
    resized: bool = False

    def label_bytes(self, spec: CacheSpec) -> int:
        """Bytes of a block's hash and tokens on disk, with an extra id per token and a salt of usual length."""
        tokens = _BYTES_A_TOKEN * spec.tokens_per_block + _OTHER_BYTES if self.keep_tokens else 0
        return HASH_BYTES.get(self.event_hash, 0) + tokens + self.checksum_bytes

    @property
    def checksum_bytes(self) -> int:
        """Bytes of a block's checksum from its commit on."""
        return CHECKSUM_BYTES if self.checksum == "commit" else 0

    def to_wire(self) -> caches_pb2.CacheOptions:
        thresholds = [
            caches_pb2.EdgeThreshold(
                **{"from": TIER_TO_WIRE[Tier(src)]}, to=TIER_TO_WIRE[Tier(dst)], min_priority=least
            )
            for src, dst, least in self.thresholds
        ]
        policy = _TO_WIRE[self.write_policy]
        return same_fields(caches_pb2.CacheOptions, self, write_policy=policy, thresholds=thresholds)

    def policy(self, defaults: Policy) -> Policy:
        own = {(Tier(src), Tier(dst)): least for src, dst, least in self.thresholds}
        return replace(
            defaults, write_policy=self.write_policy, eviction=self.eviction, thresholds={**defaults.thresholds, **own}
        )

    def to_stored(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_stored(cls, values: Mapping[str, Any]) -> Self:
        """The options that :meth:`to_stored` wrote; a missing option has its default. Raises ValueError."""
        unknown = set(values) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"options that this daemon does not know: {', '.join(sorted(unknown))}")
        write_policy = WriteMode(values.get("write_policy", WriteMode.BACK))
        thresholds = tuple((int(src), int(dst), int(least)) for src, dst, least in values.get("thresholds", ()))
        options = cls(**{**values, "write_policy": write_policy, "thresholds": thresholds})
        if any(getattr(options, field) not in {getattr(cls(), field), *known} for field, known in _NAMES.items()):
            raise ValueError(f"options that this daemon cannot do: {values}")
        return options


Wanted = Mapping[str, Any]
"""Options that a client names, by field of :class:`CacheSettings`. Other options stay, or have their defaults."""


def wanted(message: caches_pb2.CacheOptions) -> dict[str, Any]:
    """The options that a message names. Raises INVALID_ARGUMENT for an unknown option."""
    named: dict[str, Any] = {}
    if policy := message.write_policy:
        if policy not in _WRITE_POLICIES:
            raise bad_argument("options.write_policy", policy, " or ".join(_WRITE_POLICIES.values()))
        named["write_policy"] = _WRITE_POLICIES[policy]
    for field, known in _NAMES.items():
        if name := getattr(message, field):
            if name not in known:
                raise bad_argument(f"options.{field}", name, " or ".join(sorted(known)))
            named[field] = name
    if message.keep_tokens:
        named["keep_tokens"] = True
    if message.thresholds:
        named["thresholds"] = _thresholds(message.thresholds)
    return named


def _thresholds(messages: Sequence[caches_pb2.EdgeThreshold]) -> tuple[tuple[int, int, int], ...]:
    found: dict[tuple[int, int], int] = {}
    for index, message in enumerate(messages):
        field = f"options.thresholds[{index}]"
        src, dst = TIER_FROM_WIRE.get(getattr(message, "from")), TIER_FROM_WIRE.get(message.to)
        if src is None or dst is None or src >= dst:
            raise bad_argument(field, f"from {src} to {dst}", "an edge from a tier to a lower tier")
        if (src, dst) in found:
            raise bad_argument(field, f"from {src} to {dst}", "each edge once")
        if not 0 <= message.min_priority <= NEVER:
            raise bad_argument(f"{field}.min_priority", message.min_priority, f"0 to {NEVER}")
        found[src, dst] = message.min_priority
    return tuple((int(src), int(dst), least) for (src, dst), least in sorted(found.items()))


def require_same(options: CacheSettings, named: Wanted, cache: str) -> None:
    """Raises INVALID_ARGUMENT (OPTIONS_MISMATCH) if a named option differs from the cache's."""
    for field, value in named.items():
        has = getattr(options, field)
        if value != has:
            limit = f"{has!s}, the value of cache {cache}, or absent"
            raise bad_argument(f"options.{field}", value, limit, reason="OPTIONS_MISMATCH")


@dataclass(slots=True, frozen=True, eq=False)
class ServedCache:
    """An open cache. ``slots``: by tier of the cache, a count per window group."""

    id: CacheId
    name: str
    spec: CacheSpec
    runtime: CacheRuntime
    fingerprint: bytes
    slots: Slots
    options: CacheSettings
    device: Device

    @property
    def prefix(self) -> str:
        """The begin of its objects' names in a store. A cache of another specification has another prefix."""
        return prefix_of(self.name, self.fingerprint)

    @property
    def header(self) -> CacheHeader:
        return CacheHeader.of(self.name, self.spec, self.options.event_hash)


@dataclass(slots=True, frozen=True)
class Opening:
    """``created``: whether the call made the cache. ``kept``: why it does not get the asked budgets and write policy;
    empty = it has them."""

    cache: ServedCache
    created: bool = False
    kept: str = ""


def prefix_of(name: str, fingerprint: bytes) -> str:
    return f"{name}/{fingerprint.hex()}"


@dataclass(slots=True, frozen=True)
class Removal:
    """The blocks and slots of a removed cache. ``spec`` and ``device``: None for a cache that could not be read."""

    blocks: int
    spec: CacheSpec | None
    slots: Slots
    device: Device | None

    @property
    def freed(self) -> dict[Tier, int]:
        return {} if self.spec is None else {tier: tier_bytes(self.spec, n) for tier, n in self.slots.items()}


def require_same_cache(cache: ServedCache, spec: CacheSpec, device: str) -> None:
    """Raises INVALID_ARGUMENT (SPEC_MISMATCH, DEVICE_MISMATCH) if the cache differs from the request. ``device``: "" =
    any."""
    if cache.fingerprint != spec.fingerprint():
        difference = next(name for name in spec.to_dict() if getattr(spec, name) != getattr(cache.spec, name))
        limit = f"{getattr(cache.spec, difference)!r}, the value of cache {cache.name}"
        raise bad_argument(f"spec.{difference}", getattr(spec, difference), limit, reason="SPEC_MISMATCH")
    if device and device not in (cache.device.name, cache.device.id):
        limit = f"{cache.device.id or 'none'}, the device of cache {cache.name}, or absent"
        raise bad_argument("device", device, limit, reason="DEVICE_MISMATCH")


def require_same_budgets(cache: ServedCache, asked: Mapping[Tier, TierBudget], promised: Slots) -> None:
    """Raises INVALID_ARGUMENT (BUDGET_MISMATCH) if the cache neither has these budgets nor was promised them."""
    for tier, budget in asked.items():
        has = cache.slots.get(tier, ())
        if slots_of(cache.spec, tier, budget) not in (has, promised.get(tier)):
            limit = f"{tier_bytes(cache.spec, has)} bytes, the budget of cache {cache.name}, or absent"
            raise bad_argument(f"budgets[{tier}]", budget.nbytes, limit, reason="BUDGET_MISMATCH")
