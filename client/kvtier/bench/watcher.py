"""``python -m kvtier.bench.watcher ADDRESS``: one of many that follow the events of a daemon.

Every change is decoded into a key and its residency, in an index of its own, through the library as anybody would.
Asked ``{"since": [epoch, id]}`` it begins to watch after that event; asked ``{"until": id}`` it tells what it saw up to
there, see :class:`Seen`. Asked for both it stops there, whatever has happened since.
"""

from __future__ import annotations

import asyncio
import sys
import time
import zlib
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from kvtier import aio
from kvtier.aio import AsyncClient
from kvtier.bench.helper import serve
from kvtier.events import Event, Gap, WatchItem
from kvtier.types import Cursor, EventType

_HEARTBEAT_S: Final = 0.1
"""After a quiet time the end is noticed by them."""


@dataclass(slots=True)
class Seen:
    """``changes``: blocks by the type of their event. ``skipped``: events whose ids did not follow, and gaps.

    ``digest``: of all keys and residencies in their order, to compare watchers by. ``latencies``: one an event, in
    microseconds from its time to the moment when it was decoded. ``cpu_s``: of this process, meanwhile.
    """

    first: int
    last: int
    events: int = 0
    changes: dict[str, int] = field(default_factory=dict)
    skipped: int = 0
    digest: int = 0
    latencies: list[int] = field(default_factory=list)
    cpu_s: float = 0.0
    seconds: float = 0.0

    def take(self, event: Event, index: dict[bytes, int]) -> None:
        keys = event.keys
        if event.type is EventType.REMOVED:
            for key in keys:
                index.pop(key, None)
        else:
            index.update(zip(keys, event.residency, strict=True))
        self.digest = zlib.crc32(event.residency, zlib.crc32(event.packed_keys, self.digest))
        self.skipped += event.event_id != self.last + 1
        self.last = event.event_id
        self.events += 1
        self.changes[str(event.type)] = self.changes.get(str(event.type), 0) + len(keys)
        self.latencies.append((time.time_ns() - event.time_ns) // 1000)


class Watching:
    """Answers the questions of the module's text."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._index: dict[bytes, int] = {}
        self._until = sys.maxsize
        self._seen: asyncio.Task[Seen] | None = None

    async def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        self._until = question.get("until", sys.maxsize)
        if "since" in question:
            self._seen = asyncio.create_task(self._follow(Cursor(*question["since"])))
        if "until" not in question:
            return {"watching": True}
        if self._seen is None:
            raise ValueError("until comes before since")
        return asdict(await self._seen)

    async def _follow(self, since: Cursor) -> Seen:
        seen = Seen(since.id + 1, since.id)
        began, cpu = time.perf_counter(), time.process_time()
        watch = self._client.watch(since=since, heartbeats=True, heartbeat_s=_HEARTBEAT_S)
        async with watch:
            while seen.last < self._until:
                self._take(seen, await anext(watch))
        seen.seconds, seen.cpu_s = time.perf_counter() - began, time.process_time() - cpu
        return seen

    def _take(self, seen: Seen, item: WatchItem) -> None:
        if isinstance(item, Event):
            seen.take(item, self._index)
        elif isinstance(item, Gap):
            seen.skipped += 1
            seen.last = max(seen.last, item.last_id)


async def run(address: str) -> None:
    async with await aio.connect(address, timeout=60) as client:
        await serve(Watching(client).answer)


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1]))
