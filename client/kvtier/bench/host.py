"""Costs of kvtier on this machine: the client, the tiers, events, and many blocks."""

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvtier import client as aio
from kvtier import sync
from kvtier.abi.memory import empty
from kvtier.abi.spec import CacheSpec
from kvtier.cache import Cache
from kvtier.errors import DaemonError
from kvtier.events import Event
from kvtier.lease import ReadLease, WriteLease
from kvtier.memory.arrays import Bytes
from kvtier.replay.private import PrivateDaemon, TierSlots
from kvtier.replay.trace import replay_spec
from kvtier.types import BlockResult, CacheOptions, Cursor, Tier
from kvtier.wire import Keys

CACHE: Final = "kvtier-bench"
BATCH: Final = 64
"""Blocks of a measured call."""
PAGE: Final = 4096
"""The smallest slot: with blocks of this size the bookkeeping dominates."""
_ROOM: Final = 4
"""Slots of a measured host tier, in batches."""
_FILL: Final = 1024
"""Blocks of a call that only fills a tier."""
_FRESH: Final = 5
"""The most rounds if each round starts a daemon or stores many batches."""
_FEW: Final = 20
"""The fewest rounds of a short call; puts in a round of the daemon's CPU."""
_WARM_UP: Final = 2
"""Rounds that do not count: they map pages and fill caches."""
_SYNC_BLOCKS: Final = 32
"""Blocks that the daemon writes before each ``fdatasync``, and blocks that each of its threads reads at a time."""
_STOP_S: Final = 600.0
_numbers: Final = count()

BenchWork = Callable[[], Awaitable[float]]
"""Does one round and returns the seconds that count."""


@dataclass(slots=True, frozen=True)
class Result:
    """A figure. ``params``: the measured case. ``floor``: the same work without kvtier, or at the smallest size."""

    name: str
    params: Mapping[str, Any]
    value: float
    unit: str
    floor: float | None = None

    @classmethod
    def rate(cls, name: str, params: Mapping[str, Any], nbytes: int, ours: float, floor: float) -> Result:
        """Makes rates of the seconds that kvtier and the floor take for ``nbytes``."""
        return cls(name, params, nbytes / ours / (1 << 20), "MiB/s", nbytes / floor / (1 << 20))

    @property
    def ratio(self) -> float | None:
        return self.value / self.floor if self.floor else None


@dataclass(slots=True, frozen=True)
class PrivateCache:
    """The only cache of a private daemon."""

    client: aio.AsyncClient
    cache: Cache
    daemon: PrivateDaemon

    async def move(self, keys: Sequence[bytes], to: Tier) -> None:
        results = await self.cache.move(keys, to)
        if set(results) != {BlockResult.OK}:
            raise DaemonError(f"blocks could not be moved to {to}: {set(map(str, results))}", reason="BENCH")

    async def put(self, rows: Sequence[Bytes]) -> float:
        """Puts a new chain into host memory. Returns the seconds."""
        return await timed(self.cache.put(new_chain(len(rows)), rows, tier=Tier.HOST))


@asynccontextmanager
async def private_cache(
    spec: CacheSpec, slots: TierSlots, *, options: CacheOptions | None = None, **daemon: Any
) -> AsyncIterator[PrivateCache]:
    """Starts a private daemon with one cache that has all slots. ``daemon``: arguments of :class:`PrivateDaemon`."""
    async with (
        PrivateDaemon(slots.as_bytes(spec), **daemon) as running,
        await aio.connect(running.address, timeout=600) as client,
    ):
        yield PrivateCache(client, await client.open_cache(CACHE, spec, options=options), running)


def new_chain(blocks: int = BATCH) -> list[bytes]:
    """Returns keys that no other call returns."""
    number = next(_numbers)
    return [hashlib.sha256(f"{number}/{index}".encode()).digest() for index in range(blocks)]


async def interleaved(rounds: int, *works: BenchWork) -> list[float]:
    """Returns the median seconds of each work. A round does every work once, in rotating order: no work always finds
    the processor's caches as the same other work left them."""
    times: list[list[float]] = [[] for _ in works]
    for turn in range(rounds + _WARM_UP):
        for first in range(len(works)):
            chosen = (turn + first) % len(works)
            times[chosen].append(await works[chosen]())
    return [statistics.median(each[_WARM_UP:]) for each in times]


