"""Calls cancelled, timed out and killed at random moments, over a disk that sometimes fails, leak nothing."""

import asyncio
import contextlib
import random
from pathlib import Path

import pytest

from kvtierd.core.errors import UnknownLease
from kvtierd.core.ids import SessionId, Tier
from kvtierd.mover.executor import TicketRefused
from kvtierd.tiers.mapped import Chaos
from tests.unit.mover.rig import CACHE, GROUP, House, key

DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK
EDGES = {(DEVICE, HOST), (HOST, DEVICE), (HOST, DISK), (DISK, DEVICE)}


@pytest.mark.parametrize("seed", range(4))
async def test_nothing_is_held_when_everybody_has_gone(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    async with House(tmp_path) as house:
        house.open({DEVICE: 8, HOST: 8, DISK: 32}, chaos=Chaos(seed, max_delay_s=0.001))
        chains = [[key(100 * number + i) for i in range(rng.randint(1, 4))] for number in range(16)]

        def used() -> set[tuple[Tier, Tier]]:
            edges = house.engine.manager(CACHE).stats().edges
            return {edge for edge, counters in edges.items() if counters.blocks}

        async def request(session: int) -> None:
            client = house.client(session)
            chain = rng.choice(chains)
            hits = await client.get(chain)
            if hits < len(chain):
                await client.put(chain[hits:], after=chain[hits - 1] if hits else None)
            if rng.random() < 0.2:
                await client.move(chain, rng.choice([HOST, DISK]), timeout_s=0.002)
            if rng.random() < 0.1:
                await house.engine.drop(CACHE, GROUP, chain[-1:])

        async def abuse(session: int) -> None:
            # The event loop's timing decides which copies finish, so the storm goes on until each edge has copied.
            for turn in range(1000):
                if turn >= 40 and used() >= EDGES:
                    break
                task = asyncio.create_task(request(session))
                await asyncio.wait([task], timeout=rng.choice([0, 0.0005, 0.002, 1]))
                end = rng.random()
                house.disk.failing = rng.random() < 0.05
                if end < 0.3:
                    house.engine.end_session(SessionId(session))
                elif end < 0.4:
                    house.engine.orphan_session(SessionId(session))
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, TicketRefused, UnknownLease):
                    await task

        await asyncio.gather(*(abuse(session) for session in range(1, 5)))
        house.disk.failing = False
        for session in range(1, 5):
            house.engine.end_session(SessionId(session))
        await house.engine.settle()

        stats = house.engine.manager(CACHE).stats()
        assert stats.waiting == 0
        assert stats.held_by == {}
        assert all(count.held == 0 for count in stats.tiers.values())
        ours = [problem for problem in house.engine.problems() if "cache" in problem and "order of use" not in problem]
        assert not ours
        assert used() >= EDGES
