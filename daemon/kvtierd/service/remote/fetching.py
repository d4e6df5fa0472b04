"""Brings blocks from stores and peers into the host tier, so that a call finds them there.

A call with missing blocks waits here first. The length of the stored prefix is found by bisection: an object's parent
was written before it. Bytes are verified before slots are reserved, so a slow store holds no slot.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Final, Self

import numpy as np
import xxhash

from kvtierd.core.errors import UnknownLease
from kvtierd.core.ids import DAEMON, HOST, CacheId, GroupId, Key, Label, LeaseId, Tier, Traits
from kvtierd.core.transfers import CommitItem
from kvtierd.mover.engine import Engine
from kvtierd.mover.executor import MoverError, TicketRefused, UnknownCache
from kvtierd.service.cache import ServedCache
from kvtierd.service.forgotten import Forgotten, Past
from kvtierd.service.remote.sources import UNREADABLE_S, Source, Sources
from kvtierd.service.remote.telling import Teller
from kvtierd.tiers.remote.base import RemoteError
from kvtierd.tiers.remote.objects import BadObject, GroupPrefix, OtherObjectVersion, decode, object_bytes

BATCH_BYTES: Final = 8 << 20
BATCH_BLOCKS: Final = 32
DEPTH: Final = 8
"""Batches of a call that are under way at a time."""
SPARE_BYTES: Final = BATCH_BYTES * DEPTH
"""Most bytes of buffers kept for the next fetch."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class _Got:
    """A block whose bytes have been verified."""

    key: Key
    parent: Key | None
    traits: Traits
    payload: memoryview
    buffer: memoryview


class _Buffers:
    """Reused memory for objects: the pages of a new buffer cost as much as its bytes."""

    def __init__(self) -> None:
        self._spare: list[memoryview] = []

    def take(self, count: int, nbytes: int) -> list[memoryview]:
        if self._spare and len(self._spare[0]) != nbytes:
            self._spare = []  # all spare buffers have the same length
        return [self._spare.pop() if self._spare else np.empty(nbytes, np.uint8).data for _ in range(count)]

    def give_back(self, buffers: Iterable[memoryview]) -> None:
        for buffer in buffers:
            if len(buffer) * len(self._spare) < SPARE_BYTES and len(buffer) == len((self._spare or [buffer])[0]):
                self._spare.append(buffer)


@dataclass(slots=True, frozen=True)
class Chain:
    """Names the objects of a chain's blocks in one window group. ``place``: for blocks without a revision in
    ``revisions``. ``in_store``: the store may be asked for the objects."""

    place: GroupPrefix
    past: Past
    revisions: Mapping[Key, int]
    in_store: bool = True

    @classmethod
    def of(cls, cache: ServedCache, group: GroupId, keys: Sequence[Key], past: Past, *, in_store: bool = True) -> Self:
        place, revisions = GroupPrefix(cache.name, cache.fingerprint, group, past.generation), dict[Key, int]()
        if past.dropped:
            latest = past.generation
            for key in keys:
                own = past.revision(group, [key])
                latest = max(own, latest) if cache.spec.attention(group).chained else own
                revisions[key] = latest
        return cls(place, past, revisions, in_store)

    def name(self, key: Key) -> str:
        revision = self.revisions.get(key, self.place.revision)
        return (self.place if revision == self.place.revision else replace(self.place, revision=revision)).name(key)


