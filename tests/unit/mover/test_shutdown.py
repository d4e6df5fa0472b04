"""Shutting down: what can end ends, the rest is given up, nothing is left."""

import asyncio
from pathlib import Path

import pytest

from kvtierd.core.ids import Tier
from kvtierd.core.outcome import RefusalReason
from kvtierd.mover.executor import Refused, ShuttingDown
from tests.unit.mover.rig import GROUP, House, key, mover_threads

DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK
CHAIN = [key(number) for number in range(4)]


async def test_moves_in_flight_end_and_waiting_requests_are_refused(tmp_path: Path) -> None:
    async with House(tmp_path) as house:
        runtime = house.open({DEVICE: 4, DISK: 16})
        await house.client().put(CHAIN)
        house.disk.close_gate()
        waiting = asyncio.create_task(house.client(2).reserve(4, timeout_s=None))
        await asyncio.sleep(0)  # it is asked
        await asyncio.sleep(0)  # the copies that make room are planned

        ending = asyncio.create_task(house.engine.shutdown(10.0))
        with pytest.raises(Refused) as refused:
            await waiting
        assert refused.value.refusal.reason is RefusalReason.CANCELLED
        with pytest.raises(ShuttingDown):
            await house.client(2).reserve(1)
        assert not ending.done()
        house.disk.open_gate()

        assert await ending
        assert mover_threads() == []
        assert sum(house.engine.queues().values()) == 0
        assert runtime.manager.locate(GROUP, CHAIN)[0].residency & DISK.bit


async def test_a_disk_that_hangs_does_not_hold_the_shutdown(tmp_path: Path) -> None:
    async with House(tmp_path) as house:
        house.open({DEVICE: 4, DISK: 16})
        await house.client().put(CHAIN)
        house.disk.close_gate()
        waiting = asyncio.create_task(house.client(2).reserve(4))
        await asyncio.sleep(0)  # it is asked
        await asyncio.sleep(0)  # the copies that make room are planned

        assert not await house.engine.shutdown(0.05)
        with pytest.raises(Refused):
            await waiting
        assert [thread.name for thread in mover_threads()] == ["kvtierd-disk-writer-finish"]
        house.disk.open_gate()
        for thread in mover_threads():
            await asyncio.to_thread(thread.join, 30)


async def test_an_engine_without_caches_ends_at_once_and_twice() -> None:
    async with House() as house:
        assert await house.engine.shutdown(0.0)
        assert await house.engine.shutdown(0.0)
        assert mover_threads() == []