async def timed(work: Awaitable[object]) -> float:
    """Returns the seconds that the work takes."""
    started = time.perf_counter()
    await work
    return time.perf_counter() - started


def memcpy(source: Sequence[Bytes], target: Sequence[Bytes]) -> float:
    """Returns the seconds of one thread's copies, block by block."""
    started = time.perf_counter()
    for read, written in zip(source, target, strict=True):
        np.copyto(written, read)
    return time.perf_counter() - started


def _memcpy_into_memory(rows: Sequence[Bytes]) -> BenchWork:
    """Copies a batch, in turn, to four places in memory that has its pages."""
    places = cycle(empty((_ROOM, len(rows), rows[0].size)))

    async def copy() -> float:
        return memcpy(rows, next(places))

    return copy


async def _rate(
    name: str, block_bytes: int, blocks: int, rounds: int, ours: BenchWork, floor: BenchWork, **params: Any
) -> Result:
    params = {"block_bytes": block_bytes, **params}
    return Result.rate(name, params, blocks * block_bytes, *await interleaved(rounds, ours, floor))


def _rows(block_bytes: int) -> list[Bytes]:
    return list(np.random.default_rng(1).integers(0, 256, (BATCH, block_bytes), dtype=np.uint8))


def _views(lease: ReadLease | WriteLease) -> list[Bytes]:
    return [lease.view(index)[0] for index in range(len(lease))]


# -- client ------------------------------------------------------------------------------------------------------------


async def client(sizes: Sequence[int], rounds: int, keys: int) -> AsyncIterator[Result]:
    """Measures stores and gets of 64 blocks of host memory, the put of one block, and the length of a prefix of
    ``keys`` keys among as many others."""
    slots = TierSlots(0, _ROOM * BATCH, 0)
    for spec in map(replay_spec, sizes):
        yield await _first_fill(spec, slots, min(rounds, _FRESH))
        for checksum in ("disk", "commit"):
            async with private_cache(spec, slots, options=CacheOptions(checksum=checksum)) as here:
                for result in await _copies(here, checksum, rounds):
                    yield result
        async with private_cache(spec, slots) as here:
            rows = _rows(here.cache.block_bytes)
            for result in await _one_put(here, rows, max(rounds, _FEW)):
                yield result
            works = partial(here.put, rows), _memcpy_into_memory(rows)  # the tier is full by now
            yield await _rate("client.store_full", here.cache.block_bytes, BATCH, rounds, *works)
    async with private_cache(replay_spec(PAGE), TierSlots(0, 2 * keys, 0)) as here:
        stored = [new_chain(keys), new_chain(keys)]
        for chain in stored:
            await here.cache.put(chain, _rows(PAGE)[:1] * keys, tier=Tier.HOST)
        with sync.Client(here.client.address) as client:
            opened = client.open_cache(CACHE)

            async def length(pack: Callable[[list[bytes]], Keys]) -> float:
                asked = pack(random.choice(stored))
                started = time.perf_counter()
                found = opened.prefix_length(asked)
                seconds = time.perf_counter() - started
                if found != keys:
                    raise DaemonError(f"{found} of {keys} stored keys are found", reason="BENCH")
                return seconds

            times = await interleaved(rounds, lambda: length(b"".join), lambda: length(list))
        for form, seconds in zip(("bytes", "list"), times, strict=True):
            yield Result("client.prefix_length", {"keys": keys, "as": form}, 1e6 * seconds, "us")


async def _first_fill(spec: CacheSpec, slots: TierSlots, rounds: int) -> Result:
    """Measures a store into untouched slots of a new daemon."""
    rows = _rows(spec.block_bytes(0))

    async def fill() -> float:
        async with private_cache(spec, slots) as here:
            return await here.put(rows)

    return await _rate("client.first_fill", spec.block_bytes(0), BATCH, rounds, fill, _memcpy_into_memory(rows))


