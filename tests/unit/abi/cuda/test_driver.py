"""The driver's calls, on the fake: bytes arrive, memory is shared, and errors are of the right kind."""

import ctypes
import gc
import os
import sys
import threading
from types import ModuleType

import cuda.bindings
import pytest

from kvtier.abi.cuda.driver import BATCH, Driver
from kvtier.abi.cuda.errors import CudaError, CudaLost, CudaMissing, CudaOutOfMemory, CudaUnavailable
from kvtier.abi.cuda.memory import DeviceMemory
from tests.fake_cuda import load_fake, until

SIZE = 3 << 20


@pytest.fixture
def fake():
    return load_fake(max_delay_ms=2, devices=2)


@pytest.fixture
def driver(fake):
    driver = Driver(fake, "cuda")
    driver.bind()
    yield driver
    driver.close()


@pytest.fixture
def memory(driver):
    memory = DeviceMemory.create(driver, SIZE)
    yield memory
    memory.close()


@pytest.fixture
def host(driver):
    """A page-locked page."""
    return driver.alloc_host(4096)


def settle(driver, stream):
    event = driver.event()
    driver.record(event, stream)
    until(lambda: driver.done(event))
    driver.drop_event(event)


def test_a_long_batch_is_made_in_several_calls(fake, driver, memory):
    stream, host = driver.stream(), driver.alloc_host(BATCH + 1)
    ctypes.memmove(host, bytes(range(256)) * 4 + b"\x01", BATCH + 1)
    places = range(BATCH + 1)
    driver.copy_batch([memory.address + n for n in places], [host + n for n in places], [1] * len(places), stream)
    settle(driver, stream)
    assert ctypes.string_at(memory.address, BATCH + 1) == ctypes.string_at(host, BATCH + 1)
    driver.copy_batch([], [], [], stream)


def test_an_event_is_done_before_it_was_recorded(driver):
    assert driver.done(driver.event())


def test_imported_memory_outlives_its_maker(driver, host):
    first = DeviceMemory.create(driver, SIZE)
    stream = driver.stream()
    driver.fill(first.address, 0x21, 4096, stream)
    settle(driver, stream)
    assert first.fd is not None
    second = DeviceMemory.from_fd(driver, first.fd, SIZE, keep=True)
    first.close()
    driver.copy(host, second.address, 4096, stream)
    settle(driver, stream)
    assert ctypes.string_at(host, 4096) == b"\x21" * 4096
    assert second.fd is not None
    third = DeviceMemory.from_fd(driver, second.fd, SIZE)
    assert (third.fd, third.why_not) == (None, "the memory belongs to another process")
    second.close()
    third.close()


def test_what_fails_half_way_leaves_nothing(tmp_path):
    for step in ("cuMemExportToShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"):
        fake = load_fake(fail=[{"call": step, "code": "CUDA_ERROR_OUT_OF_MEMORY"}])
        driver = Driver(fake, "cuda")
        gc.collect()  # what earlier tests left has descriptors, too
        before = set(os.listdir("/proc/self/fd"))
        free = driver.memory()
        with pytest.raises(CudaOutOfMemory, match=step):
            DeviceMemory.create(driver, SIZE)
        assert fake.fake_left() == {"contexts": 1}
        assert driver.memory() == free
        assert set(os.listdir("/proc/self/fd")) == before


def test_a_thread_that_is_not_bound_works_and_keeps_its_own_context(fake, driver):
    other = Driver(fake, "cuda:1")
    seen: list[object] = []

    def work():
        other.bind()
        event = driver.event()
        driver.record(event, driver.stream())
        until(lambda: driver.done(event))
        seen.append(int(fake.cuCtxPopCurrent()[1]))
        seen.append(fake.cuCtxPopCurrent()[1])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [0xC0_0001, None]


def test_a_thread_of_ours_goes_from_one_device_to_the_other_and_back(fake, driver):
    drivers = [driver, Driver(fake, "cuda:1")]
    memories = [DeviceMemory.create(each, SIZE) for each in drivers]
    seen: list[int] = []

    def work():
        for step in range(4):
            driver, memory = drivers[step % 2], memories[step % 2]
            driver.bind()
            stream = driver.stream()
            driver.fill(memory.address, step, SIZE, stream)
            settle(driver, stream)
            driver.drop_stream(stream)
            seen.append(ctypes.string_at(memory.address, SIZE).count(step))
        seen.append(int(fake.cuCtxPopCurrent()[1]))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [SIZE] * 4 + [0xC0_0001]
    assert drivers[0].memory() == drivers[1].memory()
    memories[1].close()
    assert drivers[0].memory() < drivers[1].memory(), "each device has memory of its own"


