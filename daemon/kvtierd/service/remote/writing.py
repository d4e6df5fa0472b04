"""Carries blocks to a store, in the background. No local tier waits for it.

A block is read where it is, without a hold: if it leaves its slot meanwhile, it is offered again from where it is then.
A slow store delays no local tier.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from kvtierd.core.ids import DISK, HOST, REMOTE, GroupId, Key, SlotId, Tier
from kvtierd.core.remote import Offer
from kvtierd.mover.engine import Engine
from kvtierd.mover.executor import MoverError
from kvtierd.service.cache import Cache
from kvtierd.service.catalog import Catalog
from kvtierd.service.hub import EventHub
from kvtierd.service.remote.fetching import place_of
from kvtierd.service.remote.known import Known
from kvtierd.tiers.base import Bytes, TierError
from kvtierd.tiers.disk.store import DiskRead
from kvtierd.tiers.remote.base import RemoteError, RemoteStore
from kvtierd.tiers.remote.objects import encode

BATCH_BYTES: Final = 8 << 20
BATCH_BLOCKS: Final = 16
BATCHES: Final = 8
"""Under way at a time: with their bytes, all that waits for the store."""
LOOK_S: Final = 0.5
"""How often blocks are looked for that no event told of: those used again."""
RETRY_S: Final = 1.0

_log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class _Source:
    """Where a block's bytes are. ``generation``: of its slot in the host tier then."""

    offer: Offer
    generation: int


