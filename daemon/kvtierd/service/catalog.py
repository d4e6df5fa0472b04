"""The catalog: which caches there are, what each was given of the tiers, and how one comes into being.

Everything that blocks (allocating shared memory, making and reading disk stores) runs in a thread; the engine is told
on the loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, TypeVar

from kvtier.abi.layout import ArenaIdentity, ArenaLayout, ArenaState
from kvtier.abi.spec import CacheSpec
from kvtierd.core.events import EventSequencer
from kvtierd.core.ids import CacheId, GroupId, SlotId, Tier
from kvtierd.core.manager import BlockManager, Recovered
from kvtierd.core.policy import GroupShape
from kvtierd.mover.engine import Engine
from kvtierd.mover.runtime import CacheRuntime
from kvtierd.service.budgets import (
    Budgets,
    RememberedSlots,
    Slots,
    TierBudget,
    group_slots,
    share_of,
    slots_of,
    tier_bytes,
)
from kvtierd.service.errors import bad_argument
from kvtierd.service.faces import CacheFace
from kvtierd.service.options import CacheOptions, Wanted, require_same
from kvtierd.state import Identity
from kvtierd.tiers.arena import Arena
from kvtierd.tiers.base import TierConfigError
from kvtierd.tiers.device import Chaos, StandInDevice
from kvtierd.tiers.disk import DiskRoot, DiskStore, Recovery, StoredCache
from kvtierd.tiers.host import HostStore

T = TypeVar("T")

_log = logging.getLogger(__name__)


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
    def face(self) -> CacheFace:
        return CacheFace.of(self.name, self.spec, self.options.event_hash)


@dataclass(slots=True, frozen=True)
class Stores:
    """What a catalog opens caches in. ``disk``: None where the disk tier is not configured."""

    budgets: Budgets
    remembered: RememberedSlots
    disk: DiskRoot | None
    chaos: Chaos | None


@dataclass(slots=True, frozen=True)
class _Plan:
    """A cache that is to be. ``stored``: it is on disk already."""

    name: str
    spec: CacheSpec
    slots: Slots
    options: CacheOptions
    stored: bool


@dataclass(slots=True, frozen=True)
class _Parts:
    """What a thread has made for a cache, before the loop knows of it."""

    arena: Arena
    host: HostStore | None
    device: StandInDevice | None
    disk: DiskStore | None
    recovered: Mapping[GroupId, Sequence[Recovered]] = field(default_factory=dict)
    quarantined: Mapping[GroupId, Collection[SlotId]] = field(default_factory=dict)

    def close(self) -> None:
        for store in (self.device, self.host, self.disk):
            if store is not None:
                store.close()
        self.arena.close()


class Catalog:
    """All caches of the daemon, open until it stops. ``faces``: filled in before a cache's first event."""

    def __init__(
        self,
        engine: Engine,
        sequencer: EventSequencer,
        stores: Stores,
        identity: Identity,
        faces: dict[CacheId, CacheFace],
    ) -> None:
        self._engine: Final = engine
        self._sequencer: Final = sequencer
        self._stores: Final = stores
        self._identity: Final = identity
        self._by_id: dict[CacheId, Cache] = {}
        self._by_name: dict[str, Cache] = {}
        self._faces: Final = faces
        self._parts: list[_Parts] = []
        self._ids = count(1)
        self._opening = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    def __iter__(self) -> Iterator[Cache]:
        return iter(self._by_id.values())

    def get(self, cache: CacheId) -> Cache | None:
        return self._by_id.get(cache)

    def named(self, name: str) -> Cache | None:
        return self._by_name.get(name)

    def descriptors(self, cache: CacheId, *, write: bool) -> Mapping[str, int] | None:
        """See :class:`kvtierd.service.attach.Arenas`."""
        found = self._by_id.get(cache)
        return None if found is None else found.runtime.arena.fds(write=write)

    def name_of(self, cache: CacheId) -> str:
        """See :class:`kvtierd.service.attach.Arenas`."""
        return self._by_id[cache].name

    async def open(
        self, name: str, spec: CacheSpec, asked: Mapping[Tier, TierBudget], named: Wanted
    ) -> tuple[Cache, bool]:
        """The cache of this name, and whether it was made for this call. ``asked``: none = what is left of every tier.

        Once begun it goes on, whatever becomes of the caller: half a cache is no use to anybody.
        Raises INVALID_ARGUMENT (another spec, other budgets or options), RESOURCE_EXHAUSTED.
        """
        return await asyncio.shield(self._spawn(self._open(name, spec, asked, named), f"open-{name}"))

    async def _open(
        self, name: str, spec: CacheSpec, asked: Mapping[Tier, TierBudget], named: Wanted
    ) -> tuple[Cache, bool]:
        async with self._opening:
            cache = self._by_name.get(name)
            if cache is None:
                slots = self._stores.budgets.slots_for(spec, asked)
                return await self._make(_Plan(name, spec, slots, CacheOptions(**named), stored=False)), True
        _require_same(cache, spec, asked)
        require_same(cache.options, named, name)
        return cache, False

    async def restore(self) -> None:
        """Opens the caches that the disk remembers, with the budgets they had; the others are announced as gone.

        Memory budgets shrink to what the configuration still has. Raises :class:`TierConfigError` where the disk tier
        is smaller than its caches.
        """
        disk, remembered = self._stores.disk, self._stores.remembered
        stored = await asyncio.to_thread(disk.caches) if disk is not None else []
        names = {cache.name for cache in stored}
        self._announce_gone(remembered.names - names)
        await asyncio.to_thread(remembered.forget_gone, names if disk is not None else None)
        for position, cache in enumerate(stored):
            slots = self._slots_of_stored(cache, len(stored) - position)
            await self._make(_Plan(cache.name, cache.spec, slots, _stored_options(cache), stored=True))

    def _announce_gone(self, names: Collection[str]) -> None:
        """Watchers of an earlier life know blocks of these, and nobody may ever open them again."""
        for name in sorted(names):
            cache_id = CacheId(next(self._ids))
            self._faces[cache_id] = CacheFace(name)
            for group in range(self._stores.remembered.groups(name)):
                self._engine.announce_gone(cache_id, GroupId(group), unclean=self._identity.unclean)

    async def close(self) -> None:
        """After the engine's shutdown: lets go of all memory and of the disk."""
        if self._tasks:
            await asyncio.wait(self._tasks)
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        for parts in self._parts:
            parts.close()
        if self._stores.disk is not None:
            self._stores.disk.close()

    def _slots_of_stored(self, cache: StoredCache, sharing: int) -> dict[Tier, tuple[int, ...]]:
        """``sharing``: how many caches, this one included, are still to be given a share where none is remembered."""
        budgets, spec = self._stores.budgets, cache.spec
        on_disk = tuple(cache.slots[group] for group in sorted(cache.slots))
        wanted = tier_bytes(spec, on_disk)
        if wanted > budgets.left(Tier.DISK):
            limit = f"at least {wanted} more than its other caches take: the stored cache {cache.name} has that much"
            raise TierConfigError("disk_bytes", budgets.left(Tier.DISK), limit)
        remembered = self._stores.remembered.get(cache.name)
        slots = {Tier.DISK: on_disk}
        for tier in (Tier.DEVICE, Tier.HOST):
            had = remembered.get(tier, ()) if remembered is not None else share_of(spec, budgets.left(tier) // sharing)
            share = had if tier_bytes(spec, had) <= budgets.left(tier) else share_of(spec, budgets.left(tier))
            if share:
                slots[tier] = share
        return slots

    async def _make(self, plan: _Plan) -> Cache:
        self._stores.budgets.take(plan.spec, plan.slots)
        try:
            parts = await asyncio.to_thread(self._make_parts, plan)
            try:
                cache = self._introduce(plan, parts)
            except BaseException:
                parts.close()
                raise
        except BaseException:
            self._stores.budgets.give_back(plan.spec, plan.slots)
            raise
        self._spawn(asyncio.to_thread(parts.arena.prefault), f"prefault-{plan.name}")
        given = " ".join(f"{tier}={'+'.join(map(str, counts))}" for tier, counts in sorted(plan.slots.items()))
        blocks = sum(map(len, parts.recovered.values()))
        _log.info("cache opened name=%s cache=%d %s recovered=%d", plan.name, cache.id, given, blocks)
        return cache

    def _introduce(self, plan: _Plan, parts: _Parts) -> Cache:
        cache_id = CacheId(next(self._ids))
        manager = BlockManager(cache_id, _shapes(plan.spec, plan.slots), self._sequencer)
        stores = (parts.arena, parts.host, parts.device, parts.disk)
        runtime = CacheRuntime(cache_id, plan.name, plan.spec, manager, *stores)
        cache = Cache(runtime, plan.spec.fingerprint(), dict(plan.slots), plan.options)
        self._faces[cache_id] = cache.face
        self._engine.add_cache(
            runtime, parts.recovered, parts.quarantined, unclean=self._identity.unclean, restarted=plan.stored
        )
        parts.arena.set_state(ArenaState.SERVING)
        self._by_id[cache_id] = self._by_name[plan.name] = cache
        self._parts.append(parts)
        return cache

    def _make_parts(self, plan: _Plan) -> _Parts:
        """Blocks. Memory first, since unlike a disk store it is gone again without a trace if the rest fails."""
        spec, slots = plan.spec, plan.slots
        identity = ArenaIdentity(spec.fingerprint(), self._identity.epoch, self._identity.boot, os.getpid())
        places = {(group, int(tier)): count for tier, counts in slots.items() for group, count in enumerate(counts)}
        arena = Arena.create(plan.name, ArenaLayout.plan(spec, places), identity)
        try:
            if not plan.stored:
                self._stores.remembered.put(plan.name, slots)  # before anything of it can be announced
            disk = self._disk_store(plan)
        except BaseException:
            arena.close()
            raise
        host = HostStore(arena) if Tier.HOST in slots else None
        device = StandInDevice(arena, self._stores.chaos) if Tier.DEVICE in slots else None
        if disk is None or not plan.stored:
            return _Parts(arena, host, device, disk)
        found = disk.recover()
        if found.dropped:
            _log.warning("records on disk could not be used cache=%s dropped=%d", plan.name, found.dropped)
        return _Parts(arena, host, device, disk, _recovered(found), found.quarantined)

    def _disk_store(self, plan: _Plan) -> DiskStore | None:
        root = self._stores.disk
        if root is None or Tier.DISK not in plan.slots:
            return None
        if plan.stored:
            return root.open_cache(plan.name)
        slots = {GroupId(group): count for group, count in enumerate(plan.slots[Tier.DISK])}
        return root.create(plan.name, plan.spec, slots, plan.options.to_stored(), plan.options.label_bytes(plan.spec))

    def _spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _stored_options(cache: StoredCache) -> CacheOptions:
    try:
        return CacheOptions.from_stored(cache.options)
    except (TypeError, ValueError) as error:
        raise TierConfigError(f"options of the stored cache {cache.name}", dict(cache.options), str(error)) from error


def _shapes(spec: CacheSpec, slots: Slots) -> list[GroupShape]:
    return [
        GroupShape(
            GroupId(group),
            group_slots(slots, GroupId(group)),
            dict.fromkeys(slots, spec.record_bytes(group)),
            spec.groups[group].window_tokens,
            spec.tokens_per_block,
        )
        for group in range(len(spec.groups))
    ]


def _recovered(found: Recovery) -> dict[GroupId, list[Recovered]]:
    return {
        group: [Recovered(record.slot, record.key, record.parent, record.traits) for record in records]
        for group, records in found.records.items()
    }


def _require_same(cache: Cache, spec: CacheSpec, asked: Mapping[Tier, TierBudget]) -> None:
    if cache.fingerprint != spec.fingerprint():
        difference = next(name for name in spec.to_dict() if getattr(spec, name) != getattr(cache.spec, name))
        limit = f"{getattr(cache.spec, difference)!r}, as cache {cache.name} has"
        raise bad_argument(f"spec.{difference}", getattr(spec, difference), limit, reason="SPEC_MISMATCH")
    for tier, budget in asked.items():
        has = cache.slots.get(tier, ())
        if slots_of(spec, tier, budget) != has:
            limit = f"{tier_bytes(spec, has)} bytes, as cache {cache.name} has; or no budgets at all"
            raise bad_argument(f"budgets[{tier}]", budget.nbytes, limit, reason="BUDGET_MISMATCH")
