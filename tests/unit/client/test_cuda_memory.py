"""Slots in GPU memory, on the fake of NVIDIA's driver: bytes, fences, and what its errors become."""

import asyncio
import ctypes
import gc
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from mmap import PAGESIZE, mmap
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvtier import DeviceError, InvalidArgument, buffers
from kvtier.abi import attach
from kvtier.abi.cuda.driver import Address, Driver, Event, Stream
from kvtier.abi.cuda.errors import CudaError, CudaUnavailable
from kvtier.abi.cuda.memory import DeviceMemory
from kvtier.abi.cuda.views import DeviceView
from kvtier.abi.layout import DEVICE, HOST, ArenaLayout
from kvtier.abi.spec import CacheSpec, PoolSpec, WindowGroupSpec
from kvtier.buffers import DeviceBytes
from kvtier.deadline import PASSED, Deadline, all_of
from kvtier.errors import DaemonError
from kvtier.memory import arrays
from kvtier.memory.gpu import Gpu, fence_over, passage, passing
from kvtier.memory.tiers import CudaMemory, map_device
from tests.fake_cuda import load_fake, until
from tests.fakes.cuda.bindings._settings import Failure
from tests.unit.tiers.arena_helpers import parts

POOL_BYTES = (6000, 160)
BLOCK_BYTES = sum(POOL_BYTES)
SLOTS = 4
SPEC = CacheSpec(
    "two-pools", "uint8", 1, groups=(WindowGroupSpec(pools=tuple(PoolSpec(1, 1, n, 1) for n in POOL_BYTES)),)
)
LAYOUT = ArenaLayout.plan(SPEC, {(0, DEVICE): SLOTS, (0, HOST): 2})


@pytest.fixture
def fake() -> ModuleType:
    return load_fake(max_delay_ms=5)


@pytest.fixture
def gpu(fake: ModuleType) -> Gpu:
    gpu = Gpu(Driver(fake, "cuda"))
    gpu.driver.bind()  # as an application has its own context current, which the fake's kernels want
    return gpu


@pytest.fixture
def memory(gpu: Gpu) -> Iterator[CudaMemory]:
    memory = DeviceMemory.create(gpu.driver, LAYOUT.device_bytes)
    yield CudaMemory(gpu, memory, LAYOUT)
    memory.close()


def some_blocks(count: int, seed: int = 0) -> list[NDArray[np.uint8]]:
    return list(np.random.default_rng(seed).integers(0, 256, (count, BLOCK_BYTES), dtype=np.uint8))


def empty_blocks(count: int) -> list[NDArray[np.uint8]]:
    return list(np.zeros((count, BLOCK_BYTES), dtype=np.uint8))


def test_blocks_that_were_page_locked_apart_are_copied_apart(gpu: Gpu) -> None:
    """As the pinned tensors of an engine may be, one right after the other."""
    size = 2 * PAGESIZE
    spec = CacheSpec("one-pool", "uint8", 1, groups=(WindowGroupSpec(pools=(PoolSpec(1, 1, size, 1),)),))
    layout = ArenaLayout.plan(spec, {(0, DEVICE): 2, (0, HOST): 0})
    memory = CudaMemory(gpu, DeviceMemory.create(gpu.driver, layout.device_bytes), layout)
    pages = mmap(-1, 2 * size)
    blocks = [np.frombuffer(pages, np.uint8, size, offset) for offset in (0, size)]
    for block in blocks:
        gpu.driver.register(Address(block.ctypes.data), size)
    blocks[1][:] = 7
    memory.write(0, [0, 1], blocks)
    memory.read(0, [1, 0], blocks)
    assert (blocks[0] == 7).all() and not blocks[1].any()


def test_views_have_the_addresses_that_the_layout_says(memory: CudaMemory) -> None:
    first: Any = memory.view(0, 0, write=False)[0]
    base = first.address - parts(LAYOUT, DEVICE, 0, 0)[0][0]
    for slot in range(SLOTS):
        views = memory.view(0, slot, write=slot % 2 == 0)
        assert [(view.address - base, view.nbytes) for view in views] == parts(LAYOUT, DEVICE, 0, slot)
        assert [view.readonly for view in views] == [slot % 2 == 1] * 2


