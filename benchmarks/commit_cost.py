"""What a block costs the daemon's loop where clients put: ``python -m benchmarks.commit_cost [--profile FILE]``.

A daemon and a client on one loop, so that nobody else's work is in the figures. Puts of 64 blocks of 4 KiB, one after
another, each of which asks for the slots of the next one; before the next begins the blocks are dropped, or, with
``--full``, they stay until room must be made for others. Times are of the thread's CPU while the daemon's own verb
runs (``verb``), and of everything that the loop does, the client's part and the drops included (``all``): microseconds
a block, one JSON object. ``--profile``: of the verb alone, for ``python -m pstats``.

To compare two versions, let one process of each run in turn, several times.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import hashlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
from pydantic import ByteSize

from kvtier.aio import connect
from kvtier.bench.place import spec_of
from kvtier.types import Tier
from kvtierd.config import Config
from kvtierd.service.blocks import BlocksService
from kvtierd.service.daemon import Daemon

BATCH: Final = 64
BLOCK_BYTES: Final = 4096
SLOTS: Final = 2048
WARM_UP: Final = 3 * SLOTS // BATCH
"""Puts: every slot has been used, and with ``--full`` every further block takes another's place."""


class Stopwatch:
    """CPU of the thread in calls that never wait for anything."""

    def __init__(self, profile: cProfile.Profile | None) -> None:
        self.seconds: list[float] = []
        self._profile = profile

    def around(self, verb: Callable[..., Any]) -> Callable[..., Any]:
        async def timed(*arguments: Any) -> Any:
            if self._profile is not None:
                self._profile.enable()
            started = time.thread_time()
            try:
                return await verb(*arguments)
            finally:
                self.seconds.append(time.thread_time() - started)
                if self._profile is not None:
                    self._profile.disable()

        return timed


async def measure(
    directory: Path, tier: Tier, puts: int, *, full: bool, profile: cProfile.Profile | None
) -> dict[str, float]:
    verb = Stopwatch(profile)
    with patch.object(BlocksService, "commit", verb.around(BlocksService.commit)):  # before it is registered
        sizes: dict[str, Any] = {f"{tier}_bytes": ByteSize(SLOTS * BLOCK_BYTES)}
        daemon = await Daemon.start(Config(runtime_dir=directory / "run", state_dir=directory / "state", **sizes))
    rows = np.zeros((BATCH, BLOCK_BYTES), dtype=np.uint8)
    chains = ([hashlib.sha256(b"%d/%d" % (number, place)).digest() for place in range(BATCH)] for number in count())
    async with await connect(str(directory / "run")) as client:
        cache = await client.open_cache("cost", spec_of(BLOCK_BYTES))

        async def store(keys: list[bytes]) -> None:
            await cache.put(keys, rows, tier=tier)
            if not full:
                await cache.drop(keys[:1])

        for _ in range(WARM_UP):
            await store(next(chains))
        verb.seconds.clear()
        gc.collect()
        gc.disable()
        started = time.thread_time()
        for _ in range(puts):
            await store(next(chains))
        whole = time.thread_time() - started
        gc.enable()
    await daemon.stop()
    return {
        "verb": _a_block(statistics.median(verb.seconds)),
        "verb_quickest": _a_block(min(verb.seconds)),
        "all": _a_block(whole / puts),
    }


def _a_block(seconds: float) -> float:
    """Of a batch, as microseconds a block."""
    return round(1e6 * seconds / BATCH, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--puts", type=int, default=600)
    parser.add_argument("--tier", choices=["device", "host"], default="device")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--profile", type=Path)
    options = parser.parse_args()
    profile = cProfile.Profile() if options.profile else None
    with tempfile.TemporaryDirectory(prefix="kvtier-") as directory:
        work = measure(Path(directory), Tier[options.tier.upper()], options.puts, full=options.full, profile=profile)
        print(json.dumps(asyncio.run(work)))
    if profile is not None:
        profile.dump_stats(options.profile)


if __name__ == "__main__":
    main()
