"""What it gives that a commit brings the slots of the next put along.

``python -m benchmarks.leased_ahead [--json]``. Two clients of one private daemon put 64 blocks at a time, in turn: one
as ever, the other one without asking for slots ahead, so that each of its puts is two calls. The ratio is of times.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from unittest.mock import patch

import numpy as np

from kvtier.aio import connect
from kvtier.bench.client import BATCH, PUTS, SLOTS, TIER
from kvtier.bench.place import chains, spec_of
from kvtier.bench.result import Result
from kvtier.bench.rounds import interleaved, timed
from kvtier.cache import Cache
from kvtier.private import PrivateDaemon, TierSlots

SIZES = (64 << 10, 1 << 20)


async def measure(block_bytes: int, rounds: int) -> AsyncIterator[Result]:
    spec = spec_of(block_bytes)
    sizes = TierSlots(device=SLOTS, host=0, disk=0).as_bytes(spec)
    rows = np.random.default_rng(0).integers(0, 256, (BATCH, block_bytes), dtype=np.uint8)
    async with (
        PrivateDaemon(sizes) as daemon,
        await connect(daemon.address) as one,
        await connect(daemon.address) as two,
    ):
        ahead, plain = await one.open_cache("bench", spec), await two.open_cache("bench", spec)
        for cache in (ahead, plain):
            cache.arena.pools(TIER, 0)[0][:, ::4096].max()  # no round pays for mapping a page
        keys = chains(BATCH)
        for puts in (1, PUTS):
            with patch.object(plain._holdings._stock, "ask", return_value=0):
                paired = await interleaved(
                    lambda: _put(ahead, rows, keys, puts),  # noqa: B023  it runs within this turn
                    lambda: _put(plain, rows, keys, puts),  # noqa: B023
                    rounds,
                )
            yield paired.time("put leased ahead", {"block_bytes": block_bytes, "puts": puts})


async def _put(cache: Cache, rows: np.ndarray, keys: Iterator[list[bytes]], puts: int) -> float:
    stored = [next(keys) for _ in range(puts)]
    seconds = await timed(asyncio.gather(*(cache.put(chain, rows, tier=TIER) for chain in stored)))
    await cache.drop([chain[0] for chain in stored])
    return seconds


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="a list of {name, params, value, unit, floor, ratio}")
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    results = [result for size in SIZES async for result in measure(size, arguments.rounds)]
    if arguments.json:
        print(json.dumps([result.to_json() for result in results], indent=2))
        return
    for result in results:
        kib, puts = result.params["block_bytes"] >> 10, result.params["puts"]
        print(
            f"{puts} x {BATCH} x {kib:5} KiB: {result.value:8.0f} us, two calls {result.floor or 0:8.0f} us, "
            f"ratio {result.ratio:.2f}"
        )


if __name__ == "__main__":
    asyncio.run(main())
