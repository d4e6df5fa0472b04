"""How many slots of each tier a cache has.

A tier's size comes from the configuration. A cache's share is fixed when it is opened, in slots, and remembered: by
the disk for the disk, in the state directory for the memory tiers.

A budget without shares by hand is split over the cache's window groups. Groups differ in what they keep of a sequence
of n blocks: a full-attention group all n, a sliding group those that its window covers and one more, so that a whole
window is there while the next block fills. A group's share is in proportion to the bytes it keeps of a reference
sequence: 32,768 tokens, or as many as the budget can hold whole. So a small budget holds at least one sequence in all
its groups, and in a large one each group runs out after the same number of sequences.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from kvtier.abi.control import MAX_SLOTS
from kvtier.abi.spec import CacheSpec
from kvtier.v1 import common_pb2
from kvtierd.config import Config
from kvtierd.core.ids import GroupId, Tier
from kvtierd.service import wire
from kvtierd.service.errors import CallRefused, bad_argument
from kvtierd.tiers.base import DamagedDirectory, TierConfigError
from kvtierd.tiers.disk.root import StoredCache
from kvtierd.tiers.disk.superblock import io_errors, make_private_directory, read_superblock, write_superblock
from kvtierd.tiers.memfd import total_bytes

REFERENCE_TOKENS: Final = 32_768


def least_bytes(spec: CacheSpec) -> int:
    """The smallest budget of a tier: a slot for each group."""
    return sum(_sequence_bytes(spec, 1))


def most_bytes(spec: CacheSpec) -> int:
    """The largest budget of a tier that can be used up."""
    return sum(MAX_SLOTS * spec.record_bytes(group) for group in range(len(spec.groups)))


def split(spec: CacheSpec, budget: int) -> tuple[int, ...]:
    """Slots by group for ``budget`` bytes of a tier; none is 0. What is left over is less than any group's slot.

    ``budget`` is at least :func:`least_bytes`; no group gets more than MAX_SLOTS.
    """
    longest = range(1, _blocks(spec, REFERENCE_TOKENS) + 1)
    fitting = bisect_right(longest, budget, key=lambda blocks: sum(_sequence_bytes(spec, blocks)))
    if not fitting:
        raise ValueError(f"{budget} bytes for {len(spec.groups)} groups: at least {least_bytes(spec)}")
    weights = _sequence_bytes(spec, fitting)
    each = [spec.record_bytes(group) for group in range(len(spec.groups))]
    slots = [budget * weight // (sum(weights) * size) for weight, size in zip(weights, each, strict=True)]
    return _without_rest(slots, each, budget)


def _without_rest(slots: Sequence[int], each: Sequence[int], budget: int) -> tuple[int, ...]:
    """Gives out what rounding left, to the largest slots first, for the smallest fill the rest best."""
    filled = [min(count, MAX_SLOTS) for count in slots]
    rest = budget - sum(count * size for count, size in zip(filled, each, strict=True))
    for group in sorted(range(len(each)), key=lambda group: -each[group]):
        more = min(rest // each[group], MAX_SLOTS - filled[group])
        filled[group] += more
        rest -= more * each[group]
    return tuple(filled)


def _sequence_bytes(spec: CacheSpec, blocks: int) -> list[int]:
    """What each group keeps of a sequence of so many blocks."""
    windows = (group.window_tokens for group in spec.groups)
    kept = (min(blocks, _blocks(spec, window) + 1) if window else blocks for window in windows)
    return [spec.record_bytes(group) * count for group, count in enumerate(kept)]


def _blocks(spec: CacheSpec, tokens: int) -> int:
    return -(-tokens // spec.tokens_per_block)


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

    def slots_of_stored(self, cache: StoredCache, had: Slots | None, sharing: int) -> dict[Tier, tuple[int, ...]]:
        """Slots of a cache on disk: its own there, of each memory tier as before, or less where less is left.

        Args:
            had: its slots in the life before; None where they are not remembered.
            sharing: Caches, this one included, that are still to get a share where none is remembered.

        Raises:
            TierConfigError: where the disk tier has less left than the cache has there.
        """
        spec = cache.spec
        on_disk = tuple(cache.slots[group] for group in sorted(cache.slots))
        wanted = tier_bytes(spec, on_disk)
        if wanted > self.left(Tier.DISK):
            limit = f"at least {wanted} more than its other caches take: the stored cache {cache.name} has that much"
            raise TierConfigError("disk_bytes", self.left(Tier.DISK), limit)
        slots = {Tier.DISK: on_disk}
        for tier in (Tier.DEVICE, Tier.HOST):
            left = self.left(tier)
            share = share_of(spec, left // sharing) if had is None else had.get(tier, ())
            if tier_bytes(spec, share) > left:
                share = share_of(spec, left)
            if share:
                slots[tier] = share
        return slots

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


def require_possible(config: Config) -> None:
    """Looks and touches nothing. Blocks. Raises :class:`TierConfigError`, naming the largest key of those at fault."""
    sizes = config.tier_bytes()
    in_memory = {"host_bytes": sizes.get(Tier.HOST, 0)}
    if config.cuda_device is None:
        in_memory["device_bytes"] = sizes.get(Tier.DEVICE, 0)
    wanted, has = sum(in_memory.values()), total_bytes()
    if wanted > has:
        name = max(in_memory, key=in_memory.__getitem__)
        limit = f"the tiers in memory take {wanted} bytes, and this machine has {has}, swap included"
        raise TierConfigError(name, in_memory[name], limit)
    if Tier.DISK in sizes:
        whole = _file_system_bytes(config.disk_path)
        if sizes[Tier.DISK] > whole > 0:  # some that are made as they are used say 0
            limit = f"more than the {whole} bytes of the whole file system of {config.disk_path}"
            raise TierConfigError("disk_bytes", sizes[Tier.DISK], limit)


def _file_system_bytes(path: Path) -> int:
    """0 where it may not be looked at: whoever opens it says why."""
    try:
        status = os.statvfs(next(each for each in (path, *path.absolute().parents) if each.exists()))
    except OSError:
        return 0
    return status.f_blocks * status.f_frsize
