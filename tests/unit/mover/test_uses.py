"""What was used last is evicted last, over a restart too."""

import asyncio
from pathlib import Path

import pytest

from kvtierd.core.ids import Key, Tier
from kvtierd.mover import disk_io
from kvtierd.tiers.disk.root import DiskRoot
from tests.unit.mover.rig import CACHE, GROUP, House, key

DEVICE, DISK = Tier.DEVICE, Tier.DISK
ROOTS = [key(number) for number in range(5)]


async def store_on_disk(house: House) -> None:
    for root in ROOTS:
        await house.client().put([root])
        await house.client().move([root], DISK)


async def use(house: House) -> None:
    """A get that is answered at once never lets the loop run."""
    await house.client().get(ROOTS[:1])
    await asyncio.sleep(0)


def remembered(directory: Path) -> list[Key]:
    """Keys on disk, the least recently used first."""
    root = DiskRoot.open(directory / f"disk-{CACHE}", floor_bytes=0)
    try:
        records = root.open_cache(f"rig-{CACHE}").recover().records[GROUP]
        return [record.key for record in records]
    finally:
        root.close()


async def test_the_disk_remembers_the_order_of_use(tmp_path: Path) -> None:
    async with House(tmp_path) as house:
        house.open({DEVICE: 8, DISK: 8})
        await store_on_disk(house)
        for root in (ROOTS[3], ROOTS[0], ROOTS[3]):
            assert await house.client().get([root]) == 1
    assert remembered(tmp_path) == [ROOTS[1], ROOTS[2], ROOTS[4], ROOTS[0], ROOTS[3]]


async def test_uses_are_written_while_the_daemon_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_io, "NOTED_EVERY_S", 0.0)
    async with House(tmp_path) as house:
        house.open({DEVICE: 8, DISK: 8})
        await store_on_disk(house)
        await house.client().get([ROOTS[0]])
        while house.disk.begun.acquire(blocking=False):
            pass
        await house.client().get([ROOTS[0]])
        assert await asyncio.to_thread(house.disk.begun.acquire, timeout=10), "nothing was written to the disk"


async def test_uses_that_cannot_be_written_are_a_problem_until_others_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_io, "NOTED_EVERY_S", 0.0)
    async with House(tmp_path) as house:
        house.open({DEVICE: 8, DISK: 8})
        await store_on_disk(house)
        await house.client().get(ROOTS[:1])
        house.disk.failing = True
        async with asyncio.timeout(10):
            while not house.engine.problems():
                await use(house)
        assert "order of use" in house.engine.problems()[0]
        house.disk.failing = False
        async with asyncio.timeout(10):
            while house.engine.problems():
                await use(house)