def test_a_visit_ends_as_it_began(fake, driver):
    other = Driver(fake, "cuda:1")
    stream = driver.stream()
    with other.visit():
        assert fake.cuThreadExchangeStreamCaptureMode(2)[1] == 2
        with other.visit(), pytest.raises(CudaError, match="INVALID_HANDLE"):
            other.record(other.event(), stream)  # of the other device's context
    assert int(fake.cuCtxPopCurrent()[1]) == 0xC0_0000
    driver_of_nobody = Driver(fake, "cuda")
    with driver_of_nobody.visit():
        driver_of_nobody.drop_event(driver_of_nobody.event())
    assert fake.cuCtxPopCurrent()[1] is None
    fake.cuCtxSetCurrent(0xC0_0000)


def test_work_on_memory_that_is_gone_loses_the_device(fake, driver):
    memory = DeviceMemory.create(driver, SIZE)
    stream, event = driver.stream(), driver.event()
    go = threading.Event()
    fake.fake_work(stream, go.wait)
    driver.fill(memory.address, 1, SIZE, stream)
    driver.record(event, stream)
    memory.close()
    go.set()
    with pytest.raises(CudaLost, match="ILLEGAL_ADDRESS"):
        until(lambda: driver.done(event))


def test_a_device_is_found_by_its_uuid_wherever_it_stands(fake, driver, monkeypatch):
    second = Driver(fake, "cuda:1")
    assert second.uuid != driver.uuid
    name = f"GPU-{second.uuid.hex()}"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert Driver(fake, name).ordinal == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(CudaUnavailable, match=r"cuda:0 GPU-.*\(CUDA_VISIBLE_DEVICES=0\)"):
        Driver(fake, name)


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("cuInit", "CUDA_ERROR_NO_DEVICE"),
        ("cuInit", "CUDA_ERROR_NOT_INITIALIZED"),
        ("cuInit", "CUDA_ERROR_UNKNOWN"),
        ("cuDeviceGetUuid", "CUDA_ERROR_UNKNOWN"),
        ("cuDevicePrimaryCtxRetain", "CUDA_ERROR_OUT_OF_MEMORY"),
        ("cuDevicePrimaryCtxRetain", "CUDA_ERROR_DEVICE_UNAVAILABLE"),
    ],
)
def test_a_device_that_does_not_open(call, code):
    with pytest.raises(CudaUnavailable):
        Driver(load_fake(fail=[{"call": call, "code": code}]), "cuda")


def test_a_name_that_is_none(fake):
    with pytest.raises(ValueError, match="must be cuda, cuda:N or GPU-<uuid>"):
        Driver(fake, "gpu0")


def opening(bindings, monkeypatch):
    """What is said where importing NVIDIA's bindings comes to ``bindings``; None: they are not there."""
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", bindings)
    with pytest.raises(CudaUnavailable) as caught:
        Driver.open("cuda")
    return str(caught.value)


@pytest.mark.parametrize("version", ["11.8.7", "12.8.0", "12.9.0"])
def test_bindings_that_hold_the_interpreter_lock_are_refused_by_name(version, monkeypatch):
    monkeypatch.setattr(cuda.bindings, "__version__", version)
    said = opening(ModuleType("driver"), monkeypatch)
    assert f"cuda-bindings {version} " in said and "12.9.1 is the oldest" in said
    assert "pip install --upgrade '.[cuda]' in a clone of kvtier" in said


@pytest.mark.parametrize("raised", [KeyError(1234), ValueError("1234 is not a valid CUresult")])
def test_an_error_that_the_bindings_are_too_old_for(fake, driver, raised, monkeypatch):
    """What their wrappers do with a code that is not in their table."""

    def cuEventCreate(Flags):
        raise raised

    def cuEventQuery(hEvent):
        raise raised

    event = driver.event()
    monkeypatch.setattr(fake, "cuEventCreate", cuEventCreate)
    with pytest.raises(CudaError, match=r"cuEventCreate: unknown \(1234\)"):
        driver.event()
    monkeypatch.setattr(fake, "cuEventQuery", cuEventQuery)
    with pytest.raises(CudaError, match=r"cuEventQuery: unknown \(1234\)"):
        driver.done(event)


def test_a_driver_that_is_too_old_for_the_bindings(fake, monkeypatch):
    def cuDeviceGetUuid(dev):
        raise RuntimeError('Function "cuDeviceGetUuid_v2" not found')

    monkeypatch.setattr(fake, "cuDeviceGetUuid", cuDeviceGetUuid)
    with pytest.raises(CudaUnavailable, match="too old"):
        Driver(fake, "cuda")


def test_a_driver_below_the_minimum_is_refused_by_its_version():
    with pytest.raises(CudaMissing, match=r"driver is for CUDA 12\.6, and kvtier needs 12\.8 or newer"):
        Driver(load_fake(driver_version=12060), "cuda")
