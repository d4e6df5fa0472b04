"""``kvtier bench gpu``: a device tier on a GPU, beside bare copies between page-locked memory and the device."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvtier.bench.bare import Call, bare_server
from kvtier.bench.gpu_bare import DOWN, EDGES, UP, Bare, bare_copies
from kvtier.bench.gpu_kernels import beside_copies, why_none
from kvtier.bench.gpu_place import SETTLED_S, GpuPlace, Shape, gpu_place
from kvtier.bench.result import MIB, Paired, Result, quantile
from kvtier.bench.rounds import WARM_UP, interleaved, timed
from kvtier.types import Tier

POOLS: Final = 16
"""Of blocks that are in several."""
SHAPES: Final = (
    *(Shape(1, size) for size in (64 << 10, 256 << 10, 1 << 20, 4 << 20)),
    *(Shape(POOLS, size) for size in (16 << 10, 32 << 10, 64 << 10)),
)
_SWAPPED: Final = Shape(1, 1 << 20)
"""The block whose swap is timed, and those that are copied beside kernels."""
_MOST_BLOCKS: Final = 1024
_LEAST_BLOCKS: Final = 8
_QUANTILES: Final = {"p50": 0.5, "p99": 0.99}


@dataclass(slots=True, frozen=True)
class Options:
    """``batch_bytes``: of one move, but 8 to 1,024 blocks. ``swaps``: of one block, each way. ``settled_s``: see
    :data:`kvtier.bench.gpu_place.SETTLED_S`. ``say``: is told what cannot be measured here."""

    device: str = "cuda"
    shapes: Sequence[Shape] = SHAPES
    batch_bytes: int = 256 << 20
    rounds: int = 20
    swaps: int = 500
    settled_s: float = SETTLED_S
    say: Callable[[str], None] = lambda _: None

    def blocks(self, shape: Shape) -> int:
        return max(_LEAST_BLOCKS, min(_MOST_BLOCKS, self.batch_bytes // shape.block_bytes))


async def run(options: Options) -> AsyncIterator[Result]:
    """Floors: of copies the same bytes in the same pieces by ``cuMemcpyAsync`` between page-locked memory and the
    device, in this process; of a swap one such copy; of a kernel the same one beside bare copies of as
    many bytes a second. Raises :class:`kvtier.errors.KvtierError` (NO_GPU) where there is nothing to measure."""
    for shape in options.shapes:
        with bare_copies(options.device, shape.fragment_bytes, options.blocks(shape) * shape.pools) as bare:
            async with gpu_place(options.device, shape, options.blocks(shape), options.settled_s) as here:
                async for result in _edges(here, bare, options.rounds):
                    yield result
    blocks = options.blocks(_SWAPPED)
    with bare_copies(options.device, _SWAPPED.fragment_bytes, blocks) as bare:
        async with gpu_place(options.device, _SWAPPED, blocks, options.settled_s) as here:
            async for result in _swaps(here, options):
                yield result
            reason = why_none()
            if reason:
                options.say(f"kernels beside copies are left out: {reason}")
                return
            async for result in beside_copies(here, bare, options.rounds):
                yield result


async def _edges(here: GpuPlace, bare: Bare, rounds: int) -> AsyncIterator[Result]:
    params = {**here.shape.params(here.blocks), "bare": bare.way}
    alone: list[Paired] = []
    for edge in EDGES:
        moved, copied, bus = await _one_way(here, bare, edge, rounds)
        alone.append(moved)
        told = {**params, "bus_mib_s": round(here.nbytes / MIB / statistics.median(bus))}
        yield copied.rate(f"gpu.{edge}.copy", told, here.nbytes)
        yield moved.rate(f"gpu.{edge}.move", told, here.nbytes)
    yield await _both_ways(here, bare, alone, params, rounds)


async def _one_way(here: GpuPlace, bare: Bare, edge: str, rounds: int) -> tuple[Paired, Paired, list[float]]:
    """The same rounds by the clock of who calls, and by how long the daemon was copying; and seconds of one bare copy
    of all the bytes."""
    busy: list[float] = []
    bus: list[float] = []

    async def ours() -> float:
        seconds, copying = await here.one_way(edge)
        busy.append(copying)
        return seconds

    async def floor() -> float:
        bus.append(await bare.one_copy(edge))
        return await bare.seconds(edge)

    moved = await interleaved(ours, floor, rounds)
    return moved, Paired(busy[WARM_UP:], moved.floor), bus[WARM_UP:]


async def _both_ways(
    here: GpuPlace, bare: Bare, alone: Sequence[Paired], params: dict[str, Any], rounds: int
) -> Result:
    """Floor: one way at a time. ``bare_ratio``: the same of bare copies."""
    both = await interleaved(lambda: timed(here.cross()), lambda: bare.seconds(*EDGES), rounds)
    one_by_one = sum(statistics.median(way.ours) for way in alone)
    bare_one_by_one = sum(statistics.median(way.floor) for way in alone)
    told = {**params, **both.params(), "bare_ratio": round(bare_one_by_one / statistics.median(both.floor), 3)}
    mib = 2 * here.nbytes / MIB
    return Result("gpu.both.move", told, mib / statistics.median(both.ours), "MiB/s", mib / one_by_one)


async def _swaps(here: GpuPlace, options: Options) -> AsyncIterator[Result]:
    """One block, from the call until it is READY on the other side. Floor: a bare copy of it; what a call costs that
    does nothing stands beside."""
    down: list[float] = []
    up: list[float] = []
    key = here.below[:1]

    async def acquired() -> float:
        started = time.perf_counter()
        async with here.cache.acquire(key, Tier.DEVICE, min_blocks=1):
            return time.perf_counter() - started

    one_piece = bare_copies(options.device, _SWAPPED.fragment_bytes, 1)
    with tempfile.TemporaryDirectory(prefix="kvtier-") as directory, one_piece as bare:
        async with bare_server(Path(directory)) as server:
            empty: list[float] = []
            copies: dict[str, list[float]] = {edge: [] for edge in EDGES}
            for _ in range(options.swaps + WARM_UP):
                up.append(await acquired())
                down.append(await timed(here.move(key, Tier.HOST)))
                empty.append(await _called(server.call))
                for edge in EDGES:
                    copies[edge].append(await bare.seconds(edge))
    empty_us = round(1e6 * statistics.median(empty[WARM_UP:]), 1)
    for edge, seconds in ((UP, up), (DOWN, down)):
        for name, q in _QUANTILES.items():
            ours, floor = (1e6 * quantile(times[WARM_UP:], q) for times in (seconds, copies[edge]))
            told = {"swaps": options.swaps, "above_us": round(ours - floor, 1), "empty_call_us": empty_us}
            yield Result(f"gpu.{edge}.swap.{name}", {**here.shape.params(1), **told}, ours, "us", floor)


async def _called(call: Call) -> float:
    return await timed(call())
