"""Holding a mirror at a cursor, so that it can be compared with a listing of that very moment while traffic goes on."""

from __future__ import annotations

import asyncio

import pytest

from kvtier import Cache, Cursor, Mirror, MirrorState, Watch
from kvtier.events import WatchItem
from tests.integration.waiting import PATIENCE_S, eventually


class Steering:
    """Of all watches that are made while :meth:`installed`."""

    def __init__(self) -> None:
        self.holding = 0
        """Watches that are held up at this moment."""
        self._held = False
        self._goal: Cursor | None = None
        self._changed = asyncio.Event()

    def installed(self, monkeypatch: pytest.MonkeyPatch) -> Steering:
        steering = self

        class Steered(Watch):
            async def __anext__(self) -> WatchItem:
                await steering.pass_(self)
                return await super().__anext__()

        monkeypatch.setattr("kvtier.client.Watch", Steered)
        return self

    async def pass_(self, watch: Watch) -> None:
        """Returns when the watch may take its next item. A snapshot is never held up."""
        while self._held and watch.cursor is not None and (self._goal is None or watch.cursor >= self._goal):
            self.holding += 1
            try:
                await self._changed.wait()
            finally:
                self.holding -= 1

    def hold(self) -> None:
        """No watch takes another item than the one that it may be waiting for."""
        self._held, self._goal = True, None

    def go_to(self, cursor: Cursor | None) -> None:
        """Lets them go on, as far as that; None: without end."""
        self._held, self._goal = cursor is not None, cursor
        self._changed.set()
        self._changed = asyncio.Event()

    async def assert_agrees(self, mirror: Mirror, *groups: Cache) -> None:
        """That the mirror says of these window groups, each at the cursor of its listing, exactly what the listing
        says, whatever happens meanwhile."""
        left = list(groups)
        async with asyncio.timeout(3 * PATIENCE_S):
            while left:
                left = await self._disagreeing(mirror, left)

    async def _disagreeing(self, mirror: Mirror, groups: list[Cache]) -> list[Cache]:
        """Those whose listing was not of one moment, or of one that the mirror was past. Raises for any other."""
        await mirror.synced(timeout=PATIENCE_S)
        self.hold()
        try:
            listings = [(group, [page async for page in group.pages()]) for group in groups]
            missed = []
            for group, pages in listings:
                cursor = pages[0].as_of
                self.go_to(cursor)
                if len({page.as_of for page in pages}) > 1 or not await _reaches(mirror, cursor):
                    missed.append(group)
                    continue
                listed = {row.key: (row.residency, row.priority) for page in pages for row in page.blocks}
                mirrored = {key: (where, rank) for key, where, rank in mirror.blocks(group.name, group=group.group)}
                assert mirrored == listed, (group.name, group.group, cursor)
            return missed
        finally:
            self.go_to(None)


async def _reaches(mirror: Mirror, cursor: Cursor) -> bool:
    """False where it has gone past it, or lost its way to it."""

    async def place() -> Cursor | None:
        return mirror.cursor if mirror.state is MirrorState.EXACT else None

    return await eventually(place, lambda found: found is None or found >= cursor) == cursor