class Writer:
    """Of one store. Loop thread only. ``counts``: blocks by what became of them.

    Args:
        bytes_a_second: most that goes to the store; 0 = any.
    """

    def __init__(
        self, engine: Engine, hub: EventHub, catalog: Catalog, store: RemoteStore, known: Known, bytes_a_second: int
    ) -> None:
        self._engine: Final = engine
        self._hub: Final = hub
        self._catalog: Final = catalog
        self._store: Final = store
        self._known: Final = known
        self._bytes_a_second: Final = bytes_a_second
        self._turn_at = 0.0
        self._retry_at = 0.0
        self._under_way: set[asyncio.Task[None]] = set()
        self._carried = 0
        self.counts: Final[Counter[str]] = Counter()

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while not self._hub.closed:
                seen = self._hub.last
                found = self._begin()
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
        """How many blocks wait for the store, by reason; a block of two caches counts twice."""
        counts = Counter[str]()
        for cache in self._catalog:
            with suppress(MoverError):
                counts.update(self._engine.manager(cache.id).beyond.unwritten())
        counts["under way"] = self._carried
        return counts

    @property
    def left(self) -> int:
        """How many blocks left this host before they were written."""
        beyonds = (self._engine.manager(cache.id).beyond for cache in self._catalog)
        with suppress(MoverError):
            return sum(beyond.left for beyond in beyonds)
        return 0

    def _begin(self) -> bool:
        """Takes what is offered, as far as there is room. Whether there was anything."""
        found = False
        if time.monotonic() < self._retry_at:
            return found
        for cache in self._catalog:
            for number in range(len(cache.spec.groups)):
                if len(self._under_way) >= BATCHES:
                    return True
                found |= self._take(cache, GroupId(number))
        return found

    def _take(self, cache: Cache, group: GroupId) -> bool:
        step = max(1, min(BATCH_BLOCKS, BATCH_BYTES // cache.spec.block_bytes(group)))
        with suppress(MoverError):
            offers = self._engine.manager(cache.id).beyond.offers(group, step)
            arena = cache.runtime.arena
            sources = [
                _Source(each, arena.generation(HOST, group, SlotId(each.slot)) if each.tier is HOST else 0)
                for each in offers
            ]
            for start in range(0, len(sources), step):
                task = asyncio.create_task(self._carry(cache, group, sources[start : start + step]))
                self._under_way.add(task)
                task.add_done_callback(self._under_way.discard)
            return bool(offers)
        return False

    async def _carry(self, cache: Cache, group: GroupId, sources: Sequence[_Source]) -> None:
        left = [source.offer.key for source in sources]
        self._carried += len(sources)
        try:
            absent = await self._absent(cache, group, sources)
            async with self._catalog.holding(cache) as there:
                objects = await self._engine.beside(partial(_objects, cache, group, absent)) if there else []
            ready = [
                (source, data)
                for source, data in zip(absent, objects, strict=False)  # there are none of a removed cache
                if data is not None and self._stood(cache, group, source)
            ]
            carried = {source.offer.key for source, _ in ready}
            self._again(cache, group, [source.offer for source in absent if source.offer.key not in carried])
            await self._pace(sum(len(data) for _, data in ready))
            await self._put(cache, group, ready)
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
                    self._engine.manager(cache.id).beyond.put_back(group, left)

    def _again(self, cache: Cache, group: GroupId, offers: Sequence[Offer]) -> None:
        """Blocks that could not be read where they were are offered again, unless they are still there."""
        beyond, moved = self._engine.manager(cache.id).beyond, list[Key]()
        gone = set(beyond.absent(group, [offer.key for offer in offers]))
        for offer in offers:
            if offer.key in gone:
                self.counts["gone meanwhile"] += 1
            elif offer.tier is DISK and beyond.slot(group, offer.key) == (offer.tier, offer.slot):
                self.counts["unreadable"] += 1
            else:
                moved.append(offer.key)
        beyond.put_back(group, moved)

    async def _absent(self, cache: Cache, group: GroupId, sources: Sequence[_Source]) -> list[_Source]:
        """Those that the store does not have yet: another host may have written them. What stands on an absent block
        counts as absent, unasked: to write it again does no harm."""
        place = place_of(cache, group)
        unknown = [source.offer for source in sources if not self._known.of(place.name(source.offer.key))]
        keys, absent = {offer.key for offer in unknown}, set[Key]()

        async def ask(offers: Sequence[Offer]) -> None:
            names = [place.name(offer.key) for offer in offers]
            found = await self._store.exists(names) if names else ()
            there = [name for name, has in zip(names, found, strict=True) if has]
            self.counts["there and not given"] += sum(self._known.of(name) is False for name in there)
            self._known.note([name for name in there if self._known.of(name) is None], there=True)
            absent.update(offer.key for offer, has in zip(offers, found, strict=True) if not has)

        await ask([offer for offer in unknown if offer.parent not in keys])
        below = [offer for offer in unknown if offer.parent in keys]  # parents first
        for offer in below:
            if offer.parent in absent:
                absent.add(offer.key)
        await ask([offer for offer in below if offer.key not in absent])
        self.counts["there already"] += len(sources) - len(absent)
        return [source for source in sources if source.offer.key in absent]

    def _stood(self, cache: Cache, group: GroupId, source: _Source) -> bool:
        """What was read of memory was the block's: its slot has not changed since."""
        if source.offer.tier is not HOST:
            return True
        return cache.runtime.arena.generation(HOST, group, SlotId(source.offer.slot)) == source.generation

    async def _put(self, cache: Cache, group: GroupId, ready: Sequence[tuple[_Source, bytes]]) -> None:
        if not ready:
            return
        place, started = place_of(cache, group), time.monotonic_ns()
        names = [place.name(source.offer.key) for source, _ in ready]
        errors = await self._store.put(names, [data for _, data in ready])
        took = time.monotonic_ns() - started
        offers = [(source.offer, error) for (source, _), error in zip(ready, errors, strict=True)]
        written = [offer for offer, error in offers if error is None]
        self._known.note([place.name(offer.key) for offer in written], there=True)
        self.counts["written"] += len(written)
        self.counts["refused"] += sum(error is not None and error.of_object for _, error in offers)
        again = [offer.key for offer, error in offers if error is not None and not error.of_object]
        self._engine.manager(cache.id).beyond.put_back(group, again)
        for tier, keys in _by_tier(written).items():
            self._engine.travelled(cache.id, group, keys, tier, REMOTE, took)

    async def _pace(self, nbytes: int) -> None:
        """Waits until so many bytes may go."""
        if self._bytes_a_second:
            now = time.monotonic()
            begins, self._turn_at = max(now, self._turn_at), max(now, self._turn_at) + nbytes / self._bytes_a_second
            await asyncio.sleep(begins - now)


def _by_tier(offers: Iterable[Offer]) -> dict[Tier, list[Key]]:
    found: dict[Tier, list[Key]] = {}
    for offer in offers:
        found.setdefault(offer.tier, []).append(offer.key)
    return found


def _objects(cache: Cache, group: GroupId, sources: Sequence[_Source]) -> list[bytes | None]:
    """The object of each block; None where the disk does not give the bytes. In a thread."""
    place = place_of(cache, group)
    return [
        None if parts is None else encode(place, source.offer.key, source.offer.parent, source.offer.traits, parts)
        for source in sources
        for parts in (_parts(cache, group, source.offer),)
    ]


def _parts(cache: Cache, group: GroupId, offer: Offer) -> Sequence[Bytes] | None:
    slot = SlotId(offer.slot)
    if offer.tier is HOST:
        return cache.runtime.memory(HOST).parts(group, slot)
    pools = cache.runtime.arena.layout.groups[group].pools
    record = np.frombuffer(mmap.mmap(-1, cache.spec.record_bytes(group)), np.uint8)  # page-aligned
    try:
        if not cache.runtime.store.peek(DiskRead(group, slot, offer.key, [record.data])):
            return None
    except TierError:
        return None  # the disk's own reads say so, and are counted
    return [record[pool.record_offset : pool.record_offset + pool.block_bytes] for pool in pools]