@pytest.mark.parametrize("slot", [-1, SLOTS])
def test_a_slot_that_there_is_not(memory: CudaMemory, slot: int) -> None:
    with pytest.raises(IndexError):
        memory.read(0, [0, slot], empty_blocks(2))


def test_a_segment_shorter_than_its_layout_is_refused(gpu: Gpu) -> None:
    memory = DeviceMemory.create(gpu.driver, LAYOUT.device_bytes - 1)
    with pytest.raises(DaemonError, match="the layout says"):
        CudaMemory(gpu, memory, LAYOUT)


def test_a_fence_has_passed_when_the_stream_has(fake: ModuleType, gpu: Gpu, memory: CudaMemory) -> None:
    go, stream = threading.Event(), int(gpu.driver.stream())
    fake.fake_work(stream, go.wait)
    fence, other = fence_over([memory], stream), memory.fence(int(gpu.driver.stream()))
    assert not fence.passed()
    while not other.passed():
        pass
    assert not fence.passed(), "it stands for one stream's work, not for the device's"
    go.set()
    while not fence.passed():
        pass
    assert fence_over([memory], fence) is fence


def test_several_fences_have_passed_when_the_last_of_them_has(fake: ModuleType, gpu: Gpu) -> None:
    gates = [threading.Event(), threading.Event()]
    streams = [int(gpu.driver.stream()) for _ in gates]
    for stream, go in zip(streams, gates, strict=True):
        fake.fake_work(stream, go.wait)
    fences = [gpu.fence(stream) for stream in streams]
    together = all_of([fences[0], PASSED, fences[1]])
    for fence, go in zip(fences, gates, strict=True):
        assert not together.passed()
        go.set()
        gpu.wait(fence.passed)
    assert together.passed()


async def test_whoever_waits_for_a_fence_is_told_what_went_wrong(tmp_path: Path) -> None:
    lost, go = tmp_path / "lost", threading.Event()
    fake = load_fake(lost=lost)
    gpu = Gpu(Driver(fake, "cuda"))
    gpu.driver.bind()
    fake.fake_work(1, go.wait)
    waiting = asyncio.create_task(passing(gpu.fence(1), Deadline(30)))
    await asyncio.sleep(0)
    lost.touch()
    with pytest.raises(DeviceError, match="LAUNCH_FAILED"):
        await waiting
    go.set()


def test_a_mapping_that_is_garbage_ends_when_the_default_stream_is_done(fake: ModuleType, gpu: Gpu) -> None:
    """Work of the caller's that no lease tells of: reads of slots whose generations are compared afterwards."""
    made = DeviceMemory.create(gpu.driver, LAYOUT.device_bytes)
    assert made.fd is not None
    mapped = DeviceMemory.from_fd(gpu.driver, made.fd, made.nbytes)
    mapped.collected_by(gpu.unmap_later)
    go, address, nbytes = threading.Event(), mapped.address, made.nbytes
    fake.fake_work(1, go.wait)
    fake.fake_work(1, lambda: ctypes.memset(address, 7, nbytes))
    del mapped
    gc.collect()
    assert fake.fake_left()["mappings"] == 2
    go.set()
    until(lambda: fake.fake_left()["mappings"] < 2)
    assert ctypes.string_at(made.address, nbytes) == b"\7" * nbytes
    made.close()


def test_a_stream_that_is_being_captured_has_no_point_to_mark(fake: ModuleType, gpu: Gpu, memory: CudaMemory) -> None:
    stream = gpu.driver.stream()
    fake.fake_capture(stream, True)
    with pytest.raises(DeviceError, match="being captured into a graph") as caught:
        memory.fence(stream)
    assert caught.value.reason == "DEVICE_FAILED"
    event = gpu.driver.event()
    gpu.driver.record(event, stream)
    with pytest.raises(CudaError, match="CAPTURED_EVENT"):  # what it would have come to
        gpu.driver.done(event)
    fake.fake_capture(stream, False)
    memory.fence(stream)


