"""What copies cost the kernels of an application beside them: torch's, where it has CUDA."""

from __future__ import annotations

import asyncio
import importlib.util
import math
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

from kvtier.bench.gpu_bare import EDGES, Bare
from kvtier.bench.gpu_place import GpuPlace
from kvtier.bench.result import MIB, Paired, Result

KINDS: Final = ("bandwidth", "compute")
_ELEMENTS: Final = 64 << 20
"""float32, of each of two tensors: far more than any cache of a GPU."""
_SIDE: Final = 4096
_SECONDS: Final = 0.25
"""Of one measurement."""
_PROBE: Final = 20


def why_none() -> str:
    """Why no kernels can be run here; empty where they can."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed (pip install 'kvtier[torch]')"
    import torch

    return "" if torch.cuda.is_available() else "torch finds no CUDA device"


class Kernel:
    """One of :data:`KINDS`: ``bandwidth`` reads and writes device memory and computes next to nothing, ``compute``
    multiplies matrices that the caches hold. All of it blocks."""

    def __init__(self, kind: str, ordinal: int) -> None:
        import torch

        self._cuda: Final[Any] = torch.cuda
        self._device: Final = torch.device("cuda", ordinal)
        with self._cuda.device(self._device):
            self._stream: Final[Any] = self._cuda.Stream()
            self._launch: Final = (_bandwidth if kind == "bandwidth" else _compute)(torch, self._device)
            self._cuda.synchronize()  # the tensors are made on another stream
        self._seconds_of(_PROBE)  # loads what the first launch loads
        self._count: Final = max(1, math.ceil(_SECONDS / self._seconds_of(_PROBE)))

    def seconds(self) -> float:
        """Of one launch: the mean of a quarter of a second of them, by the device's clock."""
        return self._seconds_of(self._count)

    def _seconds_of(self, count: int) -> float:
        with self._cuda.device(self._device), self._cuda.stream(self._stream):
            start, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(count):
                self._launch()
            end.record()
            end.synchronize()
            milliseconds: float = start.elapsed_time(end)
        return milliseconds / 1e3 / count


async def beside_copies(here: GpuPlace, bare: Bare, rounds: int) -> AsyncIterator[Result]:
    """In turn: a kernel alone, beside moves both ways as fast as they go, and beside bare copies of as many bytes a
    second as those moves had."""
    for kind in KINDS:
        kernel = await asyncio.to_thread(Kernel, kind, bare.ordinal)
        alone: list[float] = []
        rates: list[float] = []
        bare_rates: list[float] = []
        paired = Paired()
        for _ in range(rounds):
            alone.append(await asyncio.to_thread(kernel.seconds))
            async with _moving(here) as rate:
                paired.ours.append(await asyncio.to_thread(kernel.seconds))
            rates.append(rate())
            with bare.load(rates[-1]) as rate:
                paired.floor.append(await asyncio.to_thread(kernel.seconds))
            bare_rates.append(rate())
        told = {
            **here.shape.params(here.blocks),
            "alone_us": round(1e6 * statistics.median(alone), 2),
            "copied_mib_s": round(statistics.median(rates) / MIB),
            "bare_mib_s": round(statistics.median(bare_rates) / MIB),
        }
        yield paired.time(f"gpu.kernel.{kind}", told)


@asynccontextmanager
async def _moving(here: GpuPlace) -> AsyncIterator[Callable[[], float]]:
    """Blocks move both ways until the end of the block; then what is yielded says how many bytes a second did."""
    ending = False

    async def move() -> None:
        while not ending:
            await here.cross()

    started, before = time.perf_counter(), await _bytes(here)
    rates: list[float] = []
    moving = asyncio.create_task(move())
    try:
        yield lambda: rates[0]
    finally:
        ending = True
        await moving
        rates.append((await _bytes(here) - before) / (time.perf_counter() - started))


async def _bytes(here: GpuPlace) -> int:
    return sum([(await here.copied(edge))[0] for edge in EDGES])


def _bandwidth(torch: Any, device: Any) -> Callable[[], Any]:
    source = torch.ones(_ELEMENTS, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return lambda: torch.add(source, 1.0, out=target)


def _compute(torch: Any, device: Any) -> Callable[[], Any]:
    left, right = (torch.randn(_SIDE, _SIDE, device=device).to(torch.bfloat16) for _ in range(2))
    product = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=product)
