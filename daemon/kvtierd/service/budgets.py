"""Who may have how many slots of which tier.

A tier's size comes from the configuration. A cache's share is fixed when it is opened, in slots, and remembered: by
the disk for the disk, in the state directory for the memory tiers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import grpc

from kvtier.abi.layout import MAX_SLOTS
from kvtier.abi.spec import CacheSpec, padded
from kvtier.v1 import common_pb2
from kvtierd.core.ids import GroupId, Tier
from kvtierd.service import wire
from kvtierd.service.errors import CallRefused, bad_argument
from kvtierd.tiers.base import DamagedDirectory
from kvtierd.tiers.disk.files import io_errors, make_private_directory
from kvtierd.tiers.disk.superblock import read_superblock, write_superblock

Slots = Mapping[Tier, int]
"""Slots by tier, of the one window group; tiers that the cache lacks are absent."""

GROUP: Final = GroupId(0)
"""The one window group that a cache has for now (``CacheSpec.validate`` sees to it)."""

_KIND: Final = "budgets"


def slot_bytes(spec: CacheSpec) -> dict[Tier, int]:
    """What a slot takes of each tier: on the device its pools' parts, elsewhere one record; padded alike."""
    pools = range(len(spec.groups[GROUP].pools))
    device = sum(padded(spec.pool_bytes(GROUP, pool)) for pool in pools)
    return {Tier.DEVICE: device, Tier.HOST: spec.record_bytes(GROUP), Tier.DISK: spec.record_bytes(GROUP)}


class Budgets:
    """Tier sizes and what is left of them."""

    def __init__(self, sizes: Mapping[Tier, int]) -> None:
        self._sizes = dict(sizes)
        self._taken = dict.fromkeys(sizes, 0)

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """That exist, the highest first."""
        return tuple(sorted(self._sizes))

    def left(self, tier: Tier) -> int:
        """Bytes; 0 for a tier that does not exist."""
        return self._sizes.get(tier, 0) - self._taken.get(tier, 0)

    def take(self, spec: CacheSpec, slots: Slots) -> None:
        """Must fit: see :meth:`slots_for`."""
        for tier, count in slots.items():
            self._taken[tier] += count * slot_bytes(spec)[tier]

    def give_back(self, spec: CacheSpec, slots: Slots) -> None:
        for tier, count in slots.items():
            self._taken[tier] -= count * slot_bytes(spec)[tier]

    def slots_for(self, spec: CacheSpec, asked: Mapping[Tier, int]) -> dict[Tier, int]:
        """Slots for budgets in bytes; none asked = all that is left of every tier.

        Raises RESOURCE_EXHAUSTED where more is asked than is left, INVALID_ARGUMENT for less than a slot.
        """
        each = slot_bytes(spec)
        if not asked:
            found = {tier: min(self.left(tier) // each[tier], MAX_SLOTS) for tier in self.tiers}
            found = {tier: count for tier, count in found.items() if count}
            if not found:
                raise _exhausted(self.tiers[0], 1, 0, f"{self.left(self.tiers[0])} bytes of it are left")
            return found
        return {tier: self._asked_slots(tier, size, each[tier]) for tier, size in asked.items()}

    def _asked_slots(self, tier: Tier, size: int, each: int) -> int:
        if size > self.left(tier):
            says = f"{size} bytes of it were asked for, {self.left(tier)} are left"
            raise _exhausted(tier, min(size // each, MAX_SLOTS), self.left(tier) // each, says)
        count = size // each
        if not 1 <= count <= MAX_SLOTS:
            limit = f"{each} to {each * MAX_SLOTS} bytes, 1 to {MAX_SLOTS} slots of {each} bytes"
            raise bad_argument(f"budgets[{tier}]", size, limit)
        return count


def _exhausted(tier: Tier, wanted: int, free: int, says: str) -> CallRefused:
    detail = common_pb2.ErrorDetail(reason="TIER_FULL", tier=wire.TIER_TO_WIRE[tier], wanted=wanted, free=free)
    return CallRefused(grpc.StatusCode.RESOURCE_EXHAUSTED, f"the {tier} tier is given out: {says}", detail)


class RememberedSlots:
    """Slots of all caches that there are, written whole or not at all. Blocking.

    A stored cache's disk slots are those of its own superblock; here they tell it from one that ends with the daemon.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        content = read_superblock(path, _KIND)
        self._slots: dict[str, dict[str, int]] = {} if content is None else _checked(path, content)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._slots)

    def get(self, name: str) -> dict[Tier, int] | None:
        slots = self._slots.get(name)
        return None if slots is None else {Tier[tier.upper()]: count for tier, count in slots.items()}

    def put(self, name: str, slots: Slots) -> None:
        """Raises TierIOError."""
        self._replace(self._slots | {name: {str(tier): count for tier, count in slots.items()}})

    def forget_gone(self, stored: Collection[str] | None) -> None:
        """Only caches that can still come back are left. ``stored``: those on disk; None while there is no disk tier,
        when all that have disk slots may be there. Raises TierIOError."""
        names = {name for name, slots in self._slots.items() if str(Tier.DISK) in slots} if stored is None else stored
        self._replace({name: slots for name, slots in self._slots.items() if name in names})

    def _replace(self, slots: dict[str, dict[str, int]]) -> None:
        if slots == self._slots:
            return
        with io_errors(f"cannot write {self._path}"):
            make_private_directory(self._path)
            write_superblock(self._path, _KIND, {"caches": slots})
        self._slots = slots


def _checked(path: Path, content: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    names = {str(tier) for tier in Tier}
    try:
        return {
            str(name): {tier: int(count) for tier, count in slots.items() if tier in names}
            for name, slots in content["caches"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedDirectory(path, f"its budgets make no sense: {error!r}") from error