def test_the_default_streams_point_is_marked_when_no_capture_forbids_it(
    fake: ModuleType, gpu: Gpu, memory: CudaMemory
) -> None:
    """While a blocking stream is captured, CUDA lets nobody record an event in the default stream, nor ask it."""
    code, blocking = fake.cuStreamCreate(0)
    assert not code
    fake.fake_capture(int(blocking), True)
    fence = memory.fence(None)
    assert [fence.passed() for _ in range(3)] == [False] * 3
    over = threading.Event()
    fake.fake_work(1, over.wait)
    fake.fake_capture(int(blocking), False)
    assert not fence.passed(), "the work that the default stream has by now is not over"
    over.set()
    passage(fence).result(timeout=30)


class Snatched(deque[Any]):
    """Has one when it is asked, which another thread takes before it can be taken here."""

    def __bool__(self) -> bool:
        return True


def test_threads_that_want_the_last_event_at_once_get_one_each(
    gpu: Gpu, memory: CudaMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "_events", Snatched())
    blocks, found = some_blocks(1), empty_blocks(1)
    memory.write(0, [1], blocks)
    gpu.wait(memory.fence(None).passed)
    memory.read(0, [1], found)
    assert np.array_equal(found, blocks)


def test_a_stream_of_nobodys_is_an_error_with_the_call_in_it(memory: CudaMemory) -> None:
    with pytest.raises(DeviceError, match=r"how far a stream.*cuStreamIsCapturing.*INVALID_HANDLE") as caught:
        memory.fence(0xDEAD)
    assert (caught.value.reason, caught.value.call, caught.value.code) == ("DEVICE_FAILED", "cuStreamIsCapturing", 400)


def test_after_a_failed_copy_nothing_is_being_copied(fake: ModuleType) -> None:
    """The third of eight is refused; the two before it, which come late, must be over when the error is raised."""
    fake = load_fake(max_delay_ms=20, fail=[{"call": "cuMemcpyAsync", "code": "CUDA_ERROR_INVALID_VALUE", "after": 2}])
    gpu = Gpu(Driver(fake, "cuda"))
    memory = CudaMemory(gpu, DeviceMemory.create(gpu.driver, LAYOUT.device_bytes), LAYOUT)
    blocks = some_blocks(SLOTS)
    with pytest.raises(DeviceError, match="copying to or from slots"):
        memory.write(0, range(SLOTS), blocks)
    for block in blocks:
        block[:] = 0
    found = empty_blocks(2)
    memory.read(0, [0, 1], found)
    assert np.array_equal([row[:6000] for row in found], [row[:6000] for row in some_blocks(2)])


def test_an_interrupted_wait_ends_when_the_copies_have(gpu: Gpu) -> None:
    asked: list[bool] = []

    def passed() -> bool:
        asked.append(len(asked) == 3)
        if len(asked) == 1:
            signal.raise_signal(signal.SIGINT)
        return asked[-1]

    with pytest.raises(KeyboardInterrupt):
        gpu.wait(passed)
    assert asked == [False, False, False, True]


