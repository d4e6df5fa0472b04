"""Hours of mixed load on one daemon: ``python -m tests.torture.soak --hours 8``.

In each minute clients connect, put, get, hold, move, drop and watch, make caches and remove them, and disconnect. Then
the clients stop, and the driver measures the resources that the daemon still holds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final

from kvtier import AsyncClient, Event, Tier, connect
from tests import devices
from tests.integration.blocks import SPEC, assert_bytes, chain, put_chain, sizes
from tests.integration.daemon import DaemonProcess
from tests.integration.load import HOLDS, Load

ROUND_S: Final = 60.0
SETTLE_S: Final = 11.0
"""Seconds without load before a measurement: the store's library keeps threads for ten seconds after their work."""
IDLE_S: Final = 5.0
"""Seconds without load after that, in which CPU time is measured."""
STEADY: Final = sizes(device=24, host=32, disk=64)
PASSING: Final = sizes(device=8, host=16, disk=32)
"""Budgets of the caches that are made and removed, one at a time."""
_CHAINS: Final = 24
_WORKERS: Final = 3
_KEPT_REMOTELY: Final = 1 << 20
_MORE_MEMORY: Final = 32 << 20
"""Bytes that the daemon may hold at the end beyond its bytes after the first round: its memory of 32,768 objects of the
store takes many rounds to fill."""
_MORE_FDS: Final = 8
_IDLE_CPU: Final = 2.0
"""Percent of a processor."""
_FLAGS: Final = ("--event-ring-bytes", "1MiB", "--event-log-bytes", "8MiB")
"""Sizes that are full within the first round, so that they do not grow later."""


@dataclass(slots=True, frozen=True)
class Sample:
    """Resources of a daemon without load. Memory in bytes; ``cpu`` in percent of a processor."""

    minutes: float
    rss: int
    anonymous: int
    fds: int
    threads: int
    cpu: float
    operations: int

    def row(self) -> str:
        return (
            f"| {self.minutes:.1f} | {self.rss / 1e6:.1f} MB | {self.anonymous / 1e6:.1f} MB | {self.fds} | "
            f"{self.threads} | {self.cpu:.1f} % | {self.operations:,} |"
        )


HEAD: Final = (
    "| minutes | RSS | of it anonymous | descriptors | threads | idle CPU | operations |\n" + "| --- " * 7 + "|"
)


async def idle(pid: int, began: float, operations: int) -> Sample:
    """Measures a daemon without load."""
    await asyncio.sleep(SETTLE_S)
    before = _cpu_s(pid)
    await asyncio.sleep(IDLE_S)
    cpu = 100 * (_cpu_s(pid) - before) / IDLE_S
    said = _status(pid)
    return Sample(
        minutes=(time.monotonic() - began) / 60,
        rss=said["VmRSS"] * 1024,
        anonymous=said["RssAnon"] * 1024,
        fds=len(os.listdir(f"/proc/{pid}/fd")),
        threads=said["Threads"],
        cpu=cpu,
        operations=operations,
    )


