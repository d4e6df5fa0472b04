"""What it costs to gather blocks from an engine's planes and to scatter them, beside copies of blocks in one piece.

    python -m benchmarks.planes [--rounds 15]

32 layers with K and V each: 64 pieces a block. Slots and pages are taken at random, 64 MiB a copy. The copies of one
round follow each other; the table has medians, in GB/s. ``memcpy``: one thread's copies, block by block. ``array``: the
client's copy of one array with all blocks, with two threads. ``busy``: beside a thread that only computes.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from statistics import median
from typing import Final

import numpy as np

from kvtier import Planes
from kvtier.arena import Arena
from kvtier.bench.host import place
from kvtier.replay.private import TierSlots
from kvtier.replay.trace import replay_spec
from kvtier.types import Tier

PIECES: Final = 64
NBYTES: Final = 64 << 20


@contextmanager
def beside(threads: int) -> Iterator[None]:
    over = threading.Event()

    def compute() -> None:
        while not over.is_set():
            sum(range(200))

    running = [threading.Thread(target=compute) for _ in range(threads)]
    for thread in running:
        thread.start()
    yield
    over.set()
    for thread in running:
        thread.join()


def seconds(copy: Callable[[], None]) -> float:
    started = time.perf_counter()
    copy()
    return time.perf_counter() - started


def copies(arena: Arena, slots: list[int], block_bytes: int, *, gather: bool) -> list[Callable[[], None]]:
    blocks, views = len(slots), [arena.view(Tier.HOST, 0, slot, write=True)[0] for slot in slots]
    parts = [np.random.randint(0, 256, (2 * blocks, block_bytes // PIECES), np.uint8) for _ in range(PIECES)]
    whole = np.random.randint(0, 256, (blocks, block_bytes), np.uint8)
    pages = Planes(parts)[random.sample(range(2 * blocks), blocks)]
    copy = arena.write if gather else arena.read

    def memcpy() -> None:
        for view, row in zip(views, whole, strict=True):
            np.copyto(view, row) if gather else np.copyto(row, view)

    return [lambda: copy(Tier.HOST, 0, slots, pages), memcpy, lambda: copy(Tier.HOST, 0, slots, whole)]


async def main(rounds: int) -> None:
    print(f"{'MiB':>4} {'way':8} {'':6}{'planes':>8}{'memcpy':>8}{'ratio':>7}{'array':>8}{'ratio':>7}")
    for mebibytes in (1, 2, 4):
        block_bytes = mebibytes << 20
        blocks = NBYTES // block_bytes
        async with place(replay_spec(block_bytes), TierSlots(0, 2 * blocks, 0)) as here:
            for gather, busy in product((True, False), (False, True)):
                async with here.cache.reserve(2 * blocks, Tier.HOST) as lease:
                    works = copies(lease.arena, random.sample(lease.slots, blocks), block_bytes, gather=gather)
                    with beside(busy):
                        times = [[seconds(work) for work in works] for _ in range(rounds + 2)][2:]
                planes, memcpy, array = (NBYTES / median(each) / 1e9 for each in zip(*times, strict=True))
                case = f"{mebibytes:4} {'gather' if gather else 'scatter':8} {'busy' if busy else 'quiet':6}"
                print(f"{case}{planes:8.1f}{memcpy:8.2f}{planes / memcpy:7.2f}{array:8.1f}{planes / array:7.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    asyncio.run(main(parser.parse_args().rounds))
