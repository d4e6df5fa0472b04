"""What kvtier costs on this machine: the client, the tiers, events, and many blocks."""

from __future__ import annotations

import asyncio
import hashlib
import mmap
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from itertools import count, cycle, islice, product
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
from kvtier.memory.arrays import Bytes
from kvtier.replay.private import PrivateDaemon, TierSlots
from kvtier.replay.trace import replay_spec
from kvtier.types import BlockResult, CacheOptions, Cursor, Tier
from kvtier.wire import Keys

CACHE: Final = "kvtier-bench"
BATCH: Final = 64
"""Blocks of a measured call."""
PAGE: Final = 4096
"""The least that a slot takes: with such blocks the bookkeeping is measured."""
_ROOM: Final = 4
"""Times so many blocks are the slots of the host tier that a client is measured with."""
_FILL: Final = 1024
"""Blocks of a call that only fills."""
_FRESH: Final = 5
"""Rounds that each start a daemon."""
_FEW: Final = 20
"""Puts of a round that is too short by itself."""
_WARM_UP: Final = 2
"""Rounds that do not count: they map pages and fill caches."""
_SYNC_BLOCKS: Final = 32
"""Blocks that the daemon writes between two calls of ``fdatasync``, and that a thread of it reads at a time."""
_STOP_S: Final = 600.0

Work = Callable[[], Awaitable[float]]
"""Does one round and returns the seconds that count."""


@dataclass(slots=True, frozen=True)
class Result:
    """One figure: of a rate, more is better; of a time or a size, less.

    ``params``: what was measured. ``floor``: the same work without kvtier, or at the smallest size, if there is such.
    """

    name: str
    params: Mapping[str, Any]
    value: float
    unit: str
    floor: float | None = None

    @classmethod
    def rate(cls, name: str, params: Mapping[str, Any], nbytes: int, ours: float, floor: float) -> Result:
        """Of rounds that move ``nbytes`` in so many seconds."""
        return cls(name, params, nbytes / ours / (1 << 20), "MiB/s", nbytes / floor / (1 << 20))

    @property
    def ratio(self) -> float | None:
        return self.value / self.floor if self.floor else None


@dataclass(slots=True, frozen=True)
class Place:
    """A cache of its own in a private daemon."""

    client: aio.AsyncClient
    cache: Cache
    daemon: PrivateDaemon

    def slots(self, tier: Tier, slots: Sequence[int]) -> list[Bytes]:
        return [view for slot in slots for view in self.cache.arena.view(tier, 0, slot, write=True)]

    async def move(self, keys: Sequence[bytes], to: Tier) -> None:
        results = await self.cache.move(keys, to)
        if set(results) != {BlockResult.OK}:
            raise DaemonError(f"blocks could not be moved to {to}: {set(map(str, results))}", reason="BENCH")


@asynccontextmanager
async def place(
    spec: CacheSpec, slots: TierSlots, *, options: CacheOptions | None = None, **wanted: Any
) -> AsyncIterator[Place]:
    """A private daemon with one cache that has all its slots. ``wanted``: of :class:`PrivateDaemon`."""
    async with (
        PrivateDaemon(slots.as_bytes(spec), **wanted) as daemon,
        await aio.connect(daemon.address, timeout=600) as client,
    ):
        yield Place(client, await client.open_cache(CACHE, spec, options=options), daemon)


def chains(blocks: int = BATCH) -> Iterator[list[bytes]]:
    """Chains of so many keys each; no key comes twice."""
    for number in count():
        yield [hashlib.sha256(f"{number}/{index}".encode()).digest() for index in range(blocks)]


async def interleaved(rounds: int, *works: Work) -> list[float]:
    """The median seconds of each work. A round does every work once; their order rotates, so that none always finds
    what another left in the processor's caches."""
    times: list[list[float]] = [[] for _ in works]
    for turn in range(rounds + _WARM_UP):
        for first in range(len(works)):
            chosen = (turn + first) % len(works)
            times[chosen].append(await works[chosen]())
    return [statistics.median(each[_WARM_UP:]) for each in times]


