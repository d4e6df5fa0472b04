"""Costs of kvtier on this machine: the client, the tiers, events, and many blocks."""

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing
import os
import random
import signal
import statistics
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvtier import client as aio
from kvtier.abi.memory import empty
from kvtier.abi.spec import CacheSpec
from kvtier.cache import Cache
from kvtier.errors import DaemonError
from kvtier.events import Event
from kvtier.lease import ReadLease, WriteLease
from kvtier.memory.arrays import Bytes
from kvtier.replay.private import PrivateDaemon
from kvtier.replay.trace import replay_spec
from kvtier.types import BlockResult, CacheOptions, Cursor, Tier

CACHE: Final = "kvtier-bench"
BATCH: Final = 64
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
_measurements: Final = count(1)
on_round: Final = ContextVar[Callable[..., object]]("on_round", default=lambda **_: None)
"""Called at the start of each round of a measurement, with the arguments of a progress bar."""

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

    async def commit(self, chain: list[bytes]) -> None:
        """Stores slots of host memory as they are, without writing their bytes."""
        async with self.cache.reserve(len(chain), Tier.HOST) as lease:
            await lease.commit(chain)

    async def fill(self, blocks: int, *tiers: Tier) -> list[bytes]:
        """Stores ``blocks`` blocks in chains, and moves them to ``tiers``. Returns the last chain."""
        chain: list[bytes] = []
        for left in range(blocks, 0, -_FILL):
            chain = new_chain(min(left, _FILL))
            await self.commit(chain)
            for tier in tiers:
                await self.move(chain, tier)
        return chain


@asynccontextmanager
async def private_cache(
    spec: CacheSpec, slots: Mapping[Tier, int], *, options: CacheOptions | None = None, **daemon: Any
) -> AsyncIterator[PrivateCache]:
    """Starts a private daemon with one cache that has all slots. ``daemon``: arguments of :class:`PrivateDaemon`."""
    async with (
        PrivateDaemon({tier: count * spec.record_bytes(0) for tier, count in slots.items()}, **daemon) as running,
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
    description, total = f"measurement {next(_measurements)}", rounds + _WARM_UP
    for turn in range(total):
        on_round.get()(description=description, completed=turn, total=total)
        for first in range(len(works)):
            chosen = (turn + first) % len(works)
            times[chosen].append(await works[chosen]())
            await asyncio.sleep(0)  # for Ctrl-C: a work may never wait
    return [statistics.median(each[_WARM_UP:]) for each in times]


async def timed(work: Awaitable[object]) -> float:
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
    name: str, rows: Sequence[Bytes], rounds: int, *works: BenchWork, times: int = 1, **params: Any
) -> Result:
    """Measures works that copy ``rows``, ``times`` times: kvtier's and the floor."""
    params, nbytes = {"block_bytes": rows[0].size, **params}, times * len(rows) * rows[0].size
    return Result.rate(name, params, nbytes, *await interleaved(rounds, *works))


def _rows(block_bytes: int) -> list[Bytes]:
    return list(np.random.default_rng(1).integers(0, 256, (BATCH, block_bytes), dtype=np.uint8))


def _views(lease: ReadLease | WriteLease) -> list[Bytes]:
    return [lease.view(index)[0] for index in range(len(lease))]


# -- client ------------------------------------------------------------------------------------------------------------


async def client(sizes: Sequence[int], rounds: int) -> list[Result]:
    """Measures stores and gets of 64 blocks of host memory, and the put of one block."""
    results, slots = list[Result](), {Tier.HOST: _ROOM * BATCH}
    for block_bytes in sizes:
        spec, rows = replay_spec(block_bytes), _rows(block_bytes)
        copy, first = _memcpy_into_memory(rows), partial(_first_fill, spec, slots, rows)
        results.append(await _rate("client.first_fill", rows, min(rounds, _FRESH), first, copy))
        for checksum in ("disk", "commit"):
            async with private_cache(spec, slots, options=CacheOptions(checksum=checksum)) as here:
                results += await _copies(here, rows, rounds, checksum)
        async with private_cache(spec, slots) as here:
            results += await _one_put(here, rows, max(rounds, _FEW))
            full = partial(here.put, rows)  # the tier is full by now
            results.append(await _rate("client.store_full", rows, rounds, full, copy))
    return results


async def _first_fill(spec: CacheSpec, slots: Mapping[Tier, int], rows: Sequence[Bytes]) -> float:
    async with private_cache(spec, slots) as here:
        return await here.put(rows)


async def _copies(here: PrivateCache, rows: list[Bytes], rounds: int, checksum: str) -> list[Result]:
    out = _rows(here.cache.block_bytes)

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

    works = {"client.store": (store, bare_store), "client.get": (get, bare_get)}
    return [await _rate(name, rows, rounds, *each, checksum=checksum) for name, each in works.items()]


