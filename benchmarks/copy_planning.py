"""Measures the daemon's CPU for a batch of copies between host memory and a GPU, before the GPU begins.

    python -m benchmarks.copy_planning [--rounds 400]

NVIDIA's bindings call a driver that does nothing (``tests/fakes/libcuda.c``, made with ``cc``). Slots lie scattered, so
no copies can be joined. Medians of the thread's processor time, from the batch of moves to the recorded event; both
directions take turns.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final

from kvtier.abi.cuda.driver import Driver
from kvtier.abi.spec import CacheSpec, PoolSpec, WindowGroupSpec
from kvtierd.core.events import EventSequencer
from kvtierd.core.ids import Tier
from kvtierd.mover.cuda.copies import BATCH_BYTES
from kvtierd.mover.runtime import Batch, CopyPiece
from tests.fake_cuda import stub_environment
from tests.unit.mover.cuda.rigs import CopyRig
from tests.unit.mover.rig import make_runtime, move

SHAPES: Final = ((1, 64 << 10), (4, 16 << 10), (16, 16 << 10))
"""Pools of a block, and its bytes in each."""
BLOCKS: Final = (1, 16, 64, 256)
"""Blocks of a batch, which has at most 16 MiB."""


def batch(source: Tier, target: Tier, blocks: int, slots: int) -> Batch:
    pairs = zip(random.sample(range(slots), blocks), random.sample(range(slots), blocks), strict=True)
    planned = move(1, source, target, [(0, src, dst) for src, dst in pairs])
    return [CopyPiece(make_runtime({Tier.HOST: 1}, EventSequencer()), planned, 0, planned.items, 0)]


def microseconds(pools: int, piece_bytes: int, blocks: int, rounds: int) -> float:
    """The median of a batch, in page-locked host memory."""
    pool = PoolSpec(layers=1, kv_heads=1, head_size=piece_bytes // 16, kv_factor=1)
    spec = CacheSpec("planning", "uint8", 16, groups=(WindowGroupSpec(pools=(pool,) * pools),))
    rig = CopyRig(Driver.open("cuda"), spec, 4 * blocks)
    rig.copies.locks.start(None)
    while rig.copies.locks.nbytes < rig.copies.locks.total:
        time.sleep(0.01)
    ways, times = ((Tier.DEVICE, Tier.HOST), (Tier.HOST, Tier.DEVICE)), list[int]()
    for each in [batch(*way, blocks, 4 * blocks) for way in ways] * rounds:
        start = time.thread_time_ns()
        rig.copies.copy(each)
        times.append(time.thread_time_ns() - start)
    rig.close()
    return median(times) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.inside:
        with TemporaryDirectory() as folder:
            again = [sys.executable, "-m", "benchmarks.copy_planning", *sys.argv[1:], "--inside"]
            subprocess.run(again, env=stub_environment(Path(folder), "-DQUIET"), check=True)
        return
    print(f"{'pools':>6}{'bytes each':>12}{'blocks':>8}{'µs a batch':>12}{'µs a slot and pool':>20}")
    for (pools, piece_bytes), blocks in product(SHAPES, BLOCKS):
        if pools * piece_bytes * blocks <= BATCH_BYTES:
            took = microseconds(pools, piece_bytes, blocks, arguments.rounds)
            print(f"{pools:>6}{piece_bytes:>12}{blocks:>8}{took:>12.1f}{took / blocks / pools:>20.2f}")


if __name__ == "__main__":
    main()
