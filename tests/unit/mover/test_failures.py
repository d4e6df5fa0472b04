"""A disk that fails costs hits, never bytes; what broke shows."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtierd.core.events import Event, EventSequencer
from kvtierd.core.ids import SessionId, Tier
from kvtierd.mover.engine import Engine
from tests.unit.mover.rig import CACHE, Client, House, key, make_runtime, mover_threads

DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK
CHAIN = [key(number) for number in range(4)]


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    """A chain in the device tier, over a disk that can fail."""
    async with House(tmp_path) as house:
        house.open({DEVICE: 8, DISK: 16})
        await house.client().put(CHAIN)
        yield house


async def test_eviction_goes_on_by_dropping_while_the_disk_fails(house: House) -> None:
    house.disk.failing = True
    for number in range(10, 60, 4):
        await house.client().put([key(number + i) for i in range(4)])
    await house.engine.settle()
    newest = [key(58 + i) for i in range(4)]
    assert await house.client().get(newest) == 4
    assert all(residency == DEVICE.bit for residency in house.listed().values())


async def test_a_failed_read_holds_nothing_and_loses_nothing(house: House) -> None:
    client = house.client()
    assert (await client.move(CHAIN, DISK)).results == (True,) * 4
    house.disk.failing = True
    assert await client.get(CHAIN) == 0
    stats = house.engine.manager(CACHE).stats()
    assert stats.held_by == {}
    assert set(house.listed().values()) == {DISK.bit}

    house.disk.failing = False
    assert await client.get(CHAIN) == 4


class BrokenHub:
    def __init__(self) -> None:
        self.broken = False

    def publish(self, events: Sequence[Event]) -> None:
        if self.broken:
            raise RuntimeError("cannot publish")


async def test_a_bug_on_the_loops_side_shows_in_health_and_in_the_log() -> None:
    loop = asyncio.get_running_loop()
    logged: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda loop, context: logged.append(context))
    hub, sequencer = BrokenHub(), EventSequencer()
    engine = Engine(loop, hub, sequencer)
    engine.add_cache(make_runtime({DEVICE: 2, HOST: 2}, sequencer))
    client = Client(engine, SessionId(1))
    await client.put([key(1)])
    task = asyncio.create_task(client.move([key(1)], HOST))
    await asyncio.sleep(0)
    hub.broken = True
    await engine.settle()

    assert "cannot publish" in engine.problems()[0]
    assert "cannot publish" in str(logged[0]["exception"])
    task.cancel()
    assert await engine.shutdown(5.0)
    assert mover_threads() == []
