"""What durability and checksums cost: DiskStore.write against bare writes of the same bytes. And recovery time.

Rounds alternate between the two, so that a noisy disk hits both; a batch overwrites slots that were freed in the round
before, as in steady state. Bare means: the same bytes to the same offsets of another slab, by O_DIRECT pwritev and one
fdatasync, without checksum, index or transaction. Needs about 1.3 GiB of disk for less than a minute.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from kvtierd.core.ids import GroupId, Key, SlotId
from kvtierd.core.traits import Traits
from kvtierd.tiers.base import Bytes
from kvtierd.tiers.disk import DiskStore, DiskWrite, SlabShape
from kvtierd.tiers.disk.changes import Changes
from kvtierd.tiers.disk.index import Index, index_bytes
from kvtierd.tiers.disk.records import Place, encode_record
from kvtierd.tiers.disk.recovery import recover_group
from kvtierd.tiers.disk.store import create_files
from kvtierd.tiers.parts import Rows

GROUP = GroupId(0)
BATCH = 32
MIB = 1 << 20


@dataclass
class WriteResult:
    """Times are of a batch of ``BATCH`` blocks. ``ratio``: bare time / store time, median of the rounds; 1 = free."""

    block_bytes: int
    slots: str
    rounds: int
    direct: bool
    store_p50_ms: float
    store_p90_ms: float
    bare_p50_ms: float
    bare_p90_ms: float
    store_mib_s: float
    bare_mib_s: float
    ratio: float


@dataclass
class RecoveryResult:
    """From a closed index on disk to records in order and a store that answers."""

    blocks: int
    seconds: float


def aligned(nbytes: int) -> Bytes:
    return np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)


def key(number: int) -> Key:
    return Key(hashlib.sha256(str(number).encode()).digest())


class Bare:
    """The same slab without a store around it."""

    def __init__(self, path: Path, shape: SlabShape, direct: bool) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0), 0o600)
        os.posix_fallocate(self._fd, 0, shape.nbytes)
        self._record_bytes = shape.record_bytes

    def write(self, slots: Sequence[int], parts: Sequence[Bytes]) -> None:
        """``slots`` ascending; neighbours go in one call."""
        start = 0
        for end in range(1, len(slots) + 1):
            if end == len(slots) or slots[end] != slots[end - 1] + 1:
                run = [part.data for part in parts[start:end]]
                if os.pwritev(self._fd, run, slots[start] * self._record_bytes) != len(run) * self._record_bytes:
                    raise OSError("short write")
                start = end
        os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def measure_writes(directory: Path, block_bytes: int, slot_count: int, adjacent: bool, seconds: float) -> WriteResult:
    shapes = {GROUP: SlabShape(block_bytes, slot_count)}
    map_bytes = index_bytes(slot_count)
    create_files(directory, shapes, map_bytes)
    store = DiskStore.open(directory, shapes, bytes(32), map_bytes)
    store.recover()
    bare = Bare(directory / "bare.slab", shapes[GROUP], store.direct)
    memory = aligned(BATCH * block_bytes)
    memory[:] = np.random.default_rng(1).integers(0, 256, memory.size, dtype=np.uint8)
    parts = list(memory.reshape(BATCH, block_bytes))
    rows = Rows(memory, memory.reshape(BATCH, block_bytes))

    order = np.arange(slot_count) if adjacent else np.random.default_rng(2).permutation(slot_count)
    lots = [sorted(lot.tolist()) for lot in order[: slot_count // BATCH * BATCH].reshape(-1, BATCH)]
    held: list[list[tuple[GroupId, Key, SlotId]]] = []
    names = iter(range(1 << 40))
    store_times: list[float] = []
    bare_times: list[float] = []

    def one_round(lot: list[int], leaving: list[tuple[GroupId, Key, SlotId]]) -> None:
        keys = [key(next(names)) for _ in lot]
        writes = [
            DiskWrite(GROUP, SlotId(slot), name, None, Traits(35), [rows.part(SlotId(row))])
            for row, (slot, name) in enumerate(zip(lot, keys, strict=True))
        ]
        started = time.perf_counter()
        failed = store.write(writes, leaving)
        between = time.perf_counter()
        bare.write(lot, parts)
        ended = time.perf_counter()
        if failed:
            raise OSError(f"{len(failed)} writes failed")
        store_times.append(between - started)
        bare_times.append(ended - between)
        held.append([(GROUP, name, SlotId(slot)) for slot, name in zip(lot, keys, strict=True)])

    # All but one lot are filled; from then on each round writes the free one and frees the oldest.
    for lot in lots[:-1]:
        one_round(lot, [])
    free = lots[-1]
    store_times.clear()
    bare_times.clear()
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(store_times) < 20:
        leaving = held.pop(0)
        one_round(free, leaving)
        free = [int(slot) for _, _, slot in leaving]
    direct = store.direct
    store.close()
    bare.close()

    batch_mib = BATCH * block_bytes / MIB
    ratios = [bare_time / store_time for store_time, bare_time in zip(store_times, bare_times, strict=True)]
    return WriteResult(
        block_bytes=block_bytes,
        slots="adjacent" if adjacent else "scattered",
        rounds=len(ratios),
        direct=direct,
        store_p50_ms=1000 * statistics.median(store_times),
        store_p90_ms=1000 * statistics.quantiles(store_times, n=10)[-1],
        bare_p50_ms=1000 * statistics.median(bare_times),
        bare_p90_ms=1000 * statistics.quantiles(bare_times, n=10)[-1],
        store_mib_s=batch_mib / statistics.median(store_times),
        bare_mib_s=batch_mib / statistics.median(bare_times),
        ratio=statistics.median(ratios),
    )


def measure_recovery(directory: Path, blocks: int) -> RecoveryResult:
    """Chains of 16 blocks in random slots, written in random order of use."""
    shape = SlabShape(4096, blocks)
    Index.create(directory / "index", [GROUP], index_bytes(blocks))
    index = Index.open(directory / "index", [GROUP], index_bytes(blocks))
    rng = np.random.default_rng(3)
    slots, uses = rng.permutation(blocks).tolist(), (1 + rng.permutation(blocks)).tolist()
    keys = [key(number) for number in range(blocks)]
    puts = [
        (
            name,
            encode_record(
                Place(slots[n], uses[n], shape.record_bytes, bytes(16)), keys[n - 1] if n % 16 else None, Traits(35)
            ),
        )
        for n, name in enumerate(keys)
    ]
    for start in range(0, blocks, 4096):
        index.commit({GROUP: Changes(puts=puts[start : start + 4096])})
    index.close()

    times: list[float] = []
    for _ in range(3):
        started = time.perf_counter()
        index = Index.open(directory / "index", [GROUP], index_bytes(blocks))
        found = recover_group(index.load(GROUP), shape)
        times.append(time.perf_counter() - started)
        index.close()
        if len(found.records) != blocks:
            raise RuntimeError(f"{len(found.records)} of {blocks} blocks recovered")
    return RecoveryResult(blocks, statistics.median(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="where the temporary directory goes")
    parser.add_argument("--seconds", type=float, default=5.0, help="measured per case")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args()

    writes: list[WriteResult] = []
    for block_bytes, slot_count in ((64 << 10, 4096), (MIB, 512)):
        for adjacent in (True, False):
            with tempfile.TemporaryDirectory(dir=options.dir, prefix="kvtier-bench-") as directory:
                writes.append(measure_writes(Path(directory), block_bytes, slot_count, adjacent, options.seconds))
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="kvtier-bench-") as directory:
        recovery = measure_recovery(Path(directory), 100_000)

    if options.json:
        print(json.dumps({"batch": BATCH, "writes": [asdict(row) for row in writes], "recovery": asdict(recovery)}))
        return
    print(f"Batches of {BATCH} blocks" + ("" if all(row.direct for row in writes) else " (no direct I/O here)"))
    print(
        f"{'block':>8} {'slots':>10} {'store ms p50/p90':>18} {'bare ms p50/p90':>17} {'store':>11} {'bare':>11} ratio"
    )
    for row in writes:
        times = (
            f"{row.store_p50_ms:>10.2f} / {row.store_p90_ms:>5.2f} {row.bare_p50_ms:>9.2f} / {row.bare_p90_ms:>5.2f}"
        )
        rates = f"{row.store_mib_s:>5.0f} MiB/s {row.bare_mib_s:>5.0f} MiB/s"
        print(f"{row.block_bytes >> 10:>4} KiB {row.slots:>10} {times} {rates} {row.ratio:.2f}")
    print(f"Recovery of {recovery.blocks} blocks: {recovery.seconds:.2f} s")


if __name__ == "__main__":
    main()