async def timed(work: Awaitable[object]) -> float:
    """The seconds that it takes."""
    started = time.perf_counter()
    await work
    return time.perf_counter() - started


def _rows(block_bytes: int) -> list[Bytes]:
    return list(np.random.default_rng(1).integers(0, 256, (BATCH, block_bytes), dtype=np.uint8))


def _memcpy(source: Sequence[Bytes], target: Sequence[Bytes]) -> float:
    """Seconds of one thread's copies, block by block."""
    started = time.perf_counter()
    for read, written in zip(source, target, strict=True):
        np.copyto(written, read)
    return time.perf_counter() - started


# -- client ------------------------------------------------------------------------------------------------------------


async def client(sizes: Sequence[int], rounds: int, keys: int) -> AsyncIterator[Result]:
    """First fill, store and first get of 64 blocks of host memory, and the prefix length of so many keys among as many
    others."""
    for block_bytes in sizes:
        yield await _first_fill(block_bytes, min(rounds, _FRESH))
    for block_bytes, checksum in product(sizes, ("disk", "commit")):
        options = CacheOptions(checksum=checksum)
        async with place(replay_spec(block_bytes), TierSlots(0, _ROOM * BATCH, 0), options=options) as here:
            for result in await _copies(here, {"block_bytes": block_bytes, "checksum": checksum}, rounds):
                yield result
    for block_bytes in sizes:
        async with place(replay_spec(block_bytes), TierSlots(0, _ROOM * BATCH, 0)) as here:
            yield await _full_store(here, rounds)
    for block_bytes in sizes:
        async with place(replay_spec(block_bytes), TierSlots(0, _ROOM * BATCH, 0)) as here:
            for result in await _one_put(here, max(rounds, _FEW)):
                yield result
    async with place(replay_spec(PAGE), TierSlots(0, 2 * keys, 0)) as here:
        stored = list(islice(chains(keys), 2))
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

            packed, listed = await interleaved(rounds, lambda: length(b"".join), lambda: length(list))
        yield Result("client.prefix_length", {"keys": keys, "as": "bytes"}, 1e6 * packed, "us")
        yield Result("client.prefix_length", {"keys": keys, "as": "list"}, 1e6 * listed, "us")


async def _first_fill(block_bytes: int, rounds: int) -> Result:
    """Slots that nobody has touched, of a daemon that has just started, beside one thread's copy into as much memory
    that has its pages."""
    rows, fresh = _rows(block_bytes), chains()
    room = empty((_ROOM, BATCH, block_bytes))
    places = cycle(room)

    async def fill() -> float:
        async with place(replay_spec(block_bytes), TierSlots(0, _ROOM * BATCH, 0)) as here:
            return await timed(here.cache.put(next(fresh), rows, tier=Tier.HOST))

    async def bare() -> float:
        return _memcpy(rows, next(places))

    params = {"block_bytes": block_bytes}
    return Result.rate("client.first_fill", params, BATCH * block_bytes, *await interleaved(rounds, fill, bare))


async def _copies(here: Place, params: Mapping[str, Any], rounds: int) -> list[Result]:
    block_bytes = here.cache.block_bytes
    rows, out, fresh = _rows(block_bytes), _rows(block_bytes), chains()

    @asynccontextmanager
    async def stored() -> AsyncIterator[list[bytes]]:
        """A new chain, so that every get is the first of its blocks."""
        chain = next(fresh)
        await here.cache.put(chain, rows, tier=Tier.HOST)
        yield chain
        await here.cache.drop(chain[:1])

    async def store() -> float:
        started = time.perf_counter()
        async with stored():
            return time.perf_counter() - started

    async def bare_store() -> float:
        async with here.cache.reserve(BATCH, Tier.HOST) as lease:
            return _memcpy(rows, here.slots(Tier.HOST, lease.slots))

    async def get() -> float:
        async with stored() as chain:
            return await timed(here.cache.get(chain, out, tier=Tier.HOST))

    async def bare_get() -> float:
        async with stored() as chain, here.cache.acquire(chain, Tier.HOST, min_blocks=BATCH) as lease:
            return _memcpy(here.slots(Tier.HOST, lease.slots), out)

    nbytes = BATCH * block_bytes
    return [
        Result.rate("client.store", params, nbytes, *await interleaved(rounds, store, bare_store)),
        Result.rate("client.get", params, nbytes, *await interleaved(rounds, get, bare_get)),
    ]


