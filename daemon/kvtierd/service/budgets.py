"""Budgets: the slots that a cache has of each tier.

The configuration sets a tier's size. A cache's slots are fixed when it is made. The disk remembers its own slots, the
state directory those of the memory tiers.

A budget without ``group_bytes`` is split over the cache's window groups. Of a sequence of n blocks a full-attention
group keeps all n, a sliding group the blocks of its window and one more. A group's share is in proportion to the bytes
that it keeps of a reference sequence: 32,768 tokens, or as many as the budget holds. So a small budget holds a sequence
in all its groups, and the groups of a large budget are full after the same number of sequences.
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
    """The largest budget of a tier: MAX_SLOTS slots for each group."""
    return sum(MAX_SLOTS * spec.record_bytes(group) for group in range(len(spec.groups)))


def split(spec: CacheSpec, budget: int) -> tuple[int, ...]:
    """Slots by group for ``budget`` bytes of a tier: 1 to MAX_SLOTS for each group. The rest is less than a slot.

    ``budget`` is at least :func:`least_bytes`.
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
    """Gives out the bytes that rounding left, to the largest slots first."""
    filled = [min(count, MAX_SLOTS) for count in slots]
    rest = budget - sum(count * size for count, size in zip(filled, each, strict=True))
    for group in sorted(range(len(each)), key=lambda group: -each[group]):
        more = min(rest // each[group], MAX_SLOTS - filled[group])
        filled[group] += more
        rest -= more * each[group]
    return tuple(filled)


def _sequence_bytes(spec: CacheSpec, blocks: int) -> list[int]:
    """Bytes that each group keeps of a sequence of ``blocks`` blocks."""
    windows = (group.window_tokens for group in spec.groups)
    kept = (min(blocks, _blocks(spec, window) + 1) if window else blocks for window in windows)
    return [spec.record_bytes(group) * count for group, count in enumerate(kept)]


def _blocks(spec: CacheSpec, tokens: int) -> int:
    return -(-tokens // spec.tokens_per_block)


Slots = Mapping[Tier, tuple[int, ...]]
"""Slots by tier of the cache, one count a window group, none 0."""

_KIND: Final = "budgets"
_VERSION: Final = 2
MAX_PAST: Final = 512
"""Removed caches whose options are remembered: the latest."""


@dataclass(slots=True, frozen=True)
class TierBudget:
    """A request for bytes of a tier. ``group_bytes``: one a window group; none = split by the specification."""

    nbytes: int
    group_bytes: tuple[int, ...] = ()


def group_slots(slots: Slots, group: GroupId) -> dict[Tier, int]:
    """One group's slots by tier."""
    return {tier: counts[group] for tier, counts in slots.items()}


def tier_bytes(spec: CacheSpec, counts: tuple[int, ...]) -> int:
    """Bytes of the slots of all groups in a tier. A slot has the same size in every tier."""
    return sum(count * spec.record_bytes(group) for group, count in enumerate(counts))


class Budgets:
    """Tier sizes and their free bytes."""

    def __init__(self, sizes: Mapping[Tier, int]) -> None:
        self._sizes = dict(sizes)
        self._taken = dict.fromkeys(sizes, 0)

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The configured tiers, the highest first."""
        return tuple(sorted(self._sizes))

    def left(self, tier: Tier) -> int:
        """Free bytes of a tier; 0 if it is not configured."""
        return self._sizes.get(tier, 0) - self._taken.get(tier, 0)

    def take(self, spec: CacheSpec, slots: Slots) -> None:
        """Takes slots, which must fit: see :meth:`slots_for`."""
        for tier, counts in slots.items():
            self._taken[tier] += tier_bytes(spec, counts)

    def give_back(self, spec: CacheSpec, slots: Slots) -> None:
        for tier, counts in slots.items():
            self._taken[tier] -= tier_bytes(spec, counts)

    def slots_for(self, spec: CacheSpec, asked: Mapping[Tier, TierBudget]) -> dict[Tier, tuple[int, ...]]:
        """Slots for budgets; no budgets = all that is left of every tier.

        Raises RESOURCE_EXHAUSTED if a budget is larger than the rest of its tier, INVALID_ARGUMENT as :func:`slots_of`.
        """
        if not asked:
            return self._all_left(spec)
        for tier, budget in asked.items():
            if budget.nbytes > self.left(tier):
                wanted, free = (sum(share_of(spec, nbytes)) for nbytes in (budget.nbytes, self.left(tier)))
                says = f"{budget.nbytes} bytes wanted, {self.left(tier)} free"
                raise _exhausted(tier, wanted, free, says)
        return {tier: slots_of(spec, tier, budget) for tier, budget in asked.items()}

    def slots_of_stored(self, cache: StoredCache, had: Slots | None, sharing: int) -> dict[Tier, tuple[int, ...]]:
        """Slots of a stored cache: its disk slots, and up to its former slots of each memory tier.

        Args:
            had: Its former slots; None if they are not remembered.
            sharing: Caches, including this one, that still get slots.

        Raises:
            TierConfigError: The rest of the disk tier is smaller than the cache.
        """
        spec = cache.spec
        on_disk = tuple(cache.slots[group] for group in sorted(cache.slots))
        wanted = tier_bytes(spec, on_disk)
        if wanted > self.left(Tier.DISK):
            limit = f"at least {wanted}, the bytes of the stored cache {cache.name}, beside the other caches"
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
            says = f"{self.left(top)} bytes free, {least_bytes(spec)} needed for a slot of each window group"
            raise _exhausted(top, len(spec.groups), 0, says)
        return found


def share_of(spec: CacheSpec, nbytes: int) -> tuple[int, ...]:
    """Slots by group for ``nbytes``; empty if they are too few for a slot of each group."""
    return split(spec, nbytes) if nbytes >= least_bytes(spec) else ()


def slots_of(spec: CacheSpec, tier: Tier, budget: TierBudget) -> tuple[int, ...]:
    """Slots by group for a tier's budget.

    Raises INVALID_ARGUMENT for less than a slot of each group, or more than MAX_SLOTS of each.
    """
    field, groups = f"budgets[{tier}]", len(spec.groups)
    if not least_bytes(spec) <= budget.nbytes <= most_bytes(spec):
        limit = f"{least_bytes(spec)} to {most_bytes(spec)} bytes: 1 to {MAX_SLOTS} slots for each window group"
        raise bad_argument(field, budget.nbytes, limit)
    if not budget.group_bytes:
        return split(spec, budget.nbytes)
    if len(budget.group_bytes) != groups:
        raise bad_argument(
            f"{field}.group_bytes", f"{len(budget.group_bytes)} values", f"{groups} values, one a window group"
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
    return CallRefused(grpc.StatusCode.RESOURCE_EXHAUSTED, f"the {tier} tier has too few free bytes: {says}", detail)


@dataclass(slots=True, frozen=True)
class PastOptions:
    """Options of a memory-only cache, as JSON values. ``spec``: hexadecimal fingerprint of its specification."""

    spec: str
    options: Mapping[str, Any]


class RememberedSlots:
    """The slots of all caches, in a file that is written whole or not at all. Blocks; for any thread.

    The file also has the options of memory-only caches, even after their removal: the client that opens such a cache
    after a restart need not be the client that chose its options. A stored cache has its options in its superblock.
    And it has the bytes that a share of a GPU came to.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._changing = threading.Lock()
        content = read_superblock(path, _KIND)
        self._slots: dict[str, dict[str, tuple[int, ...]]] = {} if content is None else _checked(path, content)
        self._options: dict[str, PastOptions] = {} if content is None else _checked_options(path, content)
        self._shares: dict[str, int] = {} if content is None else _checked_shares(path, content)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._slots)

    def get(self, name: str) -> dict[Tier, tuple[int, ...]] | None:
        slots = self._slots.get(name)
        return None if slots is None else {Tier[tier.upper()]: counts for tier, counts in slots.items()}

    def groups(self, name: str) -> int:
        """The number of the cache's window groups."""
        return max(map(len, self._slots[name].values()), default=1)

    def past_options(self, name: str, spec: str) -> Mapping[str, Any] | None:
        """Options of the present or former cache of this name and specification."""
        past = self._options.get(name)
        return past.options if past is not None and past.spec == spec else None

    def put(self, name: str, slots: Slots, past: PastOptions | None = None) -> None:
        """Remembers a cache. ``past``: options of a cache that is not on disk. Raises TierIOError."""
        with self._changing:
            others = {each: options for each, options in self._options.items() if each != name}
            if past is not None:
                others[name] = past
            self._replace(self._slots | {name: {str(tier): counts for tier, counts in slots.items()}}, others)

    def share(self, name: str, nbytes: int) -> int:
        """The bytes that a share came to when it was first asked for; ``nbytes`` the first time.

        What is free changes with the engines that run; a tier that changed with it would lose its blocks.
        ``name``: the share, and of which GPU. Raises TierIOError.
        """
        with self._changing:
            if name not in self._shares:
                self._replace(self._slots, self._options, {name: nbytes})
            return self._shares[name]

    def forget(self, name: str) -> None:
        """Raises TierIOError."""
        with self._changing:
            self._replace(
                {each: slots for each, slots in self._slots.items() if each != name},
                {each: options for each, options in self._options.items() if each != name},
            )

    def forget_gone(self, stored: Collection[str] | None) -> None:
        """Forgets the slots of caches that cannot come back. ``stored``: caches on disk; None without a disk tier, when
        every cache with disk slots may come back. Raises TierIOError."""
        names = {name for name, slots in self._slots.items() if str(Tier.DISK) in slots} if stored is None else stored
        with self._changing:
            self._replace({name: slots for name, slots in self._slots.items() if name in names}, self._options)

    def _replace(
        self,
        slots: dict[str, dict[str, tuple[int, ...]]],
        options: dict[str, PastOptions],
        shares: dict[str, int] | None = None,
    ) -> None:
        shares = self._shares if shares is None else shares
        gone = [name for name in options if name not in slots]
        options = {name: past for name, past in options.items() if name not in gone[:-MAX_PAST]}
        if (slots, options, shares) == (self._slots, self._options, self._shares):
            return
        past = {name: asdict(one) for name, one in options.items()}
        content = {"version": _VERSION, "caches": slots, "options": past, "shares": shares}
        with io_errors(f"cannot write {self._path}"):
            make_private_directory(self._path)
            write_superblock(self._path, _KIND, content)
        self._slots, self._options, self._shares = slots, options, shares


def _checked_options(path: Path, content: Mapping[str, Any]) -> dict[str, PastOptions]:
    try:
        return {
            str(name): PastOptions(str(past["spec"]), dict(past["options"]))
            for name, past in content.get("options", {}).items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedDirectory(path, f"its options cannot be read: {error!r}") from error


def _checked_shares(path: Path, content: Mapping[str, Any]) -> dict[str, int]:
    try:
        return {str(name): int(nbytes) for name, nbytes in content.get("shares", {}).items()}
    except (TypeError, ValueError, AttributeError) as error:
        raise DamagedDirectory(path, f"its shares cannot be read: {error!r}") from error


def _checked(path: Path, content: Mapping[str, Any]) -> dict[str, dict[str, tuple[int, ...]]]:
    names = {str(tier) for tier in Tier}
    if (version := content.get("version")) != _VERSION:
        raise DamagedDirectory(path, f"its budgets are of version {version}; this daemon reads version {_VERSION}")
    try:
        return {
            str(name): {tier: tuple(map(int, counts)) for tier, counts in slots.items() if tier in names}
            for name, slots in content["caches"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedDirectory(path, f"its budgets cannot be read: {error!r}") from error


def require_possible(config: Config) -> None:
    """Checks that the tiers fit into the machine. Blocks. Raises :class:`TierConfigError` for the largest wrong key."""
    sizes = config.tier_bytes()
    in_memory = {"host_bytes": sizes.get(Tier.HOST, 0)}
    if config.cuda_device is None:
        in_memory["device_bytes"] = sizes.get(Tier.DEVICE, 0)
    wanted, has = sum(in_memory.values()), total_bytes()
    if wanted > has:
        name = max(in_memory, key=in_memory.__getitem__)
        limit = f"the memory tiers take {wanted} bytes, this machine has {has} with swap"
        raise TierConfigError(name, in_memory[name], limit)
    if Tier.DISK in sizes:
        whole = _file_system_bytes(config.disk_path)
        if sizes[Tier.DISK] > whole > 0:  # a file system that grows on demand may report 0
            limit = f"the file system of {config.disk_path} has {whole} bytes"
            raise TierConfigError("disk_bytes", sizes[Tier.DISK], limit)


def _file_system_bytes(path: Path) -> int:
    """Size of the file system; 0 if it cannot be read."""
    try:
        status = os.statvfs(next(each for each in (path, *path.absolute().parents) if each.exists()))
    except OSError:
        return 0
    return status.f_blocks * status.f_frsize
