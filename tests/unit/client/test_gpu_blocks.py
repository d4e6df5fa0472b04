"""Blocks that lie on a GPU, to and from slots in host memory: bytes, page-locks, and the calls that are made."""

from __future__ import annotations

import gc
import logging
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from mmap import mmap
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvtier import buffers
from kvtier.abi.cuda import page_locks
from kvtier.abi.cuda.driver import Address, Driver
from kvtier.abi.layout import HOST, ArenaLayout
from kvtier.abi.spec import CacheSpec, PoolSpec, WindowGroupSpec
from kvtier.errors import InvalidArgument
from kvtier.memory import arrays, gpu
from kvtier.memory import tiers as memory
from kvtier.memory.arrays import Bytes
from kvtier.memory.planes import Planes
from kvtier.memory.tiers import CpuMemory
from kvtier.types import Tier
from tests.fake_cuda import GpuArray, load_fake, until, use
from tests.fakes.cuda.bindings._settings import Failure

POOL_BYTES = (6000, 160)
BLOCK_BYTES = sum(POOL_BYTES)
SLOTS = 15
SPEC = CacheSpec(
    "two-pools", "uint8", 1, groups=(WindowGroupSpec(pools=tuple(PoolSpec(1, 1, n, 1) for n in POOL_BYTES)),)
)
LAYOUT = ArenaLayout.plan(SPEC, {(0, HOST): SLOTS})
CHUNK = 16 << 10
"""Smaller than two records, so that pools' parts lie on both sides of a border."""


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (page_locks, memory):
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return use(load_fake(max_delay_ms=2, devices=2), monkeypatch)


def mapping() -> Bytes:
    """A host segment."""
    return np.frombuffer(mmap(-1, LAYOUT.host_bytes), np.uint8)


def array(driver: Driver, content: object = 0) -> GpuArray:
    return GpuArray(driver, BLOCK_BYTES, content=content)


def some_blocks(count: int = SLOTS) -> list[Bytes]:
    return list(np.random.default_rng(count).integers(0, 256, (count, BLOCK_BYTES), dtype=np.uint8))


def there_and_back(host: CpuMemory, driver: Driver) -> None:
    """Every slot is written and read, in some order; the CPU sees the same bytes."""
    blocks, order = some_blocks(), np.random.default_rng(1).permutation(SLOTS).tolist()
    arrays = [array(driver, block) for block in blocks]
    host.write(0, order, buffers.readable(arrays, SLOTS, BLOCK_BYTES, host.reach))
    found, out = np.zeros((SLOTS, BLOCK_BYTES), np.uint8), [array(driver) for _ in range(SLOTS)]
    host.read(0, order, found)
    host.read(0, order, buffers.writable(out, SLOTS, BLOCK_BYTES, host.reach))
    assert np.array_equal(found, blocks)
    assert np.array_equal([each.bytes for each in out], blocks)


def locks(fake: ModuleType) -> int:
    """Registrations of this process's memory."""
    return int(fake.fake_left().get("registrations", 0))


def copies(fake: ModuleType) -> tuple[int, int]:
    return fake.STATE._calls["cuMemcpyBatchAsync"], fake.STATE._calls["cuMemcpyAsync"]


