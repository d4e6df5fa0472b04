"""Promises: the slots that a cache was given when it was made or resized, compared with the slots that it has.

The state directory remembers promises. A start with smaller tiers gives some caches less, and a later start with room
gives them their budgets back. A promise is no reservation: other caches may take the room.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvtier.abi.spec import CacheSpec
from kvtierd.config import Config
from kvtierd.core.ids import Tier
from kvtierd.service.budgets import CACHES, KIND, Budgets, RememberedSlots, Slots, readable, tier_bytes
from kvtierd.tiers.base import TierError
from kvtierd.tiers.disk import superblock
from kvtierd.tiers.disk.root import stored_caches

NO_DISK: Final = "it has slots on disk, and no disk tier is configured (disk_bytes)"


def compared(spec: CacheSpec, promised: Slots, has: Slots) -> dict[Tier, tuple[int, int]]:
    """Bytes that a cache has, and was promised, by promised tier."""
    return {t: (tier_bytes(spec, has.get(t, ())), tier_bytes(spec, promised[t])) for t in sorted(promised)}


def told(tier: Tier, has: int, promised: int) -> str:
    """The shortage in words; empty if nothing is missing."""
    its = f"its {readable(promised)} of {tier}"
    return "" if has >= promised else f"only {readable(has)} of {its}" if has else f"no room for {its}"


def shortages(config: Config) -> Iterator[str]:
    """The stored caches that a start would give less host memory or disk than promised. Blocks, takes no lock and
    changes nothing. Raises :class:`TierConfigError` for a disk tier smaller than its caches."""
    place = config.state_dir / CACHES
    try:
        if superblock.read_superblock(place, KIND) is None:  # a damaged one raises, and is not set aside
            return
        remembered = RememberedSlots(place)
        stored = stored_caches(config.disk_path) if config.disk_bytes and config.disk_path.exists() else []
    except (TierError, OSError) as error:
        yield f"tiers are not compared with the caches of earlier starts: {error}"
        return
    budgets = Budgets({Tier.HOST: int(config.host_bytes), Tier.DISK: int(config.disk_bytes)})
    for position, cache in enumerate(stored):
        had = remembered.get(cache.name)
        slots = budgets.slots_of_stored(cache, had, len(stored) - position)
        budgets.take(cache.name, cache.spec, slots)
        lacks = (told(tier, *has) for tier, has in compared(cache.spec, had, slots).items() if tier is not Tier.DEVICE)
        yield from (f"cache {cache.name}: {said}" for said in lacks if said)
    for name in sorted(remembered.names.difference(cache.name for cache in stored)):
        if Tier.DISK in remembered.get(name):
            yield f"cache {name}: {f'it is not in {config.disk_path}' if config.disk_bytes else NO_DISK}"