async def _copies(here: PrivateCache, checksum: str, rounds: int) -> list[Result]:
    block_bytes = here.cache.block_bytes
    rows, out = _rows(block_bytes), _rows(block_bytes)

    @asynccontextmanager
    async def stored() -> AsyncIterator[tuple[list[bytes], float]]:
        """Stores a new chain for the block: every get is the first of its blocks. Yields the seconds, too."""
        chain = new_chain()
        yield chain, await timed(here.cache.put(chain, rows, tier=Tier.HOST))
        await here.cache.drop(chain[:1])

    async def store() -> float:
        async with stored() as (_, seconds):
            return seconds

    async def bare_store() -> float:
        async with here.cache.reserve(BATCH, Tier.HOST) as lease:
            return memcpy(rows, _views(lease))

    async def get() -> float:
        async with stored() as (chain, _):
            return await timed(here.cache.get(chain, out, tier=Tier.HOST))

    async def bare_get() -> float:
        async with stored() as (chain, _), here.cache.acquire(chain, Tier.HOST, min_blocks=BATCH) as lease:
            return memcpy(_views(lease), out)

    return [
        await _rate("client.store", block_bytes, BATCH, rounds, store, bare_store, checksum=checksum),
        await _rate("client.get", block_bytes, BATCH, rounds, get, bare_get, checksum=checksum),
    ]


async def _one_put(here: PrivateCache, rows: Sequence[Bytes], rounds: int) -> list[Result]:
    """Measures a put of one block and each of its steps, then the daemon's CPU for each block of a batch. The floor of
    a step is a call that finds nothing to do; the floor of the put is two of these calls and the copy."""
    steps: deque[tuple[float, float, float]] = deque()

    async def in_steps() -> float:
        began = time.perf_counter()
        async with here.cache.reserve(1, Tier.HOST) as lease:
            reserved = time.perf_counter()
            copied = memcpy(rows[:1], _views(lease))
            told = time.perf_counter()
            await lease.commit(new_chain(1), release=True)
            steps.append((reserved - began, copied, time.perf_counter() - told))
        return time.perf_counter() - began

    async def daemon_cpu() -> float:
        clock = ~here.daemon.pid << 3 | 2  # clock_getcpuclockid(3)
        before = time.clock_gettime(clock)
        for _ in range(_FEW):
            await here.put(rows)
        return (time.clock_gettime(clock) - before) / _FEW / BATCH

    async def call() -> float:
        return await timed(here.cache.set_retention([], 0))

    whole, _, called = await interleaved(rounds, lambda: here.put(rows[:1]), in_steps, call)
    (cpu,) = await interleaved(_FEW, daemon_cpu)
    reserve, copy, commit = map(statistics.median, zip(*steps, strict=True))
    figures = (
        ("client.put_one", whole, copy + 2 * called),
        ("client.put_one.reserve", reserve, called),
        ("client.put_one.commit", commit, called),
        ("client.put_one.copy", copy, None),
    )
    params = {"block_bytes": here.cache.block_bytes}
    results = [Result(name, params, 1e6 * each, "us", floor and 1e6 * floor) for name, each, floor in figures]
    return [*results, Result("client.daemon_cpu", params, 1e6 * cpu, "us/block")]


# -- tiers -------------------------------------------------------------------------------------------------------------


