"""``kvtierd`` with a lie for its peers: ``python -m tests.integration.lying_daemon LIE`` and the daemon's flags."""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Final

from kvtier.v1 import events_pb2
from kvtierd.core.ids import GroupId
from kvtierd.main import main
from kvtierd.service.servicers.caches import CachesService
from kvtierd.service.servicers.events import EventsService

Snapshot = Callable[[events_pb2.WatchBatch], None]


def lies_when_opened(lie: Callable[[Any], None]) -> None:
    """To who opens the cache without its specification, as a peer does."""
    opens = CachesService.open

    async def open(self: CachesService, session: Any, request: Any) -> Any:
        response = await opens(self, session, request)
        if not request.HasField("spec"):
            lie(response.info)
        return response

    setattr(CachesService, "open", open)  # noqa: B010  mypy would have it that a method is for ever


def lies_of_time() -> None:
    tells = CachesService._info

    def info(self: CachesService, *arguments: Any) -> Any:
        told = tells(self, *arguments)
        told.generation = (1 << 64) - 1
        return told

    setattr(CachesService, "_info", info)  # noqa: B010


def lies_in_snapshots(lie: Snapshot, times: int = 1) -> None:
    """Each time the same slice of a cache without blocks, with the lie in it."""

    async def slices(self: EventsService, epoch: int, cursor: int, watcher: Any) -> AsyncGenerator[bytes, None]:
        print("a snapshot begins", file=sys.stderr, flush=True)
        for cache in list(self._catalog):
            (honest,) = [part async for part in self._slices_of_group(epoch, cursor, cache, GroupId(0), watcher)]
            for _ in range(times):
                batch = events_pb2.WatchBatch.FromString(honest)
                lie(batch)
                yield batch.SerializeToString()
                await asyncio.sleep(0)

    setattr(EventsService, "_slices", slices)  # noqa: B010


def invented(batch: events_pb2.WatchBatch, blocks: int = 1024) -> None:
    part = batch.slice
    part.keys, part.parents = os.urandom(32 * blocks), bytes(32 * blocks)
    part.residency, part.priorities = b"\x01" * blocks, b"\x32" * blocks


def without_a_type(batch: events_pb2.WatchBatch) -> None:
    batch.events.add(id=batch.last_id, type=99, cache=batch.slice.cache)


LIES: Final[Mapping[str, Callable[[], None]]] = {
    "no groups": lambda: lies_when_opened(lambda info: info.ClearField("groups")),
    "no specification": lambda: lies_when_opened(lambda info: info.ClearField("spec")),
    "no time": lies_of_time,
    "blocks": lambda: lies_in_snapshots(invented, 1 << 40),
    "no type": lambda: lies_in_snapshots(without_a_type),
    "half keys": lambda: lies_in_snapshots(lambda batch: setattr(batch.slice, "keys", b"x" * 33)),
    "another cache": lambda: lies_in_snapshots(lambda batch: setattr(batch.slice, "cache", "z")),
    "another group": lambda: lies_in_snapshots(lambda batch: setattr(batch.slice, "group", 1 << 20)),
    "many windows": lambda: lies_in_snapshots(lambda batch: batch.slice.all_sink_tokens.extend([0] * 99)),
}

if __name__ == "__main__":
    LIES[sys.argv.pop(1)]()
    main()
