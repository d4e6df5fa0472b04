"""Watchers that come and go, many of them in one process, each of which holds what it is sent against what is promised.

Every batch joins the one before: ids are covered once, in order, and what is missing stands in a gap that says so.
Those who begin with a snapshot keep a table of where every block is; it must be the daemon's own listing.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any, Final

import grpc

from kvtier import AsyncClient, Cache, Cursor, Gap, SnapshotEnd, connect
from kvtier.errors import fault_of
from kvtier.v1 import blocks_pb2, events_pb2
from tests.integration.raw import RawClient, attached
from tests.integration.residency import ResidencyTable

KINDS: Final = ("now", "oldest", "since", "snapshot")
"""What a watcher begins with."""

_HEARTBEAT_S: Final = 0.05
_BACK: Final = 1500
"""Watchers that begin at a cursor begin so many events back, at most."""


class Crowd:
    """``watchers`` of them at any moment, each for up to ``stay_s``; another comes for each that goes."""

    def __init__(self, raw: RawClient, client: AsyncClient, cache: Cache, seed: int, stay_s: float) -> None:
        self.tally: Counter[str] = Counter()
        """Who came, by what they began with; batches and events that they checked; gaps; tables compared."""
        self._raw = raw
        self._client = client
        self._cache = cache
        self._rng = random.Random(seed)
        self._stay_s = stay_s
        self._newest = Cursor(client.epoch, 0)
        self._end: tuple[dict[bytes, int], Cursor] | None = None
        """The daemon's listing, once nothing happens any more, and the cursor that it is of."""

    async def go_home(self) -> None:
        """To be called when nothing happens any more: those who have a table compare it, and nobody comes any more."""
        listed: dict[bytes, int] = {}
        cursors = set()
        async for page in self._cache.pages():
            cursors.add(page.as_of)
            listed.update((block.key, block.residency) for block in page.blocks)
        (as_of,) = cursors
        self._end = listed, as_of

    async def one_after_the_other(self) -> None:
        while self._end is None:
            kind = self._rng.choice(KINDS)
            self.tally[kind] += 1
            leaves = asyncio.get_running_loop().time() + self._rng.uniform(0, self._stay_s)
            if kind == "snapshot":
                await self._keep_a_table(leaves)
            else:
                await self._follow(kind, leaves)

    async def _follow(self, kind: str, leaves: float) -> None:
        request = events_pb2.WatchRequest(heartbeat_ns=int(_HEARTBEAT_S * 1e9))
        covered = None
        if kind == "oldest":
            request.oldest = True
        elif kind == "since":
            covered = self._rng.randint(max(0, self._newest.id - _BACK), self._newest.id)
            request.since.CopyFrom(blocks_pb2.Cursor(epoch=self._newest.epoch, id=covered))
        stream = self._raw.stubs.events.Watch(request, metadata=self._raw.metadata)
        try:
            async with asyncio.timeout_at(leaves):
                while self._end is None:
                    covered = self._joins(await stream.read(), covered)
        except TimeoutError:
            pass
        except grpc.aio.AioRpcError as error:
            assert kind == "since" and fault_of(error).reason == "CURSOR_COMPACTED", (kind, error)
            self.tally["compacted"] += 1
        finally:
            stream.cancel()

    def _joins(self, batch: Any, covered: int | None) -> int:
        """``covered``: the last id told of before it; the same with it."""
        assert covered is None or batch.first_id == covered + 1, f"{batch.first_id} after {covered}"
        assert [event.id for event in batch.events] == list(range(batch.first_id, batch.last_id + 1))
        self.tally["batches"] += 1
        self.tally["events"] += len(batch.events)
        self._newest = max(self._newest, Cursor(batch.epoch, batch.last_id))
        if not batch.HasField("gap"):
            return int(batch.last_id)
        assert batch.gap.first_id == batch.last_id + 1, batch.gap
        self.tally["gaps"] += 1
        return int(batch.gap.last_id)

    async def _keep_a_table(self, leaves: float) -> None:
        table, complete = ResidencyTable(), False
        async with self._client.watch(snapshot=True, heartbeats=True, heartbeat_s=_HEARTBEAT_S) as watch:
            async for item in watch:
                table.apply(item)
                complete = complete or isinstance(item, SnapshotEnd)
                if isinstance(item, Gap):
                    assert item.reason != "unexplained", item
                    self.tally["gaps"] += 1
                    return
                if self._end is None:
                    if asyncio.get_running_loop().time() > leaves:
                        return
                elif complete and watch.cursor == self._end[1]:
                    assert table.blocks(self._cache.name, self._cache.group) == self._end[0]
                    self.tally["compared"] += 1
                    return


async def crowd(address: str, cache: str, seed: int, watchers: int, stay_s: float, end: asyncio.Event) -> Counter[str]:
    """A process's part of it, until ``end`` is set."""
    async with attached(address) as raw, await connect(address) as client:
        opened = await client.open_cache(cache, write=False, mapped=False)
        visitors = Crowd(raw, client, opened, seed, stay_s)
        async with asyncio.TaskGroup() as group:
            for _ in range(watchers):
                group.create_task(visitors.one_after_the_other())
            await end.wait()
            await visitors.go_home()
    return visitors.tally
