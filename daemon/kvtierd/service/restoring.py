"""What a cache is opened with by what is known of its past: slots of each tier, and options."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace

from kvtier.abi.spec import CacheSpec
from kvtierd.core.ids import Tier
from kvtierd.service.assembly import Stores
from kvtierd.service.budgets import Budgets, Slots, share_of, tier_bytes
from kvtierd.service.keeping import About, Keeper
from kvtierd.service.options import CacheOptions, Wanted
from kvtierd.tiers.base import TierConfigError
from kvtierd.tiers.disk.root import StoredCache

_log = logging.getLogger(__name__)


def slots_of_stored(stores: Stores, cache: StoredCache, sharing: int) -> dict[Tier, tuple[int, ...]]:
    """``sharing``: how many caches, this one included, are still to be given a share where none is remembered.

    Raises :class:`TierConfigError` where the disk tier has less left than the cache has there.
    """
    budgets, spec = stores.budgets, cache.spec
    on_disk = tuple(cache.slots[group] for group in sorted(cache.slots))
    wanted = tier_bytes(spec, on_disk)
    if wanted > budgets.left(Tier.DISK):
        limit = f"at least {wanted} more than its other caches take: the stored cache {cache.name} has that much"
        raise TierConfigError("disk_bytes", budgets.left(Tier.DISK), limit)
    remembered = stores.remembered.get(cache.name)
    if remembered is None:
        remembered = {tier: share_of(spec, budgets.left(tier) // sharing) for tier in (Tier.DEVICE, Tier.HOST)}
    return {Tier.DISK: on_disk, **memory_slots(budgets, spec, remembered)}


def memory_slots(budgets: Budgets, spec: CacheSpec, had: Slots) -> dict[Tier, tuple[int, ...]]:
    """Of each memory tier what the cache had, or what is left where that is less."""
    slots: dict[Tier, tuple[int, ...]] = {}
    for tier in (Tier.DEVICE, Tier.HOST):
        wanted, left = had.get(tier, ()), budgets.left(tier)
        share = wanted if tier_bytes(spec, wanted) <= left else share_of(spec, left)
        if share:
            slots[tier] = share
    return slots


def new_options(stores: Stores, name: str, spec: CacheSpec, named: Wanted) -> CacheOptions:
    """Of a new cache: what is not named is as it was where there was one before that nothing on disk tells of."""
    policy = stores.policy
    options = CacheOptions(write_policy=policy.write_policy, eviction=policy.eviction)
    past = stores.remembered.past_options(name, spec.fingerprint().hex())
    if past is not None:
        try:
            options = CacheOptions.from_stored(past)
        except (TypeError, ValueError) as error:
            _log.warning("remembered options are not used name=%s why=%r", name, str(error))
    return replace(options, **named)


def stored_options(cache: StoredCache) -> CacheOptions:
    """Raises :class:`TierConfigError`."""
    try:
        return CacheOptions.from_stored(cache.options)
    except (TypeError, ValueError) as error:
        raise TierConfigError(f"options of the stored cache {cache.name}", dict(cache.options), str(error)) from error


def kept_alone(keeper: Keeper, others: Collection[str]) -> dict[str, About]:
    """Caches that only memory has, of those whose memory was kept. Blocks."""
    return {
        name: about for name, about in keeper.abouts().items() if name not in others and Tier.DISK not in about.slots
    }
