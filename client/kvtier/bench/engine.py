"""Costs of kvtier to an engine: steps of its scheduler and copies of its worker."""

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

from kvtier.bench.host import PAGE, Result, interleaved, memcpy, new_chain
from kvtier.engine import CopyResult, EngineOptions, GroupPages, KeyChain, Layout, Mover, Planner, Work
from kvtier.engine.layout import PageGroup, PlaneLayout
from kvtier.errors import DaemonError
from kvtier.replay.private import PrivateDaemon
from kvtier.types import Tier

_BATCH: Final = 16
_SLOTS: Final = 10
"""Host slots for each block of a save: an eighth of the slots may be reserved ahead."""
_STEPS: Final = 50
"""Steps of a round: a step takes microseconds."""
_PATIENCE_S: Final = 60.0
_TRIES: Final = 30


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
        chain = KeyChain()
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


async def engine(blocks: int, layers: int, block_bytes: int, rounds: int) -> list[Result]:
    """Measures steps with a prompt of ``blocks`` blocks, and copies of blocks of ``block_bytes``."""
    return [*await _steps(blocks, rounds), *await _copies(layers, block_bytes, rounds)]


async def _steps(blocks: int, rounds: int) -> list[Result]:
    """Measures offer, plan and step for a prompt of stored blocks, while the daemon runs and while it is stopped."""
    results: list[Result] = []
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
            ranked, params = statistics.quantiles(times, n=100), {"blocks": blocks, "daemon": state}
            results += [Result(f"engine.step.p{at}", params, 1e6 * ranked[at - 1], "us") for at in (50, 99)]
    return results


async def _copies(layers: int, block_bytes: int, rounds: int) -> list[Result]:
    """Measures saves and loads of blocks with a plane for the keys and a plane for the values of each layer, beside one
    thread's memcpy."""
    nbytes = block_bytes // layers // 2
    planes = tuple(PlaneLayout(f"{layer}.{part}", nbytes) for layer in range(layers) for part in "kv")
    async with _running(Layout("kvtier-bench", 16, (PageGroup(planes),)), _BATCH) as engine:
        stored, (source, target) = new_chain(_BATCH), np.ones((2, _BATCH, len(planes) * nbytes), np.uint8)

        async def copied(new: bool) -> float:
            """Saves new blocks, or loads the saved ones. Some are left at first: no more slots are reserved yet."""
            nonlocal stored
            for _ in range(_TRIES):
                stored = new_chain(_BATCH) if new else stored
                seconds, *moved = engine.copy(stored)
                if moved == [_BATCH * (not new), _BATCH * new]:
                    return seconds
            raise DaemonError(f"{_BATCH} blocks are not copied: {_TRIES} tries failed", reason="BENCH")

        async def bare() -> float:
            return memcpy(list(source), list(target))

        for _ in range(2 * _SLOTS):  # maps every slot, so that no round pays for it
            await copied(True)
        *ours, floor = await interleaved(rounds, partial(copied, True), partial(copied, False), bare)
    params = {"planes": len(planes), "block_bytes": len(planes) * nbytes}
    times = zip(("engine.save", "engine.load"), ours, strict=True)
    return [Result.rate(name, params, target.nbytes, took, floor) for name, took in times]
