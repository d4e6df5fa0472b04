"""The fake refuses what CUDA's documentation forbids, so that a test on it fails where a GPU would go wrong."""

import ctypes
import mmap
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvtier.abi.cuda.driver import Address, Driver, Stream
from kvtier.abi.cuda.errors import CudaError, CudaUnsupported
from kvtier.abi.cuda.memory import DeviceMemory
from tests.fake_cuda import load_fake

MIB = 1 << 20


@pytest.fixture
def fake():
    return load_fake(max_delay_ms=0)


@pytest.fixture
def driver(fake):
    driver = Driver(fake, "cuda")
    driver.bind()
    return driver


@pytest.fixture
def at(driver):
    memory = DeviceMemory.create(driver, 8 * MIB)
    yield memory.address
    memory.close()


def refused(name="INVALID_VALUE"):
    return pytest.raises(CudaError, match=f"CUDA_ERROR_{name}")


def plus(address, offset):
    return Address(address + offset)


def finish(driver, stream):
    event = driver.event()
    driver.record(event, stream)
    while not driver.done(event):
        pass


def test_memory_is_mapped_and_allowed_before_it_is_touched(driver, at):
    size = driver.granularity()
    stream = driver.stream()
    handle, address = driver.create(size), driver.reserve(size)
    with refused():
        driver.copy(address, at, 4096, stream)
    driver.map(address, size, handle)
    with refused():
        driver.copy(address, at, 4096, stream)
    driver.allow(address, size)
    driver.copy(address, at, 4096, stream)
    with refused():
        driver.copy(address, at, size + 1, stream)


def test_memory_is_registered_once(driver):
    pages = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    start = Address(ctypes.addressof(ctypes.c_char.from_buffer(pages)))
    driver.register(start, 2 * mmap.PAGESIZE)
    with refused("HOST_MEMORY_ALREADY_REGISTERED"):
        driver.register(plus(start, mmap.PAGESIZE), 2 * mmap.PAGESIZE)
    with refused("HOST_MEMORY_NOT_REGISTERED"):
        driver.unregister(plus(start, mmap.PAGESIZE))
    with pytest.raises(ValueError, match="must be whole pages"):
        driver.register(plus(start, 2 * mmap.PAGESIZE), 100)
    driver.unregister(start)


def test_a_thread_without_a_context_is_refused(fake, driver):
    stream = driver.stream()
    codes: list[Any] = []
    work: tuple[Callable[[], Any], ...] = (
        lambda: fake.cuMemAlloc(4096),
        lambda: fake.cuStreamCreate(1),
        lambda: fake.cuEventCreate(2),
        lambda: fake.cuMemcpyAsync(1, 2, 3, stream),
    )
    thread = threading.Thread(target=lambda: codes.extend(call()[0].name for call in work))
    thread.start()
    thread.join()
    assert codes == ["CUDA_ERROR_INVALID_CONTEXT"] * len(work)


def test_what_a_batch_may_not_be(fake, driver, at):
    stream = driver.stream()
    for stream_, copies in (
        (stream, [(at, plus(at, MIB), 0)]),
        (Stream(0), [(at, plus(at, MIB), 4096)]),
        (stream, [(at, plus(at, MIB), 4096), (plus(at, 4095), plus(at, 2 * MIB), 4096)]),
        (stream, [(at, plus(at, MIB), 4096), (plus(at, 2 * MIB), at, 4096)]),
    ):
        with refused():
            driver.copy_batch(*zip(*copies, strict=True), stream_)
    with pytest.raises(TypeError):
        driver.copy_batch([at], [plus(at, MIB)], [np.int64(4096)], stream)
    driver.copy_batch([at, plus(at, 4096)], [plus(at, MIB)] * 2, [4096, 4096], stream)


def test_pageable_memory_is_copied_but_not_in_a_batch(driver, at):
    stream = driver.stream()
    pages = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    host = Address(ctypes.addressof(ctypes.c_char.from_buffer(pages)))
    driver.copy(at, host, 4096, stream)
    with refused():
        driver.copy_batch([at], [host], [4096], stream)
    driver.register(host, mmap.PAGESIZE)
    driver.copy_batch([at], [host], [4096], stream)
    with refused():  # in part registered, in part not
        driver.copy(at, host, mmap.PAGESIZE + 1, stream)
    driver.register(plus(host, mmap.PAGESIZE), mmap.PAGESIZE)
    with refused():  # over two registrations
        driver.copy(at, host, mmap.PAGESIZE + 1, stream)
    finish(driver, stream)


class TestRaces:
    """Two streams and the same bytes, in every way that they may not be ordered, and in every way that they may."""

    @pytest.fixture
    def streams(self, driver):
        return driver.stream(), driver.stream()

    @pytest.mark.parametrize(
        ("first", "second"),
        [((0, MIB), (2 * MIB, 0)), ((0, MIB), (0, 2 * MIB)), ((MIB, 0), (0, 2 * MIB))],
        ids=["read after write", "write after write", "write after read"],
    )
    def test_the_host_must_have_seen_the_first_done(self, driver, at, streams, first, second, capfd):
        driver.copy(plus(at, first[0]), plus(at, first[1]), 4096, streams[0])
        with refused():
            driver.copy(plus(at, second[0] + 4095), plus(at, second[1] + 4095), 4096, streams[1])
        assert "unordered with earlier work" in capfd.readouterr().err
        finish(driver, streams[0])
        driver.copy(plus(at, second[0] + 4095), plus(at, second[1] + 4095), 4096, streams[1])

    def test_reads_of_a_client_may_be_overtaken_and_writes_may_not(self):
        driver = Driver(load_fake(max_delay_ms=0, overtaken=True), "cuda")
        driver.bind()
        at, (one, other) = driver.alloc(3 * MIB), (driver.stream(), driver.stream())
        driver.copy(at, plus(at, MIB), 4096, one)
        driver.copy(plus(at, 2 * MIB), at, 4096, other)
        with refused():
            driver.copy(at, plus(at, MIB), 4096, other)
        finish(driver, one)
        finish(driver, other)

    def test_an_event_covers_only_what_came_before_it(self, driver, at, streams):
        event = driver.event()
        driver.record(event, streams[0])
        driver.fill(at, 1, 4096, streams[0])
        while not driver.done(event):
            pass
        with refused():
            driver.fill(at, 2, 4096, streams[1])


@pytest.mark.parametrize(
    ("settings", "has"),
    [
        ({"features_off": ["batch_copy"]}, False),
        ({"features_off": ["registered_address"]}, False),
        ({"bindings": 12, "driver_version": 12080}, True),
        ({"bindings": 13, "driver_version": 13000}, True),
        ({"bindings": 13, "driver_version": 12090}, False),
    ],
)
def test_batches_need_a_driver_that_knows_the_form_of_the_bindings(settings, has):
    driver = Driver(load_fake(max_delay_ms=0, **settings), "cuda")
    assert driver.features.batch_copy is has
    memory, stream = DeviceMemory.create(driver, 8192), driver.stream()
    copies = [plus(memory.address, 4096)], [memory.address], [4096]
    if has or "registered_address" in settings.get("features_off", ()):
        driver.copy_batch(*copies, stream)
        finish(driver, stream)
    else:
        with pytest.raises(CudaUnsupported, match="cuMemcpyBatchAsync"):
            driver.copy_batch(*copies, stream)