class Fetcher:
    """Fetches blocks for all caches of the daemon. Loop thread only. ``counts``: blocks by outcome."""

    def __init__(self, engine: Engine, sources: Sources, forgotten: Forgotten, teller: Teller) -> None:
        self._engine: Final = engine
        self._sources: Final = sources
        self._forgotten: Final = forgotten
        self._teller: Final = teller
        self._coming: dict[tuple[CacheId, GroupId, Key], asyncio.Future[None]] = {}
        self._buffers: Final = _Buffers()
        self._logged: Final[set[str]] = set()
        self.counts: Final[Counter[str]] = Counter()

    async def reach(self, cache: ServedCache, groups: Sequence[GroupId], keys: Sequence[Key]) -> int:
        """How long a prefix of these groups is with the blocks of the store. The prefix may turn out shorter."""
        return await self._reach(cache, await self._chains(cache, groups, keys), keys)

    async def _reach(self, cache: ServedCache, chains: Mapping[GroupId, Chain], keys: Sequence[Key]) -> int:
        low, high = self._local(cache, list(chains), keys), len(keys)
        length = high  # mostly all of it is there, or nothing
        try:
            while low < high:
                if await self._reaches(cache, chains, keys, length):
                    low = length
                else:
                    high = length - 1
                length = (low + high + 1) // 2
        except RemoteError as error:
            _log.debug("the store was not asked name=%s why=%r", cache.name, str(error))
        return self._before_holes(cache, chains, keys, low)

    async def bring(
        self,
        cache: ServedCache,
        groups: Sequence[GroupId],
        keys: Sequence[Key],
        wait_s: float,
        recompute_s: float = 0.0,
    ) -> None:
        """Extends the prefix in the host tier as far as possible within ``wait_s``. Raises nothing: a block that does
        not arrive is a miss.

        Args:
            recompute_s: seconds that the caller needs to compute a block; 0 = unknown, so blocks are always fetched.
        """
        if Tier.HOST not in cache.slots or not keys:
            return
        try:
            async with asyncio.timeout(wait_s):
                local = self._local(cache, groups, keys)
                if local == len(keys):
                    return
                chains = await self._chains(cache, groups, keys)
                length = await self._reach(cache, chains, keys)
                self.counts["absent"] += len(keys) - length
                missing = {each: self._missing(cache, each, keys, length) for each in chains}
                if length > local and self._is_worth_it(cache, missing, recompute_s):
                    for each, wanted in missing.items():
                        await self._fetch(cache, chains[each], wanted)
        except (TimeoutError, RemoteError, TicketRefused, MoverError):
            pass
        except Exception:  # noqa: BLE001  a bug, or an unforeseen answer, must not fail the call
            _log.exception("blocks were not fetched: a bug name=%s", cache.name)

    # -- missing blocks ----------------------------------------------------------------------------------------------

    def _before_holes(
        self, cache: ServedCache, chains: Mapping[GroupId, Chain], keys: Sequence[Key], length: int
    ) -> int:
        """Cuts ``length`` at the first hole that a fetch has found in a chain."""
        for group, chain in chains.items() if self._sources.knows_holes() else ():
            if cache.spec.attention(group).chained:
                missing = set(self._missing(cache, group, keys, length))
                known = self._sources.known
                lacks = (at for at in range(length) if keys[at] in missing and known.of(chain.name(keys[at])) is False)
                length = min(length, next(lacks, length))
        return length

    async def _chains(self, cache: ServedCache, groups: Sequence[GroupId], keys: Sequence[Key]) -> dict[GroupId, Chain]:
        in_store = await self._teller.hear(cache.prefix)
        past = self._forgotten.of(cache.prefix)
        return {each: Chain.of(cache, each, keys, past, in_store=in_store) for each in groups}

    def _local(self, cache: ServedCache, groups: Sequence[GroupId], keys: Sequence[Key]) -> int:
        return self._engine.manager(cache.id).match(groups, keys).blocks

    def _missing(self, cache: ServedCache, group: GroupId, keys: Sequence[Key], length: int) -> list[Key]:
        """The blocks that a prefix of ``length`` blocks needs and the group lacks."""
        needed = cache.spec.attention(group).needs(length).pick(keys)
        return self._engine.manager(cache.id).remote.absent(group, needed)

    async def _reaches(
        self, cache: ServedCache, chains: Mapping[GroupId, Chain], keys: Sequence[Key], length: int
    ) -> bool:
        """Whether each group's missing blocks of a prefix of ``length`` blocks can be fetched. In a full-attention
        group only the last missing block is asked for, as its ancestors were written before it."""
        for group, chain in chains.items():
            wanted = self._missing(cache, group, keys, length)
            if not cache.spec.attention(group).span:
                wanted = wanted[-1:]
            names = [chain.name(key) for key in wanted]
            if not all(await self._sources.exists(names, in_store=chain.in_store)):
                return False
        return True

    def _is_worth_it(self, cache: ServedCache, missing: dict[GroupId, list[Key]], recompute_s: float) -> bool:
        nbytes = sum(len(keys) * cache.spec.block_bytes(group) for group, keys in missing.items())
        blocks = max(map(len, missing.values()))
        worth = not recompute_s or self._sources.seconds(nbytes) <= blocks * recompute_s
        if not worth:
            self.counts["dearer than computing"] += blocks
        return worth

    # -- the fetch ---------------------------------------------------------------------------------------------------

    async def _fetch(self, cache: ServedCache, chain: Chain, wanted: Sequence[Key]) -> None:
        """Fetches blocks, after waiting for blocks that other calls are fetching."""
        group = chain.place.group
        while coming := {self._coming[one] for key in wanted if (one := (cache.id, group, key)) in self._coming}:
            await asyncio.wait(coming)
            wanted = self._engine.manager(cache.id).remote.absent(group, wanted)
        places = [(cache.id, group, key) for key in wanted]
        arrival: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._coming |= dict.fromkeys(places, arrival)
        try:
            await self._in_batches(cache, chain, wanted)
        finally:
            for place in places:
                del self._coming[place]
            arrival.set_result(None)

    async def _in_batches(self, cache: ServedCache, chain: Chain, wanted: Sequence[Key]) -> None:
        step = max(1, min(BATCH_BLOCKS, BATCH_BYTES // cache.spec.block_bytes(chain.place.group)))
        batches = deque(wanted[start : start + step] for start in range(0, len(wanted), step))
        under_way: deque[asyncio.Task[list[_Got]]] = deque()
        try:
            while batches or under_way:
                while batches and len(under_way) < DEPTH:
                    under_way.append(asyncio.create_task(self._get(cache, chain, batches.popleft())))
                asked, started = under_way[0], time.monotonic()
                got = self._standing(cache, chain, await asked)
                under_way.popleft()
                if not got or not self._is_current(cache, chain, got):
                    return
                await self._store_blocks(cache, chain, got, time.monotonic() - started)
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    def _is_current(self, cache: ServedCache, chain: Chain, got: Sequence[_Got]) -> bool:
        """Whether the cache has forgotten nothing since the blocks were asked for."""
        current = self._forgotten.of(cache.prefix) is chain.past
        if not current:
            self.counts["forgotten meanwhile"] += len(got)
        return current

    def _standing(self, cache: ServedCache, chain: Chain, got: Sequence[_Got]) -> Sequence[_Got]:
        """Cuts off blocks from the first with a forgotten ancestor: a chain without its first blocks lacks ancestors,
        so its revisions may be too old."""
        group, revisions = chain.place.group, dict[Key | None, int]({None: chain.past.generation})
        if not chain.past.dropped or not cache.spec.attention(group).chained:
            return got
        for number, one in enumerate(got):
            parent, path = one.parent, [one.key]
            if parent is not None and parent not in revisions:
                path += [parent, *self._engine.manager(cache.id).remote.ancestors(group, parent)]
            revisions[one.key] = max(chain.past.revision(group, path), revisions.get(parent, 0))
            if revisions[one.key] != chain.revisions[one.key]:
                return got[:number]
        return got

    async def _get(self, cache: ServedCache, chain: Chain, keys: Sequence[Key]) -> list[_Got]:
        """The sound blocks before the first that is missing or damaged; all sound blocks if the group has no chains."""
        place, group = chain.place, chain.place.group
        payload_bytes = cache.spec.block_bytes(group)
        buffers = self._buffers.take(len(keys), object_bytes(payload_bytes))
        fetched = await self._sources.get([chain.name(key) for key in keys], buffers, in_store=chain.in_store)
        verify = partial(_verified, place, payload_bytes, keys, buffers, [one.nbytes for one in fetched])
        found, damaged, others = await self._engine.beside(verify)
        sources = dict(zip(keys, (one.source for one in fetched), strict=True))
        for key, why in others.items():
            self._leave(chain.name(key), sources[key], why)
        for key, why in damaged.items():
            await self._report_damage(cache, chain, key, sources[key], why)
        there = {one.key: one for one in found}
        if not cache.spec.attention(group).chained:
            return found
        return [there[key] for key in takewhile(there.__contains__, keys)]

    async def _report_damage(self, cache: ServedCache, chain: Chain, key: Key, source: Source | None, why: str) -> None:
        self.counts["damaged"] += 1
        group = chain.place.group
        says = "an object is damaged at=%s name=%s group=%d key=%s why=%r"
        _log.warning(says, source and source.name, cache.name, group, key.hex(), why)
        self._engine.tell_damaged(cache.id, group, key)
        if source is not None and source is self._sources.store:
            with suppress(RemoteError):
                await source.store.delete([chain.name(key)])

    def _leave(self, name: str, source: Source | None, why: str) -> None:
        """Counts an object of another version as a miss, and leaves it in its source."""
        self.counts["other version"] += 1
        if source is self._sources.store:
            self._sources.known.note([name], there=False, seconds=UNREADABLE_S)  # it is not fetched again soon
        if why not in self._logged:
            self._logged.add(why)
            says = "an object is left alone at=%s object=%s why=%r, and others like it"
            _log.warning(says, source and source.name, name, why)

    async def _store_blocks(self, cache: ServedCache, chain: Chain, got: Sequence[_Got], seconds: float) -> None:
        """Commits the blocks in the host tier, unless the cache has forgotten blocks since the fetch began."""
        group = chain.place.group
        grant = await self._engine.reserve(cache.id, DAEMON, group, HOST, len(got), None, got[0].parent)
        lease = LeaseId(grant.lease or 0)
        try:
            memory = cache.runtime.memory(HOST)
            parts = [memory.parts(group, slot) for slot in grant.slots]

            def copy() -> list[bytes]:
                for one, into in zip(got, parts, strict=True):
                    rest = np.frombuffer(one.payload, np.uint8)
                    for part in into:
                        np.copyto(part, rest[: len(part)])
                        rest = rest[len(part) :]
                return [xxhash.xxh3_128_digest(one.payload) for one in got if cache.options.checksum_bytes]

            checksums = await self._engine.while_held(cache.id, DAEMON, lease, copy) or [b""] * len(got)
            items = [
                CommitItem(slot, one.key, one.parent, *_retention(cache, one.traits, checksum))
                for slot, one, checksum in zip(grant.slots, got, checksums, strict=True)
            ]
            if self._is_current(cache, chain, got):
                self._engine.take_in(cache.id, DAEMON, group, lease, items, int(seconds * 1e9))
                self.counts["fetched"] += len(got)
        finally:
            self._engine.afterwards(cache.id, lease, partial(self._release, cache.id, lease))
        self._buffers.give_back(one.buffer for one in got)  # the copy has ended

    def _release(self, cache: CacheId, lease: LeaseId) -> None:
        with suppress(UnknownLease, UnknownCache):
            self._engine.release(cache, DAEMON, [lease])


def _verified(
    place: GroupPrefix, payload_bytes: int, keys: Sequence[Key], buffers: Sequence[memoryview], sizes: Sequence[int]
) -> tuple[list[_Got], dict[Key, str], dict[Key, str]]:
    """Sound blocks, and the reasons why other objects are damaged or left alone. In a thread."""
    found: list[_Got] = []
    damaged: dict[Key, str] = {}
    others: dict[Key, str] = {}
    for key, buffer, size in zip(keys, buffers, sizes, strict=True):
        if size < 0:
            continue
        if size > len(buffer):
            damaged[key] = f"it has {size} bytes, more than a block"
            continue
        try:
            found.append(_Got(key, *decode(place, key, payload_bytes, buffer[:size]), buffer))
        except OtherObjectVersion as error:
            others[key] = str(error)
        except BadObject as error:
            damaged[key] = str(error)
    return found, damaged, others


def _retention(cache: ServedCache, traits: Traits, checksum: bytes) -> tuple[int, int, Label | None]:
    """Priority, duration and label of a fetched block. The label has only the fields that this cache keeps."""
    options, label = cache.options, traits.label
    if label is not None and not options.keep_tokens:
        label = replace(label, tokens=b"", scope=b"")
    if label is not None and not options.event_hash:
        label = replace(label, event_hash=b"")
    label = replace(label or Label(), checksum=checksum)
    return traits.priority, traits.duration_ms, label if label != Label() else None