async def _one_put(here: PrivateCache, rows: Sequence[Bytes], rounds: int) -> list[Result]:
    """Measures a put of one block, beside a reserve, a copy and a commit; then a call that finds nothing to do, and the
    daemon's CPU for each block of a batch."""

    async def by_two_calls() -> float:
        started = time.perf_counter()
        async with here.cache.reserve(1, Tier.HOST) as lease:
            memcpy(rows[:1], _views(lease))
            await lease.commit(new_chain(1), release=True)
        return time.perf_counter() - started

    async def call() -> float:
        return await timed(here.cache.unpin(new_chain(1), Tier.HOST))

    async def daemon_cpu() -> float:
        clock = ~here.daemon.pid << 3 | 2  # clock_getcpuclockid(3)
        before = time.clock_gettime(clock)
        for _ in range(_FEW):
            await here.put(rows)
        return (time.clock_gettime(clock) - before) / _FEW / BATCH

    put, two_calls, called = await interleaved(rounds, partial(here.put, rows[:1]), by_two_calls, call)
    (cpu,) = await interleaved(_FEW, daemon_cpu)
    params = {"block_bytes": here.cache.block_bytes}
    return [
        Result("client.put_one", params, 1e6 * put, "us", 1e6 * two_calls),
        Result("client.call", params, 1e6 * called, "us"),
        Result("client.daemon_cpu", params, 1e6 * cpu, "us/block"),
    ]


# -- tiers -------------------------------------------------------------------------------------------------------------


class _RawFile:
    """A file as large as the disk tier, written and read past the page cache."""

    def __init__(self, path: Path, rows: Sequence[Bytes], blocks: int) -> None:
        self._fd: Final = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        self._rows: Final = empty((BATCH, rows[0].size))
        self._rows[:] = rows
        self._parts: Final = range(0, BATCH, _SYNC_BLOCKS)
        self.places: Final = range(blocks - BATCH + 1)

    def close(self) -> None:
        os.close(self._fd)

    def write(self, place: int) -> None:
        for first in self._parts:
            self._each(os.pwritev, place, first, _SYNC_BLOCKS)
            os.fdatasync(self._fd)

    def write_all(self, places: Iterable[int]) -> None:
        """Writes a batch to each place, and syncs once."""
        for place in places:
            self._each(os.pwritev, place, 0, BATCH)
        os.fdatasync(self._fd)

    async def read(self) -> None:
        """Reads a random batch, a thread a part."""
        place = random.choice(self.places)
        parts = (asyncio.to_thread(self._each, os.preadv, place, first, _SYNC_BLOCKS) for first in self._parts)
        await asyncio.gather(*parts)

    def _each(self, call: Callable[..., int], place: int, first: int, blocks: int) -> None:
        call(self._fd, [self._rows[first : first + blocks].data], (place + first) * self._rows.shape[1])


