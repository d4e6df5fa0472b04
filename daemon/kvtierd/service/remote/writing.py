"""Writes blocks to a store in the background.

A block is read in its slot without a hold. If the block leaves the slot meanwhile, it is offered again from its new
slot. So a slow store delays no local tier.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import numpy as np

from kvtierd.core.ids import DISK, HOST, REMOTE, GroupId, Key, SlotId, Tier
from kvtierd.core.remote import Offer
from kvtierd.mover.engine import Engine
from kvtierd.mover.executor import MoverError
from kvtierd.service.cache import ServedCache
from kvtierd.service.catalog import Catalog
from kvtierd.service.forgotten import Forgotten, Past
from kvtierd.service.hub import EventHub
from kvtierd.service.remote.sources import Known
from kvtierd.service.remote.telling import Teller
from kvtierd.tiers.base import Bytes, TierError
from kvtierd.tiers.disk.store import DiskRead
from kvtierd.tiers.remote.base import CHECKSUM_BYTES, RemoteError, RemoteStore
from kvtierd.tiers.remote.objects import GroupPrefix, encode

BATCH_BYTES: Final = 8 << 20
BATCH_BLOCKS: Final = 16
BATCHES: Final = 8
"""Most batches under way at a time, which bounds the bytes that wait for the store."""
LOOK_S: Final = 0.5
"""Seconds between looks for blocks that are due without an event: blocks used again."""
RETRY_S: Final = 1.0
DAY_S: Final = 86_400
"""A day in seconds. The store is believed to keep a known block for one to two days."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class _Source:
    """Locates a block's bytes. ``generation``: of its slot in the host tier at the offer. ``name``: of its object."""

    offer: Offer
    generation: int
    name: str