async def _full_store(here: Place, rounds: int) -> Result:
    """Into a full tier, where each chain evicts another, beside one thread's copy into as much memory."""
    rows, fresh = _rows(here.cache.block_bytes), chains()
    places = cycle(empty((_ROOM, BATCH, here.cache.block_bytes)))

    async def store() -> float:
        return await timed(here.cache.put(next(fresh), rows, tier=Tier.HOST))

    async def bare() -> float:
        return _memcpy(rows, next(places))

    for _ in range(_ROOM):
        await store()
    params = {"block_bytes": here.cache.block_bytes}
    nbytes = BATCH * here.cache.block_bytes
    return Result.rate("client.store_full", params, nbytes, *await interleaved(rounds, store, bare))


async def _one_put(here: Place, rounds: int) -> list[Result]:
    """A put of one block, and by itself each step of it; then the daemon's CPU for each of 64 blocks. The floor of a
    call is one that finds nothing to do, of the whole two of those and the copy."""
    rows, fresh = _rows(here.cache.block_bytes), chains(1)
    many, steps = chains(), deque[tuple[float, float, float]]()

    async def put() -> float:
        return await timed(here.cache.put(next(fresh), rows[:1], tier=Tier.HOST))

    async def in_steps() -> float:
        began = time.perf_counter()
        async with here.cache.reserve(1, Tier.HOST) as lease:
            reserved = time.perf_counter()
            copied = reserved + _memcpy(rows[:1], here.slots(Tier.HOST, lease.slots))
            told = time.perf_counter()
            await lease.commit(next(fresh), release=True)
            steps.append((reserved - began, copied - reserved, time.perf_counter() - told))
        return time.perf_counter() - began

    async def bare() -> float:
        return await timed(here.cache.set_retention([], 0))

    async def daemon_cpu() -> float:
        clock = ~here.daemon.pid << 3 | 2  # clock_getcpuclockid(3)
        before = time.clock_gettime(clock)
        for _ in range(_FEW):
            await here.cache.put(next(many), rows, tier=Tier.HOST)
        return (time.clock_gettime(clock) - before) / _FEW / BATCH

    params = {"block_bytes": here.cache.block_bytes}
    whole, _, call = await interleaved(rounds, put, in_steps, bare)
    (cpu,) = await interleaved(_FEW, daemon_cpu)
    reserve, copy, commit = (1e6 * statistics.median(step) for step in zip(*steps, strict=True))
    return [
        Result("client.put_one", params, 1e6 * whole, "us", copy + 2e6 * call),
        Result("client.put_one.reserve", params, reserve, "us", 1e6 * call),
        Result("client.put_one.commit", params, commit, "us", 1e6 * call),
        Result("client.put_one.copy", params, copy, "us"),
        Result("client.daemon_cpu", params, 1e6 * cpu, "us/block"),
    ]


# -- tiers -------------------------------------------------------------------------------------------------------------


