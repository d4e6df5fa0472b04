"""Costs of kvtier to an engine: steps of its scheduler, copies of its worker, and the prefix from which a load wins."""

from __future__ import annotations

import os
import resource
import select
import signal
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from typing import Final

import numpy as np

from kvtier.abi.spec import DTYPE_BYTES
from kvtier.bench.host import PAGE, Result, interleaved, memcpy, new_chain
from kvtier.engine import (
    CopyResult,
    EngineOptions,
    GroupPages,
    KeyChain,
    Layout,
    Mover,
    PageGroup,
    PlaneLayout,
    Planner,
    Work,
)
from kvtier.errors import DaemonError
from kvtier.replay.private import PrivateDaemon
from kvtier.types import Tier

_BATCH: Final = 16
"""Blocks of a measured save or load."""
_SLOTS: Final = 10
"""Host slots for each block of a save: an eighth of the slots may be reserved ahead."""
_STEPS: Final = 50
"""Steps of a round: a step takes microseconds."""
_PATIENCE_S: Final = 60.0
_TRIES: Final = 10


class BareEngine:
    """A scheduler and its only worker. Each request is a prompt of at most as many blocks as there are pages."""

    def __init__(self, daemon: PrivateDaemon, layout: Layout, pages: int) -> None:
        options = EngineOptions.of({"address": daemon.address, "on_error": "fail", "reserve_blocks": pages})
        memory = {plane.name: np.ones((pages, plane.nbytes), np.uint8) for plane in layout.groups[0].planes}
        self.daemon: Final = daemon
        self._tokens: Final = layout.tokens
        self._tables: Final = {0: range(pages)}
        self._names: Final = map(str, count())
        self.planner: Final = Planner.open(layout, options)
        self.mover: Final = Mover(layout, options, [GroupPages(0, memory)])
        self.mover.open()

    def plan(self, keys: Sequence[bytes]) -> tuple[str, Work, float]:
        """Plans a new request. Returns its name, its work and the seconds of the scheduler's thread."""
        chain = KeyChain.adopt()
        chain.extend(keys)
        request, tokens = next(self._names), len(chain) * self._tokens
        started = time.perf_counter()
        known = self.planner.offer(request, chain, 0, total_tokens=tokens + 1) or 0
        self.planner.allocated(request, self._tables, known)
        self.planner.scheduled(request, known, tokens + 1 - known, self._tables)
        return request, self.planner.step(), time.perf_counter() - started

    def step(self, keys: Sequence[bytes]) -> float:
        """Plans to load stored blocks, and loads none. Returns the seconds."""
        request, work, seconds = self.plan(keys)
        self._end(request, [CopyResult(load.ticket, request, "load", 0, {}, 0, 0, 0.0) for load in work.loads])
        return seconds

    def copy(self, keys: Sequence[bytes]) -> tuple[float, int, int]:
        """Loads stored blocks and saves the others, until the saves are committed.

        Returns the seconds, and the blocks that were loaded and saved: 0 if a copy failed, as on a machine that lets
        the daemon wait. Raises :class:`DaemonError` if a copy does not end.
        """
        request, work, _ = self.plan(keys)
        ended: list[CopyResult] = []
        started = time.perf_counter()
        self.mover.start(work)
        self.mover.save()
        while len(ended) < len(work.loads) + len(work.saves):
            ready, _, _ = select.select([self.mover], [], [], _PATIENCE_S)
            ended += self.mover.poll()
            if not ready:
                raise DaemonError(f"copies do not end: {self.planner.stats()}", reason="BENCH")
        seconds = time.perf_counter() - started
        self._end(request, ended)
        if any(outcome.failed for outcome in ended):
            return seconds, 0, 0
        return seconds, sum(each.blocks for each in work.loads), sum(each.blocks for each in work.saves)

    def _end(self, request: str, ended: Sequence[CopyResult]) -> None:
        self.planner.completed(ended)
        while self.planner.pending:
            time.sleep(0.001)
            self.planner.completed(())
        self.planner.finished(request)


