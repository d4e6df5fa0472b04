"""Budgets: the slots that a cache has of each tier.

The configuration sets a tier's size. A cache's slots are fixed while it is open. The disk remembers its own slots, the
state directory remembers the slots of the memory tiers.

A budget without ``group_bytes`` is split over the cache's window groups. A full-attention group keeps all n blocks of a
sequence. A sliding group keeps its sinks, the blocks of its window and one more; an opaque group keeps all of an
engine's pages, since any page may end a prefix. A group of states (a window of one token) keeps two at least, and one
for every 4,096 tokens. A group's share is in proportion to the bytes that it keeps of a
reference sequence: 32,768 tokens, or as many as the budget holds. So a small budget holds a sequence in all its groups,
and the groups of a large budget are full after the same number of sequences.
"""

from __future__ import annotations

import logging
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from operator import mul
from pathlib import Path
from typing import Any, Final, Self

import grpc
from pydantic import ByteSize, TypeAdapter, ValidationError

from kvtier.abi.control import MAX_SLOTS
from kvtier.abi.spec import STATE, STATE_TOKENS, CacheSpec
from kvtier.v1 import common_pb2
from kvtierd.config import Config
from kvtierd.config.keys import STAND_IN, Share
from kvtierd.core.ids import GroupId, Tier
from kvtierd.service import wire
from kvtierd.service.errors import CallRefused, bad_argument
from kvtierd.tiers.base import DamagedDirectory, TierConfigError
from kvtierd.tiers.disk import superblock
from kvtierd.tiers.disk.root import StoredCache
from kvtierd.tiers.memfd import total_bytes

REFERENCE_TOKENS: Final = 32_768
WHOLE: Final = Share(1)

_log = logging.getLogger(__name__)


def least_bytes(spec: CacheSpec) -> int:
    """The smallest budget of a tier: a slot for each group."""
    return sum(_sequence_bytes(spec, 1))


def most_bytes(spec: CacheSpec) -> int:
    """The largest budget of a tier: MAX_SLOTS slots for each group."""
    return sum(MAX_SLOTS * spec.record_bytes(group) for group in range(len(spec.groups)))


