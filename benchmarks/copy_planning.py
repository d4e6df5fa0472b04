"""What a batch of copies between host memory and a GPU costs the daemon before the GPU begins.

    python -m benchmarks.copy_planning [--rounds 400]

NVIDIA's bindings call a driver that does nothing (``tests/fakes/libcuda.c``, made with ``cc``). Slots lie scattered, so
nothing can be joined. Medians of the thread's processor time, from the batch of moves to the recorded event; both
directions take turns.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final

from kvtier.abi.control import ArenaIdentity
from kvtier.abi.cuda.driver import Driver
from kvtier.abi.layout import ArenaLayout
from kvtier.abi.spec import CacheSpec, PoolSpec, WindowGroupSpec
from kvtierd.core.events import EventSequencer
from kvtierd.core.ids import Tier
from kvtierd.mover.cuda.copies import BATCH_BYTES, CudaCopies
from kvtierd.mover.runtime import Batch, Piece
from kvtierd.tiers.arena import Arena
from kvtierd.tiers.cuda.pool import CudaDevice, Gpu
from kvtierd.tiers.mapped import HostStore
from tests.fake_cuda import stub_environment
from tests.unit.mover.rig import make_runtime, move

SHAPES: Final = ((1, 64 << 10), (4, 16 << 10), (16, 16 << 10))
"""Pools of a block, and its bytes in each."""
BLOCKS: Final = (1, 16, 64, 256)
"""Of a batch, which has at most 16 MiB."""
WAYS: Final = ((Tier.DEVICE, Tier.HOST), (Tier.HOST, Tier.DEVICE))


@contextmanager
def copies_of(pools: int, piece_bytes: int, slots: int) -> Iterator[CudaCopies]:
    """Of a cache whose host memory is page-locked."""
    pool = PoolSpec(layers=1, kv_heads=1, head_size=piece_bytes // 16, kv_factor=1)
    spec = CacheSpec("planning", "uint8", 16, groups=(WindowGroupSpec(pools=(pool,) * pools),))
    layout = ArenaLayout.plan(spec, {(0, tier): slots for tier in (Tier.DEVICE, Tier.HOST)})
    gpu = Gpu(Driver.open("cuda"))
    segment = gpu.create("planning", layout.data_bytes(Tier.DEVICE))
    identity = ArenaIdentity(spec.fingerprint(), epoch=1, boot=1, pid=os.getpid())
    arena = Arena.create("planning", layout, identity, segment)
    copies = CudaCopies("planning", layout, CudaDevice(layout, segment), HostStore(arena), arena.data(Tier.HOST))
    copies.locks.start(None)
    while copies.locks.nbytes < copies.locks.total:
        time.sleep(0.01)
    yield copies
    copies.close()
    arena.close()
    gpu.close()


def batch(source: Tier, target: Tier, blocks: int, slots: int) -> Batch:
    pairs = zip(random.sample(range(slots), blocks), random.sample(range(slots), blocks), strict=True)
    planned = move(1, source, target, [(0, src, dst) for src, dst in pairs])
    return [Piece(make_runtime({Tier.HOST: 1}, EventSequencer()), planned, 0, planned.items, 0)]


def microseconds(copies: CudaCopies, batches: list[Batch], rounds: int) -> float:
    """Of one batch."""
    times = []
    for each in batches * rounds:
        start = time.thread_time_ns()
        copies.copy(each)
        times.append(time.thread_time_ns() - start)
    return median(times) / 1000


def measure(rounds: int) -> None:
    print(f"{'pools':>6}{'bytes each':>12}{'blocks':>8}{'µs a batch':>12}{'µs a slot and pool':>20}")
    for (pools, piece_bytes), blocks in product(SHAPES, BLOCKS):
        if pools * piece_bytes * blocks > BATCH_BYTES:
            continue
        slots = 4 * blocks
        with copies_of(pools, piece_bytes, slots) as copies:
            took = microseconds(copies, [batch(*way, blocks, slots) for way in WAYS], rounds)
        print(f"{pools:>6}{piece_bytes:>12}{blocks:>8}{took:>12.1f}{took / blocks / pools:>20.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        measure(arguments.rounds)
        return
    with TemporaryDirectory() as folder:
        again = [sys.executable, "-m", "benchmarks.copy_planning", *sys.argv[1:], "--inside"]
        subprocess.run(again, env=stub_environment(Path(folder), "-DQUIET"), check=True)


if __name__ == "__main__":
    main()
