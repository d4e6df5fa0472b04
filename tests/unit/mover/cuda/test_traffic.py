"""Batches on streams that are late and overtake each other: what is settled has arrived, whatever failed."""

import mmap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import cast

import numpy as np
import pytest

from kvtier.abi.cuda.driver import BATCH, Driver
from kvtier.abi.cuda.errors import CudaError, CudaLost
from kvtier.abi.cuda.memory import DeviceMemory
from kvtier.abi.cuda.page_locks import PageLocks
from kvtierd.core.ids import GroupId, SlotId, Tier
from kvtierd.mover.cuda.plan import Direction
from kvtierd.mover.cuda.traffic import Passage, Touched, Traffic
from kvtierd.mover.runtime import Unaccounted
from kvtierd.tiers.base import Bytes, TierIOError
from kvtierd.tiers.cuda.pool import CudaDevice
from tests.fake_cuda import load_fake
from tests.fakes.cuda.bindings._settings import Failure

DOWN, UP = Direction.TO_HOST, Direction.TO_DEVICE
SLOT = 4096
SLOTS = 64


class Pool:
    """What can be lost."""

    def __init__(self) -> None:
        self.lost: str | None = None

    def lose(self, why: str) -> None:
        self.lost = self.lost or why


class Rig:
    """Host and device memory of as many slots, side by side."""

    def __init__(self, **settings: object) -> None:
        self.fake: ModuleType = load_fake(**settings)
        self.driver = Driver(self.fake, "cuda")
        self.memory = DeviceMemory.create(self.driver, SLOT * SLOTS)
        self.host: Bytes = np.frombuffer(mmap.mmap(-1, SLOT * SLOTS), dtype=np.uint8)
        self.locks = PageLocks("rig", self.driver, self.host.ctypes.data, SLOT * SLOTS)
        self.pool = Pool()
        self.traffic = Traffic(self.driver, cast(CudaDevice, self.pool), self.locks)

    def on_host(self, slot: int) -> int:
        return self.host.ctypes.data + slot * SLOT

    def on_device(self, slot: int) -> int:
        return self.memory.address + slot * SLOT

    def up(self, src: int, dst: int, slots: int = 1) -> Callable[[], None]:
        """Begins a copy of host slots to the device; the answer settles it."""
        copies = [(self.on_device(dst + number), self.on_host(src + number), SLOT) for number in range(slots)]
        return self.go(UP, copies, at(Tier.HOST, src, slots), at(Tier.DEVICE, dst, slots))

    def down(self, src: int, dst: int, slots: int = 1) -> Callable[[], None]:
        copies = [(self.on_host(dst + number), self.on_device(src + number), SLOT) for number in range(slots)]
        return self.go(DOWN, copies, at(Tier.DEVICE, src, slots), at(Tier.HOST, dst, slots))

    def go(
        self, way: Direction, copies: list[tuple[int, int, int]], reads: Touched, writes: Touched
    ) -> Callable[[], None]:
        passage = self.traffic.issue(way, np.array(copies).T, reads, writes)
        return lambda: self.traffic.settle(passage)

    def fill(self, slot: int, value: int) -> None:
        self.host[slot * SLOT : (slot + 1) * SLOT] = value

    def value(self, slot: int) -> int:
        """Which value all bytes of a host slot have."""
        values = np.unique(self.host[slot * SLOT : (slot + 1) * SLOT])
        assert len(values) == 1
        return int(values[0])

    def close(self) -> None:
        assert self.traffic.close()
        assert self.locks.close()
        self.memory.close()
        self.driver.close()
        assert self.fake.fake_left() == {}


def at(tier: Tier, first: int, slots: int) -> Touched:
    return {(tier, GroupId(0), SlotId(first + number)) for number in range(slots)}


