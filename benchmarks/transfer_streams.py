"""What streams carry: put and get of blocks through gRPC, beside the same blocks through the mapped memory.

``python benchmarks/transfer_streams.py [--json]``. One private daemon, one client; the two ways take turns, so that a
noisy machine hits both. Every round puts a fresh chain and gets it back into arrays; the ratio is streams to mappings.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import tempfile
from collections.abc import AsyncIterator
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np

from kvtier import Cache, CacheSpec, Tier, connect
from kvtier.bench.result import Result
from kvtier.bench.rounds import interleaved, timed
from kvtier.private import PrivateDaemon

MIB = 1 << 20
SIZES = (64 << 10, MIB)


async def measure(block_bytes: int, blocks: int, rounds: int) -> AsyncIterator[Result]:
    spec = CacheSpec.single("streams", "uint8", tokens_per_block=16, layers=1, kv_heads=1, head_size=block_bytes // 32)
    assert spec.block_bytes(0) == block_bytes
    data = np.random.default_rng(0).integers(0, 256, (blocks, block_bytes), dtype=np.uint8)
    out = np.empty_like(data)
    numbers = count()
    with tempfile.TemporaryDirectory(prefix="kv-") as keep:
        sizes = {Tier.HOST: 4 * blocks * spec.record_bytes(0)}
        async with PrivateDaemon(sizes, keep=Path(keep)) as daemon, await connect(daemon.address) as client:
            mapped = await client.open_cache("streams", spec)
            streamed = await client.open_cache("streams", spec, mapped=False)

            def fresh() -> list[bytes]:
                number = next(numbers)
                return [hashlib.sha256(f"{number}/{index}".encode()).digest() for index in range(blocks)]

            chains = {cache.mapped: fresh() for cache in (mapped, streamed)}
            params = {"block_bytes": block_bytes, "blocks": blocks}

            async def put(cache: Cache) -> float:
                await cache.drop(chains[cache.mapped][:1])
                chains[cache.mapped] = fresh()
                return await timed(cache.put(chains[cache.mapped], data))

            async def get(cache: Cache) -> float:
                seconds = await timed(cache.get(chains[cache.mapped], out))
                assert np.array_equal(out[-1], data[-1])
                return seconds

            for name, way in (("stream put", put), ("stream get", get)):
                paired = await interleaved(partial(way, streamed), partial(way, mapped), rounds)
                yield paired.rate(name, params, data.nbytes)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="a list of {name, params, value, unit, floor, ratio}")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--mib", type=int, default=32, help="bytes of a round")
    arguments = parser.parse_args()
    results = [
        result
        for block_bytes in SIZES
        async for result in measure(block_bytes, arguments.mib * MIB // block_bytes, arguments.rounds)
    ]
    if arguments.json:
        print(json.dumps([result.to_json() for result in results], indent=2))
        return
    for result in results:
        kib = result.params["block_bytes"] >> 10
        floor, ratio = result.floor or 0, result.ratio or 0
        print(f"{result.name} {kib:5} KiB: {result.value:7.0f} MiB/s, mapped {floor:7.0f} MiB/s, ratio {ratio:.2f}")


if __name__ == "__main__":
    asyncio.run(main())
