"""Deletes objects of a store by age and by use, where the store's own rules do not.

A store may have more objects than fit in memory. It is listed once, or twice where use counts, and of a listing only
sums of bytes are kept, one a minute of last use.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvtierd.mover.executor import ShuttingDown
from kvtierd.service.remote.known import Known
from kvtierd.tiers.remote.base import Listed, RemoteStore
from kvtierd.tiers.remote.objects import parse

BATCH: Final = 128
"""So many objects are deleted in a call, or looked at in a turn of the loop."""


@dataclass(slots=True)
class Tally:
    """Blocks that go, and that stay."""

    gone: int = 0
    gone_bytes: int = 0
    kept: int = 0
    kept_bytes: int = 0


class _Object(NamedTuple):
    """``minute``: of its last use, since 1970."""

    name: str
    nbytes: int
    written_s: float
    minute: int


@dataclass(slots=True)
class _Cut:
    """What was written before ``written_s`` goes; of the rest what was last used before ``minute``, and ``left`` bytes
    or a few more of what was used then."""

    written_s: float
    minute: int = 0
    left: int = 0

    def takes(self, one: _Object) -> bool:
        if one.written_s < self.written_s or one.minute < self.minute:
            return True
        if one.minute > self.minute or self.left <= 0:
            return False
        self.left -= one.nbytes
        return True


class Deleter:
    """Of one store. Loop thread only. ``counts``: blocks by what became of them."""

    def __init__(self, store: RemoteStore, known: Known) -> None:
        self._store: Final = store
        self._known: Final = known
        self._stopping = False
        self.counts: Final[Counter[str]] = Counter()

    def stop(self) -> None:
        """The store closes: whatever deletes ends before its next batch."""
        self._stopping = True

    async def run(
        self, caches: Sequence[str], older_than_s: float | None, keep_bytes: int | None, *, dry_run: bool
    ) -> Tally:
        """Deletes blocks, whoever wrote them. What has another name than a block's stays.

        Args:
            caches: of these alone; none = all.
            older_than_s: blocks written longer ago go; None = none for their age.
            keep_bytes: of the rest, the least recently used go beyond so many; None = none for their use.

        Raises: RemoteError: the store failed, or cannot list; ShuttingDown. What was deleted before is gone.
        """
        cut, tally, doomed = await self._cut(caches, older_than_s, keep_bytes), Tally(), list[str]()
        async for one in self._objects(caches):
            if not cut.takes(one):
                tally.kept += 1
                tally.kept_bytes += one.nbytes
                continue
            tally.gone += 1
            tally.gone_bytes += one.nbytes
            if not dry_run:
                doomed.append(one.name)
            if len(doomed) == BATCH:
                await self._delete(doomed)
                doomed.clear()
        await self._delete(doomed)
        return tally

    async def _cut(self, caches: Sequence[str], older_than_s: float | None, keep_bytes: int | None) -> _Cut:
        written_s = 0.0 if older_than_s is None else time.time() - older_than_s
        if keep_bytes is None:
            return _Cut(written_s)
        by_minute: Counter[int] = Counter()
        async for one in self._objects(caches):
            if one.written_s >= written_s:
                by_minute[one.minute] += one.nbytes
        left = by_minute.total() - keep_bytes
        for minute, nbytes in sorted(by_minute.items()):
            if left <= nbytes:
                return _Cut(written_s, minute, left)
            left -= nbytes
        return _Cut(written_s)

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
        """None where the name is not a block's."""
        if parse(listed.name) is None:
            return None
        used_s = max(listed.modified_s, self._known.used_s(listed.name))
        return _Object(listed.name, listed.nbytes, listed.modified_s, int(used_s // 60))

    async def _delete(self, names: Sequence[str]) -> None:
        if names:
            self._go_on()
            await self._store.delete(names)
            self._known.note(names, there=False)
            self.counts["deleted"] += len(names)

    def _go_on(self) -> None:
        if self._stopping:
            raise ShuttingDown