def _status(pid: int) -> dict[str, int]:
    """Returns the numbers in a process's status file; sizes in KiB."""
    lines = [line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def load(address: str, seconds: float, seed: int, done: Counter[str], numbers: count[int]) -> None:
    """Runs new clients with every kind of call for ``seconds``. All clients are gone at the end."""
    over = asyncio.Event()
    rng = random.Random(seed)

    async def again(work: Callable[[AsyncClient], Awaitable[None]]) -> None:
        while not over.is_set():
            async with await connect(address, timeout=20, wait=20) as client:
                try:
                    await work(client)
                except HOLDS:
                    done["held up"] += 1
                else:
                    done[work.__name__] += 1

    async def session_that_reads(client: AsyncClient) -> None:
        cache = await client.open_cache("steady", SPEC, write=False)
        keys = chain(f"steady/{rng.randrange(_CHAINS)}", 8)
        found = await cache.get(keys)
        assert_bytes(keys[: len(found)], found)
        await client.stats()

    async def cache_made_and_removed(client: AsyncClient) -> None:
        name = f"passing-{next(numbers)}"
        cache = await client.open_cache(name, SPEC, budgets=PASSING)
        keys = await put_chain(cache, name, 12)
        await cache.move(keys, Tier.DISK)
        assert_bytes(keys, await cache.get(keys))
        await cache.close()
        await client.remove_cache(name, force=True)

    async def watch() -> None:
        async with await connect(address, wait=20) as client, client.watch() as items:
            async for item in items:
                done["event"] += isinstance(item, Event)

    async with AsyncExitStack() as stack:
        observer = await stack.enter_async_context(await connect(address))
        await observer.open_cache("steady", SPEC, budgets=STEADY)
        mixed = await stack.enter_async_context(
            Load(address, "steady", chains=_CHAINS, workers=_WORKERS, seed=rng.getrandbits(32))
        )
        watcher = asyncio.create_task(watch())
        passing = [asyncio.create_task(again(work)) for work in (session_that_reads, cache_made_and_removed)]
        await asyncio.wait([*passing, watcher], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        over.set()
        await asyncio.gather(*passing)
        await mixed.stop()
        watcher.cancel()
        await asyncio.wait([watcher])
        await observer.remote_gc(keep_bytes=_KEPT_REMOTELY)
        assert not watcher.done() or watcher.cancelled(), watcher.exception()
    done.update(mixed.done)


async def soak(home: Path, rounds: int, seed: int, *, load_s: float = ROUND_S - SETTLE_S - IDLE_S) -> list[Sample]:
    """Prints a row per round. Raises if a byte was wrong, a call failed, or the daemon's log has an error."""
    passing = {tier: STEADY[tier] + PASSING[tier] for tier in STEADY}
    remote = json.dumps({"url": f"file://{home}/store", "write": "evict"})
    (home / "store").mkdir()
    with DaemonProcess(home, passing, ["--remote", remote, *_FLAGS]) as daemon:
        done: Counter[str] = Counter()
        numbers = count()
        began = time.monotonic()
        print(HEAD)
        samples = [await idle(daemon.pid, began, 0)]
        print(samples[0].row(), flush=True)
        for number in range(rounds):
            await load(daemon.address, load_s, seed + number, done, numbers)
            operations = done.total() - done["event"] - done["blocks"]
            samples.append(await idle(daemon.pid, began, operations))
            print(samples[-1].row(), flush=True)
        print(f"0 wrong of {done['blocks']:,} blocks read, {done['event']:,} events told; {dict(sorted(done.items()))}")
    return samples


def complaint(samples: Sequence[Sample]) -> str:
    """Returns the resources that have grown, and CPU time used without load; empty if there are none. Compares with the
    end of the first round, when every part has been used."""
    first, last = samples[1], samples[-1]
    grown = {
        "anonymous memory": (first.anonymous, last.anonymous, _MORE_MEMORY),
        "descriptors": (first.fds, last.fds, _MORE_FDS),
        "threads": (first.threads, last.threads, _MORE_FDS),
    }
    found = [f"{what}: {at} -> {then}" for what, (at, then, more) in grown.items() if then - at > more]
    if last.cpu > _IDLE_CPU:
        found.append(f"idle CPU: {last.cpu:.1f} %")
    return ", ".join(found)


def main() -> str:
    parser = argparse.ArgumentParser(prog="python -m tests.torture.soak", description=__doc__)
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--hours", type=float)
    length.add_argument("--minutes", type=float)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    options = parser.parse_args()
    minutes = options.hours * 60 if options.hours else options.minutes
    devices.prepare()
    home = Path(tempfile.mkdtemp(prefix="kv-soak-"))
    print(f"--seed {options.seed}")
    try:
        samples = asyncio.run(soak(home, max(1, round(minutes * 60 / ROUND_S)), options.seed))
    finally:
        shutil.rmtree(home)
    return complaint(samples)


if __name__ == "__main__":
    sys.exit(main() or None)