async def tiers(sizes: Sequence[int], rounds: int, disk_bytes: int) -> list[Result]:
    """Measures moves of 64 blocks to and from disk, and stores into full tiers, beside a raw file that takes as many
    blocks a call, in as many threads, as the daemon's disk tier."""
    results: list[Result] = []
    for block_bytes in sizes:
        rows, on_disk = _rows(block_bytes), disk_bytes // block_bytes
        slots = {Tier.HOST: max(4 * BATCH, on_disk // 4), Tier.DISK: on_disk}
        async with private_cache(replay_spec(block_bytes), slots) as here:
            with closing(_RawFile(here.daemon.home / "raw", rows, on_disk)) as raw:
                results += await _disk_edges(here, raw, rows, rounds)
                results.append(await _sustained(here, raw, rows, min(rounds, _FRESH)))
    return results


async def _disk_edges(here: PrivateCache, raw: _RawFile, rows: Sequence[Bytes], rounds: int) -> list[Result]:
    slots = here.cache.slots(Tier.DISK)
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

    async def bare_write() -> float:
        return await timed(asyncio.to_thread(raw.write, random.choice(raw.places)))

    for place in raw.places[::BATCH]:  # the first write of a place is slower than all others
        await write()
        raw.write(place)
    works = {"host>disk": (write, bare_write), "disk>host": (read, lambda: timed(raw.read()))}
    nbytes = slots * here.cache.block_bytes
    return [await _rate(f"tiers.{edge}", rows, rounds, *each, disk_bytes=nbytes) for edge, each in works.items()]


async def _sustained(here: PrivateCache, raw: _RawFile, rows: Sequence[Bytes], rounds: int) -> Result:
    """Measures stores of four times the host tier into full tiers, so that each stored block sends a block to disk."""
    slots = here.cache.slots(Tier.HOST)
    places, times = cycle(raw.places[::BATCH]), 4 * slots // BATCH

    async def store() -> float:
        return sum([await here.put(rows) for _ in range(times)])

    async def bare_store() -> float:
        return await timed(asyncio.to_thread(raw.write_all, islice(places, times)))

    nbytes = slots * here.cache.block_bytes
    return await _rate("tiers.sustained", rows, rounds, store, bare_store, times=times, host_bytes=nbytes)


# -- events ------------------------------------------------------------------------------------------------------------


async def events(watchers: int, rounds: int, puts: int) -> list[Result]:
    """Measures block changes a second until the last watcher has decoded all of them; the floor has no watchers.

    A round puts and drops chains of 256 blocks; every fourth chain moves in between. Every watcher is a process.
    Raises :class:`DaemonError` if a watcher misses a change.
    """
    blocks = 256
    rows, changes = _rows(PAGE)[:1] * blocks, (2 * puts + puts // 4) * blocks
    spawn = multiprocessing.get_context("spawn")
    # The watchers end with the daemon: Ctrl-C is for this process alone.
    with spawn.Pool(watchers, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as processes:
        async with private_cache(replay_spec(PAGE), dict.fromkeys((Tier.DEVICE, Tier.HOST), 4 * blocks)) as here:

            async def store() -> None:
                for number in range(1, puts + 1):
                    chain = new_chain(blocks)
                    await here.cache.put(chain, rows, tier=Tier.DEVICE)
                    if number % 4 == 0:
                        await here.move(chain, Tier.HOST)
                    await here.cache.drop(chain[:1])

            async def watched() -> float:
                stats = await here.client.stats()
                each = here.client.address, Cursor(stats.epoch, stats.last_event_id), changes
                watching = asyncio.to_thread(processes.starmap, watch, [each] * watchers, 1)
                return await timed(asyncio.gather(store(), watching))

            ours, floor = await interleaved(rounds, watched, lambda: timed(store()))
    params = {"watchers": watchers, "changes": changes}
    return [Result("events.changes", params, changes / ours, "changes/s", changes / floor)]


_runner: Final = cache(asyncio.Runner)
"""Gives the same loop to all rounds: gRPC goes on polling the first loop of a process."""


def watch(address: str, since: Cursor, changes: int) -> None:
    """Decodes block changes, in a process that does so in every round."""

    async def follow() -> None:
        seen = 0
        async with await aio.connect(address, timeout=60) as client, client.watch(since=since, breaks=True) as watching:
            while seen < changes:
                item = await anext(watching)
                if not isinstance(item, Event):
                    raise DaemonError(f"a watcher missed changes after {seen} of {changes}: {item}", reason="BENCH")
                seen += len(item.keys)

    _runner().run(follow())


# -- scale -------------------------------------------------------------------------------------------------------------


async def scale(counts: Sequence[int], rounds: int, on_disk: int) -> list[Result]:
    """Measures the cost of a block of 4 KiB in calls of 64, with ``counts`` blocks in the cache; the floor is the
    smallest count. Then the daemon's memory a block, and the time from a start to the first answer about blocks on
    disk."""
    results, works = list[Result](), dict[str, list[BenchWork]](acquire=[], store=[])
    async with AsyncExitStack() as stack:
        for blocks in counts:
            here = await stack.enter_async_context(private_cache(replay_spec(PAGE), {Tier.HOST: blocks}))
            await here.fill(blocks // 10)
            before, more = _anonymous_bytes(here), blocks - blocks // 10
            last = await here.fill(more)
            works["acquire"].append(partial(_acquire, here, last[:BATCH]))
            works["store"].append(partial(_evict, here))
            memory = (_anonymous_bytes(here) - before) / more
            results.append(Result("scale.memory", {"blocks": blocks}, memory, "bytes/block"))
        for name, each in works.items():
            costs = [1e6 * seconds / BATCH for seconds in await interleaved(rounds, *each)]
            for blocks, cost in zip(counts, costs, strict=True):
                results.append(Result(f"scale.{name}", {"blocks": blocks}, cost, "us/block", costs[0]))
    return [*results, Result("scale.restart", {"blocks": on_disk}, await _restart(on_disk), "s")]


async def _evict(here: PrivateCache) -> float:
    return await timed(here.commit(new_chain()))


async def _acquire(here: PrivateCache, chain: list[bytes]) -> float:
    started = time.perf_counter()
    async with here.cache.acquire(chain, Tier.HOST, min_blocks=len(chain)):
        pass
    return time.perf_counter() - started


async def _restart(blocks: int) -> float:
    slots = {Tier.HOST: max(blocks // 16, 2 * _FILL), Tier.DISK: blocks}
    async with private_cache(replay_spec(PAGE), slots) as here:
        last = await here.fill(blocks, Tier.DISK)
        await here.daemon.stop(_STOP_S)
        started = time.perf_counter()
        await here.daemon.start()
        async with await aio.connect(here.daemon.address) as client:
            cache = await client.open_cache(CACHE, replay_spec(PAGE))
            if (await cache.match(last)).blocks != len(last):
                raise DaemonError("blocks on disk are not found after the restart", reason="BENCH")
            return time.perf_counter() - started


def _anonymous_bytes(here: PrivateCache) -> int:
    """Resident memory of the daemon, without files and arenas."""
    lines = Path(f"/proc/{here.daemon.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))
