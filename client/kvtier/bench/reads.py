"""Reads without a call, by both clients: the second half of ``kvtier bench client``.

A long chain is looked up among a million blocks. They stand in an index that the daemon's own writer made in a file: to
store them through a daemon would take minutes.
"""

from __future__ import annotations

import asyncio
import hashlib
import mmap
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtier import sync, transfer
from kvtier.abi.key_index import IndexReader
from kvtier.abi.keys import KEY_BYTES, chain_keys
from kvtier.abi.layout import ArenaLayout
from kvtier.bench.bare import bare_server
from kvtier.bench.place import BLOCK_STEP, CACHE, Place, chains, place, scatter, spec_of
from kvtier.bench.result import Result
from kvtier.bench.rounds import interleaved, timed
from kvtier.errors import DaemonError
from kvtier.private import TierSlots
from kvtier.tensors import Bytes
from kvtier.types import Tier

BLOCKS: Final = 8_192
ENTRIES: Final = 1_000_000
BATCH: Final = 64
TIER: Final = Tier.HOST
_SMALL: Final = 4096
_KNOWN: Final = 8
"""Chains that are read in turn, so few that a client remembers where they were."""
_SMALL_ENOUGH: Final = 64 << 10


@dataclass(slots=True, frozen=True)
class Options:
    """``entries``: of the index in which the long chain is looked up."""

    block_bytes: Sequence[int] = (64 << 10, 1 << 20)
    rounds: int = 40
    entries: int = ENTRIES


async def run(options: Options) -> AsyncIterator[Result]:
    async for result in _lookups(options):
        yield result
    async for result in _keys_of_tokens(options):
        yield result
    for block_bytes in options.block_bytes:
        slots = TierSlots(device=0, host=BATCH * _chains_of(block_bytes), disk=0)
        async with place(spec_of(block_bytes), slots) as here:
            async for result in _gets(here, options):
                yield result


async def _lookups(options: Options) -> AsyncIterator[Result]:
    """Of ``BLOCKS`` chained keys. Floor: an empty call to a bare server."""
    slots = TierSlots(device=0, host=BATCH, disk=0)
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as directory:
        stored, index = await _large_index(Path(directory), options.entries)
        async with place(spec_of(_SMALL), slots) as here, bare_server(Path(directory)) as bare:
            with sync.Client(here.client.address) as client:
                cache = client.open_cache(CACHE, spec_of(_SMALL))
                cache.arena.index = index
                for name, verb, part in (
                    ("prefix_length.all", cache.prefix_length, 1.0),
                    ("prefix_length.half", cache.prefix_length, 0.5),
                    ("prefix_length.none", cache.prefix_length, 0.0),
                    ("match.long", cache.match, 1.0),
                    ("locate", cache.locate, 1.0),
                ):
                    ours = _round(verb, _parts_of(stored, part))
                    paired = await interleaved(ours, lambda: timed(bare.call()), options.rounds)
                    yield paired.time(f"client.{name}", {"blocks": BLOCKS, "entries": len(stored)})


async def _keys_of_tokens(options: Options) -> AsyncIterator[Result]:
    """Token ids to keys. Floor: the same hashes of the same bytes, without a parent."""
    tokens = np.random.default_rng(1).integers(0, 1 << 17, BLOCKS * BLOCK_STEP, dtype=np.uint32)
    data = bytes(KEY_BYTES + 4 * BLOCK_STEP)

    def hashes() -> None:
        for _ in range(BLOCKS):
            hashlib.sha256(data).digest()

    async def ours() -> float:
        return _seconds(lambda: chain_keys(tokens, BLOCK_STEP))

    async def floor() -> float:
        return _seconds(hashes)

    yield (await interleaved(ours, floor, options.rounds)).time(
        "client.keys", {"tokens": len(tokens), "blocks": BLOCKS}
    )


