"""What a store beyond the host gives through kvtier, and what its own library gives."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

import numpy as np

from kvtier.bench.host import CACHE, Place, Result, interleaved, place, timed
from kvtier.errors import DaemonError, InvalidArgument
from kvtier.events import Event
from kvtier.memory.arrays import Bytes
from kvtier.replay.private import TierSlots
from kvtier.replay.trace import replay_spec
from kvtier.types import Cause, EventType, Tier

_ROUND_BYTES: Final = 64 << 20
"""Of the blocks of a measured call: 64 of 1 MiB. The store's own library has all of them under way at once."""
_PIECE_BYTES: Final = 8 << 20
"""Of a chain that is stored: an engine stores a prompt as it computes it."""
_TIMEOUT_S: Final = 30
"""Of a call of the store: a slow one is to be measured."""


class Bucket:
    """obstore. ``remove`` deletes the benchmark's objects whose names end so."""

    def __init__(self, url: str) -> None:
        from obstore.exceptions import BaseError
        from obstore.store import from_url

        try:
            self._store: Final = from_url(url)
        except (BaseError, ValueError):  # its own text is about the library
            raise InvalidArgument("url", url, "a store as kvtierd's --remote names it") from None

    async def put(self, names: Sequence[str], rows: Sequence[Bytes]) -> None:
        puts = (self._store.put_async(*pair, use_multipart=False) for pair in zip(names, rows, strict=True))
        await asyncio.gather(*puts)

    async def get(self, names: Sequence[str]) -> None:
        async def get(name: str) -> None:
            await (await self._store.get_async(name)).bytes_async()

        await asyncio.gather(*map(get, names))

    async def remove(self, ends: Collection[str]) -> None:
        async for page in self._store.list(CACHE):
            await self._store.delete_async([meta["path"] for meta in page if meta["path"].endswith(tuple(ends))])


class _Mooncake:
    """Mooncake's client, which may be called by one thread at a time."""

    def __init__(self, url: str) -> None:
        from mooncake.store import MooncakeDistributedStore

        parts = urlsplit(url)
        asked = {"protocol": "tcp", "devices": "", "metadata": "P2PHANDSHAKE", **dict(parse_qsl(parts.query))}
        self._prefix: Final = f"{parts.path.strip('/')}/".lstrip("/")
        self._room: Final = np.frombuffer(mmap.mmap(-1, _ROUND_BYTES), np.uint8)
        self._store: Final = MooncakeDistributedStore()
        with socket.create_connection((parts.hostname or "", parts.port or 50051), 2.0) as tried:
            host = tried.getsockname()[0]
        wanted = (host, asked["metadata"], 0, 0, asked["protocol"], asked["devices"], parts.netloc)
        code = self._store.setup(*wanted) or self._store.register_buffer(self._room.ctypes.data, self._room.nbytes)
        if code:
            raise DaemonError(f"Mooncake at {parts.netloc} answers {code}", reason="BENCH")

    async def put(self, names: Sequence[str], rows: Sequence[Bytes]) -> None:
        for row, into in zip(rows, self._room.reshape(len(rows), -1), strict=True):
            np.copyto(into, row)
        await self._call(self._store.batch_put_from, names)

    async def get(self, names: Sequence[str]) -> None:
        await self._call(self._store.batch_get_into, names)

    async def remove(self, ends: Collection[str]) -> None:
        self._store.remove_by_regex(f"^{self._prefix}{CACHE}/.*({'|'.join(ends)})$", True)

    async def _call(self, verb: Any, names: Sequence[str]) -> None:
        step, start = self._room.nbytes // len(names), self._room.ctypes.data
        places = [start + number * step for number in range(len(names))]
        keys = [f"{self._prefix}{name}" for name in names]
        codes = await asyncio.to_thread(verb, keys, places, [step] * len(names))
        if min(codes) < 0:
            raise DaemonError(f"Mooncake answers {min(codes)}", reason="BENCH")


