"""Keeps daemons agreed on the blocks that their caches have forgotten.

Daemons that share a store write to one object for each cache, ``CACHE/FINGERPRINT/forgotten``. Each daemon joins the
content of the object with its own record, so the order does not matter; a daemon whose record was overwritten writes it
again at its next look. Peers tell the generation of their caches.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from kvtier.abi.words import BlockResult
from kvtierd.core.ids import GroupId
from kvtierd.mover.engine import Engine
from kvtierd.mover.executor import MoverError
from kvtierd.service.cache import ServedCache
from kvtierd.service.catalog import Catalog
from kvtierd.service.forgotten import BlockPlace, Forgotten, Past
from kvtierd.tiers.base import TierIOError
from kvtierd.tiers.remote.base import RemoteError, RemoteRefused, RemoteUnavailable
from kvtierd.tiers.remote.breaker import Guarded

LOOK_S: Final = 2.0
"""Seconds between two looks at the record of a cache."""
WATCH_S: Final = 60.0
"""Seconds for which a daemon looks, ever more rarely, whether an object that it wrote stays unchanged."""
MOST_REMOVED: Final = 256
"""Removed caches whose past is kept here. The store keeps the past of all removed caches."""
VERSION: Final = 1
"""Format version of the object. Every change of its content needs a new number."""
TELL_S: Final = 2.0
"""Seconds that a call which forgets blocks waits for the store."""
RETRY_S: Final = 1.0
"""Seconds after a failed look during which callers do not look again."""
_LONGEST_LOOK_S: Final = 30.0
"""Seconds after which the looks at other caches go on beside a slow look."""
_BYTES: Final = 1 << 14
_MOST_BYTES: Final = 2 << 20

_log = logging.getLogger(__name__)

Generations = Callable[[str], Iterable[int]]
"""Returns the generations that peers tell of an open cache, by its name."""


@dataclass(slots=True, eq=False)
class Teller:
    """Exchanges records of forgotten blocks. Loop thread only. ``_store``: None = only peers."""

    _engine: Engine
    _catalog: Catalog
    _forgotten: Forgotten
    _store: Guarded | None
    _peers: Generations
    _heard: dict[str, Past] = field(default_factory=dict, init=False)
    """The past of each cache as this daemon and the store both have it."""
    _watched: dict[str, tuple[float, float]] = field(default_factory=dict, init=False)
    """When to look at an object again that this daemon wrote, and seconds since the last look."""
    _looks: dict[str, asyncio.Task[None]] = field(default_factory=dict, init=False)
    """The running look of each cache. A caller that gives up does not stop a look, which may be amid a reset."""
    _failed_at: dict[str, float] = field(default_factory=dict, init=False)
    _woken: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _stopping: bool = field(default=False, init=False)
    _read_last: dict[str, tuple[bytes, Past]] = field(default_factory=dict, init=False)
    _logged: set[str] = field(default_factory=set, init=False)

    async def run(self) -> None:
        """Looks until cancelled."""
        await self._catalog.loaded()
        while True:
            due = {cache.prefix for cache in self._catalog} | {
                prefix for prefix in self._forgotten.prefixes if not self.has_heard(prefix)
            }
            for prefix in sorted(due | self._to_watch()):
                await asyncio.wait([self._start(prefix)], timeout=_LONGEST_LOOK_S)
            await self._prune()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._woken.wait()
            self._woken.clear()

    def _to_watch(self) -> set[str]:
        now = asyncio.get_running_loop().time()
        due = {prefix: waited_s for prefix, (at, waited_s) in self._watched.items() if at <= now}
        for prefix, waited_s in due.items():
            self._watched[prefix] = now + 2 * waited_s, 2 * waited_s
            if waited_s > WATCH_S / 2:
                del self._watched[prefix]
        return set(due)

    async def _prune(self) -> None:
        """Leaves the oldest pasts of removed caches to the store."""
        settled = sorted(
            filter(self._is_settled, self._forgotten.prefixes), key=lambda each: self._forgotten.of(each).generation
        )
        for prefix in settled[: max(0, len(settled) - MOST_REMOVED)]:
            with suppress(TierIOError):  # the next start finds it again
                if await self._forgotten.remove(prefix, partial(self._is_settled, prefix)):
                    for known in (self._heard, self._read_last, self._failed_at):
                        known.pop(prefix, None)

    def _is_settled(self, prefix: str) -> bool:
        """Returns whether only the store has to keep the past of a cache: the cache is removed, and the store knows."""
        busy = prefix in self._watched or prefix in self._looks or self._forgotten.has_old(prefix)
        told = self._store is not None and self.has_heard(prefix)
        return told and not busy and not self._catalog.knows(prefix.partition("/")[0])

    async def stop(self) -> None:
        """Ends all looks. No look begins afterwards."""
        self._stopping = True
        looks = list(self._looks.values())
        for look in looks:
            look.cancel()
        await asyncio.gather(*looks, return_exceptions=True)

    def has_heard(self, prefix: str) -> bool:
        """Returns whether the daemon can tell the store's valid objects of a cache from forgotten objects."""
        return self._store is None or self._heard.get(prefix) is self._forgotten.of(prefix)

    def wake(self, prefix: str) -> None:
        """Hastens the next look, since blocks of the cache wait for it."""
        if not self._has_failed(prefix):
            self._woken.set()

    async def hear(self, prefix: str) -> bool:
        """Looks if necessary, and waits :data:`TELL_S` at most. Returns :meth:`has_heard`."""
        if not self.has_heard(prefix) and not self._has_failed(prefix) and not self._stopping:
            await asyncio.wait([self._start(prefix)], timeout=TELL_S)
        return self.has_heard(prefix)

    async def tell(self, prefix: str) -> bool:
        """Tells the store of a reset or a drop. Returns False if the store has to be told later."""
        with suppress(TimeoutError):
            async with asyncio.timeout(TELL_S):
                if prefix in self._looks:  # a running look may have begun before the change
                    await asyncio.wait([self._looks[prefix]])
                if not self.has_heard(prefix) and not self._stopping:
                    await asyncio.wait([self._start(prefix)])
        return self.has_heard(prefix)

    async def let_go(self, cache: ServedCache) -> int:
        """Drops the blocks that an earlier reset left, except blocks in use. Returns the number of blocks in use."""
        prefix = cache.prefix
        if self._forgotten.kept(prefix) or self._forgotten.is_due(prefix):
            async with self._forgotten.change(prefix):
                if self._forgotten.is_due(prefix):
                    await self._reset(cache)
                else:
                    self._forgotten.keep(prefix, await self._drop(cache, self._forgotten.kept(prefix)))
        return len(self._forgotten.kept(prefix))

    async def _reset(self, cache: ServedCache) -> None:
        report = await self._engine.reset(cache.id, force=True)
        self._forgotten.keep(cache.prefix, report.roots)
        says = "a cache is reset, as its past says name=%s dropped=%d kept=%d"
        _log.info(says, cache.name, report.dropped, report.kept)

    def _has_failed(self, prefix: str) -> bool:
        return asyncio.get_running_loop().time() < self._failed_at.get(prefix, 0.0) + RETRY_S

    def _start(self, prefix: str) -> asyncio.Task[None]:
        look = self._looks.get(prefix)
        if look is None:
            look = self._looks[prefix] = asyncio.create_task(self._look_at(prefix), name=f"look-{prefix}")
            look.add_done_callback(lambda _: self._looks.pop(prefix))
        return look

    async def _look_at(self, prefix: str) -> None:
        try:
            await self._look(prefix)
        except (RemoteError, MoverError, TierIOError) as error:
            self._failed_at[prefix] = asyncio.get_running_loop().time()
            if isinstance(error, TierIOError) and prefix not in self._logged:
                self._logged.add(prefix)
                _log.warning("a cache's past cannot be kept cache=%s why=%r", prefix, str(error))
        except Exception:  # noqa: BLE001  our bug; looks at other caches go on
            _log.exception("a cache is not looked at cache=%s", prefix)

    async def _look(self, prefix: str) -> None:
        """Joins the record of this daemon with the records of others. Raises RemoteError, MoverError, TierIOError."""
        if (cache := self._cache(prefix)) is not None:
            for generation in self._peers(cache.name):
                await self._adopt(prefix, Past(generation))
            await self.let_go(cache)
        if self._store is None:
            return
        theirs = await self._read(self._store, prefix)
        await self._adopt(prefix, theirs)
        async with self._forgotten.change(prefix) as ours:
            pass
        if (joined := ours.joined(theirs)) != theirs:
            await self._write(self._store, prefix, joined)
            self._watched[prefix] = asyncio.get_running_loop().time() + LOOK_S, LOOK_S
        self._heard[prefix] = ours

    def _cache(self, prefix: str) -> ServedCache | None:
        cache = self._catalog.named(prefix.partition("/")[0])
        return cache if cache is not None and cache.prefix == prefix else None

    async def _adopt(self, prefix: str, theirs: Past) -> None:
        """Forgets the blocks that other daemons forgot. A dropped block that is in use goes at a later look."""
        if self._forgotten.of(prefix).joined(theirs) == self._forgotten.of(prefix):
            return
        async with self._forgotten.change(prefix) as ours:
            if (joined := ours.joined(theirs)) == ours:
                return
            self._forgotten.set(prefix, joined)
            if (cache := self._cache(prefix)) is None:
                self._forgotten.keep(prefix, (), due=True)  # the cache may be on a disk that cannot be read now
            elif joined.generation > ours.generation:
                await self._reset(cache)
            else:
                fresh = {place: at for place, at in joined.dropped.items() if at > ours.dropped.get(place, 0)}
                held = await self._drop(cache, fresh)
                gone = {place: fresh[place] for place in fresh.keys() - held}
                self._forgotten.set(prefix, ours.joined(Past(0, gone)) if gone else ours)

    async def _drop(self, cache: ServedCache, places: Collection[BlockPlace]) -> frozenset[BlockPlace]:
        """Returns the blocks that are in use and stay."""
        held = set[BlockPlace]()
        for group in map(GroupId, range(len(cache.spec.groups))):
            keys = [key for of, key in places if of == group]
            report = await self._engine.drop(cache.id, group, keys)
            results = zip(keys, report.results, strict=True)
            held |= {(group, key) for key, result in results if result is BlockResult.HELD}
        if len(held) < len(places):
            await self._engine.forgotten(cache.id)
        return frozenset(held)

    async def _read(self, store: Guarded, prefix: str) -> Past:
        """Reads the object of a cache. Raises RemoteError, also for an object that it cannot read."""
        at, buffer = object_name(prefix), memoryview(bytearray(_BYTES))
        try:
            there = all(await store.exists([at]))  # not by get: a store may list objects and give none
        except RemoteError as failed:
            if failed.of_object:
                await store.exists([f"{at}.other"])  # if this fails as well, the store has failed
            raise
        if not there:
            return Past()
        (length,) = await store.get([at], [buffer])
        if length > len(buffer):
            buffer = memoryview(bytearray(min(length, _MOST_BYTES)))
            (length,) = await store.get([at], [buffer])
        if length < 0:
            raise RemoteUnavailable(f"{at} is not given")
        whole = bytes(buffer[:length])
        before, past = self._read_last.get(prefix, (b"", Past()))
        if whole == before:
            return past
        past = self._decoded(at, whole)
        self._read_last[prefix] = whole, past
        return past

    def _decoded(self, at: str, whole: bytes) -> Past:
        try:
            content = json.loads(whole)
            if content["version"] == VERSION:
                return Past.decoded(content)
            why = f"it is of version {content['version']}; this daemon reads version {VERSION}"
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            why = repr(error)
        if at not in self._logged:
            self._logged.add(at)
            says = "the store is not used for a cache: its record of the past cannot be read object=%s why=%r"
            _log.warning(says, at, why)
        raise RemoteRefused(f"{at}: {why}")

    async def _write(self, store: Guarded, prefix: str, past: Past) -> None:
        if not store.replaces:
            await store.delete([object_name(prefix)])
        data = json.dumps({"version": VERSION} | past.encoded()).encode()
        (failed,) = await store.put([object_name(prefix)], [data])
        if failed is not None:
            raise failed


def object_name(prefix: str) -> str:
    return f"{prefix}/forgotten"