async def tiers(sizes: Sequence[int], rounds: int, disk_bytes: int) -> AsyncIterator[Result]:
    """Measures moves of 64 blocks to and from disk, and stores into full tiers, beside a raw file as large as the disk
    tier that is written and read past the page cache."""
    for block_bytes in sizes:
        slots = TierSlots(0, max(4 * BATCH, disk_bytes // 4 // block_bytes), disk_bytes // block_bytes)
        with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as kept:
            async with private_cache(replay_spec(block_bytes), slots, keep=Path(kept)) as here:
                fd = os.open(Path(kept) / "raw", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
                for result in await _disk_edges(here, fd, rounds):
                    yield result
                yield await _sustained(here, fd, min(rounds, _FRESH))
                os.close(fd)


async def _disk_edges(here: PrivateCache, fd: int, rounds: int) -> list[Result]:
    """Measures moves. The raw file takes as many blocks a call, in as many threads, as the daemon's disk tier does."""
    block_bytes, slots = here.cache.block_bytes, here.cache.slots(Tier.DISK)
    rows, parts = _rows(block_bytes), range(0, BATCH, _SYNC_BLOCKS)
    stored: deque[list[bytes]] = deque(maxlen=max(1, slots // BATCH // 2))

    async def write() -> float:
        chain = new_chain()
        await here.cache.put(chain, rows, tier=Tier.HOST)
        seconds = await timed(here.move(chain, Tier.DISK))
        stored.append(chain)
        return seconds

    async def read() -> float:
        chain = random.choice(stored)
        seconds = await timed(here.move(chain, Tier.HOST))
        await here.move(chain, Tier.DISK)
        return seconds

    async with here.cache.reserve(BATCH, Tier.HOST) as lease:
        views = [view.data for view in _views(lease)]

        def write_raw(place: int) -> None:
            for first in parts:
                os.pwritev(fd, views[first : first + _SYNC_BLOCKS], (place + first) * block_bytes)
                os.fdatasync(fd)

        def read_raw(place: int, first: int) -> None:
            os.preadv(fd, views[first : first + _SYNC_BLOCKS], (place + first) * block_bytes)

        async def bare_write() -> float:
            return await timed(asyncio.to_thread(write_raw, random.randrange(slots - BATCH + 1)))

        async def bare_read() -> float:
            place = random.randrange(slots - BATCH + 1)
            return await timed(asyncio.gather(*(asyncio.to_thread(read_raw, place, first) for first in parts)))

        for place in range(0, slots - BATCH + 1, BATCH):  # the first write of a place is slower than all others
            await write()
            write_raw(place)
        disk_bytes = slots * block_bytes
        return [
            await _rate(f"tiers.{edge}", block_bytes, BATCH, rounds, *works, disk_bytes=disk_bytes)
            for edge, works in (("host>disk", (write, bare_write)), ("disk>host", (read, bare_read)))
        ]


async def _sustained(here: PrivateCache, fd: int, rounds: int) -> Result:
    """Measures stores of four times the host tier into full tiers, so that each stored block sends a block to disk. The
    raw file is written from its start to its end and synced once."""
    block_bytes, host = here.cache.block_bytes, here.cache.slots(Tier.HOST)
    rows, pages, batches = _rows(block_bytes), empty((BATCH, block_bytes)), 4 * host // BATCH
    places = cycle(range(0, here.cache.slots(Tier.DISK) - BATCH + 1, BATCH))
    pages[:] = rows

    async def store() -> float:
        return sum([await here.put(rows) for _ in range(batches)])

    def write_raw() -> None:
        for place in islice(places, batches):
            os.pwrite(fd, pages.data, place * block_bytes)
        os.fdatasync(fd)

    works = store, lambda: timed(asyncio.to_thread(write_raw))
    return await _rate("tiers.sustained", block_bytes, batches * BATCH, rounds, *works, host_bytes=host * block_bytes)


# -- events ------------------------------------------------------------------------------------------------------------


async def events(watchers: int, rounds: int, puts: int) -> AsyncIterator[Result]:
    """Measures block changes a second until the last watcher has decoded all of them; the floor has no watchers.

    A round puts and drops chains of 256 blocks; every fourth chain moves in between. Every watcher is a process.
    Raises :class:`DaemonError` if a watcher misses a change.
    """
    blocks = 256
    rows, changes = _rows(PAGE)[:1] * blocks, (2 * puts + puts // 4) * blocks
    async with private_cache(replay_spec(PAGE), TierSlots(4 * blocks, 4 * blocks, 0)) as here:
        with ProcessPoolExecutor(watchers, multiprocessing.get_context("spawn")) as processes:

            async def store() -> None:
                for number in range(1, puts + 1):
                    chain = new_chain(blocks)
                    await here.cache.put(chain, rows, tier=Tier.DEVICE)
                    if number % 4 == 0:
                        await here.move(chain, Tier.HOST)
                    await here.cache.drop(chain[:1])

            async def watched() -> float:
                stats = await here.client.stats()
                since = Cursor(stats.epoch, stats.last_event_id)
                watching = [processes.submit(watch, here.client.address, since, changes) for _ in range(watchers)]
                return await timed(asyncio.gather(store(), *map(asyncio.wrap_future, watching)))

            ours, floor = await interleaved(rounds, watched, lambda: timed(store()))
    params = {"watchers": watchers, "changes": changes}
    yield Result("events.changes", params, changes / ours, "changes/s", changes / floor)


_runner: Final = cache(asyncio.Runner)
"""Gives the same loop to all rounds: gRPC goes on polling the first loop of a process."""


def watch(address: str, since: Cursor, changes: int) -> None:
    """Decodes block changes, in a process that does so in every round."""

    async def follow() -> None:
        seen = 0
        async with await aio.connect(address, timeout=60) as client, client.watch(since=since) as watching:
            while seen < changes:
                item = await anext(watching)
                if not isinstance(item, Event):
                    raise DaemonError(f"a watcher missed changes after {seen} of {changes}: {item}", reason="BENCH")
                seen += len(item.keys)

    _runner().run(follow())


# -- scale -------------------------------------------------------------------------------------------------------------


async def scale(counts: Sequence[int], rounds: int, on_disk: int) -> AsyncIterator[Result]:
    """Measures the cost of a block of 4 KiB in calls of 64, with ``counts`` blocks in the cache; the floor is the
    smallest count. Then the daemon's memory a block, and :func:`_restart`."""
    async with AsyncExitStack() as stack:
        spec, works = replay_spec(PAGE), dict[str, list[BenchWork]](acquire=[], store=[])
        for blocks in counts:
            here = await stack.enter_async_context(private_cache(spec, TierSlots(0, blocks, 0)))
            await _fill(here, blocks // 10)
            before = _anonymous_bytes(here)
            last = await _fill(here, blocks - blocks // 10)
            works["acquire"].append(partial(_acquire, here, last[:BATCH]))
            works["store"].append(partial(_evict, here))
            memory = (_anonymous_bytes(here) - before) / (blocks - blocks // 10)
            yield Result("scale.memory", {"blocks": blocks}, memory, "bytes/block")
        for name, each in works.items():
            costs = [1e6 * seconds / BATCH for seconds in await interleaved(rounds, *each)]
            for blocks, cost in zip(counts, costs, strict=True):
                yield Result(f"scale.{name}", {"blocks": blocks}, cost, "us/block", costs[0])
    for result in await _restart(on_disk):
        yield result


async def _fill(here: PrivateCache, blocks: int, *, disk: bool = False) -> list[bytes]:
    """Stores ``blocks`` blocks in chains. Returns the last chain."""
    chain: list[bytes] = []
    for left in range(blocks, 0, -_FILL):
        chain = new_chain(min(left, _FILL))
        await _store(here, chain)
        if disk:
            await here.move(chain, Tier.DISK)
    return chain


async def _store(here: PrivateCache, chain: list[bytes]) -> None:
    """Commits slots as they are, without writing their bytes."""
    async with here.cache.reserve(len(chain), Tier.HOST) as lease:
        await lease.commit(chain)


async def _evict(here: PrivateCache) -> float:
    """Stores into a full cache, which evicts as many blocks."""
    return await timed(_store(here, new_chain()))


async def _acquire(here: PrivateCache, chain: list[bytes]) -> float:
    started = time.perf_counter()
    async with here.cache.acquire(chain, Tier.HOST, min_blocks=len(chain)):
        pass
    return time.perf_counter() - started


async def _restart(blocks: int) -> list[Result]:
    """Measures the CPU of the slow callbacks of the daemon's loop while blocks go to disk, and the time from a start to
    the first answer about them."""
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as kept:
        told, slots = Path(kept) / "callbacks", TierSlots(0, max(blocks // 16, 2 * _FILL), blocks)
        module = ("kvtier.bench.callbacks", str(told))
        async with private_cache(replay_spec(PAGE), slots, keep=Path(kept), module=module) as here:
            last = await _fill(here, blocks, disk=True)
            await here.daemon.stop(_STOP_S)
            callback = float(told.read_text())
            started = time.perf_counter()
            await here.daemon.start()
            async with await aio.connect(here.daemon.address) as client:
                cache = await client.open_cache(CACHE, replay_spec(PAGE))
                if (await cache.match(last)).blocks != len(last):
                    raise DaemonError("blocks on disk are not found after the restart", reason="BENCH")
                seconds = time.perf_counter() - started
    params = {"blocks": blocks}
    return [Result("scale.callback.p99.9", params, callback, "us"), Result("scale.restart", params, seconds, "s")]


def _anonymous_bytes(here: PrivateCache) -> int:
    """Resident memory of the daemon, without files and arenas."""
    lines = Path(f"/proc/{here.daemon.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))
