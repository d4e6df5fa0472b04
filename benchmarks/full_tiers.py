"""What a put into full tiers waits for, by watermarks and by whether the daemon rests between two puts.

``python -m benchmarks.full_tiers [--rounds N] [--block-bytes N] [--json]``

Private daemons that differ in tiers and watermarks alone, of a device of 1,024 slots, all tiers full before the first
round. Each round puts 64 blocks into each daemon, one after the other and in another order each time, so that a daemon
rests while the others work; ``busy`` are puts of the same daemons in a row, as quickly as they go.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import numpy as np

from benchmarks.watermarks import Marks
from kvtier import Cache, connect
from kvtier.bench.place import chains, spec_of
from kvtier.bench.result import Result
from kvtier.private import PrivateDaemon, TierSlots
from kvtier.tensors import Bytes

BATCH = 64
DEVICE_SLOTS = 1024
TIERS = (TierSlots(DEVICE_SLOTS, 2048, 0), TierSlots(DEVICE_SLOTS, 2048, 8192))
MARKS = (Marks(0), Marks(0.2))
IN_A_ROW = 8


@dataclass(slots=True)
class Fed:
    """A daemon and the seconds of each put."""

    name: str
    cache: Cache
    keys: Iterator[list[bytes]]
    rested: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)

    async def put(self, rows: Sequence[Bytes], told: list[float] | None) -> None:
        chain = next(self.keys)
        begun = time.perf_counter()
        await self.cache.put(chain, rows)
        if told is not None:
            told.append(time.perf_counter() - begun)


async def measure(rounds: int, block_bytes: int) -> list[Result]:
    spec = spec_of(block_bytes)
    rows = list(np.random.default_rng(1).integers(0, 256, (BATCH, block_bytes), dtype=np.uint8))
    async with AsyncExitStack() as stack:
        fed = []
        for slots in TIERS:
            for marks in MARKS:
                module = ("kvtierd.main", *marks.flags)
                daemon = await stack.enter_async_context(PrivateDaemon(slots.as_bytes(spec), module=module))
                client = await stack.enter_async_context(await connect(daemon.address))
                name = f"{'device, host, disk' if slots.disk else 'device, host'}; watermarks {marks}"
                fed.append(Fed(name, await client.open_cache("bench", spec), chains(BATCH)))
                for _ in range((slots.device + slots.host + slots.disk) // BATCH + 1):
                    await fed[-1].put(rows, None)
        for turn in range(rounds):
            for one in fed[:: 1 if turn % 2 else -1]:
                await one.put(rows, one.rested)
        for turn in range(rounds // IN_A_ROW):
            for one in fed[:: 1 if turn % 2 else -1]:
                await one.put(rows, None)
                for _ in range(IN_A_ROW):
                    await one.put(rows, one.busy)
    params = {"rounds": rounds, "block_bytes": block_bytes, "blocks": BATCH}
    return [
        Result(f"put, {how}: {one.name}", params, 1e3 * statistics.median(times), "ms")
        for one in fed
        for how, times in (("rested", one.rested), ("busy", one.busy))
    ]


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="a list of {name, params, value, unit, floor, ratio}")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--block-bytes", type=int, default=65536)
    arguments = parser.parse_args()
    results = await measure(arguments.rounds, arguments.block_bytes)
    if arguments.json:
        print(json.dumps([result.to_json() for result in results], indent=2))
        return
    for result in results:
        print(f"{result.name:58} {result.value:7.2f} ms")


if __name__ == "__main__":
    asyncio.run(main())
