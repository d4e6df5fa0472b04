"""Measures the engines of the remote tier beside the bare libraries.

    python -m benchmarks.remote [--rounds 20]

A directory, SeaweedFS and Mooncake on loopback, started here. The bare library puts and gets as many objects of the
same size side by side, in turns with the engine. Its gets leave the bytes where the library puts them; the engine's
bring them into the caller's memory. Medians of the wall time.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeAlias

import numpy as np

from kvtier.bench.host import CACHE, interleaved, timed
from kvtier.memory.arrays import Bytes
from kvtierd.tiers.remote.opening import open_store
from tests.remote.servers import Server, mooncake, seaweed

SHAPES: Final = ((32, 1 << 20), (8, 4 << 20))
"""Objects, and bytes of each."""

Calls: TypeAlias = Sequence[Callable[[Sequence[str]], Awaitable[object]]]
"""Put, get and remove objects by their names."""


def bare_bucket(url: str, rows: Sequence[Bytes]) -> Calls:
    """obstore in this process."""
    from obstore.store import from_url

    store = from_url(url)

    async def put(names: Sequence[str]) -> None:
        pairs = zip(names, rows, strict=True)
        await asyncio.gather(*(store.put_async(*pair, use_multipart=False) for pair in pairs))

    async def get(names: Sequence[str]) -> None:
        async def bytes_of(name: str) -> None:
            await (await store.get_async(name)).bytes_async()

        await asyncio.gather(*map(bytes_of, names))

    return put, get, lambda names: store.delete_async(list(names))


def bare_mooncake(url: str, rows: Sequence[Bytes]) -> Calls:
    """Mooncake's library alone. Its memory has the objects already, and is registered."""
    from mooncake.store import MooncakeDistributedStore

    store: Any = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", url.split("/")[2]) == 0
    memory = np.array(rows)
    store.register_buffer(memory.ctypes.data, memory.nbytes)
    places, sizes = [row.ctypes.data for row in memory], [row.nbytes for row in memory]

    async def put(names: Sequence[str]) -> None:
        assert not any(store.batch_put_from(list(names), places, sizes))

    async def get(names: Sequence[str]) -> None:
        assert store.batch_get_into(list(names), places, sizes) == sizes

    async def remove(names: Sequence[str]) -> None:
        store.batch_remove(list(names), True)

    return put, get, remove


async def compare(
    url: str, library: Callable[[str, Sequence[Bytes]], Calls], count: int, nbytes: int, rounds: int
) -> None:
    """Prints a line for puts and a line for gets."""
    rows = list(np.random.default_rng(1).integers(0, 256, (count, nbytes), np.uint8))
    into = [memoryview(bytearray(nbytes)) for _ in range(count)]
    store, numbers = open_store(url), itertools.count()
    ours: Calls = (lambda names: store.put(names, rows), lambda names: store.get(names, into), store.delete)
    ways = ours, library(url, rows)

    async def work(calls: Calls, at: int) -> float:
        """Puts, gets and removes new objects. Returns the seconds of call number ``at``."""
        names = [f"{CACHE}/{next(numbers)}" for _ in range(count)]
        return [await timed(call(names)) for call in calls][at]

    for at, verb in enumerate(("put", "get")):
        seconds = await interleaved(rounds, *(partial(work, calls, at) for calls in ways))
        rate, floor = (count * nbytes / each / (1 << 20) for each in seconds)
        case = f"{url[:4]} {verb} {f'{count} x {nbytes >> 20} MiB':11}"
        print(f"{case} {rate:6.0f} MiB/s  bare {floor:6.0f}  ratio {rate / floor:.2f}", flush=True)
    await store.close()


@contextmanager
def directory() -> Iterator[Server]:
    with TemporaryDirectory() as path:
        yield Server(f"file://{path}", [], {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    for stores, library in ((directory, bare_bucket), (seaweed, bare_bucket), (mooncake, bare_mooncake)):
        with stores() as server:
            os.environ.update(server.env)
            for shape in SHAPES:
                asyncio.run(compare(server.url, library, *shape, rounds))


if __name__ == "__main__":
    main()
