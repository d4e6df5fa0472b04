"""Every block's residency by the event stream alone: what the daemon's listings are compared with."""

import asyncio
from collections.abc import Mapping
from typing import Any

from kvtier import AsyncClient, Cursor
from kvtier.events import Event, SnapshotEnd, SnapshotSlice, SnapshotStart, WatchItem
from kvtier.types import EventType
from kvtier.wire import split_keys
from tests.integration.waiting import PATIENCE_S


class ResidencyTable:
    """Key to residency set, by cache and window group. Exact from a watch's ``SnapshotEnd`` on, without a gap."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, int], dict[bytes, int]] = {}

    def blocks(self, cache: str, group: int = 0) -> Mapping[bytes, int]:
        return self._groups.setdefault((cache, group), {})

    def apply(self, item: WatchItem) -> None:
        if isinstance(item, SnapshotStart):
            self._groups.clear()
        if not isinstance(item, Event | SnapshotSlice):
            return
        blocks = self._groups.setdefault((item.cache, item.group), {})
        kind = EventType.STORED if isinstance(item, SnapshotSlice) else item.type
        if kind in (EventType.STORED, EventType.UPDATED):
            blocks.update(zip(split_keys(item.packed_keys), item.residency, strict=True))
        elif kind is EventType.REMOVED:
            for key in item.keys:
                blocks.pop(key, None)
        else:
            blocks.clear()


async def snapshot(client: AsyncClient, **filters: Any) -> tuple[ResidencyTable, Cursor]:
    """What a watch that begins with a snapshot says, up to its end, and the cursor there."""
    table = ResidencyTable()
    async with client.watch(snapshot=True, **filters) as watch, asyncio.timeout(PATIENCE_S):
        async for item in watch:
            table.apply(item)
            if isinstance(item, SnapshotEnd):
                return table, item.cursor
    raise AssertionError("the watch ended")
