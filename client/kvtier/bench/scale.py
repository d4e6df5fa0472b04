"""``kvtier bench scale``: what a block costs among 10^4, 10^5 and 10^6 others."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvtier import aio
from kvtier.bench.place import CACHE, Place, chains, place, spec_of
from kvtier.bench.result import Result, spread
from kvtier.bench.rounds import WARM_UP, timed
from kvtier.cache import Cache
from kvtier.errors import DaemonError
from kvtier.private import PrivateDaemon, TierSlots
from kvtier.types import Tier

BLOCK_BYTES: Final = 4096
"""A page, the least that a slot takes: what is measured is the bookkeeping."""
CHAIN: Final = 64
_FILL: Final = 1024
"""Blocks of a call that only fills."""
_KEPT: Final = 256
"""Chains of each cache that are looked at."""
_WORKED: Final = 30
"""Chains of so many blocks that a daemon has had before its memory is looked at: their events fill the ring that is
kept in memory, and its journals, its threads' arenas and what LMDB keeps are as large as work alone makes them."""
_STOP_TIMEOUT_S: Final = 600.0
_HOST_PART: Final = 16
"""With a disk, the host has this part of its slots: as in ``kvtierd.bench.core``."""


@dataclass(slots=True, frozen=True)
class Options:
    """``disk``: measured with a disk tier, too. ``directory``: where that goes; None = the system's place for temporary
    files."""

    blocks: Sequence[int] = (10_000, 100_000, 1_000_000)
    rounds: int = 100
    disk: bool = True
    directory: Path | None = None


async def run(options: Options) -> AsyncIterator[Result]:
    """The floor of every size is the smallest one, so that the ratio says how the cost grows."""
    async for result in _core(options):
        yield result
    async for result in _client(options):
        yield result
    for blocks in options.blocks if options.disk else ():
        async for result in _restart(blocks, options.directory):
            yield result


# -- the core ----------------------------------------------------------------------------------------------------------


async def _core(options: Options) -> AsyncIterator[Result]:
    """CPU time, measured inside a process of the daemon's package: this one may not import it."""
    for flags in ((), ("--disk",)) if options.disk else ((),):
        smallest: dict[str, float] = {}
        for blocks in options.blocks:
            told = await _told("kvtierd.bench.core", "--blocks", str(blocks), *flags)
            params = {"blocks": blocks, "tiers": told["tiers"]}
            for name, value in told["us"].items():
                yield Result(f"scale.core.{name}", params, value, "us/block", smallest.setdefault(name, value))
            yield Result("scale.core.memory", params, told["bytes"], "bytes/block")


async def _told(module: str, *arguments: str) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments), stdout=asyncio.subprocess.PIPE
    )
    said, _ = await process.communicate()
    if process.returncode:
        raise DaemonError(f"{module} ended with status {process.returncode}", reason="BENCH")
    told: dict[str, Any] = json.loads(said)
    return told


# -- through the client ------------------------------------------------------------------------------------------------


@dataclass(slots=True, frozen=True)
class _Memory:
    """Bytes of the daemon. ``itself``: what it took by working, beyond one that has just started. ``a_block``: what
    each further block took."""

    itself: int
    a_block: float

    def results(self, params: dict[str, Any]) -> Iterator[Result]:
        yield Result("scale.daemon.itself", params, self.itself / 2**20, "MiB")
        yield Result("scale.daemon.memory", params, self.a_block, "bytes/block")


@dataclass(slots=True)
class _Full:
    """A cache whose only tier is full. ``kept``: chains in it; ``fresh``: keys never used before."""

    here: Place
    blocks: int
    memory: _Memory
    kept: list[list[bytes]]
    fresh: Callable[[], list[bytes]]
    times: dict[str, list[float]] = field(default_factory=dict)


async def _client(options: Options) -> AsyncIterator[Result]:
    """All sizes at once, each in a daemon of its own, measured in turn."""
    async with AsyncExitStack() as stack:
        full = []
        for blocks in options.blocks:
            slots = TierSlots(device=0, host=blocks, disk=0)
            full.append(await _filled(await stack.enter_async_context(place(spec_of(BLOCK_BYTES), slots)), blocks))
        for name in _VERBS:
            await _in_turn(full, name, options.rounds)
        for name in _VERBS:
            smallest = None
            for each in full:
                params = {"blocks": each.blocks, "rounds": options.rounds, "spread": spread(each.times[name])}
                value = 1e6 * statistics.median(each.times[name]) / CHAIN
                smallest = smallest or value
                yield Result(f"scale.client.{name}", params, value, "us/block", smallest)
        for each in full:
            for result in each.memory.results({"blocks": each.blocks, "tiers": "host"}):
                yield result


