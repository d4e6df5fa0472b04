"""Engines whose kernels write and read slots while the daemon swaps blocks between all tiers, for want of room.

Each word of each block is checked: by a kernel where a block lies on the device, else in the arrays it came out in.
"""

import asyncio
import random
from collections import Counter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier import BlockResult, Cache, CacheSpec, DeadlineExceeded, PoolSpec, Tier, TierFull, WindowGroupSpec, connect
from kvtier.abi.words import TIERS
from kvtier.deadline import Stream
from tests import devices
from tests.gpu.kernels import WORD, Kernels, pattern
from tests.integration.torture_blocks import CHAIN_BLOCKS, chain
from tests.integration.waiting import PATIENCE_S

_LAYERS: Final = 2 if devices.ON_FAKE else 32
SPEC: Final = CacheSpec(
    model="race",
    dtype="uint8",
    tokens_per_block=16,
    groups=(WindowGroupSpec(pools=(PoolSpec(_LAYERS, 4, 256), PoolSpec(1, 1, 520))),),
)
"""On a GPU 1 MiB and a bit: copies that kernels can overtake."""
SLOT_BYTES: Final = SPEC.record_bytes(0)
BLOCK_WORDS: Final = SPEC.block_bytes(0) // WORD
SIZES: Final = {Tier.DEVICE: 24 * SLOT_BYTES, Tier.HOST: 32 * SLOT_BYTES, Tier.DISK: 160 * SLOT_BYTES}
_CHAINS: Final = 30
"""Of their 180 blocks some are always dropped from the disk for others."""
_CALL_S: Final = 3 * PATIENCE_S
_REFUSED: Final = (TierFull, DeadlineExceeded)
"""No fault of anybody: others hold the slots."""


def content(key: bytes) -> NDArray[np.uint8]:
    """A block as kernels write it."""
    return pattern(key, 0, BLOCK_WORDS).view(np.uint8)


def wrong_words(key: bytes, block: NDArray[np.uint8]) -> int:
    return int(np.count_nonzero(block.view(np.uint64) != content(key).view(np.uint64)))


class Race:
    """Engines on one cache, each with a stream of its own. ``tally`` counts what they did; a wrong word is raised."""

    def __init__(self, address: str, kernels: Kernels, seed: int) -> None:
        self.tally: Counter[str] = Counter()
        self._address = address
        self._kernels = kernels
        self._random = random.Random(seed)

    async def run(self, engines: int, turns: int) -> Counter[str]:
        """Each engine takes so many turns."""
        async with asyncio.TaskGroup() as group:
            for _ in range(engines):
                group.create_task(self._play(turns))
        return self.tally

    async def _play(self, turns: int) -> None:
        parts = (self._write, self._write, self._read, self._read, self._read, self._put, self._get, self._move)
        stream = self._kernels.stream()
        async with await connect(self._address, timeout=_CALL_S, wait=_CALL_S) as client:
            cache = await client.open_cache("race", SPEC)
            for _ in range(turns):
                try:
                    await self._random.choice(parts)(cache, stream)
                except _REFUSED:
                    self.tally["refused"] += 1

    def _some(self) -> list[bytes]:
        return chain(self._random.randrange(_CHAINS))[: self._random.randint(1, CHAIN_BLOCKS)]

    async def _write(self, cache: Cache, stream: Stream) -> None:
        keys = self._some()
        lease = await cache.reserve(len(keys), Tier.DEVICE)
        for index, key in enumerate(keys):
            self._kernels.write(lease.view(index), key, stream)
        self._stored(await lease.commit(keys, release=True, stream=stream), "written")

    async def _read(self, cache: Cache, stream: Stream) -> None:
        lease = await cache.acquire(self._some(), Tier.DEVICE)
        if not lease.blocks:
            return
        checks = [self._kernels.check(lease.view(index), key, stream) for index, key in enumerate(lease.keys)]
        await lease.release(stream=stream)
        for index, wrong in enumerate(checks):
            assert wrong() == 0, f"{wrong()} of {BLOCK_WORDS} words of block {index} of {len(checks)} are wrong"
        self.tally["checked on the device"] += len(checks)

    async def _put(self, cache: Cache, stream: Stream) -> None:
        keys = self._some()
        blocks = [content(key) for key in keys]
        tier = self._random.choice((Tier.DEVICE, Tier.HOST))
        self._stored(await cache.put(keys, blocks, tier=tier), "put")

    async def _get(self, cache: Cache, stream: Stream) -> None:
        keys = self._some()
        found = await cache.get(keys, tier=self._random.choice((Tier.DEVICE, Tier.HOST)))
        for key, block in zip(keys, found, strict=False):
            assert (wrong := wrong_words(key, block)) == 0, f"{wrong} of {BLOCK_WORDS} words are wrong in an array"
        self.tally["checked in arrays"] += len(found)

    async def _move(self, cache: Cache, stream: Stream) -> None:
        await cache.move(self._some(), self._random.choice(tuple(TIERS)))

    def _stored(self, results: list[BlockResult], how: str) -> None:
        assert set(results) <= {BlockResult.OK, BlockResult.EXISTS, BlockResult.PARENT_MISSING, BlockResult.NO_ROOM}
        self.tally[how] += results.count(BlockResult.OK)
