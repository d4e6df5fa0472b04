"""Lanes over a GPU's copies: what nobody can account for is never reported, and costs the rest of its batch nothing."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

from kvtierd.core.events import EventSequencer
from kvtierd.core.ids import Tier
from kvtierd.core.outcome import MoveResult
from kvtierd.mover.edges import LANES, Edges
from kvtierd.mover.runtime import CacheRuntime, CopyPiece, Faults
from kvtierd.mover.work import reports_of
from kvtierd.mover.worker import Gathering
from kvtierd.tiers.disk.root import DiskRoot
from tests.fakes.cuda.bindings._settings import Failure
from tests.integration.waiting import eventually
from tests.unit.mover.cuda.rigs import Rig
from tests.unit.mover.rig import GROUP, SPEC, fill, holds, key, make_runtime, move

DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.fixture
def runtime(rig: Rig) -> CacheRuntime:
    plain = make_runtime({DEVICE: 8, HOST: 8}, EventSequencer())
    return dataclasses.replace(plain, arena=rig.arena, host=rig.host, device=rig.device, cuda=rig.copies)


class Desk:
    """Keeps what arrives."""

    def __init__(self) -> None:
        self.results: list[MoveResult] = []
        self.edges = Edges(asyncio.get_running_loop(), self._deliver)

    def _deliver(self, runtime: CacheRuntime, results: Sequence[MoveResult]) -> None:
        self.results += results

    async def problems(self) -> list[str]:
        return self.edges.problems()


def cannot_be_asked(rig: Rig, call: str) -> None:
    """From now on ``call``, of an event, fails, and so does a look at its stream."""
    for each in (call, "cuStreamQuery"):
        rig.fake.STATE.settings.fail.append(Failure(each, "CUDA_ERROR_INVALID_VALUE", times=0))


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    desk = Desk()
    yield desk
    assert await desk.edges.stop(grace_s=60)


async def test_a_batch_that_nobody_can_account_for_is_never_reported(
    rig: Rig, runtime: CacheRuntime, desk: Desk
) -> None:
    cannot_be_asked(rig, "cuEventRecord")
    desk.edges.submit(runtime, move(1, HOST, DEVICE, [(1, 3, 5)]))
    await eventually(desk.problems, lambda problems: "Unaccounted" in str(problems))
    assert desk.results == []
    assert desk.edges.in_flight() == 1
    assert rig.device.lost is not None


@pytest.fixture
def with_disk(runtime: CacheRuntime, tmp_path: Path) -> Iterator[CacheRuntime]:
    root = DiskRoot.open(tmp_path / "disk", floor_bytes=0)
    yield dataclasses.replace(runtime, disk=root.create("c", SPEC, {GROUP: 8}))
    root.close()


@pytest.mark.parametrize("call", ["cuEventRecord", "cuEventQuery"])
async def test_a_fetch_that_nobody_can_account_for_is_no_matter_to_the_rest_of_its_batch(
    rig: Rig, with_disk: CacheRuntime, desk: Desk, call: str
) -> None:
    for slot in (1, 2, 3):
        fill(with_disk, HOST, slot, key(slot))
    desk.edges.submit(with_disk, move(1, HOST, DISK, [(3, 3, 3)]))
    await desk.edges.idle()
    cannot_be_asked(rig, call)
    # What the writer is given at once it takes as one batch.
    lane = next(lane for lane in LANES if lane.name == "disk-writer")
    moves = (
        move(2, HOST, DISK, [(1, 1, 1)]),
        move(3, DEVICE, DISK, [(5, 5, 5)]),
        move(4, HOST, DISK, [(2, 2, 2)]),
        move(5, DISK, None, [(3, 3, None)]),
    )
    batch = [CopyPiece(with_disk, each, 0, each.items, 0) for each in moves]
    gathering = Gathering(lane, batch[0])
    assert all(gathering.join(piece) for piece in batch[1:])
    assert gathering.pieces == batch
    begun = await asyncio.to_thread(lane.carry_out, batch)
    assert callable(begun)
    assert await asyncio.to_thread(begun) == Faults(failed=frozenset({1}))
    assert rig.device.lost is not None
    fill(with_disk, HOST, 1, key(9))
    desk.edges.submit(with_disk, move(6, DISK, HOST, [(1, 1, 1), (2, 2, 4), (3, 3, 6)]))
    await desk.edges.idle()
    assert holds(with_disk, HOST, 1, key(1)) and holds(with_disk, HOST, 4, key(2))
    assert desk.results[-1].corrupt == frozenset({2}), "it was retired"


@pytest.mark.parametrize("call", ["cuEventRecord", "cuEventQuery"])
async def test_a_load_that_nobody_can_account_for_keeps_its_own_slots_out_of_use(
    rig: Rig, with_disk: CacheRuntime, desk: Desk, call: str
) -> None:
    fill(with_disk, HOST, 1, key(1))
    fill(with_disk, HOST, 2, key(2))
    desk.edges.submit(with_disk, move(1, HOST, DISK, [(1, 1, 1), (2, 2, 2)]))
    await desk.edges.idle()
    cannot_be_asked(rig, call)
    lane = next(lane for lane in LANES if lane.name == "disk-reader")
    moves = move(2, DISK, DEVICE, [(1, 1, 6)]), move(3, DISK, HOST, [(2, 2, 7)])
    batch = [CopyPiece(with_disk, each, 0, each.items, 0) for each in moves]
    done = await asyncio.to_thread(lane.carry_out, batch)
    faults = await asyncio.to_thread(done) if callable(done) else done
    (report,) = reports_of(batch, faults, 0, 1)
    assert (report.piece.move.id, report.failed, report.corrupt) == (3, frozenset(), frozenset())
    assert holds(with_disk, HOST, 7, key(2))
