"""The catalog: it opens, restores and removes caches.

``service/assembly.py`` makes the parts of a cache in a thread. The catalog introduces them to the engine on the loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial, wraps
from itertools import count
from typing import Any, Concatenate, Final, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import grpc

from kvtier.abi.control import ArenaState
from kvtier.abi.spec import CacheSpec
from kvtierd.core.events import Cause, EventSequencer
from kvtierd.core.ids import CacheId, GroupId, Tier
from kvtierd.mover.engine import Engine
from kvtierd.mover.runtime import CacheRuntime
from kvtierd.service.assembly import Assembler, Parts, Plan, Stores
from kvtierd.service.budgets import Account, PastOptions, Slots, TierBudget, slots_of, tier_bytes
from kvtierd.service.cache import (
    CacheSettings,
    Opening,
    Removal,
    ServedCache,
    Wanted,
    prefix_of,
    require_same,
    require_same_budgets,
    require_same_cache,
)
from kvtierd.service.devices import Device
from kvtierd.service.errors import CallRefused, bad_argument, cache_not_opened, log_unheard, refused, unknown
from kvtierd.service.families import LastOpen, family_of, first_to_give_way, idle_members, idle_since
from kvtierd.service.hub import CacheHeader
from kvtierd.service.promises import NO_DISK, compared, told
from kvtierd.service.recovery import NOBODY, OldLife
from kvtierd.service.resizing import Resizing, compact, new_slots, save_surplus
from kvtierd.service.sessions import ClientSession
from kvtierd.state import Identity
from kvtierd.tiers.base import DamagedDirectory, TierConfigError, TierError, TierIOError

P = ParamSpec("P")
T = TypeVar("T")

_MAX_NOTES: Final = 8

_log = logging.getLogger(__name__)


def _to_the_end(
    work: Callable[Concatenate[Catalog, str, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Catalog, str, P], Coroutine[Any, Any, T]]:
    """Has a call go on if its caller is cancelled. The log then tells of a failure."""

    @wraps(work)
    async def call(catalog: Catalog, name: str, /, *args: P.args, **others: P.kwargs) -> T:
        task = catalog._spawn(work(catalog, name, *args, **others), f"{work.__name__}-{name}")
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(log_unheard)
            raise

    return call


class Catalog:
    """All caches of the daemon, each open until it is removed or the daemon stops. ``headers``: filled in before a
    cache's first event. Opening and removing a cache hold the lock of its name."""

    def __init__(
        self,
        engine: Engine,
        sequencer: EventSequencer,
        stores: Stores,
        identity: Identity,
        headers: dict[CacheId, CacheHeader],
    ) -> None:
        self._engine: Final = engine
        self._stores: Final = stores
        self._identity: Final = identity
        self._assembler: Final = Assembler(stores, identity, sequencer)
        self._by_id: dict[CacheId, ServedCache] = {}
        self._by_name: dict[str, ServedCache] = {}
        self._headers: Final = headers
        self._left_out: dict[str, str] = {}
        self._lost: dict[str, str] = {}
        """Caches whose directories were missing at the start, until a cache of the name is removed."""
        self._unfinished: dict[str, Removal] = {}
        """Caches whose files could not be deleted, with the slots that go back to the budgets afterwards."""
        self.unserved: dict[str, str] = {}
        """Known caches for which there is no room at all, until they are opened again or removed."""
        self._noted: dict[tuple[CacheId, Tier], str] = {}
        self._loading: dict[str, asyncio.Lock] = {}
        """Caches of an earlier daemon that are not read yet, with the locks of their names, which are held."""
        self._loaded: Final = asyncio.Event()
        self._loaded.set()
        self._resized: dict[str, Resizing] = {}
        """The last resize of each cache: a client whose own session ended with it asks again."""
        self._parts: dict[CacheId, Parts] = {}
        self._ids = count(1)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.notes: Final[deque[str]] = deque(maxlen=_MAX_NOTES)
        """The latest takeovers of budgets, for status."""

    def __iter__(self) -> Iterator[ServedCache]:
        return iter(self._by_id.values())

    def get(self, cache: CacheId) -> ServedCache | None:
        return self._by_id.get(cache)

    def opened(self, session: ClientSession, cache_id: int) -> ServedCache:
        """The cache, if this session has opened it. Raises INVALID_ARGUMENT, NOT_FOUND, FAILED_PRECONDITION."""
        if not cache_id:
            raise bad_argument("cache_id", cache_id, "the id of a cache that this session has opened")
        cache = self._by_id.get(CacheId(cache_id))
        if cache is None:
            raise unknown("cache_id", cache_id)
        if cache.id not in session.caches:
            raise cache_not_opened(cache_id)
        return cache

    def knows(self, name: str) -> bool:
        """Returns whether a cache of the name exists, served or left out."""
        return self.named(name) is not None or name in self._left_out

    def named(self, name: str) -> ServedCache | None:
        return self._by_name.get(name)

    def exists(self, name: str) -> bool:
        """Whether a cache of the name exists or is being made."""
        lock = self._locks.get(name)
        return name in self._by_name or (lock is not None and lock.locked())

    @property
    def accounts(self) -> list[Account]:
        """Bytes of the tiers, and the caches that have them."""
        return self._stores.devices.accounts

    def problems(self) -> list[str]:
        """Problems for health: caches that are left out or not read yet, and noted problems."""
        left_out = [f"cache {name} is left out: {why}" for name, why in sorted(self._left_out.items())]
        left_out += [f"cache {name} has lost its blocks: {why}" for name, why in sorted(self._lost.items())]
        left_out += [f"cache {name} is still being read" for name in sorted(self._loading)]
        left_out += [f"cache {name} is not served: {why}" for name, why in sorted(self.unserved.items())]
        noted = [(c.name, said) for c in self for tier, has in self.compared(c).items() if (said := told(tier, *has))]
        noted += [(c.name, problem) for c in self for tier in Tier if (problem := self._noted.get((c.id, tier)))]
        return left_out + [f"cache {name}: {problem}" for name, problem in noted]

    def compared(self, cache: ServedCache) -> dict[Tier, tuple[int, int]]:
        """Bytes that a cache has, and was promised, by promised tier."""
        return compared(cache.spec, self._stores.remembered.get(cache.name), cache.slots)

    def missing(self) -> Iterator[tuple[str, Tier, int]]:
        """Bytes that a cache was promised and lacks, by its name and promised tier; all bytes of an unserved cache."""
        for cache in self:
            yield from ((cache.name, tier, max(0, owed - has)) for tier, (has, owed) in self.compared(cache).items())
        for name in self.unserved:
            yield from ((name, tier, nbytes) for tier, nbytes in self._stores.remembered.promised_bytes(name).items())

    def note(self, cache: ServedCache, tier: Tier, problem: str | None) -> None:
        """Sets the problem of a cache's tier for health; None = no problem."""
        if problem is None:
            self._noted.pop((cache.id, tier), None)
        else:
            self._noted[cache.id, tier] = problem

    async def lose_device(self, cache: ServedCache, why: str) -> None:
        """Takes the cache's device tier out of service until a restart. Raises :class:`MoverError` if the cache is
        removed meanwhile."""
        if (cache.id, Tier.DEVICE) not in self._noted:
            self.note(cache, Tier.DEVICE, f"the device tier is out of service until a restart: {why}")
            _log.warning("device tier is out of service name=%s why=%r", cache.name, why)
            await self._engine.lose_tier(cache.id, Tier.DEVICE)

    @asynccontextmanager
    async def holding(self, cache: ServedCache) -> AsyncIterator[bool]:
        """Holds the lock of the cache's name. Yields whether the cache is still open."""
        async with self._lock_of(cache.name):
            yield self._by_id.get(cache.id) is cache

    @_to_the_end
    async def open(
        self,
        name: str,
        spec: CacheSpec | None,
        asked: Mapping[Tier, TierBudget],
        named: Wanted,
        device: str = "",
        *,
        create: bool,
        last_open: LastOpen,
    ) -> Opening:
        """Opens or makes the cache of a name. A cancelled caller does not stop the making.

        Idle members of its family give way to a new cache. An idle cache with a family gets the asked budgets and write
        policy; one that cannot have them opens as it is.
        Args:
            spec: None = the cache's own; a new cache needs a specification.
            asked: Budgets; empty = the default share of every tier.
            device: Name or id of its device; "" = the choice of :meth:`Devices.for_new`.
            create: Whether the cache may be made.
        Raises: CallRefused: INVALID_ARGUMENT (differs), RESOURCE_EXHAUSTED, NOT_FOUND, FAILED_PRECONDITION (left out).
        """
        cache = self._by_name.get(name)
        if cache is None:
            async with self._lock_of(name):
                cache = self._by_name.get(name)
                if cache is None:
                    self._require_whole(name)
                    if spec is None or not create:
                        raise self._not_served(name)
                    home = self._stores.devices.for_new(device, asked)
                    await self._make_room(name, spec, home, asked, last_open)
                    had, options = self._stores.remembered.get(name), self._stores.new_options(name, spec, named)
                    owed = {tier: counts for tier, counts in had.items() if len(counts) == len(spec.groups)}
                    slots = home.budgets.slots_for(spec, asked, owed=owed)
                    plan = Plan(name, spec, slots, options, home, promised=owed | slots if asked else slots | owed)
                    home.budgets.take(name, spec, slots)
                    cache = await self._make(plan)
                    self._note_opening(cache)
                    return Opening(cache, created=True)
        require_same_cache(cache, spec or cache.spec, device)
        if cache.options.resized:
            asked = {}
        if family_of(cache.spec) is None:
            require_same_budgets(cache, asked, self._stores.remembered.get(name))
            require_same(cache.options, named, name)
            lacks = (told(tier, *has) for tier, has in self.compared(cache).items() if tier in asked)
            return Opening(cache, kept="; ".join(filter(None, lacks)))
        self._note_opening(cache)
        require_same(cache.options, {field: value for field, value in named.items() if field != "write_policy"}, name)
        return await self._changed(cache, asked, replace(cache.options, **named), last_open)

    async def _make_room(
        self, name: str, spec: CacheSpec, home: Device, asked: Mapping[Tier, TierBudget], last_open: LastOpen
    ) -> None:
        """Has idle members of the family give way until the cache's budgets fit. No member gives way if that is not
        enough for the asked budgets."""
        wanted, disk = home.budgets.wanted(spec, asked), self._stores.disk
        while any(nbytes > home.budgets.left(tier, name) for tier, nbytes in wanted.items()):
            before = {} if disk is None else await asyncio.to_thread(disk.last_openings)
            # A member whose lock is held may itself wait for another member's lock.
            free = [cache for cache in self if not self._lock_of(cache.name).locked()]
            members = idle_members(spec, free, last_open, before)
            left = {tier: home.budgets.left(tier, name) for tier in wanted}
            if (giving := first_to_give_way(members, wanted, left, home, whole=bool(asked))) is None:
                return
            await self._give_way(giving, name, last_open)

    async def _give_way(self, idle: ServedCache, name: str, last_open: LastOpen) -> None:
        """Removes a cache, if it is still idle, in favour of the cache ``name``. A remote store keeps its blocks."""

        def check(cache: ServedCache) -> None:
            if cache is not idle or idle_since(cache, last_open) is None:
                raise refused(grpc.StatusCode.FAILED_PRECONDITION, "CACHE_IN_USE", f"cache {cache.name} is in use")

        with suppress(CallRefused):  # it is gone or in use: the caller looks again
            removal = await self.remove(idle.name, check, force=False, dry_run=False, cause=Cause.QUOTA)
            family = f"an idle cache of its family with {removal.blocks} blocks"
            self.notes.append(f"cache {name} took over the budgets of {idle.name}, {family}")
            _log.info("%s", self.notes[-1])

    async def _changed(
        self, cache: ServedCache, asked: Mapping[Tier, TierBudget], options: CacheSettings, last_open: LastOpen
    ) -> Opening:
        """Opens a cache, with other budgets or another write policy if it is idle and the budgets fit."""
        home, spec = cache.device, cache.spec
        slots = dict(cache.slots) | {tier: slots_of(spec, tier, budget) for tier, budget in asked.items()}
        if (slots, options) == (cache.slots, cache.options):
            return Opening(cache)
        async with self.holding(cache) as served:
            if not served:
                return Opening(cache)  # the caller finds it gone
            if asked and idle_since(cache, last_open) is not None:
                await self._make_room(cache.name, spec, home, asked, last_open)
            lacking = [tier for tier in asked if tier_bytes(spec, slots[tier]) > home.budgets.left(tier, cache.name)]
            if idle_since(cache, last_open) is None:
                return Opening(cache, kept="a session has it open, or blocks are held")
            if lacking:
                return Opening(cache, kept=f"the {lacking[0]} tier has too few bytes left")
            return Opening(await self._remake(cache, slots, options))

    async def _remake(self, cache: ServedCache, slots: Slots, options: CacheSettings) -> ServedCache:
        """Makes a cache anew with other slots or options, or as it was if that fails. Blocks on disk stay."""
        self._take_larger(cache, slots)
        await self._release(cache, await self._withdraw(cache, Cause.EXPLICIT))
        return (await self._made_anew(cache, slots, options))[0]

    def _take_larger(self, cache: ServedCache, slots: Slots) -> None:
        size, both = partial(tier_bytes, cache.spec), {tier: (slots[tier], cache.slots.get(tier, ())) for tier in slots}
        cache.device.budgets.take(cache.name, cache.spec, {tier: max(pair, key=size) for tier, pair in both.items()})

    async def _made_anew(
        self, cache: ServedCache, slots: Slots, options: CacheSettings, former: CacheRuntime | None = None
    ) -> tuple[ServedCache, TierError | None]:
        """Makes a dismantled cache with other slots or options, or as it was; then the error says why."""
        name, spec, budgets, had = cache.name, cache.spec, cache.device.budgets, self._stores.remembered.get(cache.name)
        stored, fault = Tier.DISK in cache.slots, None
        for now, its_options in ((slots, options), (cache.slots, cache.options)):
            owed = had | dict(now.items() - cache.slots.items())  # tiers whose slots stay keep their promise
            plan = Plan(name, spec, now, its_options, cache.device, stored=stored, changed=True, promised=owed)
            plan = replace(plan, former=former)
            budgets.take(name, spec, now)
            try:
                return await self._make(plan), fault
            except TierError as error:
                fault = error
                _log.warning("a cache cannot be made anew name=%s why=%r", name, str(error))
        self._left_out[name], self._unfinished[name] = str(fault), Removal(0, spec, {}, None)
        raise TierIOError(0, f"cache {name} is left out: {fault}")

    def _note_opening(self, cache: ServedCache) -> None:
        if (disk := self._stores.disk) is not None and family_of(cache.spec) is not None:
            self._spawn(asyncio.to_thread(disk.note_opening, cache.name), f"note-{cache.name}")

    def _not_served(self, name: str) -> CallRefused:
        if (why := self.unserved.get(name)) is None:
            return unknown("name", name)
        return refused(grpc.StatusCode.FAILED_PRECONDITION, "NOT_SERVED", f"cache {name} is not served: {why}")

    def _require_whole(self, name: str) -> None:
        """Raises FAILED_PRECONDITION if the cache is on disk but left out."""
        if name in self._left_out:
            message = f"cache {name} is left out: {self._left_out[name]}"
            raise refused(grpc.StatusCode.FAILED_PRECONDITION, "DAMAGED_CACHE", message)

    @_to_the_end
    async def remove(
        self,
        name: str,
        check: Callable[[ServedCache], None],
        *,
        force: bool,
        dry_run: bool,
        cause: Cause = Cause.EXPLICIT,
    ) -> Removal:
        """Removes a cache, its blocks and its files. ``check`` refuses by raising. A remote store keeps its blocks
        unless ``cause`` is EXPLICIT.

        A cache that is left out is removed only with ``force``. Raises NOT_FOUND, FAILED_PRECONDITION, TierIOError.
        """
        async with self._lock_of(name):
            cache = self._by_name.get(name)
            if cache is not None:
                check(cache)
                removal = Removal(cache.runtime.manager.stats().blocks, cache.spec, cache.slots, cache.device)
            elif (why := self._left_out.get(name, self.unserved.get(name))) is None:
                raise unknown("name", name)
            elif not force:
                message = f"cache {name} is left out: {why}; only force removes it"
                raise refused(grpc.StatusCode.FAILED_PRECONDITION, "DAMAGED_CACHE", message)
            else:
                removal = self._unfinished.get(name, Removal(0, None, {}, None))
            if dry_run:
                return removal
            if cache is not None:
                await self._release(cache, await self._withdraw(cache, cause))
            self._left_out[name], self._unfinished[name] = "its files are not deleted", removal
            await asyncio.to_thread(self._delete, name)
            if cause is Cause.EXPLICIT:
                prefix = None if removal.spec is None else prefix_of(name, removal.spec.fingerprint())
                await self._stores.forgotten.reset(name, prefix)
            del self._left_out[name], self._unfinished[name]
            self._lost.pop(name, None)
            self.unserved.pop(name, None)
            if removal.spec is not None and removal.device is not None:
                removal.device.budgets.give_back(name, removal.slots)
        _log.info("cache removed name=%s blocks=%d", name, removal.blocks)
        return removal

    @_to_the_end
    async def resize(
        self, name: str, asked: Mapping[Tier, TierBudget], end_sessions: Callable[[ServedCache], None]
    ) -> Resizing:
        """Gives a cache other budgets, or answers with the last resize: see ``service/resizing.py``.
        Raises CallRefused, :class:`TierError`; the cache then keeps its budgets."""
        async with self._lock_of(name):
            self._require_whole(name)
            if (cache := self._by_name.get(name)) is None:
                raise self._not_served(name)
            promised, spec = self._stores.remembered.get(name), cache.spec
            slots = new_slots(cache, asked, promised)
            if slots == cache.slots:
                settled = promised | {tier: slots[tier] for tier in asked}
                past = None if Tier.DISK in slots else PastOptions(spec.fingerprint().hex(), cache.options.to_stored())
                await asyncio.to_thread(self._stores.remembered.put, name, settled, past, cache.device.id)
                return self._resized.get(name, Resizing())
            began, before = time.monotonic_ns(), cache.runtime.manager.stats().blocks
            await save_surplus(self._engine, cache, slots)
            slots = new_slots(cache, asked, promised)  # meanwhile clients pin blocks, and other caches take budgets
            self._take_larger(cache, slots)
            stalled = time.monotonic_ns()
            end_sessions(cache)
            parts = await self._withdraw(cache, Cause.EXPLICIT)
            try:
                if parts.disk is not None:
                    await asyncio.to_thread(compact, cache.runtime, parts.disk, slots)
                    await asyncio.to_thread(parts.disk.close)
                options = replace(cache.options, resized=True)
                made, fault = await self._made_anew(cache, slots, options, cache.runtime)
                now = time.monotonic_ns()
            finally:
                await self._release(cache, parts)
            if fault is not None:
                raise fault
            evicted = max(0, before - made.runtime.manager.stats().blocks)
            done = self._resized[name] = Resizing(now - began, now - stalled, evicted)
        _log.info("cache resized name=%s stalled_ns=%d evicted=%d", name, done.stalled_ns, evicted)
        return done

    async def _withdraw(self, cache: ServedCache, cause: Cause) -> Parts:
        """Takes an open cache out of service and ends its moves. The caller releases its memory and its store."""
        del self._by_id[cache.id], self._by_name[cache.name]
        cache.runtime.arena.set_state(ArenaState.CLOSED)
        await self._engine.remove_cache(cache.id)
        for group in range(len(cache.spec.groups)):
            self._engine.announce_gone(cache.id, GroupId(group), cause)
        self._stores.keeper.forget(cache.name)
        for tier in Tier:
            self.note(cache, tier, None)
        return self._parts.pop(cache.id)

    async def _release(self, cache: ServedCache, parts: Parts) -> None:
        if not await asyncio.to_thread(parts.close):
            _log.error("memory is not given back before the daemon ends name=%s", cache.name)
        await asyncio.to_thread(cache.runtime.manager.close)

    def _delete(self, name: str) -> None:
        """Deletes the cache's files. Blocks. Without the directory, the next start forgets the rest."""
        if self._stores.disk is not None:
            self._stores.disk.remove(name)
        self._stores.remembered.forget(name)

    def _lock_of(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    async def plan_restore(self, old: OldLife = NOBODY) -> list[Plan]:
        """Plans for the caches on disk and the caches with kept memory, which take their budgets.

        Other known caches are announced as gone. A damaged cache is left out. Memory budgets shrink to the
        configuration. A cache whose device is gone gets another one. A call that opens a planned cache waits for
        :meth:`load`. Raises TierConfigError if the disk tier is smaller than its caches.
        """
        disk, remembered = self._stores.disk, self._stores.remembered
        stored = {} if disk is None else {cache.name: cache for cache in await asyncio.to_thread(disk.caches)}
        promised = {name for name in remembered.names if Tier.DISK in remembered.get(name)}
        if disk is None:
            self.unserved = dict.fromkeys(promised, NO_DISK)
        else:
            self._left_out = await asyncio.to_thread(disk.damaged)
            gone = promised.difference(stored, self._left_out, disk.taken_away)
            self._lost = {name: f"{disk.directory_of(name)} was missing at the start" for name in gone}
        abouts = await asyncio.to_thread(self._stores.keeper.abouts)
        others = {*stored, *self._left_out}
        kept = {n: about for n, about in abouts.items() if n not in others and Tier.DISK not in about.slots}
        self._announce_gone({name: remembered.groups(name) for name in remembered.names - stored.keys() - kept.keys()})
        await asyncio.to_thread(remembered.forget_gone, others if disk is not None else None, kept)
        devices, made = self._stores.devices, partial(Plan, unclean=self._identity.unclean, old=old)
        plans, sharing = [], len(stored)
        # Caches that stay on their device come before caches whose device is gone.
        order = sorted([*stored, *kept], key=lambda name: (devices.lacks(remembered.device(name)), name in kept))
        for name in order:
            device = devices.for_known(remembered.device(name))
            if (cache := stored.get(name)) is not None:
                slots = device.budgets.slots_of_stored(cache, remembered.get(name), sharing)
                sharing -= 1
                device.budgets.take(name, cache.spec, slots)
                try:
                    options = CacheSettings.from_stored(cache.options)
                except (TypeError, ValueError) as error:
                    raise TierConfigError(f"options of cache {name}", dict(cache.options), str(error)) from error
                plans.append(made(name, cache.spec, slots, options, device, stored=True))
                continue
            about = kept[name]
            wanted = {tier: tier_bytes(about.spec, counts) for tier, counts in about.slots.items()}
            lacking = [tier for tier in sorted(wanted) if wanted[tier] > device.budgets.left(tier)]
            if lacking:
                self.unserved[name] = f"{told(lacking[0], 0, wanted[lacking[0]])}; its blocks in memory are lost"
                self._announce_gone({name: len(about.spec.groups)})
                continue
            device.budgets.take(name, about.spec, about.slots)
            plans.append(made(name, about.spec, about.slots, about.options, device))
        for plan in plans:
            self._loading[plan.name] = self._lock_of(plan.name)
            await self._loading[plan.name].acquire()
            self._loaded.clear()
        return plans

    async def load(self, plans: Sequence[Plan]) -> None:
        """Opens the planned caches in order, while the loop serves calls."""
        try:
            for plan in plans:
                await self._load(plan)
                self._loading.pop(plan.name).release()
        finally:
            for name, lock in self._loading.items():
                self._left_out[name] = "the start of the daemon failed before the cache was read"
                lock.release()
            self._loading.clear()
            self._loaded.set()
        self._stores.keeper.close()
        for problem in self.problems():
            _log.warning("%s", problem)

    async def _load(self, plan: Plan) -> None:
        try:
            await self._make(plan)
        except (DamagedDirectory, TierIOError) as error:
            if not plan.stored:
                raise
            self._left_out[plan.name] = str(error)
            self._unfinished[plan.name] = Removal(0, plan.spec, {}, None)
            self._announce_gone({plan.name: len(plan.spec.groups)})

    async def loaded(self) -> None:
        """Returns when every planned cache is open or left out."""
        await self._loaded.wait()

    def _announce_gone(self, groups: Mapping[str, int]) -> None:
        """Announces to watchers of an earlier daemon that these caches lost their blocks. ``groups``: the number of
        window groups of each cache."""
        for name in sorted(groups):
            cache_id = CacheId(next(self._ids))
            self._headers[cache_id] = CacheHeader(name)
            cause = Cause.LOST if self._identity.unclean else Cause.SHUTDOWN
            for group in range(groups[name]):
                self._engine.announce_gone(cache_id, GroupId(group), cause)

    async def close(self) -> bool:
        """Releases all memory and the disk, after the engine's shutdown. False if a GPU may still copy some memory."""
        if self._tasks:
            await asyncio.wait(self._tasks)
        return await asyncio.to_thread(self._close)

    def _close(self) -> bool:
        closed = [parts.close(for_successor=self._stores.keeper.keeps) for parts in self._parts.values()]
        if self._stores.disk is not None:
            self._stores.disk.close()
        return all(closed)

    async def _make(self, plan: Plan) -> ServedCache:
        """Makes a cache whose budgets are taken; a failure gives them back."""
        cache_id = CacheId(next(self._ids))
        try:
            parts = await asyncio.to_thread(self._assembler.assemble, plan, cache_id)
            try:
                cache = self._introduce(plan, cache_id, parts)
            except BaseException:
                parts.close()
                raise
        except BaseException:
            plan.device.budgets.give_back(plan.name, plan.slots)
            raise
        if Tier.DEVICE in plan.slots and (lost := parts.lost or plan.device.lost) is not None:
            await self.lose_device(cache, lost)  # its first slice runs before any other call
        self._spawn(asyncio.to_thread(parts.arena.prefault), f"prefault-{plan.name}")
        if parts.cuda is not None:
            parts.cuda.locks.start(None)  # needs no mapping: Parts.close keeps locked memory
        given = ",".join(f"{tier}:{'+'.join(map(str, counts))}" for tier, counts in sorted(plan.slots.items()))
        says = "cache opened name=%s cache=%d slots=%s device=%s recovered=%d"
        _log.info(says, plan.name, cache.id, given, plan.device.id, parts.blocks)
        return cache

    def _introduce(self, plan: Plan, cache_id: CacheId, parts: Parts) -> ServedCache:
        stores = (parts.arena, parts.host, parts.device, parts.disk)
        runtime = CacheRuntime(cache_id, plan.name, plan.spec, parts.manager, *stores, cuda=parts.cuda)
        slots, fingerprint = dict(plan.slots), plan.spec.fingerprint()
        cache = ServedCache(cache_id, plan.name, plan.spec, runtime, fingerprint, slots, plan.options, plan.device)
        if not plan.stored and not plan.restarted:
            self._stores.forgotten.begin(cache.prefix)
        self._headers[cache_id] = cache.header
        self.unserved.pop(plan.name, None)
        self._engine.add_cache(runtime, parts.left)
        parts.arena.set_state(ArenaState.SERVING)
        self._by_id[cache_id] = self._by_name[plan.name] = cache
        self._parts[cache_id] = parts
        return cache

    def _spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
