"""For the disk to remember: which of its blocks were used and whose retention changed, written about once a second.

Without it the order of eviction after a restart would be the order of writing. A kill loses the uses of the last second
at most, and those of a write that was under way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Final

from kvtierd.core.ids import GroupId, Key
from kvtierd.core.traits import Traits
from kvtierd.mover.runtime import CacheRuntime
from kvtierd.tiers.base import TierError

NOTED_EVERY_S: Final = 1.0


class UseLog:
    """Of one cache. Loop thread only; the disk is written to in a thread, one write at a time."""

    def __init__(self, runtime: CacheRuntime) -> None:
        self._runtime = runtime
        self._writing: asyncio.Task[None] | None = None
        self._written_at = time.monotonic()
        self.problem: str | None = None
        """Why the last write failed. Its uses are lost, which costs order, never blocks."""

    def note(self) -> None:
        """Starts a write if one is due and none is under way; meanwhile uses add up in the core."""
        busy = self._writing is not None and not self._writing.done()
        if not busy and time.monotonic() - self._written_at >= NOTED_EVERY_S:
            self._start()

    async def finish(self) -> None:
        """Returns when everything used so far is on disk, or has failed to get there. A write under way goes on when
        the caller is cancelled: its thread does so in any case."""
        if self._writing is not None:
            await asyncio.shield(self._writing)
        self._start()
        if self._writing is not None:
            await asyncio.shield(self._writing)

    def _start(self) -> None:
        self._written_at = time.monotonic()
        uses = self._runtime.manager.take_disk_uses()
        changed = self._runtime.manager.take_restated()
        if uses or changed:
            self._writing = asyncio.get_running_loop().create_task(self._write(uses, changed))

    async def _write(
        self, uses: Mapping[GroupId, Sequence[Key]], changed: Mapping[GroupId, Sequence[tuple[Key, Traits]]]
    ) -> None:
        touches = [(group, b"".join(keys)) for group, keys in uses.items()]
        restate = [(group, key, traits) for group, blocks in changed.items() for key, traits in blocks]
        try:
            await asyncio.to_thread(self._runtime.store.write, (), (), touches, restate)
            self.problem = None
        except TierError as error:
            self.problem = f"cache {self._runtime.name}: the order of use could not be written: {error}"
