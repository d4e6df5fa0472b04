"""``kvtier bench latency``: what a lookup waits while every edge is busy, and how long callbacks keep the loop."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvtier.bench.bare import BareServer, bare_server
from kvtier.bench.place import CACHE, Place, chains, place, spec_of
from kvtier.bench.result import Result, quantile
from kvtier.cache import Cache
from kvtier.errors import DaemonError
from kvtier.private import PrivateDaemon, TierSlots
from kvtier.types import Tier

SLOTS: Final = TierSlots(device=256, host=512, disk=2048)
BUSY_EDGES: Final = ("device>host", "host>disk", "disk>device", "disk>host", "host>device")
_MATCHED: Final = 64
_CALL_EVERY_S: Final = 0.002
_WARM_UP_S: Final = 60.0
_QUANTILES: Final = {"p50": 0.5, "p99": 0.99}


@dataclass(slots=True, frozen=True)
class Options:
    """``rounds`` of ``seconds`` each, with the daemon and without. ``directory``: see ``kvtier.bench.tiers``."""

    block_bytes: int = 256 << 10
    rounds: int = 4
    seconds: float = 3.0
    directory: Path | None = None


async def run(options: Options) -> AsyncIterator[Result]:
    """The floor is an empty call to a bare server, in whose process the same bytes a second are copied on each edge as
    the daemon copied in the round before, by as many threads."""
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=options.directory) as kept:
        told = Path(kept) / "callbacks.json"
        module = ("kvtierd.bench.callbacks", str(told))
        async with (
            place(spec_of(options.block_bytes), SLOTS, keep=Path(kept) / "daemon", module=module) as here,
            bare_server(Path(kept), options.block_bytes) as bare,
        ):
            bench = await _Bench.prepared(here, bare, options)
            async for result in bench.run():
                yield result
            if here.daemon is not None:
                await here.daemon.stop()
        for result in _callbacks(json.loads(told.read_text()), options):
            yield result


class _Bench:
    def __init__(self, here: Place, asked: Cache, daemon: PrivateDaemon, bare: BareServer, options: Options) -> None:
        self._here = here
        self._asked = asked
        self._daemon = daemon
        self._bare = bare
        self._options = options
        self._matched = [key[::-1] for key in next(chains(_MATCHED))]

    @classmethod
    async def prepared(cls, here: Place, bare: BareServer, options: Options) -> _Bench:
        if here.daemon is None:
            raise DaemonError("only a private daemon can be measured so", reason="BENCH")
        # A mapped cache would be looked up without asking the daemon.
        asked = await here.client.open_cache(CACHE, here.cache.spec, mapped=False)
        bench = cls(here, asked, here.daemon, bare, options)
        # Held, so that what is looked up stays.
        lease = await here.cache.reserve(_MATCHED, Tier.HOST)
        await lease.commit(bench._matched)
        return bench

    async def run(self) -> AsyncIterator[Result]:
        ours: list[float] = []
        floor: list[float] = []
        speeds: list[dict[str, float]] = []
        async with _loading(self._daemon.address, self._options.block_bytes) as load:
            await self._until_busy()
            for _ in range(self._options.rounds):
                before, began = await self._moved(), time.perf_counter()
                os.kill(self._daemon.pid, signal.SIGUSR1)
                ours += await self._calls(lambda: self._asked.match(self._matched))
                os.kill(self._daemon.pid, signal.SIGUSR1)
                after, seconds = await self._moved(), time.perf_counter() - began
                speeds.append({edge: (after[edge] - before[edge]) / seconds for edge in after})
                load.send_signal(signal.SIGSTOP)
                await self._bare.copies(speeds[-1])
                floor += await self._calls(self._bare.call)
                await self._bare.copies({})
                load.send_signal(signal.SIGCONT)
        params = {"block_bytes": self._options.block_bytes, "matched": _MATCHED, "calls": len(ours)}
        for edge in BUSY_EDGES:
            mib = sum(speed.get(edge, 0.0) for speed in speeds) / len(speeds) / (1 << 20)
            yield Result(f"latency.load.{edge}", params, mib, "MiB/s")
        for name, q in _QUANTILES.items():
            yield Result(f"latency.match.{name}", params, 1e6 * quantile(ours, q), "us", 1e6 * quantile(floor, q))

    async def _calls(self, call: Callable[[], Awaitable[Any]]) -> list[float]:
        """One after the other, with a pause between them: they are to meet the load, not to be it."""
        times = []
        until = time.perf_counter() + self._options.seconds
        while (started := time.perf_counter()) < until:
            await call()
            times.append(time.perf_counter() - started)
            await asyncio.sleep(_CALL_EVERY_S)
        return times

    async def _moved(self) -> dict[str, int]:
        (cache,) = (await self._here.client.stats()).caches
        return {edge.edge: edge.bytes for edge in cache.edges}

    async def _until_busy(self) -> None:
        """Every tier is full and every edge has been used."""
        try:
            async with asyncio.timeout(_WARM_UP_S):
                while not all(map((await self._moved()).get, BUSY_EDGES)):  # noqa: ASYNC110  it counts, and tells nobody
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise DaemonError(f"not every edge was busy within {_WARM_UP_S:g} s", reason="BENCH") from None


@asynccontextmanager
async def _loading(address: str, block_bytes: int) -> AsyncIterator[asyncio.subprocess.Process]:
    load = await asyncio.create_subprocess_exec(sys.executable, "-m", "kvtier.bench.load", address, str(block_bytes))
    try:
        yield load
    finally:
        load.kill()
        await load.wait()


def _callbacks(told: dict[str, Any], options: Options) -> list[Result]:
    """Of the daemon's loop, in the rounds under load: CPU of its thread."""
    params = {"block_bytes": options.block_bytes, "callbacks": told["callbacks"]}
    results = [Result(f"latency.callback.{name}", params, told[name], "us") for name in ("p50", "p99", "p99.9")]
    return [*results, Result("latency.callback.max", {**params, "slow": told["slow"]}, told["max"], "us")]
