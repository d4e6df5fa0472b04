"""Deletes objects of a store by age and by use, if the store has no rules of its own.

A store may have more objects than fit in memory. Deletion by age lists the store once. Deletion by use lists it twice
and reads the begin of each object, which names its parent: 44 bytes per object are kept. A use of a block counts for
its ancestors, too, so chains are deleted from their ends.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import xxhash

from kvtierd.core.ids import Key
from kvtierd.mover.executor import ShuttingDown
from kvtierd.service.cache import prefix_of
from kvtierd.service.forgotten import Forgotten
from kvtierd.service.remote.sources import Known
from kvtierd.tiers.remote.base import Listed, RemoteStore
from kvtierd.tiers.remote.objects import LINK_BYTES, GroupPrefix, parent_in, parse

BATCH: Final = 128
"""Objects that are deleted in a call, or looked at in a turn of the loop."""


@dataclass(slots=True)
class DeletionCounts:
    """Counts of deleted and of kept blocks."""

    gone: int = 0
    gone_bytes: int = 0
    kept: int = 0
    kept_bytes: int = 0


class _Object(NamedTuple):
    """``used_s``: last use or write, in seconds since 1970. ``forgotten``: whether its block is forgotten."""

    name: str
    place: GroupPrefix
    key: Key
    nbytes: int
    written_s: float
    used_s: float
    forgotten: bool

    @property
    def id(self) -> int:
        return xxhash.xxh3_64_intdigest(self.name.encode())


_LINK: Final = np.dtype(
    [(name, "<u8") for name in ("id", "block", "revision", "parent", "nbytes")] + [("minute", "<u4")]
)
"""An object and its parent. ``block``, ``parent``: ids of blocks, the same for all revisions; 0 = no parent.
``minute``: of the last use."""


def _link(one: _Object, parent: Key | None) -> bytes:
    above = 0 if parent is None else _block_id(one.place, parent)
    block = _block_id(one.place, one.key)
    row = one.id, block, one.place.revision, above, one.nbytes, int(one.used_s // 60)
    return np.array(row, _LINK).tobytes()


def _doomed(links: bytearray, keep_bytes: int) -> Collection[int]:
    """Returns the ids of the objects to delete until ``keep_bytes`` are left: the least recently used, children before
    parents. A use counts for the ancestors, too. For a thread."""
    rows = np.frombuffer(links, _LINK)
    blocks, parents, sizes = rows["block"], rows["parent"], rows["nbytes"]
    by_block = np.lexsort((rows["revision"], blocks))
    last = np.searchsorted(blocks, parents, side="right", sorter=by_block) - 1  # the latest revision of the parent
    above = np.where(blocks[by_block][last] == parents, by_block[last], -1)
    depths, latest = _depths(above), rows["minute"].tolist()
    for number in np.argsort(-depths).tolist():
        if (parent := above[number]) >= 0:
            latest[parent] = max(latest[parent], latest[number])
    order = np.lexsort((-depths, latest))
    excess = int(sizes.sum()) - keep_bytes
    count = int(np.searchsorted(np.cumsum(sizes[order]), excess)) + 1 if excess > 0 else 0
    return set(rows["id"][order[:count]].tolist())


def _depths(above: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The depth of each object in its chain; a root has 0. ``above``: the number of its parent; -1 = none. The steps
    upward double, which ends a circle of hostile objects, too."""
    depths = (above >= 0).astype(np.int64)
    for _ in range(len(above).bit_length()):
        depths += np.where(above >= 0, depths[above], 0)
        above = np.where(above >= 0, above[above], -1)
    return depths


class Deleter:
    """Deletes from a single store. Loop thread only. ``counts``: blocks by outcome."""

    def __init__(self, store: RemoteStore, known: Known, forgotten: Forgotten) -> None:
        self._store: Final = store
        self._known: Final = known
        self._forgotten: Final = forgotten
        self._stopping = False
        self.counts: Final[Counter[str]] = Counter()

    def stop(self) -> None:
        """Ends running deletions before their next batch, since the store closes."""
        self._stopping = True

    async def run(
        self, caches: Sequence[str], older_than_s: float | None, keep_bytes: int | None, *, dry_run: bool
    ) -> DeletionCounts:
        """Deletes blocks of all daemons, and every block that a reset has forgotten. Objects that are not blocks stay.

        Args:
            caches: limits the deletion to these; empty = all caches.
            older_than_s: delete blocks written longer ago; None = no deletion by age.
            keep_bytes: delete the least recently used blocks above this size, from the ends of chains; None = no
                deletion by use.

        Raises: RemoteError: the store failed, or cannot list; ShuttingDown. Blocks deleted before stay deleted.
        """
        began_s = time.time()
        written_s = 0.0 if older_than_s is None else began_s - older_than_s
        unused = () if keep_bytes is None else await self._unused(caches, written_s, keep_bytes)
        counts, doomed = DeletionCounts(), list[str]()
        async for one in self._objects(caches):
            keeps = one.used_s >= began_s or one.id not in unused
            if keeps and one.written_s >= written_s and not one.forgotten:
                counts.kept += 1
                counts.kept_bytes += one.nbytes
                continue
            counts.gone += 1
            counts.gone_bytes += one.nbytes
            if not dry_run:
                doomed.append(one.name)
            if len(doomed) == BATCH:
                await self._delete(doomed)
                doomed.clear()
        await self._delete(doomed)
        return counts

    async def _unused(self, caches: Sequence[str], written_s: float, keep_bytes: int) -> Collection[int]:
        links, batch = bytearray(), list[_Object]()
        async for one in self._objects(caches):
            if not one.forgotten and one.written_s >= written_s:
                batch.append(one)
            if len(batch) == BATCH:
                await self._add(links, batch)
                batch.clear()
        await self._add(links, batch)
        return await asyncio.to_thread(_doomed, links, keep_bytes)

    async def _add(self, links: bytearray, batch: Sequence[_Object]) -> None:
        """Looks up the parents of objects. An unreadable object counts as a root."""
        begins = await self._store.begins([one.name for one in batch], LINK_BYTES) if batch else ()
        for one, begin in zip(batch, begins, strict=True):
            links += _link(one, parent_in(begin))

    async def _objects(self, caches: Sequence[str]) -> AsyncIterator[_Object]:
        looked_at = 0
        for prefix in [f"{name}/" for name in caches] or [""]:
            self._go_on()
            async for listed in self._store.listing(prefix):
                if (one := self._block(listed)) is not None:
                    yield one
                looked_at += 1
                if looked_at % BATCH == 0:
                    await asyncio.sleep(0)
                    self._go_on()

    def _block(self, listed: Listed) -> _Object | None:
        """The object of a block; None for any other object."""
        parsed = parse(listed.name)
        if parsed is None:
            return None
        place, key = parsed
        used_s = max(listed.modified_s, self._known.used_s(listed.name))
        forgotten = place.revision < self._forgotten.generation(prefix_of(place.cache, place.fingerprint))
        return _Object(listed.name, place, key, listed.nbytes, listed.modified_s, used_s, forgotten)

    async def _delete(self, names: Sequence[str]) -> None:
        if names:
            self._go_on()
            await self._store.delete(names)
            self._known.note(names, there=False)
            self.counts["deleted"] += len(names)

    def _go_on(self) -> None:
        if self._stopping:
            raise ShuttingDown


def _block_id(place: GroupPrefix, key: Key) -> int:
    return xxhash.xxh3_64_intdigest(place.prefix.encode() + key)
