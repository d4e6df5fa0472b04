"""What kvtier costs an engine: its scheduler a step, its worker a block, and from which prefix on a load wins."""

from __future__ import annotations

import os
import resource
import select
import signal
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from functools import partial
from itertools import count
from typing import Final

import numpy as np

from kvtier.abi.spec import DTYPE_BYTES
from kvtier.bench.host import PAGE, Result, chains, interleaved
from kvtier.engine import EngineOptions, KeyChain, Layout, Mover, Outcome, PageGroup, Pages, Plane, Planner, Work
from kvtier.errors import DaemonError
from kvtier.replay.private import PrivateDaemon
from kvtier.types import Tier

_BATCH: Final = 16
"""Blocks of a measured save or load."""
_SLOTS: Final = 10
"""Of the host tier, for each block of a save: an eighth of them may be reserved ahead."""
_STEPS: Final = 50
"""Of a round: one takes microseconds."""
_PATIENCE_S: Final = 60.0
_TRIES: Final = 10


class Engine:
    """A scheduler and its only worker. Each request is a prompt of at most as many blocks as there are pages."""

    def __init__(self, daemon: PrivateDaemon, layout: Layout, pages: int) -> None:
        options = EngineOptions.of({"address": daemon.address, "on_error": "fail", "reserve_blocks": pages})
        memory = {plane.name: np.ones((pages, plane.nbytes), np.uint8) for plane in layout.groups[0].planes}
        self.daemon: Final = daemon
        self._tokens: Final = layout.tokens
        self._tables: Final = {0: range(pages)}
        self._names: Final = map(str, count())
        self._planner: Final = Planner.open(layout, options)
        self._mover: Final = Mover(layout, options, [Pages(0, memory)])
        self._mover.open()

    def close(self) -> None:
        self._mover.close()
        self._planner.close()

    def plan(self, chain: KeyChain) -> tuple[str, Work]:
        """All that a new request costs the scheduler's thread."""
        request, tokens = next(self._names), len(chain) * self._tokens
        known = self._planner.offer(request, chain, 0, total_tokens=tokens + 1) or 0
        self._planner.allocated(request, self._tables, known)
        self._planner.scheduled(request, known, tokens + 1 - known, self._tables)
        return request, self._planner.step()

    def step(self, chain: KeyChain) -> float:
        """The seconds of a plan to load a chain, which is not carried out."""
        started = time.perf_counter()
        request, work = self.plan(chain)
        seconds = time.perf_counter() - started
        self._end(request, [Outcome(load.ticket, request, "load", 0, {}, 0, 0, 0.0) for load in work.loads])
        return seconds

    def copy(self, chain: KeyChain) -> tuple[float, int, int]:
        """The seconds of a request's copies, and how many blocks it has loaded and saved: none where one failed, as on
        a machine that lets the daemon wait.

        Returns once they are committed. Raises :class:`DaemonError` where a copy does not end.
        """
        request, work = self.plan(chain)
        told: list[Outcome] = []
        started = time.perf_counter()
        self._mover.start(work)
        self._mover.save()
        while len(told) < len(work.loads) + len(work.saves):
            ready, _, _ = select.select([self._mover], [], [], _PATIENCE_S)
            told += self._mover.poll()
            if not ready:
                raise DaemonError(f"copies do not end: {self._planner.stats()}", reason="BENCH")
        seconds = time.perf_counter() - started
        self._end(request, told)
        if any(outcome.failed for outcome in told):
            return seconds, 0, 0
        return seconds, sum(each.blocks for each in work.loads), sum(each.blocks for each in work.saves)

    def _end(self, request: str, told: Sequence[Outcome]) -> None:
        self._planner.completed(told)
        while self._planner.pending:
            time.sleep(0.001)
            self._planner.completed(())
        self._planner.finished(request)


@asynccontextmanager
async def _running(layout: Layout, pages: int) -> AsyncIterator[Engine]:
    async with PrivateDaemon({Tier.HOST: _SLOTS * pages * layout.spec.record_bytes(0)}) as daemon:
        with closing(Engine(daemon, layout, pages)) as engine:
            yield engine


def _preemptions() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


def _chain(keys: Sequence[bytes]) -> KeyChain:
    chain = KeyChain.adopt()
    chain.extend(keys)
    return chain


async def steps(blocks: int, rounds: int) -> AsyncIterator[Result]:
    """Offer, plan and step for a prompt of stored blocks, while the daemon runs and while it is stopped."""
    async with _running(Layout("kvtier-bench", 16, (PageGroup((Plane("all", PAGE),)),)), blocks) as engine:
        chain = _chain(next(chains(blocks)))
        while engine.copy(chain)[1] < blocks:
            pass
        for state, number in (("runs", signal.SIGCONT), ("stopped", signal.SIGSTOP)):
            os.kill(engine.daemon.pid, number)
            times: list[float] = []
            try:
                while len(times) < _STEPS * rounds:
                    before, seconds = _preemptions(), engine.step(chain)
                    if _preemptions() == before:  # else it tells how busy the machine is; what waits still counts
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
    """Saves and loads of blocks whose keys and values are a plane in each layer, beside one thread's plain copy, and
    the prefix from which on a load takes less time than to compute it at so many tokens a second."""
    nbytes = kv_heads * head_size * tokens * DTYPE_BYTES[dtype]
    planes = tuple(Plane(f"{layer}.{part}", nbytes) for layer in range(layers) for part in "kv")
    async with _running(Layout("kvtier-bench", tokens, (PageGroup(planes),)), _BATCH) as engine:
        fresh, (source, target) = chains(_BATCH), np.ones((2, _BATCH, len(planes) * nbytes), np.uint8)
        stored = next(fresh)

        async def save() -> float:
            nonlocal stored
            saved, seconds = 0, 0.0
            while saved < _BATCH:  # fewer are, where no more slots are reserved yet
                stored = next(fresh)
                seconds, _, saved = engine.copy(_chain(stored))
            return seconds

        async def load(blocks: int) -> float:
            for _ in range(_TRIES):
                seconds, loaded, _ = engine.copy(_chain(stored[:blocks]))
                if loaded == blocks:
                    return seconds
            raise DaemonError(f"{blocks} stored blocks are not loaded: {_TRIES} tries failed", reason="BENCH")

        async def bare() -> float:
            started = time.perf_counter()
            for read, written in zip(source, target, strict=True):
                np.copyto(written, read)
            return time.perf_counter() - started

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
