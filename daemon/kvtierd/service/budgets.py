"""Who may have how many slots of which tier.

A tier's size comes from the configuration. A cache's share is fixed when it is opened, in slots, and remembered: by
the disk for the disk, in the state directory for the memory tiers.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from kvtier.abi.control import MAX_SLOTS
from kvtier.abi.spec import CacheSpec
from kvtier.v1 import common_pb2
from kvtierd.core.ids import GroupId, Tier
from kvtierd.service import wire
from kvtierd.service.errors import CallRefused, bad_argument
from kvtierd.service.split import least_bytes, most_bytes, split
from kvtierd.tiers.base import DamagedDirectory
from kvtierd.tiers.disk.superblock import io_errors, make_private_directory, read_superblock, write_superblock

Slots = Mapping[Tier, tuple[int, ...]]
"""Slots by tier, one count a window group and none of them 0; tiers that the cache lacks are absent."""

_KIND: Final = "budgets"
_VERSION: Final = 2
MAX_PAST: Final = 512
"""Caches that are gone whose options are remembered: the latest."""

"""Of the remembered slots: a list by tier. Version 1, which does not say so, has one number: of the one group."""


@dataclass(slots=True, frozen=True)
class TierBudget:
    """What a cache asks of a tier. ``group_bytes``: by hand, one a window group; none = split by the specification."""

    nbytes: int
    group_bytes: tuple[int, ...] = ()


def group_slots(slots: Slots, group: GroupId) -> dict[Tier, int]:
    """One group's slots by tier."""
    return {tier: counts[group] for tier, counts in slots.items()}


def tier_bytes(spec: CacheSpec, counts: tuple[int, ...]) -> int:
    """What the slots of all groups take of a tier. A slot takes as much of each: its parts, padded alike."""
    return sum(count * spec.record_bytes(group) for group, count in enumerate(counts))


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
        for tier, counts in slots.items():
            self._taken[tier] += tier_bytes(spec, counts)

    def give_back(self, spec: CacheSpec, slots: Slots) -> None:
        for tier, counts in slots.items():
            self._taken[tier] -= tier_bytes(spec, counts)

    def slots_for(self, spec: CacheSpec, asked: Mapping[Tier, TierBudget]) -> dict[Tier, tuple[int, ...]]:
        """Slots for budgets; none asked = all that is left of every tier.

        Raises RESOURCE_EXHAUSTED where more is asked than is left, INVALID_ARGUMENT as :func:`slots_of`.
        """
        if not asked:
            return self._all_left(spec)
        for tier, budget in asked.items():
            if budget.nbytes > self.left(tier):
                wanted, free = (sum(share_of(spec, nbytes)) for nbytes in (budget.nbytes, self.left(tier)))
                says = f"{budget.nbytes} bytes of it were asked for, {self.left(tier)} are left"
                raise _exhausted(tier, wanted, free, says)
        return {tier: slots_of(spec, tier, budget) for tier, budget in asked.items()}

    def _all_left(self, spec: CacheSpec) -> dict[Tier, tuple[int, ...]]:
        shares = {tier: share_of(spec, self.left(tier)) for tier in self.tiers}
        found = {tier: share for tier, share in shares.items() if share}
        if not found:
            top = self.tiers[0]
            says = f"{self.left(top)} bytes of it are left, {least_bytes(spec)} are a slot for each window group"
            raise _exhausted(top, len(spec.groups), 0, says)
        return found


def share_of(spec: CacheSpec, nbytes: int) -> tuple[int, ...]:
    """Slots by group for so many bytes; empty where that is less than a slot for each."""
    return split(spec, nbytes) if nbytes >= least_bytes(spec) else ()