def split(spec: CacheSpec, budget: int) -> tuple[int, ...]:
    """Slots by group for ``budget`` bytes of a tier: 1 to MAX_SLOTS for each group. The rest is less than a slot.
    ``budget`` is at least :func:`least_bytes`."""
    longest = range(1, -(-REFERENCE_TOKENS // spec.tokens_per_block) + 1)
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
    return [spec.record_bytes(group) * _kept(spec, group, blocks) for group in range(len(spec.groups))]


def _kept(spec: CacheSpec, group: int, blocks: int) -> int:
    shape, attention = spec.groups[group], spec.attention(group)
    if shape.window_tokens == STATE:
        return min(blocks, max(2, blocks * spec.tokens_per_block // STATE_TOKENS))
    return min(blocks, attention.sinks + attention.span + 1) if attention.span and not shape.opaque else blocks


Slots = Mapping[Tier, tuple[int, ...]]
"""Slots by tier of the cache, a count above 0 per window group."""

CACHES: Final = "caches"
"""The directory below the state directory that has the budgets of caches."""
KIND: Final = "budgets"
_VERSION: Final = 2
MAX_PAST: Final = 512
"""Most removed caches whose options are remembered; the latest stay."""


@dataclass(slots=True, frozen=True)
class TierBudget:
    """A request for bytes of a tier. ``group_bytes``: by window group; empty = split by the specification."""

    nbytes: int
    group_bytes: tuple[int, ...] = ()


def group_slots(slots: Slots, group: GroupId) -> dict[Tier, int]:
    return {tier: counts[group] for tier, counts in slots.items()}


def tier_bytes(spec: CacheSpec, counts: tuple[int, ...]) -> int:
    """Bytes of the slots of all groups in a tier. A slot has the same size in every tier."""
    return sum(count * spec.record_bytes(group) for group, count in enumerate(counts))


@dataclass(slots=True)
class Account:
    """Bytes of a tier. ``device``: of the tier, "" for host and disk. ``given``: bytes by name of the cache.
    ``refused``: whether a refusal was logged since the last change."""

    tier: Tier
    device: str
    size: int
    given: dict[str, int] = field(default_factory=dict)
    refused: bool = False

    @property
    def left(self) -> int:
        return self.size - sum(self.given.values())

    def told(self, may_see: Callable[[str], bool], idle_s: Callable[[str], int | None]) -> str:
        """Describes the bytes of each cache. ``may_see``: whether a cache may be named. ``idle_s``: seconds since a
        session had the cache open; None = a session has."""
        name = f"{self.tier} tier of {self.device}" if self.device else f"{self.tier} tier"
        largest = sorted(filter(may_see, self.given), key=self.given.__getitem__, reverse=True)[:MAX_NAMED]
        times = {
            cache: f" idle for {timedelta(seconds=idle)}" for cache in largest if (idle := idle_s(cache)) is not None
        }
        parts = [f"{cache} {readable(self.given[cache])}{times.get(cache, '')}" for cache in largest]
        if len(parts) < len(self.given):
            parts.append(f"{len(self.given) - len(parts)} other caches")
        free = f"{_exact(self.left)} of {readable(self.size)} are free"
        says = free if self.left else f"all {readable(self.size)} are given out"
        return f"{name}: {says}" + (f" ({', '.join(parts)})" if parts else "")


MAX_NAMED: Final = 8
"""Most caches that a refusal names, the largest."""


class BudgetExhausted(CallRefused):
    """RESOURCE_EXHAUSTED for bytes of a tier. ``asked``: a sentence on the use of the bytes."""

    def __init__(self, account: Account, asked: str, wanted: int, free: int) -> None:
        detail = common_pb2.ErrorDetail(
            reason="TIER_FULL",
            tier=wire.TIER_TO_WIRE[account.tier],
            wanted=min(wanted, MAX_SLOTS),
            free=min(free, MAX_SLOTS),
        )
        super().__init__(grpc.StatusCode.RESOURCE_EXHAUSTED, asked, detail)
        self._account: Final = account
        self._asked: Final = asked
        self.tell(lambda _: True, lambda _: None)
        if not account.refused:
            _log.warning("a cache is refused: %s", self.message)
            account.refused = True

    def tell(self, may_see: Callable[[str], bool], idle_s: Callable[[str], int | None]) -> None:
        """Rewrites the message for a caller: see :meth:`Account.told`."""
        way_out = "`kvtier cache rm NAME`, or open caches with budgets="
        self.message = f"{self._account.told(may_see, idle_s)}; {self._asked}. {way_out}"


class Budgets:
    """Bytes of tiers, and the caches that have them.

    Args:
        shared: Tiers that other budgets have, too.
        device: The device of the device tier.
        default: Share of each tier for a cache without budgets.
    """

    def __init__(
        self, sizes: Mapping[Tier, int], shared: Budgets | None = None, device: str = "", default: Share = WHOLE
    ) -> None:
        own = {tier: Account(tier, device, size) for tier, size in sizes.items()}
        self._accounts: Final[dict[Tier, Account]] = own | ({} if shared is None else shared._accounts)
        self._default: Final = default

    @property
    def accounts(self) -> list[Account]:
        """The accounts of the configured tiers, the highest first."""
        return [self._accounts[tier] for tier in sorted(self._accounts)]

    def left(self, tier: Tier, own: str = "") -> int:
        """Free bytes of a tier, with the bytes of the cache ``own``; 0 if it is not configured."""
        account = self._accounts.get(tier)
        return 0 if account is None else account.left + account.given.get(own, 0)

    def take(self, name: str, spec: CacheSpec, slots: Slots) -> None:
        """Takes slots for a cache, which must fit: see :meth:`slots_for`."""
        for tier, counts in slots.items():
            account = self._accounts[tier]
            account.given[name], account.refused = tier_bytes(spec, counts), False

    def give_back(self, name: str, slots: Slots) -> None:
        for tier in slots:
            account = self._accounts[tier]
            del account.given[name]
            account.refused = False

    def wanted(self, spec: CacheSpec, asked: Mapping[Tier, TierBudget]) -> dict[Tier, int]:
        """Bytes by tier for budgets; without budgets the default share of every tier."""
        if asked:
            return {tier: budget.nbytes for tier, budget in asked.items()}
        least = least_bytes(spec)
        return {each.tier: max(self._default.of(each.size), least) for each in self.accounts}

    def slots_for(
        self, spec: CacheSpec, asked: Mapping[Tier, TierBudget], own: str = "", owed: Slots | None = None
    ) -> dict[Tier, tuple[int, ...]]:
        """Slots for budgets; without budgets the ``owed`` slots, which the cache was promised earlier, or else the
        default share of every tier; in each case the rest of the tier if that is less.

        Raises RESOURCE_EXHAUSTED if a budget is larger than the rest of its tier, INVALID_ARGUMENT like
        :func:`slots_of`.
        """
        if not asked:
            return self._default_slots(spec, owed or {})
        for tier, budget in asked.items():
            if budget.nbytes > self.left(tier, own):
                wanted, free = (sum(share_of(spec, nbytes)) for nbytes in (budget.nbytes, self.left(tier, own)))
                raise BudgetExhausted(self._accounts[tier], f"{_exact(budget.nbytes)} were asked for", wanted, free)
        return {tier: slots_of(spec, tier, budget) for tier, budget in asked.items()}

    def slots_of_stored(self, cache: StoredCache, had: Slots, sharing: int) -> dict[Tier, tuple[int, ...]]:
        """Slots of a stored cache: its disk slots, and up to its former slots of each memory tier.

        Args:
            had: Its former slots; empty if they are not remembered.
            sharing: Caches, including this one, that still get slots.

        Raises:
            TierConfigError: The rest of the disk tier is smaller than the cache.
        """
        spec = cache.spec
        on_disk = tuple(cache.slots[group] for group in sorted(cache.slots))
        wanted = tier_bytes(spec, on_disk)
        if wanted > self.left(Tier.DISK):
            disk = self._accounts[Tier.DISK]
            limit = f"at least {disk.size - disk.left + wanted}, the bytes of the stored caches up to {cache.name}"
            raise TierConfigError("disk_bytes", disk.size, limit)
        slots = {Tier.DISK: on_disk}
        for tier in (Tier.DEVICE, Tier.HOST):
            left = self.left(tier)
            share = had.get(tier, ()) if had else share_of(spec, left // sharing)
            if share := _fitting(spec, share, left):
                slots[tier] = share
        return slots

    def _default_slots(self, spec: CacheSpec, owed: Slots) -> dict[Tier, tuple[int, ...]]:
        """Slots without budgets: at least a slot for each group in each tier with enough room. Disk alone is refused if
        there is a memory tier."""
        promised = {tier: counts for tier, counts in owed.items() if tier in self._accounts}
        wanted = promised or {tier: share_of(spec, nbytes) for tier, nbytes in self.wanted(spec, {}).items()}
        fitting = {tier: _fitting(spec, counts, self.left(tier)) for tier, counts in wanted.items()}
        found = {tier: counts for tier, counts in fitting.items() if counts}
        memory = self._accounts.keys() - {Tier.DISK}
        if not found or (memory and memory.isdisjoint(found)):
            says = f"a slot of each window group takes {_exact(least_bytes(spec))}"
            raise BudgetExhausted(self._accounts[max(memory or self._accounts)], says, len(spec.groups), 0)
        return found


def readable(nbytes: int) -> str:
    return ByteSize(nbytes).human_readable(separator=" ")


def _exact(nbytes: int) -> str:
    """Like :func:`readable`, with the bytes if that rounds, so that different sizes read differently."""
    unit = 1 << (max(nbytes.bit_length(), 1) - 1) // 10 * 10
    return readable(nbytes) if nbytes * 10 % unit == 0 else f"{readable(nbytes)} ({nbytes} bytes)"


def share_of(spec: CacheSpec, nbytes: int) -> tuple[int, ...]:
    """Slots by group for ``nbytes``; empty if they are too few for a slot of each group."""
    return split(spec, nbytes) if nbytes >= least_bytes(spec) else ()


def _fitting(spec: CacheSpec, counts: tuple[int, ...], left: int) -> tuple[int, ...]:
    return counts if tier_bytes(spec, counts) <= left else share_of(spec, left)


def slots_of(spec: CacheSpec, tier: Tier, budget: TierBudget) -> tuple[int, ...]:
    """Slots by group for a tier's budget. Raises INVALID_ARGUMENT for less than a slot of each group, or more than
    MAX_SLOTS of each."""
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


@dataclass(slots=True, frozen=True)
class PastOptions:
    """Options of a memory-only cache, as JSON values. ``spec``: hexadecimal fingerprint of its specification."""

    spec: str
    options: Mapping[str, Any]


@dataclass(slots=True, frozen=True)
class _Content:
    """The content of :class:`RememberedSlots`, by name of the cache. ``caches``: slots by name of the tier. ``shares``:
    bytes by name of the share. ``gpus``: uuids by the names in the configuration. ``block_bytes``: by window group."""

    caches: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    options: Mapping[str, PastOptions] = field(default_factory=dict)
    shares: Mapping[str, int] = field(default_factory=dict)
    devices: Mapping[str, str] = field(default_factory=dict)
    gpus: Mapping[str, str] = field(default_factory=dict)
    block_bytes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads the file. A damaged file is set aside, as no block depends on it. Raises DamagedDirectory for a file of
        another version, TierIOError."""
        with superblock.io_errors(f"cannot use {path}"):
            superblock.refuse_link(path)
        try:
            content = superblock.read_superblock(path, KIND)
        except DamagedDirectory as error:
            superblock.set_aside(path)
            _log.warning(
                "the budgets of caches are set aside: caches on disk share the memory tiers evenly; to undo it, stop "
                "the daemon and put a sound SUPERBLOCK back why=%r kept_as=%s",
                *(str(error), path / superblock.SET_ASIDE),
            )
            return cls()
        if content is None:
            return cls()
        if (version := content.pop("version", None)) != _VERSION:
            raise DamagedDirectory(path, f"its budgets are of version {version}; this daemon reads version {_VERSION}")
        try:
            return TypeAdapter(cls).validate_python(content)
        except ValidationError as error:
            raise DamagedDirectory(path, f"its budgets cannot be read: {error}") from error

    def write(self, path: Path) -> None:
        """Raises TierIOError."""
        with superblock.io_errors(f"cannot write {path}"):
            superblock.make_private_directory(path)
            superblock.write_superblock(path, KIND, {"version": _VERSION} | asdict(self))


class RememberedSlots:
    """The promised slots and the device of all caches, in a file that is written whole or not at all. Blocks; for any
    thread. A cache may have less than its promise after a start with smaller tiers: see ``service/promises.py``.

    The file also has the options of memory-only caches, even after their removal: after a restart, another client than
    the one that chose the options may open the cache. A stored cache has its options in its superblock. The file also
    has the bytes of each share of a GPU.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._changing = threading.Lock()
        self._content = _Content.read(path)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._content.caches)

    def get(self, name: str) -> dict[Tier, tuple[int, ...]]:
        """The promised slots; empty for an unknown cache."""
        return {Tier[tier.upper()]: counts for tier, counts in self._content.caches.get(name, {}).items()}

    def promised_bytes(self, name: str) -> dict[Tier, int]:
        """The bytes of the promised slots."""
        each = self._content.block_bytes.get(name, ())
        return {tier: sum(map(mul, counts, each)) for tier, counts in self.get(name).items()}

    @property
    def gpus(self) -> Mapping[str, str]:
        """The uuid of each GPU of the last start, by its name in the configuration."""
        return self._content.gpus

    def know(self, gpus: Mapping[str, str]) -> None:
        """Sets :attr:`gpus`. Raises TierIOError."""
        with self._changing:
            self._replace(gpus=gpus)

    def device(self, name: str) -> str | None:
        """The id of the cache's device, "" if the cache has none; None if it is not remembered."""
        return self._content.devices.get(name)

    def groups(self, name: str) -> int:
        """The number of the cache's window groups."""
        return max(map(len, self._content.caches[name].values()), default=1)

    def past_options(self, name: str, spec: str) -> Mapping[str, Any] | None:
        """Options of the present or former cache of this name and specification."""
        past = self._content.options.get(name)
        return past.options if past is not None and past.spec == spec else None

    def put(
        self,
        name: str,
        slots: Slots,
        past: PastOptions | None = None,
        device: str = "",
        block_bytes: Sequence[int] = (),
    ) -> None:
        """Remembers a cache. ``past``: options of a cache that is not on disk. ``block_bytes``: by window group; empty
        = as before. Raises TierIOError."""
        with self._changing:
            now = self._content
            others = {each: options for each, options in now.options.items() if each != name}
            self._replace(
                caches={**now.caches, name: {str(tier): counts for tier, counts in slots.items()}},
                options=others if past is None else others | {name: past},
                devices={**now.devices, name: device},
                block_bytes={**now.block_bytes, name: tuple(block_bytes) or now.block_bytes.get(name, ())},
            )

    @property
    def shares(self) -> Mapping[str, int]:
        """Bytes of each share, by the name that :meth:`share` takes."""
        return self._content.shares

    def share(self, name: str, nbytes: int) -> int:
        """The bytes of a share at its first use; ``nbytes`` at the first use.

        Free memory changes with the running engines; a tier that changed with it would lose its blocks. ``name``: the
        share and its GPU. Raises TierIOError.
        """
        with self._changing:
            if name not in self._content.shares:
                self._replace(shares={**self._content.shares, name: nbytes})
            return self._content.shares[name]

    def forget(self, name: str) -> None:
        """Forgets a cache and its options. Raises TierIOError."""
        with self._changing:
            now = self._content
            self._replace(
                caches={each: promise for each, promise in now.caches.items() if each != name},
                options={each: past for each, past in now.options.items() if each != name},
            )

    def forget_gone(self, stored: Collection[str] | None, kept: Collection[str] = ()) -> None:
        """Forgets the slots of caches that cannot come back. ``stored``: caches on disk; None without a disk tier, when
        every cache with disk slots may come back. ``kept``: caches in kept memory. Raises TierIOError."""
        with self._changing:
            caches = self._content.caches
            names = {name for name in caches if "disk" in caches[name]} if stored is None else stored
            self._replace(caches={name: caches[name] for name in caches if name in names or name in kept})

    def _replace(self, **changes: Mapping[str, Any]) -> None:
        now = replace(self._content, **changes)
        gone = [name for name in now.options if name not in now.caches][:-MAX_PAST]
        now = replace(
            now,
            options={name: past for name, past in now.options.items() if name not in gone},
            devices={name: device for name, device in now.devices.items() if name in now.caches},
            block_bytes={name: each for name, each in now.block_bytes.items() if name in now.caches},
        )
        if now != self._content:
            now.write(self._path)
            self._content = now


def require_possible(config: Config) -> str:
    """Checks that the tiers fit into the machine. Blocks. Returns a warning, or an empty string. Raises
    :class:`TierConfigError` for the largest wrong key."""
    stand_in = sum(int(device.bytes) for device in config.device if device.name == STAND_IN)
    in_memory = {"host_bytes": int(config.host_bytes), "device": stand_in}
    wanted, has = sum(in_memory.values()), total_bytes()
    if wanted > has:
        name = max(in_memory, key=in_memory.__getitem__)
        limit = f"the memory tiers take {_exact(wanted)}, this machine has {_exact(has)} with swap"
        raise TierConfigError(name, in_memory[name], limit)
    if config.disk_bytes:
        whole = _file_system_bytes(config.disk_path)
        if config.disk_bytes > whole > 0:  # a file system that grows on demand may report 0
            limit = f"the file system of {config.disk_path} has {_exact(whole)}"
            raise TierConfigError("disk_bytes", int(config.disk_bytes), limit)
        free = _file_system_bytes(config.disk_path, free=True) + _bytes_below(config.disk_path)
        if config.disk_bytes > free > 0:
            values = f"disk_bytes={int(config.disk_bytes)} free_or_own={free} dir={config.disk_path}"
            return f"the disk tier is larger than its share of the file system can be {values}"
    return ""


def _bytes_below(path: Path) -> int:
    """Bytes that the files below a directory take on disk; 0 if it cannot be read."""
    try:
        files = (Path(place, name) for place, _, names in os.walk(path) for name in names)
        return sum(each.lstat().st_blocks * 512 for each in files)
    except OSError:
        return 0


def _file_system_bytes(path: Path, *, free: bool = False) -> int:
    """Size of the file system, or its free bytes; 0 if it cannot be read."""
    try:
        status = os.statvfs(next(each for each in (path, *path.absolute().parents) if each.exists()))
    except OSError:
        return 0
    return (status.f_bavail if free else status.f_blocks) * status.f_frsize
