"""What copies cost the kernels beside them: the figures, with kernels that torch's CPU carries out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvtier.bench import gpu_kernels
from kvtier.bench.gpu_bare import Bare
from kvtier.bench.gpu_kernels import KINDS, Kernel, beside_copies
from kvtier.bench.gpu_place import GpuPlace, Shape

torch = pytest.importorskip("torch")


class Event:
    """On the CPU all is done when the call returns."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        assert self.at

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at - self.at)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(Event=Event, Stream=object, stream=nullcontext, device=nullcontext, synchronize=lambda: None)
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(torch, "device", lambda kind, ordinal: {("cuda", 3): "cpu"}[kind, ordinal])
    monkeypatch.setattr(gpu_kernels, "_ELEMENTS", 1024)
    monkeypatch.setattr(gpu_kernels, "_SIDE", 16)
    monkeypatch.setattr(gpu_kernels, "_SECONDS", 0.001)


class Here:
    """Copies a block each way whenever it is asked to."""

    def __init__(self) -> None:
        self.shape, self.blocks = Shape(1, 1 << 20), 8
        self.crossed = 0

    async def cross(self) -> None:
        await asyncio.sleep(0)
        self.crossed += 1

    async def copied(self, edge: str) -> tuple[int, int]:
        return self.crossed << 20, 0


class Bus:
    ordinal = 3

    def __init__(self) -> None:
        self.asked: list[float] = []

    @contextmanager
    def load(self, bytes_a_second: float) -> Iterator[Callable[[], float]]:
        self.asked.append(bytes_a_second)
        yield lambda: bytes_a_second / 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_kernel_is_launched_and_timed_by_the_device(kind: str) -> None:
    assert Kernel(kind, 3).seconds() > 0


async def test_each_kernel_is_timed_beside_moves_and_beside_as_many_bare_copies() -> None:
    here, bus = Here(), Bus()
    found = [result async for result in beside_copies(cast(GpuPlace, here), cast(Bare, bus), rounds=3)]
    assert [result.name for result in found] == ["gpu.kernel.bandwidth", "gpu.kernel.compute"]
    assert len(bus.asked) == 3 * len(KINDS)
    assert min(bus.asked) > 0
    for result in found:
        told: dict[str, Any] = dict(result.params)
        assert (told["rounds"], told["block_bytes"], told["blocks"]) == (3, 1 << 20, 8)
        assert told["alone_us"] > 0 and result.floor
        assert told["bare_mib_s"] == pytest.approx(told["copied_mib_s"] / 2, abs=1)