def test_locked_memory_is_copied_in_one_call_each_way(fake: ModuleType) -> None:
    host, driver = CpuMemory(LAYOUT, Tier.HOST, mapping()), Driver(fake, "cuda")
    assert locks(fake) == 0, "nothing is locked for who has no blocks on a GPU"

    def one_call_each() -> bool:
        batches, singles = copies(fake)
        there_and_back(host, driver)
        return copies(fake) == (batches + 2, singles)

    until(one_call_each)
    assert locks(fake) == -(-LAYOUT.host_bytes // CHUNK)


def test_a_driver_without_batches_copies_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use(load_fake(max_delay_ms=0, features_off=["batch_copy"]), monkeypatch)
    there_and_back(CpuMemory(LAYOUT, Tier.HOST, mapping()), Driver(fake, "cuda"))
    assert copies(fake)[0] == 0


def test_what_cannot_be_locked_is_copied_all_the_same_and_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fail = {"call": "cuMemHostRegister", "code": "CUDA_ERROR_INVALID_VALUE", "after": 3, "times": 0}
    fake = use(load_fake(max_delay_ms=0, fail=[fail]), monkeypatch)
    host, driver = CpuMemory(LAYOUT, Tier.HOST, mapping()), Driver(fake, "cuda")
    with caplog.at_level(logging.WARNING, "kvtier"):
        there_and_back(host, driver)
        until(lambda: caplog.messages)
        before = copies(fake)
        there_and_back(host, driver)
    assert all(after > count for after, count in zip(copies(fake), before, strict=True)), "some are locked, some not"
    (message,) = caplog.messages
    assert f"{3 * CHUNK} of {LAYOUT.host_bytes} bytes of host memory are page-locked" in message
    assert "cuMemHostRegister: CUDA_ERROR_INVALID_VALUE" in message


def test_memory_is_unlocked_before_it_is_unmapped(fake: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    data = mapping()
    address, unregister, mapped = data.ctypes.data, Driver.unregister, []

    def seen(self: Driver, start: Address) -> None:
        mapped.append(is_mapped(start))
        unregister(self, start)

    monkeypatch.setattr(Driver, "unregister", seen)
    host, count = CpuMemory(LAYOUT, Tier.HOST, data), -(-LAYOUT.host_bytes // CHUNK)
    there_and_back(host, Driver(fake, "cuda"))
    until(lambda: locks(fake) == count)
    view = host.view(0, 1, write=False)[0]
    del host, data
    gc.collect()
    assert locks(fake) == count, "a view of it is left"
    del view
    gc.collect()
    until(lambda: locks(fake) == 0)
    assert mapped == [True] * count
    until(lambda: not is_mapped(address))


def is_mapped(address: int) -> bool:
    ranges = re.findall(r"^(\w+)-(\w+) ", Path("/proc/self/maps").read_text(), re.MULTILINE)
    return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)


class Tensor(GpuArray):
    """As far as it is one of torch."""

    nbytes, is_cuda = BLOCK_BYTES, True

    def __init__(self, driver: Driver, content: object) -> None:
        super().__init__(driver, BLOCK_BYTES, content=content)
        self.device = SimpleNamespace(type="cuda", index=driver.ordinal)

    def contiguous(self) -> Tensor:
        return self

    def is_contiguous(self) -> bool:
        return True

    def data_ptr(self) -> int:
        return int(self.memory.address)


@pytest.mark.parametrize("kind", [array, Tensor])
def test_blocks_of_several_gpus_and_of_the_cpu_in_one_call(
    fake: ModuleType, monkeypatch: pytest.MonkeyPatch, kind: Callable[..., Any]
) -> None:
    for module in (arrays, buffers, gpu):
        monkeypatch.setattr(module, "is_tensor", lambda value: isinstance(value, Tensor))
    host, blocks = CpuMemory(LAYOUT, Tier.HOST, mapping()), some_blocks(6)
    drivers = [Driver(fake, "cuda:0"), Driver(fake, "cuda:1")]
    mixed: list[Any] = [
        kind(drivers[index % 3], block) if index % 3 < 2 else block for index, block in enumerate(blocks)
    ]
    host.write(0, range(6), buffers.readable(mixed, 6, BLOCK_BYTES, host.reach))
    found = np.zeros((6, BLOCK_BYTES), np.uint8)
    host.read(0, range(6), found)
    assert np.array_equal(found, blocks)


def test_threads_copy_side_by_side(fake: ModuleType) -> None:
    hosts = [CpuMemory(LAYOUT, Tier.HOST, mapping()) for _ in range(3)]
    with ThreadPoolExecutor(len(hosts)) as threads:
        assert list(threads.map(lambda host: there_and_back(host, Driver(fake, "cuda")), hosts)) == [None] * 3


@pytest.mark.parametrize("slot", [-1, SLOTS])
def test_a_slot_that_there_is_not(fake: ModuleType, slot: int) -> None:
    host = CpuMemory(LAYOUT, Tier.HOST, mapping())
    out = buffers.writable([array(Driver(fake, "cuda"))], 1, BLOCK_BYTES, host.reach)
    with pytest.raises(IndexError):
        host.read(0, [slot], out)


def test_where_the_gpu_cannot_be_used_arrays_are_refused_and_the_reason_is_told(
    fake: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host, block = CpuMemory(LAYOUT, Tier.HOST, mapping()), array(Driver(fake, "cuda"))
    fake.STATE.settings.fail.append(Failure("cuDevicePrimaryCtxRetain", "CUDA_ERROR_OUT_OF_MEMORY", 1, 0))
    with caplog.at_level(logging.WARNING, "kvtier"):
        for _ in range(2):
            with pytest.raises(InvalidArgument, match="slots that are mapped for its GPU"):
                buffers.readable([block], 1, BLOCK_BYTES, host.reach)
    (message,) = caplog.messages
    assert "takes no context of this process" in message


PIECES = (100, 4000, 2000, 60)
"""Of a page, in four tensors; the border of the pools lies within the third, those of chunks anywhere."""


def tensors(driver: Driver) -> list[GpuArray]:
    """An engine's, half of whose bytes are another's."""
    return [GpuArray(driver, 2 * SLOTS, nbytes, stride=2 * nbytes) for nbytes in PIECES]


def bytes_in(parts: list[GpuArray], pages: list[int]) -> Bytes:
    return np.concatenate([part.bytes[pages] for part in parts], axis=1)


def test_pages_on_a_gpu_are_copied_in_one_call_each_way(fake: ModuleType) -> None:
    host, driver = CpuMemory(LAYOUT, Tier.HOST, mapping()), Driver(fake, "cuda")
    blocks, source, target = np.stack(some_blocks()), tensors(driver), tensors(driver)
    order, pages = np.random.default_rng(1).permutation(SLOTS).tolist(), list(range(SLOTS, 2 * SLOTS))
    for part, begin, end in zip(source, np.cumsum(PIECES) - PIECES, np.cumsum(PIECES), strict=True):
        part.bytes[pages] = blocks[:, begin:end]
    written = Planes(source)[pages]
    assert host.waits(written)

    def one_call_each() -> bool:
        batches, singles = copies(fake)
        host.write(0, order, buffers.readable(written, SLOTS, BLOCK_BYTES, host.reach))
        host.read(0, order, Planes(target)[pages[::-1]])
        return copies(fake) == (batches + 2, singles)

    until(one_call_each)
    found = np.zeros((SLOTS, BLOCK_BYTES), np.uint8)
    host.read(0, order, found)
    assert np.array_equal(found, blocks)
    assert np.array_equal(bytes_in(target, pages[::-1]), blocks)
    assert not bytes_in(target, list(range(SLOTS))).any()
    with pytest.raises(IndexError):
        host.read(0, [SLOTS], Planes(target)[[0]])


def test_planes_of_two_gpus_are_refused(fake: ModuleType) -> None:
    host = CpuMemory(LAYOUT, Tier.HOST, mapping())
    mixed = Planes([*tensors(Driver(fake, "cuda:0"))[:2], *tensors(Driver(fake, "cuda:1"))[2:]])[[0]]
    with pytest.raises(InvalidArgument, match="planes of a GPU: must be planes of one GPU"):
        host.write(0, [0], mixed)
    for take in (buffers.readable, buffers.writable):
        with pytest.raises(InvalidArgument, match="slots that are mapped for their GPU"):
            take(mixed, 1, BLOCK_BYTES, host.reach)
    with pytest.raises(InvalidArgument, match=r"parts\[1\] = an array elsewhere"):
        Planes([tensors(Driver(fake, "cuda:0"))[0], np.zeros((2 * SLOTS, 8), np.uint8)])