def slots_of(spec: CacheSpec, tier: Tier, budget: TierBudget) -> tuple[int, ...]:
    """Slots by group for a tier's budget, whatever is left of the tier.

    Raises INVALID_ARGUMENT for less than a slot for each group, or more than it could use.
    """
    field, groups = f"budgets[{tier}]", len(spec.groups)
    if not least_bytes(spec) <= budget.nbytes <= most_bytes(spec):
        limit = f"{least_bytes(spec)} to {most_bytes(spec)} bytes: 1 to {MAX_SLOTS} slots for each window group"
        raise bad_argument(field, budget.nbytes, limit)
    if not budget.group_bytes:
        return split(spec, budget.nbytes)
    if len(budget.group_bytes) != groups:
        raise bad_argument(
            f"{field}.group_bytes", f"{len(budget.group_bytes)} of them", f"{groups}, one a window group"
        )
    if sum(budget.group_bytes) > budget.nbytes:
        says = f"together at most the tier's {budget.nbytes} bytes"
        raise bad_argument(f"{field}.group_bytes", sum(budget.group_bytes), says)
    for group, nbytes in enumerate(budget.group_bytes):
        each = spec.record_bytes(group)
        if not each <= nbytes <= each * MAX_SLOTS:
            limit = f"{each} to {each * MAX_SLOTS} bytes, 1 to {MAX_SLOTS} slots of {each} bytes"
            raise bad_argument(f"{field}.group_bytes[{group}]", nbytes, limit)
    return tuple(nbytes // spec.record_bytes(group) for group, nbytes in enumerate(budget.group_bytes))


def _exhausted(tier: Tier, wanted: int, free: int, says: str) -> CallRefused:
    detail = common_pb2.ErrorDetail(
        reason="TIER_FULL", tier=wire.TIER_TO_WIRE[tier], wanted=min(wanted, MAX_SLOTS), free=min(free, MAX_SLOTS)
    )
    return CallRefused(grpc.StatusCode.RESOURCE_EXHAUSTED, f"the {tier} tier is given out: {says}", detail)


@dataclass(slots=True, frozen=True)
class PastOptions:
    """Of a cache that has nothing on disk. ``spec``: the fingerprint of its specification, hexadecimal; ``options``:
    plain JSON values."""

    spec: str
    options: Mapping[str, Any]


class RememberedSlots:
    """Slots of all caches that there are, written whole or not at all. Blocking; for any thread.

    A stored cache's disk slots are those of its own superblock; here they tell it from one that ends with the daemon.
    Of these the options are remembered besides, even when the cache is gone: its clients open it again after a restart,
    and whoever comes first need not be the one that chose them. A stored cache has its own in its superblock.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._changing = threading.Lock()
        content = read_superblock(path, _KIND)
        self._slots: dict[str, dict[str, tuple[int, ...]]] = {} if content is None else _checked(path, content)
        self._options: dict[str, PastOptions] = {} if content is None else _checked_options(path, content)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._slots)

    def get(self, name: str) -> dict[Tier, tuple[int, ...]] | None:
        slots = self._slots.get(name)
        return None if slots is None else {Tier[tier.upper()]: counts for tier, counts in slots.items()}

    def groups(self, name: str) -> int:
        """How many window groups the cache has."""
        return max(map(len, self._slots[name].values()), default=1)

    def past_options(self, name: str, spec: str) -> Mapping[str, Any] | None:
        """Those of the cache of this name and specification, whether or not there is one now."""
        past = self._options.get(name)
        return past.options if past is not None and past.spec == spec else None

    def put(self, name: str, slots: Slots, past: PastOptions | None = None) -> None:
        """``past``: of a cache that has nothing on disk. Raises TierIOError."""
        with self._changing:
            others = {each: options for each, options in self._options.items() if each != name}
            if past is not None:
                others[name] = past
            self._replace(self._slots | {name: {str(tier): counts for tier, counts in slots.items()}}, others)

    def forget(self, name: str) -> None:
        """Raises TierIOError."""
        with self._changing:
            self._replace(
                {each: slots for each, slots in self._slots.items() if each != name},
                {each: options for each, options in self._options.items() if each != name},
            )

    def forget_gone(self, stored: Collection[str] | None) -> None:
        """Only slots of caches that can still come back are left. ``stored``: those on disk; None while there is no
        disk tier, when all that have disk slots may be there. Raises TierIOError."""
        names = {name for name, slots in self._slots.items() if str(Tier.DISK) in slots} if stored is None else stored
        with self._changing:
            self._replace({name: slots for name, slots in self._slots.items() if name in names}, self._options)

    def _replace(self, slots: dict[str, dict[str, tuple[int, ...]]], options: dict[str, PastOptions]) -> None:
        gone = [name for name in options if name not in slots]
        options = {name: past for name, past in options.items() if name not in gone[:-MAX_PAST]}
        if slots == self._slots and options == self._options:
            return
        past = {name: asdict(one) for name, one in options.items()}
        with io_errors(f"cannot write {self._path}"):
            make_private_directory(self._path)
            write_superblock(self._path, _KIND, {"version": _VERSION, "caches": slots, "options": past})
        self._slots, self._options = slots, options


def _checked_options(path: Path, content: Mapping[str, Any]) -> dict[str, PastOptions]:
    try:
        return {
            str(name): PastOptions(str(past["spec"]), dict(past["options"]))
            for name, past in content.get("options", {}).items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedDirectory(path, f"its options make no sense: {error!r}") from error


def _checked(path: Path, content: Mapping[str, Any]) -> dict[str, dict[str, tuple[int, ...]]]:
    names = {str(tier) for tier in Tier}
    version = content.get("version", 1)
    if version not in (1, _VERSION):
        raise DamagedDirectory(path, f"its budgets are of version {version}; this daemon reads 1 and {_VERSION}")
    try:
        return {
            str(name): {tier: _counts(value, version) for tier, value in slots.items() if tier in names}
            for name, slots in content["caches"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedDirectory(path, f"its budgets make no sense: {error!r}") from error


def _counts(value: Any, version: int) -> tuple[int, ...]:
    return (int(value),) if version == 1 else tuple(int(count) for count in value)