def test_an_interrupt_before_the_end_of_the_copies_is_marked_leaves_none_under_way(
    fake: ModuleType, gpu: Gpu, memory: CudaMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = gpu.driver.record

    def interrupted(event: Event, stream: Stream) -> None:
        monkeypatch.setattr(gpu.driver, "record", record)
        signal.raise_signal(signal.SIGINT)
        record(event, stream)

    monkeypatch.setattr(gpu.driver, "record", interrupted)
    blocks = some_blocks(SLOTS)
    with pytest.raises(KeyboardInterrupt):
        memory.write(0, range(SLOTS), blocks)
    for block in blocks:
        block[:] = 0
    found = empty_blocks(SLOTS)
    memory.read(0, range(SLOTS), found)
    assert np.array_equal(found, some_blocks(SLOTS))


@pytest.mark.parametrize("call", ["cuEventRecord", "cuEventQuery"])
def test_copies_whose_event_fails_are_over_when_that_is_raised(
    fake: ModuleType, gpu: Gpu, memory: CudaMemory, call: str
) -> None:
    memory.write(0, [0], some_blocks(1))
    go = threading.Event()
    fake.fake_work(gpu.to_device, go.wait)
    fake.STATE.settings.fail.append(Failure(call, "CUDA_ERROR_INVALID_VALUE", after=fake.STATE._calls[call]))
    asked = fake.STATE._calls["cuStreamQuery"]
    blocks = some_blocks(SLOTS)
    raised: list[DeviceError] = []

    def write() -> None:
        try:
            memory.write(0, range(SLOTS), blocks)
        except DeviceError as error:
            raised.append(error)

    writing = threading.Thread(target=write)
    writing.start()
    while fake.STATE._calls["cuStreamQuery"] < asked + 3:
        assert writing.is_alive(), "it has raised, and the stream copies"
    go.set()
    writing.join(30)
    assert [error.call for error in raised] == [call]
    found = empty_blocks(SLOTS)
    for block in blocks:
        block[:] = 0
    memory.read(0, range(SLOTS), found)
    assert np.array_equal(found, some_blocks(SLOTS))


def test_a_lost_device_says_what_to_do(tmp_path: Path) -> None:
    lost = tmp_path / "lost"
    gpu = Gpu(Driver(load_fake(lost=lost), "cuda"))
    memory = CudaMemory(gpu, DeviceMemory.create(gpu.driver, LAYOUT.device_bytes), LAYOUT)
    fence = memory.fence(None)
    lost.write_text("CUDA_ERROR_ILLEGAL_ADDRESS")
    with pytest.raises(DeviceError, match="end it, and the daemon has its slots back") as caught:
        fence.passed()
    assert caught.value.reason == "DEVICE_LOST"
    with pytest.raises(DeviceError):
        memory.read(0, [0], empty_blocks(1))


# -- rows that lie on the GPU themselves ------------------------------------------------------------------------------


class Array:
    """An array of the GPU that is nobody's tensor, of one block."""

    def __init__(self, gpu: Gpu, *, shape: tuple[int, ...] = (BLOCK_BYTES,), strides: tuple[int, ...] | None = None):
        self.memory = DeviceMemory.create(gpu.driver, BLOCK_BYTES)
        data = (self.memory.address, False)
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": shape,
            "strides": strides,
            "typestr": "|u1",
            "data": data,
        }


def test_a_block_is_taken_when_the_callers_stream_has_made_it(
    fake: ModuleType, gpu: Gpu, memory: CudaMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,), go, made = some_blocks(1), threading.Event(), Array(gpu)
    fake.fake_work(1, go.wait)
    fake.fake_work(1, lambda: ctypes.memmove(made.memory.address, block.ctypes.data, BLOCK_BYTES))
    writing = threading.Thread(
        target=lambda rows: memory.write(0, [1], rows), args=[buffers.readable([made], 1, BLOCK_BYTES, lambda _: gpu)]
    )
    writing.start()
    go.set()
    writing.join()
    found = empty_blocks(1)
    memory.read(0, [1], found)
    assert np.array_equal(found, [block])


def test_an_array_is_taken_when_the_stream_that_it_names_has_made_it(gpu: Gpu, memory: CudaMemory) -> None:
    """Version 3 of the array interface: CuPy's arrays say on which stream they are made."""
    stream, data = gpu.driver.stream(), np.full(BLOCK_BYTES, 5, np.uint8)
    source = gpu.driver.alloc_host(BLOCK_BYTES)
    ctypes.memmove(source, data.ctypes.data, BLOCK_BYTES)
    made = Array(gpu)
    made.__cuda_array_interface__ |= {"version": 3, "stream": stream}
    gpu.driver.copy(made.memory.address, source, BLOCK_BYTES, stream)
    memory.write(0, [2], buffers.readable([made], 1, BLOCK_BYTES, lambda _: gpu))
    found = empty_blocks(1)
    memory.read(0, [2], found)
    assert np.array_equal(found, [data])


