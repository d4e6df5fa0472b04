"""A store that daemons share, as a test looks into it and changes it behind their backs."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final
from urllib.parse import urlsplit

from kvtier import AsyncClient, Cache, Retention, Tier
from kvtierd.core.ids import GroupId, Key
from kvtierd.tiers.remote.base import RemoteStore
from kvtierd.tiers.remote.objects import GroupPrefix, object_bytes
from kvtierd.tiers.remote.opening import open_store
from tests.integration.blocks import BLOCK_BYTES, SPEC, blocks, sizes
from tests.integration.waiting import PATIENCE_S, eventually

ROOMY: Final = sizes(host=32, disk=64)
_BATCH: Final = 64


class SharedStore:
    """Objects of the first window group of one cache. ``url``: what daemons open."""

    def __init__(self, url: str, cache: str) -> None:
        self.url = url
        self._store: RemoteStore = open_store(url)
        self._place = GroupPrefix(cache, SPEC.fingerprint(), GroupId(0))

    async def held(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those of the keys whose objects are there."""
        found = await self._store.exists(self._names(keys))
        return [key for key, there in zip(keys, found, strict=True) if there]

    async def has(self, keys: Sequence[bytes], within: float = PATIENCE_S) -> None:
        """Waits until it has them all."""
        await eventually(lambda: self.held(keys), lambda found: found == list(keys), within=within)

    async def read(self, key: bytes) -> bytes:
        into = memoryview(bytearray(object_bytes(BLOCK_BYTES)))
        (nbytes,) = await self._store.get(self._names([key]), [into])
        return bytes(into[:nbytes])

    async def write(self, objects: Mapping[bytes, bytes]) -> None:
        """In place of what is there; Mooncake replaces nothing by itself."""
        names = self._names(objects)
        await self._store.delete(names)
        await self._store.put(names, list(objects.values()))

    async def delete(self, keys: Sequence[bytes]) -> None:
        for start in range(0, len(keys), _BATCH):
            await self._store.delete(self._names(keys[start : start + _BATCH]))

    def path(self, key: bytes) -> str:
        """Of the block's object, as a request names it."""
        return f"{urlsplit(self.url).netloc}{urlsplit(self.url).path}/{self._names([key])[0]}"

    async def close(self) -> None:
        await self._store.close()

    def _names(self, keys: Iterable[bytes]) -> list[str]:
        return [self._place.name(Key(key)) for key in keys]


async def put(cache: Cache, keys: Sequence[bytes], retention: Retention | None = None) -> None:
    await cache.put(keys, blocks(keys), tier=Tier.HOST, retention=retention)


async def fetched(client: AsyncClient) -> int:
    """Blocks that came from the store since the daemon's start."""
    return (await client.stats()).remote.blocks.get("fetched", 0)


async def read_bytes(client: AsyncClient) -> int:
    """Bytes of objects that came, likewise."""
    return sum(each.bytes for each in (await client.stats()).remote.operations if each.operation == "get")


async def problem_of(client: AsyncClient) -> str:
    return (await client.stats()).remote.problem


async def unwritten(client: AsyncClient) -> int:
    return sum((await client.stats()).remote.unwritten.values())
