"""What arrives in NVIDIA's library of kvtier's calls, through the real bindings, and what comes back of its answers.

The library is ``tests/fakes/libcuda.c``: it does nothing but say what it was given, or wait for another thread.
"""

import re
import shutil
import subprocess
import sys

import pytest

from tests.fake_cuda import load_fake, stub_environment

pytest.importorskip("cuda.bindings", reason="NVIDIA's bindings are not installed")
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler to make the library with")

CALLS = """
import os
from kvtier.abi.cuda.driver import Address, Driver
from kvtier.abi.cuda.errors import CudaError
from kvtier.abi.cuda.memory import DeviceMemory

def tell(*values):
    os.write(2, (">" + " ".join(map(str, values)) + "\\n").encode())

driver = Driver.open("GPU-10111213-1415-1617-1819-1a1b1c1d1e1f")
tell(driver.ordinal, driver.name, driver.pci_address(), *driver.memory(), driver.features.batch_copy)
driver.bind()
made = DeviceMemory.create(driver, 3 << 20)
shared = DeviceMemory.from_fd(driver, made.fd, 3 << 20)
tell(made.fd, hex(made.address), Driver.ordinal_at(made.address))
shared.close()
made.close()
stream, event, plain, host = driver.stream(), driver.event(), driver.alloc(100), driver.alloc_host(100)
driver.register(Address(0x64000), 8192)
driver.unregister(Address(0x64000))
driver.record(event, stream)
tell(driver.done(event), driver.done(event))
tell(driver.capturing(stream))
tell(driver.idle(stream), driver.idle(stream))
driver.copy(plain, host, 8, stream)
driver.copy_batch([0xFEDCBA9876543210], [0x10], [5], stream)
driver.copy_batch([1, 2, 3], [0x101, 0x102, 0x103], [0x201, 0x202, 0x203], stream)
for refused in (lambda: driver.copy(plain, host, 700, stream), lambda: driver.fill(plain, 255, 4711, stream)):
    try:
        refused()
    except CudaError as error:
        tell(type(error).__name__, error)
driver.drop_event(event)
driver.drop_stream(stream)
driver.free(plain)
driver.free_host(host)
driver.close()
"""
SAID = """\
cuInit 0
cuDeviceGetAttribute 41 1
cuDeviceGetAttribute 102 1
cuDeviceGetAttribute 103 1
cuDeviceGetAttribute 91 1
cuDevicePrimaryCtxRetain 1
cuCtxPushCurrent_v2 0xc0
cuThreadExchangeStreamCaptureMode 2
cuThreadExchangeStreamCaptureMode 1
cuCtxPopCurrent_v2 .
>1 Stub 1 0000:3b:01.0 5497558138880 9895604649984 True
cuCtxSetCurrent 0xc0
cuThreadExchangeStreamCaptureMode 2
cuMemCreate 4194304 type 1 handles 1 at 1 1 rdma 0 flags 0
cuMemExportToShareableHandle 77 1 0
cuMemAddressReserve 4194304 2097152 0 0
cuMemMap 7000000000 4194304 0 77 0
cuMemSetAccess 7000000000 4194304 at 1 1 flags 3 count 1
cuMemRelease 77
cuMemImportFromShareableHandle 3 1
cuMemAddressReserve 4194304 2097152 0 0
cuMemMap 7000000000 4194304 0 78 0
cuMemSetAccess 7000000000 4194304 at 1 1 flags 3 count 1
cuMemRelease 78
cuPointerGetAttribute 9 7000000000
>3 0x7000000000 1
cuMemUnmap 7000000000 4194304
cuMemAddressFree 7000000000 4194304
cuMemUnmap 7000000000 4194304
cuMemAddressFree 7000000000 4194304
cuStreamCreate 1
cuEventCreate 2
cuMemAlloc_v2 100
cuMemHostAlloc 100 1
cuMemHostRegister_v2 0x64000 8192 1
cuMemHostUnregister 0x64000
cuEventRecord 0xe1 0x51
cuEventQuery 0xe1
cuEventQuery 0xe1
>False True
cuStreamIsCapturing 0x51
>True
cuStreamQuery 0x51
cuStreamQuery 0x51
>False True
cuMemcpyAsync 7100000000 7200000000 8 0x51
cuMemcpyBatchAsync_v2 0x51 order 1 flags 1 firsts 0 of 1
cuMemcpyBatchAsync_v2 fedcba9876543210 10 5
cuMemcpyBatchAsync_v2 0x51 order 1 flags 1 firsts 0 of 1
cuMemcpyBatchAsync_v2 1 101 513
cuMemcpyBatchAsync_v2 2 102 514
cuMemcpyBatchAsync_v2 3 103 515
cuMemcpyAsync 7100000000 7200000000 700 0x51
>CudaLost cuMemcpyAsync: CUDA_ERROR_ILLEGAL_ADDRESS (700): as the test asked
cuMemsetD8Async 7100000000 255 4711 0x51
>CudaError cuMemsetD8Async: unknown (4711): an error that these bindings do not know
cuEventDestroy_v2 0xe1
cuStreamDestroy_v2 0x51
cuMemFree_v2 7100000000
cuMemFreeHost 0x7200000000
cuDevicePrimaryCtxRelease_v2 1
"""


ANSWERED = {
    *("cuDeviceGet", "cuDeviceGetCount", "cuDeviceGetName", "cuDeviceGetPCIBusId", "cuDeviceGetUuid"),
    *("cuDriverGetVersion", "cuGetErrorString", "cuMemGetAllocationGranularity", "cuMemGetInfo"),
}
"""Calls that the library does not tell of: their answers show that they arrived."""


def test_no_call_is_left_out():
    said = {line.split()[0].removesuffix("_v2") for line in SAID.splitlines() if line.startswith("cu")}
    assert {name for name in vars(load_fake()) if re.match(r"cu[A-Z]", name)} == said | ANSWERED


ANSWERING = """
import os, threading

(asked, asks), (answers, answer) = os.pipe(), os.pipe()
os.dup2(asks, 100)
os.dup2(answers, 101)

def answering():
    while os.read(asked, 1):
        os.write(answer, b"!")

threading.Thread(target=answering, daemon=True).start()
"""
"""Another thread of Python, which each call of the driver waits for."""


def run(script, environment):
    return subprocess.run(
        [sys.executable, "-c", script], env=environment, check=False, capture_output=True, text=True, timeout=60
    )


def test_every_call_arrives_as_it_was_meant(tmp_path):
    done = run(CALLS, stub_environment(tmp_path))
    assert done.stderr == SAID
    assert done.returncode == 0


def test_no_call_holds_the_interpreter_lock(tmp_path):
    done = run(ANSWERING + CALLS, stub_environment(tmp_path, "-DGATE"))
    assert "holds the interpreter lock" not in done.stderr
    assert done.returncode == 0, done.stderr
