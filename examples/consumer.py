"""Follows the place of every block of a cache by events alone: ``python examples/consumer.py CACHE [ADDRESS]``."""

import asyncio
import sys

import kvtier
from kvtier import Event, EventType, Gap, SnapshotSlice, SnapshotStart


async def follow(client: kvtier.AsyncClient, cache: str, blocks: dict[bytes, int]) -> None:
    """Keeps ``blocks``, key to residency, equal to window group 0, over restarts and lost events."""
    while True:
        async with client.watch(snapshot=True, caches=[cache], groups=[0]) as watch:
            async for item in watch:
                match item:
                    case SnapshotSlice() | Event(type=EventType.STORED | EventType.UPDATED):
                        blocks.update(zip(item.keys, item.residency, strict=True))
                    case Event(type=EventType.REMOVED):
                        for key in item.keys:
                            blocks.pop(key, None)
                    case SnapshotStart() | Event():  # a snapshot begins, or the group was created or cleared
                        blocks.clear()
                    case Gap():
                        break  # events are lost: another snapshot replaces them
                print(watch.cursor, type(item).__name__, len(blocks), "blocks")


async def main(cache: str, address: str | None = None) -> None:
    async with kvtier.connect(address, wait=60) as client:
        await follow(client, cache, {})


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: consumer.py CACHE [ADDRESS]")
    asyncio.run(main(*sys.argv[1:]))
