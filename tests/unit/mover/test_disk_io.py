"""What the disk threads hand to the store, and whose the store's answers are."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from kvtierd.core.ids import Key, Tier
from kvtierd.core.outcome import Move
from kvtierd.mover import disk_io
from kvtierd.mover.runtime import CacheRuntime, CopyPiece, Faults
from kvtierd.tiers.disk.batch import DiskWrite
from kvtierd.tiers.disk.root import DiskRoot
from kvtierd.tiers.disk.store import Begun
from tests.unit.mover.rig import CACHE, GROUP, House, StubbornDisk, fill, holds, key, move

DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK
ROOTS = [key(number) for number in range(5)]


class PickyDisk(StubbornDisk):
    """Fails to store some blocks."""

    refuses: frozenset[Key] = frozenset()

    def begin(self, writes: Sequence[DiskWrite]) -> Begun:
        begun = super().begin(writes)
        refused: Future[list[int]] = Future()
        refused.set_result([number for number, write in enumerate(writes) if write.key in self.refuses])
        return replace(begun, moving=[*begun.moving, refused])


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[CacheRuntime]:
    async with House(tmp_path, PickyDisk) as house:
        yield house.open({HOST: 8, DISK: 8})


def batch(runtime: CacheRuntime, *moves: Move) -> list[CopyPiece]:
    return [CopyPiece(runtime, each, 0, each.items, 0) for each in moves]


def test_a_failure_beside_deletions_is_the_right_items(runtime: CacheRuntime) -> None:
    for slot in range(6):
        fill(runtime, HOST, slot, key(slot))
    assert disk_io.write(batch(runtime, move(1, HOST, DISK, [(0, 0, 0), (1, 1, 1)])))() == Faults()
    assert isinstance(runtime.disk, PickyDisk)
    runtime.disk.refuses = frozenset([key(3)])

    mixed = batch(
        runtime,
        move(2, DISK, None, [(0, 0, None)]),
        move(3, HOST, DISK, [(2, 2, 2), (3, 3, 3)]),
        move(4, DISK, None, [(1, 1, None)]),
        move(5, HOST, DISK, [(4, 4, 4)]),
    )
    assert disk_io.write(mixed)() == Faults(failed=frozenset([2]))

    back = move(6, DISK, HOST, [(0, 0, 6), (2, 2, 7), (3, 3, 5), (4, 4, 1)])
    assert disk_io.read(batch(runtime, back)) == Faults(corrupt=frozenset([0, 2]))  # deleted, and never stored
    assert holds(runtime, HOST, 7, key(2))
    assert holds(runtime, HOST, 1, key(4))


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


async def test_uses_are_written_meanwhile_and_a_failure_is_a_problem_until_others_are(
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