async def remote(url: str | None, sizes: Sequence[int], rounds: int) -> AsyncIterator[Result]:
    """Blocks written through to a store, and read by another daemon.

    Args:
        url: as ``[remote]`` has it; None = a directory.

    Raises:
        InvalidArgument: the library of such a store is not installed.
    """
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as directory:
        url = url or Path(directory).as_uri()
        try:
            bare = _Mooncake(url) if url.startswith("mooncake:") else Bucket(url)
        except ImportError as missing:
            raise InvalidArgument("url", url, f"a store whose library is installed ({missing})") from missing
        for block_bytes in sizes:
            async with AsyncExitStack() as stack:
                flag = json.dumps({"url": url, "write": "through", "timeout_seconds": _TIMEOUT_S})
                slots = TierSlots(0, 2 * _ROUND_BYTES // block_bytes, 0)
                writer, reader = [
                    await stack.enter_async_context(
                        place(replay_spec(block_bytes), slots, module=("kvtierd.main", "--remote", flag))
                    )
                    for _ in range(2)
                ]
                for result in await _both_ways(writer, reader, bare, urlsplit(url).scheme, rounds):
                    yield result


async def _both_ways(writer: Place, reader: Place, bare: Bucket | _Mooncake, scheme: str, rounds: int) -> list[Result]:
    block_bytes = writer.cache.block_bytes
    blocks = _ROUND_BYTES // block_bytes
    rows = list(np.random.default_rng(1).integers(0, 256, (blocks, block_bytes), dtype=np.uint8))
    out = np.ones((blocks, block_bytes), np.uint8)
    stored = _names(blocks)

    async def put() -> float:
        chain, seconds = await _written(writer, rows)
        await bare.remove([key.hex() for key in chain])
        return seconds

    async def bare_put() -> float:
        names = _names(blocks)
        seconds = await timed(bare.put(names, rows))
        await bare.remove(names)
        return seconds

    async def load(work: Callable[[list[bytes]], Awaitable[object]]) -> float:
        chain, _ = await _written(writer, rows)
        seconds = await timed(work(chain))
        await reader.cache.release_all()
        await bare.remove([key.hex() for key in chain])
        return seconds

    def get(chain: list[bytes]) -> Awaitable[object]:
        return reader.cache.get(chain, list(out))

    def ready(chain: list[bytes]) -> Awaitable[object]:
        return reader.cache.acquire(chain, Tier.HOST, min_blocks=blocks).__aenter__()

    await bare.put(stored, rows)
    works = (put, bare_put, partial(load, get), partial(load, ready), lambda: timed(bare.get(stored)))
    written, bare_written, read, became_ready, bare_read = await interleaved(rounds, *works)
    await bare.remove(stored)
    params = {"store": scheme, "block_bytes": block_bytes, "blocks": blocks}
    return [
        Result.rate("remote.put", params, _ROUND_BYTES, written, bare_written),
        Result.rate("remote.get", params, _ROUND_BYTES, read, bare_read),
        Result("remote.ready", params, 1e3 * became_ready, "ms", 1e3 * bare_read),
    ]


def _names(blocks: int) -> list[str]:
    return [f"{CACHE}/bare/{os.urandom(32).hex()}" for _ in range(blocks)]


async def _written(writer: Place, rows: Sequence[Bytes]) -> tuple[list[bytes], float]:
    """A new chain that the store has, and after how many seconds it had it."""
    chain, step = [os.urandom(32) for _ in rows], max(1, _PIECE_BYTES // len(rows[0]))

    async def arrive() -> None:
        for first in range(0, len(chain), step):
            parent = chain[first - 1] if first else None
            piece = slice(first, first + step)
            await writer.cache.put(chain[piece], rows[piece], parent=parent, tier=Tier.HOST)
        left = len(chain)
        while left:
            event = await anext(watching)
            left -= len(event.keys) if isinstance(event, Event) and event.moved_to is Tier.REMOTE else 0

    async with writer.client.watch(types=[EventType.UPDATED], causes=[Cause.REMOTE]) as watching:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return chain, await timed(arrive())
        except TimeoutError:
            problem = (await writer.client.stats()).remote
            raise DaemonError(f"the store does not take blocks: {problem}", reason="BENCH") from None