@pytest.fixture(params=[13000, 12080], ids=["batches", "one-by-one"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Drivers with and without a call for whole batches."""
    rig = Rig(max_delay_ms=3, seed=7, driver_version=request.param)
    rig.locks.start(None)
    yield rig
    rig.close()


def test_slots_with_gaps_keep_what_is_between_them(rig: Rig) -> None:
    for slot in range(6):
        rig.fill(slot, slot + 1)
    rig.up(0, 0, slots=6)()
    copies = [(rig.on_host(32 + 3 * number), rig.on_device(1 + 2 * number), SLOT) for number in range(3)]
    rig.go(DOWN, copies, at(Tier.DEVICE, 1, 5), at(Tier.HOST, 32, 7))()
    assert [rig.value(32 + slot) for slot in range(7)] == [2, 0, 0, 4, 0, 0, 6]


def test_a_batch_waits_for_the_batches_of_the_other_stream_on_its_slots(rig: Rig) -> None:
    """Without the waits this reads what was there before, or writes over what is read."""
    with ThreadPoolExecutor() as settling:
        for turn in range(1, 25):
            rig.fill(0, turn)
            rig.fill(2, 100 + turn)
            settled = [settling.submit(rig.up(0, 5))]
            settled += [settling.submit(rig.down(5, 1))]  # read after write, of slot 5
            settled += [settling.submit(rig.up(2, 5))]  # write after read
            settled += [settling.submit(rig.down(5, 3))]
            for each in settled:
                each.result(30)
            assert (rig.value(1), rig.value(3)) == (turn, 100 + turn)


def test_without_that_wait_two_streams_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that the test above is to find, planted: the fake knows that nothing orders the two."""
    monkeypatch.setattr(Passage, "clashes", lambda *_: False)
    rig, gate = Rig(), threading.Event()
    rig.fake.fake_work(rig.traffic._ways[UP].stream, gate.wait)
    up, down = rig.up(0, 5), rig.down(5, 1)
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        down()
    gate.set()
    up()
    rig.close()


def test_a_batch_that_waits_for_another_ends_with_the_device() -> None:
    rig, gate = Rig(), threading.Event()
    rig.fake.fake_work(rig.traffic._ways[UP].stream, gate.wait)
    up = rig.up(0, 5)

    def copy_down() -> None:
        rig.down(5, 1)()

    with ThreadPoolExecutor(1) as thread:
        down = thread.submit(copy_down)
        rig.fake.STATE._lost = rig.fake.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
        gate.set()
        with pytest.raises(CudaLost):
            up()
        with pytest.raises(CudaLost):
            down.result(30)
    assert rig.traffic.close()


def test_a_batch_whose_second_call_fails_is_over_when_its_first_is() -> None:
    rig = Rig(fail=[{"call": "cuMemcpyBatchAsync", "code": "CUDA_ERROR_INVALID_VALUE", "after": 1}])
    rig.locks.start(None)
    until_locked(rig.locks)
    part = 64
    slots = BATCH * part // SLOT
    for slot in range(slots + 1):
        rig.fill(slot, 7)
    gate = threading.Event()
    rig.fake.fake_work(rig.traffic._ways[UP].stream, gate.wait)
    end = (slots + 1) * SLOT
    copies = [(rig.on_device(0) + begin, rig.on_host(0) + end - part - begin, part) for begin in range(0, end, part)]
    passage = rig.traffic.issue(UP, np.array(copies).T, at(Tier.HOST, 0, slots + 1), at(Tier.DEVICE, 0, slots + 1))
    assert not rig.traffic.ends_soon(passage)
    gate.set()
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        rig.traffic.settle(passage)
    rig.down(0, 32, slots)()
    assert {rig.value(32 + slot) for slot in range(slots)} == {7}
    rig.close()


CALLS = (
    "cuEventCreate",
    "cuMemcpyBatchAsync",
    "cuMemcpyAsync",
    "cuEventRecord",
    "cuEventQuery",
    "cuStreamQuery",
)
CODES = ("CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_LAUNCH_FAILED")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("code", CODES)
def test_whichever_call_fails_and_whenever_no_batch_is_told_as_done_with_other_bytes(call: str, code: str) -> None:
    """And who cannot close afterwards has said that the device is lost."""
    for place in range(5):
        failure = {"call": call, "code": code, "after": place, "times": 1 + place % 2}
        rig = Rig(seed=place, driver_version=(13000, 12080)[place % 2], fail=[failure])
        rig.locks.start(None)
        held: dict[int, int | None] = {}
        for turn in range(1, 9):
            rig.fill(0, turn)
            rig.fill(1, turn)
            slot = 3 * (turn % 4)
            held[slot] = turn if ended(rig.up, 0, slot) else None
            rig.fill(40, 99)
            if ended(rig.down, slot, 40) and held[slot] is not None:
                assert rig.value(40) == held[slot]
        if rig.traffic.close(1.0):
            assert rig.traffic.under_way == 0
        else:
            assert rig.pool.lost is not None


def ended(copy: Callable[[int, int, int], Callable[[], None]], src: int, dst: int) -> bool:
    try:
        copy(src, dst, 2)()
    except (CudaError, TierIOError, Unaccounted):
        return False
    return True


def test_a_close_waits_for_nobody_and_frees_nothing_under_a_copy() -> None:
    rig = Rig()
    gate = threading.Event()
    stream = rig.traffic._ways[UP].stream
    rig.fake.fake_work(stream, gate.wait)
    settle = rig.up(0, 0)
    assert not rig.traffic.close()
    gate.set()
    settle()
    rig.close()


def test_a_lost_device_fails_what_was_under_way_and_takes_nothing_more() -> None:
    rig = Rig()
    gate = threading.Event()
    rig.fake.fake_work(rig.traffic._ways[UP].stream, gate.wait)
    first, second = rig.up(0, 0), rig.up(1, 1)
    rig.fake.STATE._lost = rig.fake.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    gate.set()
    for settle in (first, second):
        with pytest.raises(CudaLost, match="ILLEGAL_ADDRESS"):
            settle()
    assert rig.pool.lost is not None
    assert "ILLEGAL_ADDRESS" in rig.pool.lost
    assert rig.traffic.under_way == 0
    with pytest.raises(CudaLost):
        rig.down(0, 0)()
    assert rig.traffic.close()


@pytest.mark.parametrize("call", ["cuEventCreate", "cuMemcpyAsync", "cuEventRecord", "cuEventQuery"])
def test_whichever_call_of_a_batch_says_that_the_device_is_lost_it_is_told_before_the_batch_fails(call: str) -> None:
    rig = Rig(fail=[{"call": call, "code": "CUDA_ERROR_LAUNCH_FAILED", "times": 0}])
    with pytest.raises(CudaLost, match=call):
        rig.up(0, 0)()
    assert rig.pool.lost is not None
    assert call in rig.pool.lost
    assert rig.traffic.under_way == 0


@pytest.mark.parametrize("call", ["cuEventRecord", "cuEventQuery"])
def test_an_error_of_an_event_fails_its_batch_alone_and_not_before_it_has_ended(call: str) -> None:
    rig, gate, order = Rig(), threading.Event(), list[str]()
    rig.fill(0, 7)
    stream = rig.traffic._ways[UP].stream
    rig.fake.fake_work(stream, gate.wait)
    rig.fake.STATE.settings.fail.append(_next(rig.fake, call, "CUDA_ERROR_INVALID_HANDLE"))
    settle = rig.up(0, 0)
    rig.fake.fake_work(stream, lambda: order.append("copied"))

    def ends() -> None:
        with pytest.raises(CudaError, match=f"{call}: CUDA_ERROR_INVALID_HANDLE"):
            settle()
        order.append("failed")

    ending = threading.Thread(target=ends)
    ending.start()
    while not rig.fake.STATE._calls["cuStreamQuery"]:
        assert ending.is_alive()
    assert (rig.traffic.under_way, order) == (1, [])
    gate.set()
    ending.join(30)
    assert order == ["copied", "failed"]
    assert rig.pool.lost is None
    rig.up(0, 1)()
    rig.down(1, 2)()
    assert rig.value(2) == 7
    rig.close()


@pytest.mark.parametrize("call", ["cuEventRecord", "cuEventQuery"])
def test_a_batch_is_never_over_if_its_stream_cannot_be_asked_either(call: str) -> None:
    rig = Rig(fail=[{"call": each, "code": "CUDA_ERROR_INVALID_VALUE", "times": 0} for each in (call, "cuStreamQuery")])
    with pytest.raises(Unaccounted):
        rig.up(0, 0)()
    assert rig.pool.lost is not None
    assert "cuStreamQuery" in rig.pool.lost
    assert rig.traffic.under_way == 1
    assert not rig.traffic.close()


def test_a_close_beside_a_call_that_hangs_ends_and_says_so(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, go = threading.Event(), threading.Event()

    def hangs(*_: object) -> None:
        inside.set()
        go.wait()

    with monkeypatch.context() as patch:
        patch.setattr(rig.driver, "copy", hangs)
        patch.setattr(rig.driver, "copy_batch", hangs)

        def copy() -> None:
            rig.up(0, 0)()

        copying = threading.Thread(target=copy, daemon=True)
        copying.start()
        inside.wait()
        closed: list[bool] = []
        closing = threading.Thread(target=lambda: closed.append(rig.traffic.close(0.01)), daemon=True)
        closing.start()
        closing.join(5)
        assert closed == [False]
        assert rig.traffic.issuing
        go.set()
        copying.join(30)
    rig.up(1, 1)()
    assert not rig.traffic.issuing


def test_events_are_used_again(rig: Rig) -> None:
    for turn in range(30):
        rig.up(turn, turn)()
    assert rig.fake.fake_left()["events"] == 1


def until_locked(locks: PageLocks) -> None:
    while locks.nbytes < locks.total:
        assert locks.problem is None


def _next(fake: ModuleType, call: str, code: str) -> Failure:
    """The next call of this name fails."""
    return Failure(call, code, after=fake.STATE._calls[call])