async def _gets(here: Place, options: Options) -> AsyncIterator[Result]:
    """Of 64 blocks of the host tier into arrays that are there. Floor: the copy alone, with the same primitive, from
    such slots into the same arrays. Every round reads other blocks than the one before, so neither finds them in the
    processor's caches."""
    await scatter(here.cache, TIER)
    block_bytes = here.cache.block_bytes
    rows = np.empty((BATCH, block_bytes), dtype=np.uint8)
    rows[:] = np.random.default_rng(1).integers(0, 256, block_bytes, dtype=np.uint8)
    stored: list[tuple[bytes, NDArray[np.intp]]] = []
    for chain in islice(chains(BATCH), _chains_of(block_bytes)):
        await here.cache.put(chain, rows, tier=TIER)
        slots = [place.host_slot or 0 for place in await here.cache.locate(chain)]
        stored.append((b"".join(chain), np.array(slots, dtype=np.intp)))
    with sync.Client(here.client.address) as client:
        cache = client.open_cache(CACHE, spec_of(block_bytes))
        pools = cache.arena.pools(TIER, 0)

        async def waited_for(packed: bytes) -> float:
            return _seconds(lambda: cache.get(packed, rows, tier=TIER))

        async def awaited(packed: bytes) -> float:
            return await timed(here.cache.get(packed, rows, tier=TIER))

        async def floor(slots: NDArray[np.intp]) -> float:
            return _seconds(lambda: transfer.out_of_slots(pools, slots, rows))

        known, every = stored[:_KNOWN], stored
        for name, get, chosen in (
            ("sync", waited_for, known),
            ("async", awaited, known),
            ("sync, first time", waited_for, every),
        ):
            if len(every) == len(known) and chosen is every:
                continue
            ours_next, floor_next = cycle(chosen), cycle(chosen[len(chosen) // 2 :] + chosen[: len(chosen) // 2])
            paired = await interleaved(
                lambda get=get, chain=ours_next: get(next(chain)[0]),  # type: ignore[misc]
                lambda chain=floor_next: floor(next(chain)[1]),  # type: ignore[misc]
                4 * options.rounds,
            )
            params = {"block_bytes": block_bytes, "blocks": BATCH, "tier": str(TIER), "client": name}
            yield paired.rate("client.get", params, BATCH * block_bytes)
        cache.close()


def _chains_of(block_bytes: int) -> int:
    """How many chains are stored: of small blocks more than a client remembers the places of."""
    return 20 if block_bytes <= _SMALL_ENOUGH else 2


async def _large_index(directory: Path, entries: int) -> tuple[Bytes, IndexReader]:
    """So many keys and an index of them all."""
    stored = np.random.default_rng(1).integers(0, 256, (entries, KEY_BYTES), dtype=np.uint8)
    keys, control = directory / "keys", directory / "control"
    stored.tofile(keys)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvtierd.bench.key_index", str(keys), str(control)
    )
    if await process.wait():
        raise DaemonError("the index was not made", reason="BENCH")
    with control.open("rb") as file:
        segment = np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), dtype=np.uint8)
    segment[:: mmap.PAGESIZE].sum()  # maps every page, as they are for a client that has read for some time
    return stored, IndexReader(ArenaLayout.read(segment), segment)


def _parts_of(stored: Bytes, part: float) -> Callable[[], bytes]:
    """Chains of which so large a part is stored, each of other keys: what a cache has not seen just now."""
    rng = np.random.default_rng(2)
    there = int(part * BLOCKS)

    def chain() -> bytes:
        first = int(rng.integers(len(stored) - BLOCKS + 1))
        absent: bytes = rng.bytes((BLOCKS - there) * KEY_BYTES)
        return stored[first : first + there].tobytes() + absent

    return chain


def _round(verb: Callable[[bytes], object], chain: Callable[[], bytes]) -> Callable[[], Any]:
    async def round() -> float:
        packed = chain()
        return _seconds(lambda: verb(packed))

    return round


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