def test_what_is_made_contiguous_is_so_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies that make it so are work of the caller's stream like any other."""
    steps: list[str] = []

    class Tensor:
        """As far as it is one of torch, on the GPU, whose rows do not follow each other."""

        nbytes, is_cuda, device = 8, True, SimpleNamespace(type="cuda", index=0)

        def contiguous(self) -> "Tensor":
            steps.append("copied")
            return self

        def is_contiguous(self) -> bool:
            return True

        def data_ptr(self) -> int:
            return 0

    class Here:
        def fence(self, stream: int | None) -> object:
            steps.append("marked")
            return PASSED

    for module in (arrays, buffers):
        monkeypatch.setattr(module, "is_tensor", lambda value: isinstance(value, Tensor))
    here: Any = Here()
    blocks: Any = [Tensor(), Tensor()]
    assert len(buffers.readable(blocks, 2, 8, lambda _: here)) == 2
    assert steps == ["copied", "copied", "marked"]


def test_what_cannot_be_taken_where_it_lies_is_refused(gpu: Gpu) -> None:
    scattered = Array(gpu, shape=(BLOCK_BYTES // 2, 2), strides=(4, 1))
    for array, place in ((scattered, lambda _: gpu), (Array(gpu), None)):
        for take in (buffers.readable, buffers.writable):
            with pytest.raises(InvalidArgument, match=r"\[0\] = an array .* C-contiguous"):
                take([array], 1, BLOCK_BYTES, place)
    with pytest.raises(InvalidArgument, match=f"{BLOCK_BYTES} bytes: must be {BLOCK_BYTES + 1} bytes"):
        buffers.readable([Array(gpu)], 1, BLOCK_BYTES + 1, lambda _: gpu)


def test_what_is_read_only_is_no_target(gpu: Gpu) -> None:
    view = DeviceView(DeviceMemory.create(gpu.driver, BLOCK_BYTES), 0, BLOCK_BYTES, readonly=True)
    with pytest.raises(InvalidArgument, match=r"out\[0\] = an array that is not"):
        buffers.writable([view], 1, BLOCK_BYTES, lambda _: gpu)
    assert len(buffers.readable([view], 1, BLOCK_BYTES, lambda _: gpu)) == 1


def test_rows_with_strides_of_c_order_are_contiguous(gpu: Gpu) -> None:
    array = Array(gpu, shape=(BLOCK_BYTES // 2, 2), strides=(2, 1))
    (row,) = buffers.readable([array], 1, BLOCK_BYTES, lambda _: gpu)
    assert isinstance(row, DeviceBytes) and row.address == array.memory.address


# -- opening a device ------------------------------------------------------------------------------------------------


async def test_a_device_that_is_not_there_is_a_reason_and_no_descriptor_is_left() -> None:
    fd = os.memfd_create("cuda")
    gc.collect()  # what earlier tests left has descriptors, too
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises((CudaUnavailable, CudaError), match=r".+"):
        await map_device(fd, attach.CudaHandle("0" * 32, LAYOUT.device_bytes))
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(fd)


async def test_opening_does_not_hold_up_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    go, fd = threading.Event(), os.memfd_create("cuda")

    def slow(uuid: str) -> Gpu:
        assert go.wait(10)
        raise DaemonError("opened", reason="")

    monkeypatch.setattr(Gpu, "of", slow)
    opening = asyncio.create_task(map_device(fd, attach.CudaHandle("0" * 32, 1)))
    await asyncio.sleep(0)
    go.set()
    with pytest.raises(DaemonError, match="opened"):
        await opening
    os.close(fd)
