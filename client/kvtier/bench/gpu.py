"""Moves between a device tier on a GPU and host memory, against bare copies by CUDA's driver."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import permutations, product
from typing import Final

import numpy as np

from kvtier.abi.cuda.driver import Driver
from kvtier.abi.cuda.errors import CudaUnavailable
from kvtier.abi.spec import CacheSpec, PoolSpec, WindowGroupSpec
from kvtier.bench.host import CACHE, PrivateCache, Result, interleaved, new_chain, private_cache, timed
from kvtier.errors import KvtierError
from kvtier.types import Tier

SHAPES: Final = (*((1, size) for size in (64 << 10, 256 << 10, 1 << 20, 4 << 20)), (16, 16 << 10), (16, 64 << 10))
"""Pools of a block, and its bytes in each."""
_POOL_GRAIN: Final = 4 << 20
"""On a GPU a pool may begin at a multiple of half of this."""

BareCopy = Callable[[int, Tier], Awaitable[float]]
"""Copies a number of pieces from a tier to the other tier. Returns the seconds until they are there."""


async def gpu(
    device: str, shapes: Sequence[tuple[int, int]], batch_bytes: int, rounds: int, settle_s: float
) -> list[Result]:
    """Measures moves of 8 to 1,024 blocks, and of one block, each way.

    Args:
        settle_s: how long a cache is used before it is measured, while its host memory is page-locked.

    Raises:
        KvtierError: NO_GPU, with the reason.
    """
    results: list[Result] = []
    for pools, piece_bytes in shapes:
        blocks = max(8, min(1024, batch_bytes // (pools * piece_bytes)))
        pool = PoolSpec(layers=1, kv_heads=1, head_size=piece_bytes // 16, kv_factor=1)
        spec = CacheSpec(CACHE, "uint8", 16, groups=(WindowGroupSpec(pools=(pool,) * pools),))
        slots = {Tier.DEVICE: 2 * blocks + -(-_POOL_GRAIN // piece_bytes), Tier.HOST: 2 * blocks}
        chain, rows = new_chain(blocks), np.ones((blocks, pools * piece_bytes), np.uint8)
        with bare_copies(device, piece_bytes, blocks * pools) as bare:
            async with private_cache(spec, slots, device=device) as here:
                await here.cache.put(chain, rows, tier=Tier.HOST)
                until = time.monotonic() + settle_s
                while time.monotonic() < until:
                    await _move(here, chain, Tier.DEVICE, Tier.HOST)
                for keys, edge in product((chain[:1], chain), permutations((Tier.DEVICE, Tier.HOST), 2)):
                    pieces = len(keys) * pools
                    params = {"pools": pools, "piece_bytes": piece_bytes, "blocks": len(keys)}
                    works = partial(_move, here, keys, *edge), partial(bare, pieces, edge[0])
                    times = await interleaved(rounds, *works)
                    results.append(Result.rate(f"gpu.{edge[0]}>{edge[1]}", params, pieces * piece_bytes, *times))
    return results


async def _move(here: PrivateCache, keys: Sequence[bytes], source: Tier, target: Tier) -> float:
    """Returns the seconds of a move, before which the blocks move to its source."""
    await here.move(keys, source)
    return await timed(here.move(keys, target))


@contextmanager
def bare_copies(device: str, piece_bytes: int, pieces: int) -> Iterator[BareCopy]:
    """Copies between page-locked memory and the device, every piece to a random place."""
    try:
        driver = Driver.open(device)
    except (CudaUnavailable, ValueError) as error:
        raise KvtierError(f"there is no GPU to measure: {error}", reason="NO_GPU") from error
    with ExitStack() as undo:
        undo.callback(driver.close)
        undo.enter_context(driver.visit())
        stream, event = driver.stream(), driver.event()
        undo.callback(driver.drop_stream, stream)
        undo.callback(driver.drop_event, event)
        host, memory = driver.alloc_host(piece_bytes * pieces), driver.alloc(piece_bytes * pieces)
        undo.callback(driver.free_host, host)
        undo.callback(driver.free, memory)
        places = random.sample(range(pieces), pieces)

        async def copy(count: int, source: Tier) -> float:
            read, written = (memory, host) if source is Tier.DEVICE else (host, memory)
            dsts = [written + place * piece_bytes for place in places[:count]]
            srcs = [read + index * piece_bytes for index in range(count)]
            copies, locked = np.array([dsts, srcs, [piece_bytes] * count]), np.ones(count, np.bool_)
            started = time.perf_counter()
            driver.copy_many(copies, locked, stream)
            driver.record(event, stream)
            while not driver.done(event):
                pass
            return time.perf_counter() - started

        yield copy