async def _filled(here: Place, blocks: int) -> _Full:
    fresh = _daemon_bytes(here)
    source = chains(_FILL)
    kept = [(await _worked(here, source))[:CHAIN]]
    worked = _daemon_bytes(here)
    for start in range(_FILL, blocks, _FILL):
        chain = next(source)[: min(_FILL, blocks - start)]
        await _store(here.cache, chain)
        kept.append(chain[:CHAIN])
    memory = _Memory(worked - fresh, (_daemon_bytes(here) - worked) / (blocks - _FILL))
    # Of the newer half, the newest at most: what is measured later makes room at the other end.
    newest = kept[max(len(kept) // 2, len(kept) - _KEPT) :]
    short = chains(CHAIN)
    return _Full(here, blocks, memory, newest, lambda: [key[::-1] for key in next(short)])


async def _worked(here: Place, source: Iterator[list[bytes]], *, disk: bool = False) -> list[bytes]:
    """Has the daemon do all that is done to blocks, over and over. The last of them are there after it."""
    chain: list[bytes] = []
    for _ in range(_WORKED):
        if chain:
            await here.cache.drop(chain[:1])
        chain = next(source)
        await _store(here.cache, chain)
        if disk:
            await here.cache.move(chain, Tier.DISK)
            await _hold(here.cache, chain)
    return chain


async def _in_turn(full: Sequence[_Full], name: str, rounds: int) -> None:
    order = random.Random(1)
    for turn in range(rounds + WARM_UP):
        for each in order.sample(full, len(full)):
            chain = order.choice(each.kept) if name in _OF_KEPT else each.fresh()
            seconds = await timed(_VERBS[name](each.here.cache, chain))
            if name == "commit":
                await each.here.cache.drop(chain[:1])
            if turn >= WARM_UP:
                each.times.setdefault(name, []).append(seconds)


async def _match(cache: Cache, chain: list[bytes]) -> None:
    await cache.match(chain)


async def _hold(cache: Cache, chain: list[bytes]) -> None:
    async with cache.acquire(chain, Tier.HOST, min_blocks=len(chain)):
        pass


async def _store(cache: Cache, chain: list[bytes]) -> None:
    """Reserve, commit, release; the bytes are whatever the slots hold."""
    async with cache.reserve(len(chain), Tier.HOST) as lease:
        await lease.commit(chain)


_OF_KEPT: Final = frozenset({"match", "acquire_release"})
_VERBS: Final[Mapping[str, Callable[[Cache, list[bytes]], Awaitable[None]]]] = {
    "match": _match,
    "acquire_release": _hold,
    "commit": _store,  # where room is: what was stored is dropped again
    "evict": _store,  # where none is
}


# -- the restart -------------------------------------------------------------------------------------------------------


async def _restart(blocks: int, directory: Path | None) -> AsyncIterator[Result]:
    """A clean stop and a start with a full disk tier, up to the first answered match. The floor starts with nothing."""
    host = max(blocks // _HOST_PART, 2 * _FILL)
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=directory) as kept:
        async with place(spec_of(BLOCK_BYTES), TierSlots(0, host, blocks), keep=Path(kept)) as here:
            fresh = _daemon_bytes(here)
            source = chains(_FILL)
            last = await _worked(here, source, disk=True)
            worked, first = _daemon_bytes(here), await _stored(here)
            for _ in range((blocks + host) // _FILL - 1):
                last = next(source)
                await _store(here.cache, last)
            await here.cache.move(last, Tier.DISK)
            params = {"blocks": blocks, "tiers": "host, disk"}
            stored = await _stored(here)
            memory = _Memory(worked - fresh, (_daemon_bytes(here) - worked) / (stored - first))
            for result in memory.results(params | {"stored": stored}):
                yield result
            daemon = _daemon(here)
            yield Result("scale.stop", params, await timed(daemon.stop(_STOP_TIMEOUT_S)), "s")
            seconds = await timed(_serving_again(daemon, last))
    async with PrivateDaemon({Tier.HOST: BLOCK_BYTES}) as empty:
        await empty.stop()
        floor = await timed(empty.start())
    yield Result("scale.restart", params, seconds, "s", floor)


async def _serving_again(daemon: PrivateDaemon, chain: list[bytes]) -> None:
    await daemon.start()
    async with await aio.connect(daemon.address) as client:
        cache = await client.open_cache(CACHE, spec_of(BLOCK_BYTES))
        if (await cache.match(chain)).blocks != len(chain):
            raise DaemonError("what was on disk before the restart is not found after it", reason="BENCH")


async def _stored(here: Place) -> int:
    return next(cache.blocks for cache in (await here.client.stats()).caches if cache.name == CACHE)


def _daemon(here: Place) -> PrivateDaemon:
    if here.daemon is None:
        raise DaemonError("only a private daemon can be measured so", reason="BENCH")
    return here.daemon


def _daemon_bytes(here: Place) -> int:
    """Resident memory of the daemon that is no file's and no arena's."""
    for line in Path(f"/proc/{_daemon(here).pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise DaemonError("the kernel does not tell RssAnon", reason="BENCH")
