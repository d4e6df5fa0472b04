"""Bytes survive every way through the tiers while the copies come late and out of order."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtierd.core.ids import Key, Tier
from kvtierd.tiers.mapped import Chaos
from tests.unit.mover.rig import CACHE, Client, House, key

DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK


def chain_of(number: int, length: int) -> list[Key]:
    """Chains of the same ten share their first two blocks."""
    shared = [key(1000 * (number // 10) + i) for i in range(2)]
    return shared + [key(100_000 + 1000 * number + i) for i in range(length - 2)]


async def serve(client: Client, chain: Sequence[Key]) -> int:
    """One request as an engine would: what is stored is fetched and compared, the rest is written. The hits."""
    hits = await client.get(chain)
    missing = chain[hits:]
    if missing:
        await client.put(missing, after=chain[hits - 1] if hits else None)
    return hits


@pytest.mark.parametrize("seed", range(5))
async def test_three_tiers_under_chaos(tmp_path: Path, seed: int) -> None:
    async with House(tmp_path) as house:
        house.open({DEVICE: 16, HOST: 24, DISK: 96}, chaos=Chaos(seed, max_delay_s=0.002))
        rng = random.Random(seed)
        requests = [chain_of(rng.randrange(30), 4) for _ in range(150)]
        hits = 0

        async def work(client: Client) -> None:
            nonlocal hits
            while requests:
                hits += await serve(client, requests.pop())

        await asyncio.gather(*(work(house.client(session)) for session in range(1, 4)))
        await house.engine.settle()

        assert hits > 100
        assert house.engine.problems() == []
        assert house.hub.residency() == house.listed()
        used = {edge for edge, counters in house.engine.manager(CACHE).stats().edges.items() if counters.blocks}
        assert {(DEVICE, HOST), (HOST, DEVICE), (HOST, DISK), (DISK, DEVICE)} <= used
        assert sum(house.engine.queues().values()) == 0
