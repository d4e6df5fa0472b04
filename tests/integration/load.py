"""Load: clients that put, get, hold, move and drop chains without end, and look at every byte they are given."""

import asyncio
import random
from collections import Counter
from typing import Final, Self

import numpy as np

from kvtier import BlockResult, Cache, DaemonUnavailable, DeadlineExceeded, LeaseLost, Tier, TierFull, TooShort, connect
from kvtier.abi.words import TIERS
from tests.integration.blocks import SPEC, assert_bytes, block, blocks, chain
from tests.integration.touching import bytes_in, scribble_into

CHAIN_BLOCKS: Final = 12
_CALL_S: Final = 20.0
_HOLD_S: Final = 0.02
HOLDS: Final = (TierFull, DeadlineExceeded, TooShort)
"""No fault of anybody: others hold the slots, or have made the chain shorter."""
_DEATHS: Final = (LeaseLost, DaemonUnavailable)
"""What a caller may see of a daemon that dies: a lease is gone, or an answer that cannot be asked for again."""


class Load:
    """``workers`` clients on an open cache, with ``chains`` chains. ``async with``; a wrong byte is raised at the end.

    A chain that is dropped is never put again: another takes its place, under a name of its own.
    """

    def __init__(self, address: str, name: str, *, chains: int, workers: int, seed: int) -> None:
        self.name = name
        self.done: Counter[str] = Counter()
        """Operations that ended well, by kind; "died" those that a death of the daemon ended. "blocks": compared."""
        self.dropped: set[str] = set()
        """Chains that a drop was asked for."""
        self.acknowledged: set[bytes] = set()
        """Blocks that a move said are on disk."""
        self._address = address
        self._names = [f"{name}/{number}" for number in range(chains)]
        self._rng = random.Random(seed)
        self._workers = workers
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False

    @property
    def living(self) -> list[str]:
        """Chains that have not been dropped."""
        return list(self._names)

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._work(), name=f"{self.name}-{n}") for n in range(self._workers)]
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Lets every worker end what it is at. Raises what went wrong in any of them."""
        self._stopping = True
        if self._tasks:
            async with asyncio.timeout(_CALL_S * 2):
                await asyncio.gather(*self._tasks)

    def check(self) -> None:
        """Raises what has gone wrong so far."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def _work(self) -> None:
        kinds = (self._put, self._get, self._read_in_place, self._reserve_in_vain, self._move, self._drop)
        weights = (8, 8, 5, 1, 2, 1)
        async with await connect(self._address, timeout=_CALL_S, wait=_CALL_S) as client:
            cache = await client.open_cache(self.name, SPEC)
            while not self._stopping:
                (operation,) = self._rng.choices(kinds, weights)
                try:
                    await operation(cache)
                except HOLDS:
                    self.done["held up"] += 1
                except _DEATHS:
                    self.done["died"] += 1
                else:
                    self.done[operation.__name__.strip("_")] += 1

    def _some_keys(self) -> list[bytes]:
        return chain(self._rng.choice(self._names), self._rng.randint(1, CHAIN_BLOCKS))

    def _some_tier(self) -> Tier:
        return self._rng.choice((Tier.DEVICE, Tier.HOST))

    async def _put(self, cache: Cache) -> None:
        keys = self._some_keys()
        results = await cache.put(keys, blocks(keys), tier=self._some_tier())
        assert set(results) <= {BlockResult.OK, BlockResult.EXISTS, BlockResult.PARENT_MISSING, BlockResult.NO_ROOM}

    async def _get(self, cache: Cache) -> None:
        keys = self._some_keys()
        found = await cache.get(keys, tier=self._some_tier())
        assert_bytes(keys[: len(found)], found)
        self.done["blocks"] += len(found)

    async def _read_in_place(self, cache: Cache) -> None:
        """Holds a chain for a while, over a death of the daemon perhaps, and reads it where it lies."""
        async with cache.acquire(self._some_keys(), self._some_tier()) as lease:
            await asyncio.sleep(self._rng.uniform(0, _HOLD_S))
            for index, key in enumerate(lease.keys):
                right = np.array_equal(bytes_in(lease.view(index)), block(key))
                assert right, f"wrong bytes under a lease in the {lease.tier} tier"
            assert lease.unchanged()
            self.done["blocks"] += len(lease)

    async def _reserve_in_vain(self, cache: Cache) -> None:
        """Takes slots, scribbles into them and gives them back without a commit."""
        async with cache.reserve(self._rng.randint(1, 4), self._some_tier()) as lease:
            for index in range(len(lease)):
                scribble_into(lease.view(index))

    async def _move(self, cache: Cache) -> None:
        keys, tier = self._some_keys(), self._rng.choice(tuple(TIERS))
        results = await cache.move(keys, tier)
        if tier is Tier.DISK:
            self.acknowledged.update(key for key, result in zip(keys, results, strict=True) if result is BlockResult.OK)

    async def _drop(self, cache: Cache) -> None:
        number = self._rng.randrange(len(self._names))
        name = self._names[number]
        self.dropped.add(name)
        self._names[number] = f"{self.name}/{number}.{len(self.dropped)}"
        await cache.drop(chain(name, 1))
