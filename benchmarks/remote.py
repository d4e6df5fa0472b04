"""What the engines of the remote tier leave of the bare libraries' throughput.

    python -m benchmarks.remote [--rounds 20]

A directory, SeaweedFS and Mooncake on loopback, started here. The bare library puts and gets as many objects of the
same size side by side, in turns with the engine. Its gets leave the bytes where the library puts them; the engine's
bring them into the caller's memory. Medians of the wall time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np

from kvtier.bench.host import CACHE, timed
from kvtier.memory.arrays import Bytes
from kvtierd.tiers.remote.opening import open_store
from tests.remote.servers import Server, mooncake, seaweed

SHAPES: Final = ((32, 1 << 20), (8, 4 << 20))
"""Objects, and bytes of each."""

Objects = Callable[[Sequence[str]], Awaitable[object]]


class Bucket:
    """obstore in this process."""

    def __init__(self, url: str) -> None:
        from obstore.store import from_url

        self._store: Final = from_url(url)

    async def put(self, names: Sequence[str], rows: Sequence[Bytes]) -> None:
        puts = (self._store.put_async(*pair, use_multipart=False) for pair in zip(names, rows, strict=True))
        await asyncio.gather(*puts)

    async def get(self, names: Sequence[str]) -> None:
        async def get(name: str) -> None:
            await (await self._store.get_async(name)).bytes_async()

        await asyncio.gather(*map(get, names))

    async def remove(self, names: Sequence[str]) -> None:
        await self._store.delete_async(list(names))


class BareMooncake:
    """Mooncake's library alone. Its memory has the objects already, and is registered."""

    def __init__(self, url: str, count: int, nbytes: int) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._store: Any = MooncakeDistributedStore()
        assert self._store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", url.split("/")[2]) == 0
        self._memory = np.ones((count, nbytes), np.uint8)
        self._store.register_buffer(self._memory.ctypes.data, self._memory.nbytes)
        self._sizes = [nbytes] * count
        self._places = [row.ctypes.data for row in self._memory]

    async def put(self, names: Sequence[str], rows: Sequence[Bytes]) -> None:
        assert not any(self._store.batch_put_from(list(names), self._places, self._sizes))

    async def get(self, names: Sequence[str]) -> None:
        found = self._store.batch_get_into(list(names), self._places, self._sizes)
        assert found == self._sizes, found

    async def remove(self, names: Sequence[str]) -> None:
        self._store.batch_remove(list(names), True)


async def compare(url: str, bare: Bucket | BareMooncake, count: int, nbytes: int, rounds: int) -> None:
    """Prints a line for puts and one for gets."""
    objects = list(np.random.default_rng(1).integers(0, 256, (count, nbytes), np.uint8))
    into = [memoryview(bytearray(nbytes)) for _ in range(count)]
    store = open_store(url)
    ways: dict[str, tuple[Objects, Objects]] = {
        "put": (lambda names: store.put(names, objects), lambda names: bare.put(names, objects)),
        "get": (lambda names: store.get(names, into), bare.get),
    }
    seconds: dict[tuple[str, int], list[float]] = {(verb, way): [] for verb in ways for way in range(2)}
    for turn in range(rounds + 1):
        names = [[f"{CACHE}/{way}/{nbytes}/{turn}/{i}" for i in range(count)] for way in range(2)]
        for verb, calls in ways.items():
            for way in (0, 1) if turn % 2 else (1, 0):
                took = await timed(calls[way](names[way]))
                if turn:  # the first meets cold connections
                    seconds[verb, way].append(took)
        await store.delete(names[0])
        await bare.remove(names[1])
    await store.close()
    for verb in ways:
        ours, theirs = (count * nbytes / median(seconds[verb, way]) / (1 << 20) for way in range(2))
        shape = f"{count} x {nbytes >> 20} MiB"
        print(
            f"{url[:4]} {verb} {shape:11} {ours:6.0f} MiB/s  bare {theirs:6.0f}  ratio {ours / theirs:.2f}", flush=True
        )


@contextmanager
def directory() -> Iterator[Server]:
    with TemporaryDirectory() as path:
        yield Server(f"file://{path}", [], {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    for stores, library in (
        (directory, lambda url, *_: Bucket(url)),
        (seaweed, lambda url, *_: Bucket(url)),
        (mooncake, BareMooncake),
    ):
        with stores() as server:
            os.environ.update(server.env)
            for shape in SHAPES:
                asyncio.run(compare(server.url, library(server.url, *shape), *shape, rounds))


if __name__ == "__main__":
    main()