@dataclass(slots=True, eq=False)
class Writer:
    """Writes to a single store. Loop thread only. ``_bytes_a_second``: limit of the writes; 0 = no limit. ``counts``:
    blocks by outcome."""

    _engine: Engine
    _hub: EventHub
    _catalog: Catalog
    _store: RemoteStore
    _known: Known
    _bytes_a_second: int
    _forgotten: Forgotten
    _teller: Teller
    _turn_at: float = field(default=0.0, init=False)
    _retry_at: float = field(default=0.0, init=False)
    _under_way: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    _carried: int = field(default=0, init=False)
    counts: Counter[str] = field(default_factory=Counter, init=False)

    async def run(self) -> None:
        """Writes offered blocks until cancelled."""
        try:
            while not self._hub.closed:
                seen = self._hub.last
                found = self._begun()
                if len(self._under_way) >= BATCHES:
                    await asyncio.wait(self._under_way, return_when=asyncio.FIRST_COMPLETED)
                elif not found:
                    await self._hub.news(seen, asyncio.get_running_loop().time() + LOOK_S)
        finally:
            for task in self._under_way:
                task.cancel()
            await asyncio.gather(*self._under_way, return_exceptions=True)

    @property
    def unwritten(self) -> Counter[str]:
        """Blocks that wait for the store, by reason. A block of two caches counts twice."""
        counts = Counter[str]()
        for cache in self._catalog:
            with suppress(MoverError):
                counts.update(self._engine.manager(cache.id).remote.unwritten())
        counts["under way"] = self._carried
        return counts

    @property
    def left(self) -> int:
        """The number of blocks that left this host before they were written."""
        remotes = (self._engine.manager(cache.id).remote for cache in self._catalog)
        with suppress(MoverError):
            return sum(remote.left for remote in remotes)
        return 0

    def _begun(self) -> bool:
        try:
            return self._begin()
        except Exception:  # noqa: BLE001  our bug; other blocks are still written
            _log.exception("blocks are not offered to the store")
            self._retry_at = time.monotonic() + RETRY_S
            return False

    def _begin(self) -> bool:
        """Takes offered blocks while there is room for batches. Returns whether any were offered."""
        found = False
        if time.monotonic() < self._retry_at:
            return found
        for cache in self._catalog:
            self._engine.manager(cache.id).remote.begin_day(int(time.time() // DAY_S))
            for number in range(len(cache.spec.groups)):
                if len(self._under_way) >= BATCHES:
                    return True
                found |= self._take(cache, GroupId(number))
        return found

    def _take(self, cache: ServedCache, group: GroupId) -> bool:
        step = max(1, min(BATCH_BLOCKS, BATCH_BYTES // cache.spec.block_bytes(group)))
        if self._forgotten.is_changing(cache.prefix) or self._forgotten.is_due(cache.prefix):
            return False  # a block about to be forgotten would get the name of a fresh block
        if not self._teller.has_heard(cache.prefix):
            self._teller.wake(cache.prefix)
            return False
        with suppress(MoverError):
            offers = self._engine.manager(cache.id).remote.offers(group, step)
            arena, past = cache.runtime.arena, self._forgotten.of(cache.prefix)
            names, old = self.names(cache, group, [each.key for each in offers]), self._of_before(cache, group, offers)
            sources = [
                _Source(
                    each, arena.generation(HOST, group, SlotId(each.slot)) if each.tier is HOST else 0, names[each.key]
                )
                for each in offers
                if each.key not in old
            ]
            self._carried += len(sources)
            for start in range(0, len(sources), step):
                task = asyncio.create_task(self._carry(cache, group, past, sources[start : start + step]))
                self._under_way.add(task)
                task.add_done_callback(self._under_way.discard)
            return bool(offers)
        return False

    def names(self, cache: ServedCache, group: GroupId, keys: Iterable[Key]) -> dict[Key, str]:
        """Names of the blocks' present or future objects."""
        past, remote = self._forgotten.of(cache.prefix), self._engine.manager(cache.id).remote
        place, revisions = GroupPrefix(cache.name, cache.fingerprint, group, past.generation), dict[Key, int]()
        names: dict[Key, str] = {}
        for key in keys:
            path, above = [key], None
            for above in remote.ancestors(group, key) if past.dropped else ():
                if above in revisions:
                    break
                path.append(above)
            latest = past.generation if above is None else revisions.get(above, past.generation)
            for each in reversed(path):
                latest = revisions[each] = max(latest, past.revision(group, [each]))
            names[key] = (place if latest == place.revision else replace(place, revision=latest)).name(key)
        return names

    def _of_before(self, cache: ServedCache, group: GroupId, offers: Sequence[Offer]) -> set[Key]:
        """Returns the keys of offers that a reset kept, or whose ancestors it kept: the store must not get them."""
        kept = self._forgotten.kept(cache.prefix)
        remote = self._engine.manager(cache.id).remote
        return {
            offer.key
            for offer in (offers if kept else ())
            if any((group, key) in kept for key in (offer.key, *remote.ancestors(group, offer.key)))
        }

    async def _carry(self, cache: ServedCache, group: GroupId, past: Past, sources: Sequence[_Source]) -> None:
        left = [source.offer.key for source in sources]
        try:
            there = await self._there(sources)
            wanted = [source for source in sources if source.name not in there or not source.offer.recovered]
            async with self._catalog.holding(cache) as is_open:
                objects = await self._engine.beside(partial(_objects, cache, group, wanted)) if is_open else []
            ready = [
                (source, data)
                for source, data in zip(wanted, objects, strict=False)  # a removed cache has no objects
                if data is not None and self._stood(cache, group, source)
            ]
            if self._forgotten.of(cache.prefix) is not past:
                return  # the blocks are offered again, under other names
            carried = {source.offer.key for source, _ in ready}
            self._again(cache, group, [source.offer for source in wanted if source.offer.key not in carried])
            same = await self._same([(source, data) for source, data in ready if source.name in there])
            self.counts["there already"] += len(sources) - len(wanted) + len(same)
            ready = [(source, data) for source, data in ready if source.name not in same]
            await self._pace(sum(len(data) for _, data in ready))
            await self._put(cache, group, past, ready, there)
            left = []
        except RemoteError as error:
            self._retry_at = time.monotonic() + RETRY_S
            _log.debug("blocks were not carried to the store name=%s why=%r", cache.name, str(error))
        except MoverError:
            left = []  # the cache is gone, or the daemon ends
        finally:
            self._carried -= len(sources)
            if left:
                self.counts["not taken"] += len(left)
                with suppress(MoverError):
                    self._engine.manager(cache.id).remote.put_back(group, left)

    def _again(self, cache: ServedCache, group: GroupId, offers: Sequence[Offer]) -> None:
        """Offers unread blocks again, except blocks that are gone and blocks still in the same disk slot."""
        remote, moved = self._engine.manager(cache.id).remote, list[Key]()
        gone = set(remote.absent(group, [offer.key for offer in offers]))
        for offer in offers:
            if offer.key in gone:
                self.counts["gone meanwhile"] += 1
            elif offer.tier is DISK and remote.slot(group, offer.key) == (offer.tier, offer.slot):
                self.counts["unreadable"] += 1
            else:
                moved.append(offer.key)
        remote.put_back(group, moved)

    async def _there(self, sources: Sequence[_Source]) -> set[str]:
        """The names of objects that the store has, perhaps from another host."""
        unknown = [source.name for source in sources if not self._known.of(source.name)]
        found = await self._store.exists(unknown) if unknown else ()
        there = {name for name, has in zip(unknown, found, strict=True) if has}
        self.counts["there and not given"] += sum(self._known.of(name) is False for name in there)
        self._known.note([name for name in there if self._known.of(name) is None], there=True)
        return there | {source.name for source in sources}.difference(unknown)

    async def _same(self, ready: Sequence[tuple[_Source, bytes]]) -> set[str]:
        """The names of objects that the store has with these bytes."""
        names, begins = [source.name for source, _ in ready], [b""] * len(ready)
        with suppress(RemoteError):  # writing the objects again does no harm
            begins = [*await self._store.begins(names, CHECKSUM_BYTES)] if names else begins
        pairs = zip(ready, begins, strict=True)
        return {source.name for (source, data), begin in pairs if begin == data[:CHECKSUM_BYTES]}

    def _stood(self, cache: ServedCache, group: GroupId, source: _Source) -> bool:
        """Whether the bytes read from memory are the block's: its slot has not changed since the offer."""
        if source.offer.tier is not HOST:
            return True
        return cache.runtime.arena.generation(HOST, group, SlotId(source.offer.slot)) == source.generation

    async def _put(
        self,
        cache: ServedCache,
        group: GroupId,
        past: Past,
        ready: Sequence[tuple[_Source, bytes]],
        there: Collection[str],
    ) -> None:
        """Puts objects into the store. ``past``: gave the objects' names. ``there``: objects to replace."""
        if not ready:
            return
        started, names = time.monotonic_ns(), [source.name for source, _ in ready]
        replaced = [name for name in names if name in there]
        if replaced and not self._store.replaces:
            await self._store.delete(replaced)
        errors = await self._store.put(names, [data for _, data in ready])
        took = time.monotonic_ns() - started
        self._known.note([name for name, error in zip(names, errors, strict=True) if error is None], there=True)
        offers = [(source.offer, error) for (source, _), error in zip(ready, errors, strict=True)]
        # After a drop, a new block of the same key has another name, under which the store lacks it.
        current = self._forgotten.of(cache.prefix) is past
        written = [offer for offer, error in offers if error is None and current]
        self.counts["written"] += len(written)
        self.counts["replaced"] += len(replaced)
        self.counts["refused"] += sum(error is not None and error.of_object for _, error in offers)
        again = [offer.key for offer, error in offers if error is not None and not error.of_object]
        self._engine.manager(cache.id).remote.put_back(group, again)
        for tier, keys in _by_tier(written).items():
            self._engine.travelled(cache.id, group, keys, tier, REMOTE, took)

    async def _pace(self, nbytes: int) -> None:
        """Waits until ``nbytes`` may be written."""
        if self._bytes_a_second:
            now = time.monotonic()
            begins, self._turn_at = max(now, self._turn_at), max(now, self._turn_at) + nbytes / self._bytes_a_second
            await asyncio.sleep(begins - now)


def _by_tier(offers: Iterable[Offer]) -> dict[Tier, list[Key]]:
    found: dict[Tier, list[Key]] = {}
    for offer in offers:
        found.setdefault(offer.tier, []).append(offer.key)
    return found


def _objects(cache: ServedCache, group: GroupId, sources: Sequence[_Source]) -> list[bytes | None]:
    """The object of each block; None if the disk does not give the bytes. In a thread."""
    place = GroupPrefix(cache.name, cache.fingerprint, group)
    return [
        None if parts is None else encode(place, source.offer.key, source.offer.parent, source.offer.traits, parts)
        for source in sources
        for parts in (_parts(cache, group, source.offer),)
    ]


def _parts(cache: ServedCache, group: GroupId, offer: Offer) -> Sequence[Bytes] | None:
    slot = SlotId(offer.slot)
    if offer.tier is HOST:
        return cache.runtime.memory(HOST).parts(group, slot)
    pools = cache.runtime.arena.layout.groups[group].pools
    record = np.frombuffer(mmap.mmap(-1, cache.spec.record_bytes(group)), np.uint8)  # page-aligned
    try:
        report = cache.runtime.store.read([DiskRead(group, slot, offer.key, [record.data])], held=False)
    except TierError:
        return None  # the disk's own reads meet the error, report it and count it
    if report.failed or report.corrupt:
        return None
    return [record[pool.record_offset : pool.record_offset + pool.block_bytes] for pool in pools]
