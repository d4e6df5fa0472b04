"""Families: variants of one model under one engine, whose caches take over each other's budgets.

Engine version, settings and weights are part of a cache's name, so an engine that starts again may need another cache.
Only an idle cache gives way: no session has it open, and no block is leased or pinned.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Final

from kvtier.abi.spec import CacheSpec
from kvtierd.core.ids import Tier
from kvtierd.service.budgets import tier_bytes
from kvtierd.service.cache import ServedCache
from kvtierd.service.devices import Device

_ENGINE: Final = re.compile(r"[A-Za-z_-]*")

LastOpen = Callable[[ServedCache], float | None]
"""When a session last had a cache open, on the monotonic clock, 0 = in an earlier life of the daemon. None: a session
has the cache open or may come back to it, or the caller may not write there."""


def family_of(spec: CacheSpec) -> tuple[str, str] | None:
    """The model, and the engine's name without its version. None: the identity names no engine."""
    engine = spec.identity.get("engine")
    found = None if engine is None else _ENGINE.match(engine)
    return (spec.model, found[0]) if found else None


def idle_since(cache: ServedCache, last_open: LastOpen) -> float | None:
    """The time since which the cache is idle; None if it is not."""
    manager = cache.runtime.manager
    pinned = any(next(window.state.pins.blocks(), None) is not None for window in manager.windows.values())
    return None if pinned or manager.leases else last_open(cache)


def idle_members(
    spec: CacheSpec, caches: Iterable[ServedCache], last_open: LastOpen, before: Mapping[str, float]
) -> list[ServedCache]:
    """Idle caches of a family: empty ones first, then the least recently open. ``before``: the last opening by name,
    for caches that were last open in an earlier life of the daemon."""
    family = family_of(spec)
    found = [
        (cache.runtime.manager.stats().blocks > 0, since, before.get(cache.name, 0.0), cache)
        for cache in caches
        if family is not None and family_of(cache.spec) == family
        if (since := idle_since(cache, last_open)) is not None
    ]
    return [cache for *_, cache in sorted(found, key=itemgetter(0, 1, 2))]


def first_to_give_way(
    members: Sequence[ServedCache],
    wanted: Mapping[Tier, int],
    left: Mapping[Tier, int],
    device: Device,
    *,
    whole: bool,
) -> ServedCache | None:
    """The first idle member with bytes in a tier that has too few left. ``whole``: None if all members together would
    not be enough for the wanted bytes."""
    short = []
    for tier, nbytes in wanted.items():
        reachable = left[tier] + sum(bytes_in(cache, tier, device) for cache in members)
        if whole and nbytes > reachable:
            return None
        if left[tier] < min(nbytes, reachable):
            short.append(tier)
    return next((cache for cache in members if any(bytes_in(cache, tier, device) for tier in short)), None)


def bytes_in(cache: ServedCache, tier: Tier, device: Device) -> int:
    """Bytes of the cache in a tier; 0 in the device tier of another device."""
    there = tier is not Tier.DEVICE or cache.device is device
    return tier_bytes(cache.spec, cache.slots.get(tier, ())) if there else 0
