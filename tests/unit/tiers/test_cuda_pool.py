"""GPU memory of a cache, on the fake of NVIDIA's bindings: what is allocated, shared, taken over and given back."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvtier.abi import attach
from kvtier.abi.control import ArenaIdentity
from kvtier.abi.cuda.driver import Driver
from kvtier.abi.layout import ArenaLayout
from kvtier.abi.spec import CacheSpec
from kvtierd.core.ids import GroupId, SessionId, SlotId, Tier
from kvtierd.tiers.arena import Arena
from kvtierd.tiers.base import NotAdoptable, TierConfigError, TierIOError
from kvtierd.tiers.cuda.pool import READERS_GET_NONE, Gpu
from kvtierd.tiers.cuda.store import CudaDevice
from tests.fake_cuda import load_fake
from tests.unit.tiers.arena_helpers import parts

MIB = 1 << 20
GROUP = GroupId(0)
SPEC = CacheSpec.single("model", "uint8", tokens_per_block=16, layers=1, kv_heads=1, head_size=136)
"""4352 bytes a block, padded to two pages."""
LAYOUT = ArenaLayout.plan(SPEC, {(0, int(Tier.DEVICE)): 3, (0, int(Tier.HOST)): 2})
MADE = ArenaIdentity(SPEC.fingerprint(), epoch=1, boot=3, pid=1)
OURS = replace(MADE, boot=4)


class Rig:
    """Of a fake with one device: the GPU, and what the fake knows of it."""

    def __init__(self, **settings: Any) -> None:
        self.bindings: ModuleType = load_fake(max_delay_ms=0.1, **settings)
        self.gpu = Gpu(Driver(self.bindings, "cuda"))

    @property
    def left(self) -> dict[str, int]:
        """What was not given back."""
        found: dict[str, int] = self.bindings.STATE.left()
        return {kind: count for kind, count in found.items() if kind != "contexts"}


@pytest.fixture
def rig() -> Rig:
    return Rig(memory=8 * MIB)


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def described(rig: Rig, nbytes: int) -> attach.CudaMemory:
    return attach.CudaMemory(rig.gpu.driver.uuid.hex(), nbytes)


def test_memory_is_rounded_zeroed_shared_and_given_back(rig: Rig) -> None:
    segment = rig.gpu.create("c", 3 * MIB)
    assert (segment.memory.nbytes, segment.fresh) == (4 * MIB, True)
    assert segment.described == described(rig, 4 * MIB)
    assert ctypes.string_at(segment.memory.address, 4 * MIB) == bytes(4 * MIB), "the fake's fresh memory is not zero"
    assert segment.offer(write=True) == segment.fd
    assert segment.offer(write=False) == READERS_GET_NONE
    segment.close()
    assert rig.left == {}
    assert rig.gpu.memory() == (8 * MIB, 8 * MIB)


def test_what_is_not_free_is_refused_with_numbers(rig: Rig) -> None:
    first = rig.gpu.create("first", 5 * MIB)
    with pytest.raises(TierConfigError, match=rf"device memory of second = {4 * MIB}: not enough .* {2 * MIB} bytes"):
        rig.gpu.create("second", 3 * MIB)
    first.close()
    rig.gpu.create("second", 3 * MIB).close()
    assert rig.left == {}


def test_who_is_patient_gets_what_is_let_go_of_meanwhile(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    first = rig.gpu.create("first", 8 * MIB)
    monkeypatch.setattr("kvtierd.tiers.cuda.pool.time.sleep", lambda _: first.close())
    second = rig.gpu.create("second", 8 * MIB, patience_s=60.0)
    second.close()


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemExportToShareableHandle", "cuMemMap", "cuMemSetAccess"])
def test_an_allocation_that_fails_half_way_leaves_nothing(call: str) -> None:
    rig = Rig(fail=[{"call": call, "code": "CUDA_ERROR_OUT_OF_MEMORY"}])
    with pytest.raises(TierConfigError, match="not enough memory"):
        rig.gpu.create("c", MIB)
    assert rig.left == {}
    rig.gpu.create("c", MIB).close()


@pytest.mark.parametrize("call", ["cuMemsetD8Async", "cuStreamCreate"])
def test_memory_that_cannot_be_cleared_is_not_used(call: str) -> None:
    rig = Rig(fail=[{"call": call, "code": "CUDA_ERROR_INVALID_VALUE"}])
    with pytest.raises(TierIOError, match=call):
        rig.gpu.create("c", MIB)
    assert rig.left == {}
    assert rig.gpu.lost is None


def test_memory_that_may_still_be_cleared_is_nobodys_until_the_end(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    rig = Rig(hold=hold, fail=[{"call": "cuStreamQuery", "code": "CUDA_ERROR_INVALID_VALUE"}])
    before = rig.gpu.memory()[0]
    with pytest.raises(TierIOError, match="cuStreamQuery"):
        rig.gpu.create("c", 2 * MIB)
    assert before - rig.gpu.memory()[0] == 2 * MIB
    hold.unlink()
    rig.gpu.create("d", 2 * MIB).close()
    assert rig.gpu.memory()[0] == before - 2 * MIB


def test_a_device_that_is_lost_is_noticed(rig: Rig, tmp_path: Path) -> None:
    lost = tmp_path / "lost"
    rig = Rig(lost=lost)
    segment = rig.gpu.create("c", MIB)
    device = CudaDevice(LAYOUT, segment)
    assert device.lost is None
    lost.touch()
    with pytest.raises(TierIOError, match="LAUNCH_FAILED"):
        rig.gpu.create("d", MIB)
    assert device.lost is not None and "LAUNCH_FAILED" in device.lost
    device.lose("another reason")
    assert "LAUNCH_FAILED" in device.lost
    assert "the GPU is lost" in str(segment.offer(write=True))
    segment.close()
    rig.gpu.close()


@pytest.mark.parametrize("feature", ["vmm", "posix_fd"])
def test_memory_that_cannot_be_shared_says_why(feature: str) -> None:
    rig = Rig(features_off=[feature])
    segment = rig.gpu.create("c", MIB)
    assert segment.fd is None
    assert "cannot be shared" in str(segment.offer(write=True))
    arena = Arena.create("c", LAYOUT, MADE, rig.gpu.create("c", LAYOUT.device_bytes))
    assert set(arena.kept_fds) == {attach.CONTROL, attach.HOST}
    arena.close()
    segment.close()
    assert rig.left == {}


def test_what_may_be_other_memory_is_not_taken_over(rig: Rig) -> None:
    segment = rig.gpu.create("c", MIB)
    assert segment.fd is not None
    right = described(rig, 2 * MIB)
    for known in (None, replace(right, uuid="0" * 32), replace(right, nbytes=4 * MIB)):
        with pytest.raises(NotAdoptable, match="not CudaMemory"):
            rig.gpu.adopt(segment.fd, MIB, known)
    with open("/dev/null") as null, pytest.raises(NotAdoptable, match="cannot import"):
        rig.gpu.adopt(null.fileno(), MIB, right)
    segment.close()
    assert rig.left == {}


# -- in an arena -------------------------------------------------------------------------------------------------------


def test_slots_are_where_the_layout_says(rig: Rig, undo: ExitStack) -> None:
    arena = Arena.create("c", LAYOUT, MADE, rig.gpu.create("c", LAYOUT.device_bytes))
    undo.callback(arena.close)
    assert arena.gpu_memory is not None
    device = CudaDevice(LAYOUT, arena.gpu_memory)
    for slot in range(3):
        ((start, nbytes),) = parts(LAYOUT, Tier.DEVICE, 0, slot)
        assert device.address(GROUP, 0, SlotId(slot)) == device.memory.address + start
        assert device.nbytes(GROUP, 0) == nbytes
    assert device.stride(GROUP, 0) == 8192
    for slot in (-1, 3):
        with pytest.raises(IndexError):
            device.address(GROUP, 0, SlotId(slot))


def earlier(rig: Rig) -> Arena:
    """With a READY block in each tier, that of the device leased."""
    arena = Arena.create("c", LAYOUT, MADE, rig.gpu.create("c", LAYOUT.device_bytes))
    arena.end_writes(Tier.DEVICE, GROUP, [SlotId(1)])
    arena.set_owners(Tier.DEVICE, GROUP, {SlotId(1): SessionId(9)})
    arena.end_writes(Tier.HOST, GROUP, [SlotId(0)])
    return arena


def heirlooms(arena: Arena) -> dict[str, int]:
    return {segment: os.dup(fd) for segment, fd in arena.kept_fds.items() if segment != attach.CUDA}


def test_what_is_adopted_with_the_gpus_memory_stays_ready(rig: Rig, undo: ExitStack) -> None:
    before = earlier(rig)
    undo.callback(before.close)
    memory = rig.gpu.adopt(before.kept_fds[attach.CUDA], LAYOUT.device_bytes, described(rig, 2 * MIB))
    arena = Arena.adopt("c", LAYOUT, OURS, heirlooms(before), memory)
    undo.callback(arena.close)
    assert arena.ready_slots(Tier.DEVICE, GROUP) == [1]
    assert arena.owned(Tier.DEVICE, GROUP) == {1: 9}


def test_a_refused_adoption_leaves_the_gpus_memory_to_its_owner(rig: Rig, undo: ExitStack) -> None:
    before = earlier(rig)
    undo.callback(before.close)
    memory = rig.gpu.create("c", LAYOUT.device_bytes)
    undo.callback(memory.close)
    fds = {segment: fd for segment, fd in before.kept_fds.items() if segment != attach.HOST}
    with pytest.raises(NotAdoptable, match="segments"):
        Arena.adopt("c", LAYOUT, OURS, fds, memory)
    assert memory.fd is not None
    os.fstat(memory.fd)