@asynccontextmanager
async def _running(layout: Layout, pages: int) -> AsyncIterator[BareEngine]:
    async with PrivateDaemon({Tier.HOST: _SLOTS * pages * layout.spec.record_bytes(0)}) as daemon:
        engine = BareEngine(daemon, layout, pages)
        try:
            yield engine
        finally:
            engine.mover.close()
            engine.planner.close()


def _preemptions() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


async def steps(blocks: int, rounds: int) -> AsyncIterator[Result]:
    """Measures offer, plan and step for a prompt of stored blocks, while the daemon runs and while it is stopped."""
    async with _running(Layout("kvtier-bench", 16, (PageGroup((PlaneLayout("all", PAGE),)),)), blocks) as engine:
        keys = new_chain(blocks)
        while engine.copy(keys)[1] < blocks:
            pass
        for state, number in (("runs", signal.SIGCONT), ("stopped", signal.SIGSTOP)):
            os.kill(engine.daemon.pid, number)
            times: list[float] = []
            try:
                while len(times) < _STEPS * rounds:
                    before, seconds = _preemptions(), engine.step(keys)
                    if _preemptions() == before:  # a preempted step tells how busy the machine is
                        times.append(seconds)
            finally:
                os.kill(engine.daemon.pid, signal.SIGCONT)
            ranked = statistics.quantiles(times, n=100)
            for percent in (50, 99):
                params = {"blocks": blocks, "daemon": state}
                yield Result(f"engine.step.p{percent}", params, 1e6 * ranked[percent - 1], "us")


async def copies(
    layers: int, kv_heads: int, head_size: int, tokens: int, dtype: str, rounds: int, tokens_per_second: Sequence[float]
) -> AsyncIterator[Result]:
    """Measures saves and loads of blocks with a plane for the keys and a plane for the values of each layer, beside one
    thread's memcpy; and the prefix from which a load takes less time than a model of each speed takes to compute it."""
    nbytes = kv_heads * head_size * tokens * DTYPE_BYTES[dtype]
    planes = tuple(PlaneLayout(f"{layer}.{part}", nbytes) for layer in range(layers) for part in "kv")
    async with _running(Layout("kvtier-bench", tokens, (PageGroup(planes),)), _BATCH) as engine:
        stored, (source, target) = new_chain(_BATCH), np.ones((2, _BATCH, len(planes) * nbytes), np.uint8)

        async def save() -> float:
            nonlocal stored
            saved, seconds = 0, 0.0
            while saved < _BATCH:  # the first saves are of fewer blocks: no more slots are reserved yet
                stored = new_chain(_BATCH)
                seconds, _, saved = engine.copy(stored)
            return seconds

        async def load(blocks: int) -> float:
            for _ in range(_TRIES):
                seconds, loaded, _ = engine.copy(stored[:blocks])
                if loaded == blocks:
                    return seconds
            raise DaemonError(f"{blocks} stored blocks are not loaded: {_TRIES} tries failed", reason="BENCH")

        async def bare() -> float:
            return memcpy(list(source), list(target))

        for _ in range(2 * _SLOTS):  # maps every slot, so that no round pays for it
            await save()
        saved, loaded, one, copied = await interleaved(rounds, save, partial(load, _BATCH), partial(load, 1), bare)
    params = {"planes": len(planes), "block_bytes": len(planes) * nbytes}
    yield Result.rate("engine.save", params, target.nbytes, saved, copied)
    yield Result.rate("engine.load", params, target.nbytes, loaded, copied)
    # Noise may make a single block the slowest; no block is loaded in less time than its plain copy takes.
    a_block = max((loaded - one) / (_BATCH - 1), copied / _BATCH)
    for speed in tokens_per_second:
        gained = tokens / speed - a_block
        if gained > 0:  # else no load wins, and there is no such prefix
            shortest = tokens * max(1.0, (one - a_block) / gained)
            yield Result("engine.break_even", {**params, "tokens_per_second": speed}, shortest, "tokens")