async def tiers(sizes: Sequence[int], rounds: int, disk_bytes: int, directory: Path | None) -> AsyncIterator[Result]:
    """Moves of 64 blocks to and from disk, and stores into full tiers, against a raw file."""
    for block_bytes in sizes:
        slots = TierSlots(0, max(4 * BATCH, disk_bytes // 4 // block_bytes), disk_bytes // block_bytes)
        with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=directory) as kept:
            async with place(replay_spec(block_bytes), slots, keep=Path(kept)) as here:
                for result in await _disk_edges(here, Path(kept) / "raw", rounds):
                    yield result
                yield await _sustained(here, Path(kept) / "raw", min(rounds, 5))


async def _disk_edges(here: Place, raw: Path, rounds: int) -> list[Result]:
    """The raw file is as large as the disk tier, and written and read past the page cache in calls of as many blocks,
    by as many threads, as the daemon has."""
    block_bytes, slots = here.cache.block_bytes, here.cache.slots(Tier.DISK)
    rows, fresh = _rows(block_bytes), chains()
    stored: deque[list[bytes]] = deque(maxlen=max(1, slots // BATCH // 2))

    async def write() -> float:
        chain = next(fresh)
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
        views = [view.data for view in here.slots(Tier.HOST, lease.slots)]
        fd = os.open(raw, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        parts = range(0, BATCH, _SYNC_BLOCKS)

        def write_raw(place: int) -> None:
            for first in parts:
                os.pwritev(fd, views[first : first + _SYNC_BLOCKS], (place + first) * block_bytes)
                os.fdatasync(fd)

        def read_raw(place: int, first: int) -> None:
            os.preadv(fd, views[first : first + _SYNC_BLOCKS], (place + first) * block_bytes)

        async def bare_write() -> float:
            place = random.randrange(slots - BATCH + 1)
            return await timed(asyncio.to_thread(write_raw, place))

        async def bare_read() -> float:
            place = random.randrange(slots - BATCH + 1)
            return await timed(asyncio.gather(*(asyncio.to_thread(read_raw, place, first) for first in parts)))

        for place in range(0, slots - BATCH + 1, BATCH):  # the first write of a place is slower than all others
            await write()
            write_raw(place)
        params = {"block_bytes": block_bytes, "disk_bytes": slots * block_bytes}
        results = [
            Result.rate("tiers.host>disk", params, BATCH * block_bytes, *await interleaved(rounds, write, bare_write)),
            Result.rate("tiers.disk>host", params, BATCH * block_bytes, *await interleaved(rounds, read, bare_read)),
        ]
        os.close(fd)
        return results


async def _sustained(here: Place, raw: Path, rounds: int) -> Result:
    """Stores four times what the host tier holds into full tiers, so that each block stored sends one to disk; against
    the raw file written from its start to its end and synced once."""
    block_bytes, slots = here.cache.block_bytes, here.cache.slots(Tier.DISK)
    batches = 4 * here.cache.slots(Tier.HOST) // BATCH
    rows, fresh = _rows(block_bytes), chains()
    places = cycle(range(0, slots - BATCH + 1, BATCH))
    fd = os.open(raw, os.O_RDWR | os.O_DIRECT)
    with mmap.mmap(-1, BATCH * block_bytes) as pages:
        pages[:] = b"".join(row.tobytes() for row in rows)

        async def store() -> float:
            started = time.perf_counter()
            for chain in islice(fresh, batches):
                await here.cache.put(chain, rows, tier=Tier.HOST)
            return time.perf_counter() - started

        def write_raw() -> None:
            for place in islice(places, batches):
                os.pwrite(fd, pages, place * block_bytes)
            os.fdatasync(fd)

        ours, floor = await interleaved(rounds, store, lambda: timed(asyncio.to_thread(write_raw)))
    os.close(fd)
    params = {"block_bytes": block_bytes, "host_bytes": here.cache.slots(Tier.HOST) * block_bytes}
    return Result.rate("tiers.sustained", params, batches * BATCH * block_bytes, ours, floor)


# -- events ------------------------------------------------------------------------------------------------------------


async def events(watchers: int, rounds: int, puts: int) -> AsyncIterator[Result]:
    """Block changes a second until the last watcher has decoded all of them; the floor is without watchers.

    A round puts and drops chains of 256 blocks, of which every fourth moves in between. Every watcher is a process of
    its own. Raises :class:`DaemonError` if one misses a change.
    """
    blocks = 256
    rows, fresh, changes = _rows(PAGE)[:1] * blocks, chains(blocks), (2 * puts + puts // 4) * blocks
    async with place(replay_spec(PAGE), TierSlots(4 * blocks, 4 * blocks, 0)) as here:
        with ProcessPoolExecutor(watchers, multiprocessing.get_context("spawn")) as processes:

            async def store() -> None:
                for number, chain in enumerate(islice(fresh, puts), 1):
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


@cache
def _runner() -> asyncio.Runner:
    """One for all rounds: gRPC goes on polling the first loop of a process."""
    return asyncio.Runner()


def watch(address: str, since: Cursor, changes: int) -> None:
    """Decodes so many block changes, in a process that does so in every round."""

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


async def scale(counts: Sequence[int], rounds: int, on_disk: int, directory: Path | None) -> AsyncIterator[Result]:
    """What one of 64 blocks of 4 KiB costs among how many others; the floor is the smallest count.

    Then memory of the daemon a block, a start with so many blocks ``on_disk``, and the CPU of the loop's slow callbacks
    while those were stored.
    """
    async with AsyncExitStack() as stack:
        places = [await stack.enter_async_context(place(replay_spec(PAGE), TierSlots(0, each, 0))) for each in counts]
        acquiring, storing = [], []
        for blocks, here in zip(counts, places, strict=True):
            fresh = chains(_FILL)
            await _fill(here, fresh, blocks // 10)
            before = _anonymous_bytes(here)
            last = await _fill(here, fresh, blocks - blocks // 10)
            acquiring.append(_acquiring(here, last[:BATCH]))
            storing.append(_storing(here, fresh))
            memory = (_anonymous_bytes(here) - before) / (blocks - blocks // 10)
            yield Result("scale.memory", {"blocks": blocks}, memory, "bytes/block")
        for name, works in (("acquire", acquiring), ("store", storing)):
            costs = [1e6 * seconds / BATCH for seconds in await interleaved(rounds, *works)]
            for blocks, cost in zip(counts, costs, strict=True):
                yield Result(f"scale.{name}", {"blocks": blocks}, cost, "us/block", costs[0])
    for result in await _restart(on_disk, directory):
        yield result


async def _fill(here: Place, fresh: Iterator[list[bytes]], blocks: int, *, disk: bool = False) -> list[bytes]:
    """Stores so many blocks in chains. Returns the last chain."""
    chain: list[bytes] = []
    for left in range(blocks, 0, -_FILL):
        chain = next(fresh)[:left]
        await _store(here, chain)
        if disk:
            await here.move(chain, Tier.DISK)
    return chain


async def _store(here: Place, chain: list[bytes]) -> None:
    """The bytes are whatever the slots hold."""
    async with here.cache.reserve(len(chain), Tier.HOST) as lease:
        await lease.commit(chain)


async def _acquire(here: Place, chain: list[bytes]) -> None:
    async with here.cache.acquire(chain, Tier.HOST, min_blocks=len(chain)):
        pass


def _acquiring(here: Place, chain: list[bytes]) -> Work:
    return lambda: timed(_acquire(here, chain))


def _storing(here: Place, fresh: Iterator[list[bytes]]) -> Work:
    """The cache is full: each store evicts as many blocks."""
    return lambda: timed(_store(here, next(fresh)[:BATCH]))


async def _restart(blocks: int, directory: Path | None) -> list[Result]:
    """The time from a start to the first answer about blocks on disk."""
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=directory) as kept:
        told, slots = Path(kept) / "callbacks", TierSlots(0, max(blocks // 16, 2 * _FILL), blocks)
        module = ("kvtier.bench.callbacks", str(told))
        async with place(replay_spec(PAGE), slots, keep=Path(kept), module=module) as here:
            last = await _fill(here, chains(_FILL), blocks, disk=True)
            await here.daemon.stop(_STOP_S)
            seconds = await timed(_serving(here.daemon, last))
            return [
                Result("scale.callback.p99.9", {"blocks": blocks}, float(told.read_text()), "us"),
                Result("scale.restart", {"blocks": blocks}, seconds, "s"),
            ]


async def _serving(daemon: PrivateDaemon, chain: list[bytes]) -> None:
    await daemon.start()
    async with await aio.connect(daemon.address) as client:
        cache = await client.open_cache(CACHE, replay_spec(PAGE))
        if (await cache.match(chain)).blocks != len(chain):
            raise DaemonError("what was on disk before the restart is not found after it", reason="BENCH")


def _anonymous_bytes(here: Place) -> int:
    """Resident memory of the daemon that is no file's and no arena's."""
    lines = Path(f"/proc/{here.daemon.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))
