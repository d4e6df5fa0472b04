"""``kvtier bench restart``: a daemon is killed under a reader, and how soon the next one serves."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from kvtier import aio
from kvtier.bench.place import CACHE, Place, chains, place, spec_of
from kvtier.bench.reader import CHAIN, content
from kvtier.bench.result import MIB, Result
from kvtier.errors import DaemonError, RetryableError
from kvtier.private import TierSlots

BLOCK_BYTES: Final = 4096
MODULE: Final = ("kvtierd.main", "--supervise")
_SETTLED_S: Final = 1.0
"""Between a restart and the next kill; the time before a kill with which reads during it are compared."""
_SPARE: Final = 4 * CHAIN
"""Slots besides those that are filled: a writer has some ahead of need."""
_NEXT_S: Final = 60.0
_POLL_S: Final = 0.002


@dataclass(slots=True, frozen=True)
class Options:
    """``blocks`` in host memory; killed ``rounds`` times."""

    blocks: int = 100_000
    rounds: int = 3


@dataclass(slots=True, frozen=True)
class Restart:
    """When the daemon was killed, and a call about the cache was answered by the next one, by the monotonic clock.

    ``seconds``: until the next one answered any call, and that one, since its process began; by the clock and of CPU.
    """

    killed: float
    matched: float
    seconds: dict[str, float]


async def run(options: Options) -> AsyncIterator[Result]:
    """Floors: a daemon of 64 blocks for the time to the first call, and the reads before the kill for those during
    it."""
    count = max(1, options.blocks // CHAIN)
    params: dict[str, Any] = {"blocks": count * CHAIN, "rounds": options.rounds}
    empty = await _of_few_blocks(options.rounds)
    async with place(spec_of(BLOCK_BYTES), TierSlots(0, count * CHAIN + _SPARE, 0), module=MODULE) as here:
        for _, chain in zip(range(count), chains(CHAIN), strict=False):
            await here.cache.put(chain, content(chain, BLOCK_BYTES))
        async with _reading(here, count) as reader:
            restarts = []
            for _ in range(options.rounds):
                await asyncio.sleep(_SETTLED_S)
                restarts.append(await _restart(here, next(chains(CHAIN))))
            await asyncio.sleep(_SETTLED_S)
            told = await reader.told()
    for name in restarts[0].seconds:
        ours, floor = (statistics.median(restart.seconds[name] for restart in each) for each in (restarts, empty))
        yield Result(f"restart.{name}", params, ours, "s", floor)
    reads = {"reads": len(told["ends"]), **{name: told[name] for name in ("short", "wrong", "calls")}}
    reads["errors"] = len(told["errors"])
    during, before = _rates(told["ends"], restarts)
    yield Result("restart.read", params | reads, during, "MiB/s", before)
    pauses = [after - at for at, after in pairwise(told["ends"])]
    yield Result("restart.longest_read", params | reads, 1e3 * max(pauses), "ms", 1e3 * statistics.median(pauses))


async def _of_few_blocks(rounds: int) -> list[Restart]:
    async with place(spec_of(BLOCK_BYTES), TierSlots(0, CHAIN + _SPARE, 0), module=MODULE) as here:
        chain = next(chains(CHAIN))
        await here.cache.put(chain, content(chain, BLOCK_BYTES))
        restarts = []
        for _ in range(rounds):
            await asyncio.sleep(_SETTLED_S)
            restarts.append(await _restart(here, chain))
        return restarts


async def _restart(here: Place, chain: list[bytes]) -> Restart:
    """Kills the daemon and asks for the next one as fast as it can."""
    if here.daemon is None:
        raise DaemonError("only a private daemon can be measured so", reason="BENCH")
    pid = (await here.client.stats()).pid
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(_NEXT_S), AsyncExitStack() as stack:
        client = await stack.enter_async_context(await _connected(here.daemon.address))
        following = _Process((await client.stats()).pid)
        answered = following.age()
        cache = await client.open_cache(CACHE, spec_of(BLOCK_BYTES))
        if await cache.prefix_length(chain) != len(chain):
            raise DaemonError("what was in memory before the restart is not found after it", reason="BENCH")
        matched = following.age()
        names = ("answered", "answered.cpu", "matched", "matched.cpu")
        return Restart(killed, time.monotonic(), dict(zip(names, (*answered, *matched), strict=True)))


async def _connected(address: str) -> aio.AsyncClient:
    while True:
        try:
            return await aio.connect(address, timeout=_NEXT_S)
        except RetryableError:
            await asyncio.sleep(_POLL_S)


class _Process:
    """Times in hundredths of a second, as the kernel tells them."""

    def __init__(self, pid: int) -> None:
        self._stat = Path(f"/proc/{pid}/stat")

    def age(self) -> tuple[float, float]:
        """Seconds since it began, and of CPU that it has had."""
        fields = self._stat.read_text().rsplit(")", 1)[1].split()
        user, system, began = (int(fields[place]) / os.sysconf("SC_CLK_TCK") for place in (11, 12, 19))
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began, user + system


def _rates(ends: list[float], restarts: list[Restart]) -> tuple[float, float]:
    """MiB/s while daemons were restarted, and just before."""
    mib = CHAIN * BLOCK_BYTES / MIB

    def rate(spans: list[tuple[float, float]]) -> float:
        reads = sum(begin < end <= until for end in ends for begin, until in spans)
        return mib * reads / sum(until - begin for begin, until in spans)

    during = rate([(restart.killed, restart.matched) for restart in restarts])
    return during, rate([(restart.killed - _SETTLED_S / 2, restart.killed) for restart in restarts])


class _Reader:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def line(self) -> bytes:
        if self._process.stdout is None:
            raise DaemonError("the reader has no standard output", reason="BENCH")
        return await self._process.stdout.readline()

    async def told(self) -> dict[str, Any]:
        """Ends it, and what it has to tell."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        told: dict[str, Any] = json.loads(await self.line())
        return told


@asynccontextmanager
async def _reading(here: Place, count: int) -> AsyncIterator[_Reader]:
    """Once it has read everything once."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvtier.bench.reader", here.client.address, str(BLOCK_BYTES), str(count)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 30,
    )
    try:
        reader = _Reader(process)
        if not await reader.line():
            raise DaemonError("the reader has ended", reason="BENCH")
        yield reader
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
