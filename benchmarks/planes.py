"""Measures the gathering of blocks from an engine's planes and the scattering, beside copies of blocks in one piece.

    python -m benchmarks.planes

32 layers with K and V each: 64 pieces a block. Slots and pages are taken at random, 64 MiB a copy. The copies of a
round follow each other; the table has the rates in GB/s that the fastest quarter of the rounds reaches. ``memcpy``: one
thread's copies, block by block. ``busy``: beside a thread that only computes.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Final

import numpy as np

from kvtier import Planes
from kvtier.arena import MappedArena
from kvtier.bench.host import memcpy, private_cache
from kvtier.replay.private import TierSlots
from kvtier.replay.trace import replay_spec
from kvtier.types import Tier

PIECES: Final = 64
NBYTES: Final = 64 << 20
ROUNDS: Final = 40


def copies(arena: MappedArena, slots: list[int], block_bytes: int, way: str) -> list[Callable[[], float]]:
    """The copies of planes and of whole blocks. Each returns its seconds."""
    blocks, views = len(slots), [arena.view(Tier.HOST, 0, slot, write=True)[0] for slot in slots]
    parts = [np.random.randint(0, 256, (2 * blocks, block_bytes // PIECES), np.uint8) for _ in range(PIECES)]
    pages = Planes(parts)[random.sample(range(2 * blocks), blocks)]
    whole = list(np.random.randint(0, 256, (blocks, block_bytes), np.uint8))
    copy = {"gather": arena.write, "scatter": arena.read}[way]

    def planes() -> float:
        started = time.perf_counter()
        copy(Tier.HOST, 0, slots, pages)
        return time.perf_counter() - started

    return [planes, lambda: memcpy(whole, views) if way == "gather" else memcpy(views, whole)]


def measured(works: Sequence[Callable[[], float]], busy: bool) -> list[float]:
    """The rate of each, in GB/s."""
    over = threading.Event()
    if not busy:
        over.set()  # the neighbour ends at once
    neighbour = threading.Thread(target=lambda: all(sum(range(200)) for _ in iter(over.is_set, True)))
    neighbour.start()
    times = [[work() for work in works] for _ in range(ROUNDS + 2)][2:]
    over.set()
    neighbour.join()
    return [NBYTES / sorted(each)[ROUNDS // 4] / 1e9 for each in zip(*times, strict=True)]


async def main() -> None:
    print(f"{'MiB':>4} {'way':8} {'':6}{'planes':>8}{'memcpy':>8}{'ratio':>7}")
    for mebibytes in (1, 2, 4):
        blocks = NBYTES // (mebibytes << 20)
        async with (
            private_cache(replay_spec(mebibytes << 20), TierSlots(0, 2 * blocks, 0)) as here,
            here.cache.reserve(2 * blocks, Tier.HOST) as lease,
        ):
            for way, busy in product(("gather", "scatter"), (False, True)):
                works = copies(lease.arena, random.sample(lease.slots, blocks), mebibytes << 20, way)
                planes, whole = measured(works, busy)
                case = f"{mebibytes:4} {way:8} {'busy' if busy else 'quiet':6}"
                print(f"{case}{planes:8.1f}{whole:8.1f}{planes / whole:7.2f}")


if __name__ == "__main__":
    asyncio.run(main())
