"""What this host can do for a device tier: where it refuses, the test is skipped with its reason."""

import ctypes
import fcntl
import functools
import mmap
import os
import resource
import select
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import pytest

from kvtier.abi.cuda.driver import Address, Driver
from kvtier.abi.cuda.errors import CudaError
from kvtier.abi.cuda.memory import DeviceMemory
from kvtier.abi.cuda.opening import load_bindings, uuid_name
from tests import devices

pytestmark = pytest.mark.gpu

NBYTES: Final = 16 << 20
FILLED: Final = b"\xa5" * NBYTES
PACKAGES: Final = ("kvtier", "torch", "numpy", "grpcio", "lmdb", *(() if devices.ON_FAKE else ("cuda-bindings",)))
MODES: Final = {0: "default", 2: "prohibited", 3: "exclusive process"}
SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def refusable(test):
    @functools.wraps(test)
    def run(*args, **options):
        try:
            test(*args, **options)
        except (OSError, CudaError) as error:
            pytest.skip(f"no: {error}")

    return run


def test_what_it_is(device, record_property):
    tell = record_property
    tell("device", device.name)
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        tell("driver", subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[0])
    tell("CUDA", "{}.{}".format(*divmod(device.features.driver_version // 10, 100)))
    tell("packages", ", ".join(f"{name} {version(name)}" for name in PACKAGES))
    tell("features", ", ".join(name for name, there in asdict(device.features).items() if there is True))
    tell("id", f"{uuid_name(device.uuid)} at {device.pci_address()}")
    tell("memory", "{} of {} MiB free".format(*(nbytes >> 20 for nbytes in device.memory())))
    cuda: Any = load_bindings()
    attribute = cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_MODE
    code, mode = cuda.cuDeviceGetAttribute(attribute, cuda.cuDeviceGet(device.ordinal)[1])
    tell("compute mode", f"status {int(code)}" if code else MODES.get(mode, str(mode)))
    tell("kernel", Path("/proc/version").read_text().strip())
    tell("cores", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}")
    tell("memory of the host", f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') >> 30} GiB")
    tell("locked memory, at most", resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])


@refusable
def test_a_pidfd_tells_the_end_of_a_process():
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child, os.fdopen(os.pidfd_open(child.pid)) as end:
        assert not select.select([end], [], [], 0)[0]
        child.communicate()
        assert select.select([end], [], [], 5)[0]


@refusable
def test_a_memfd_takes_seals_and_opens_again():
    fd = memfd()
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    os.fchmod(fd, 0o400)
    os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY))
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) == SEALS


@refusable
@pytest.mark.parametrize("maker", ["lives", "has ended"])
def test_device_memory_of_another_process_is_imported(device, maker):
    """When its maker has ended, a descriptor alone keeps it."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "tests.gpu.test_host", str(theirs.fileno())]
    with ours, subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.PIPE) as child:
        theirs.close()
        why_not, fds, *_ = socket.recv_fds(ours, 4096, 1)
        if not fds:
            pytest.skip(f"no: {why_not.decode()}")
        if maker == "has ended":
            child.communicate()
        imported = DeviceMemory.from_fd(device, fds[0], NBYTES)
        os.close(fds[0])
        host = device.alloc_host(NBYTES)
        do(device, lambda stream: device.copy(host, imported.address, NBYTES, stream))
        assert ctypes.string_at(host, NBYTES) == FILLED
        device.free_host(host)
        imported.close()


@refusable
@pytest.mark.parametrize("use", ["copies", "O_DIRECT"])
def test_a_memfd_is_page_locked(device, tmp_path, use):
    """As the host tier is, which the device and the disk read and write."""
    fd = memfd()
    start = ctypes.c_char.from_buffer(mmap.mmap(fd, NBYTES))  # which keeps it mapped
    address = Address(ctypes.addressof(start))
    device.register(address, NBYTES)
    if use == "copies":
        source = device.alloc(NBYTES)
        fill(device, source)
        do(device, lambda stream: device.copy(address, source, NBYTES, stream))
        assert os.pread(fd, NBYTES, 0) == FILLED
        device.free(source)
    else:
        write_and_read(tmp_path, address)
    device.unregister(address)
    del start


@refusable
def test_page_locked_memory_of_the_driver_takes_o_direct(device, tmp_path):
    address = device.alloc_host(NBYTES)
    write_and_read(tmp_path, address)
    device.free_host(address)


def write_and_read(folder, address):
    """Past the page cache."""
    part = (ctypes.c_char * NBYTES).from_address(address)
    ctypes.memmove(address, FILLED, NBYTES)
    fd = os.open(folder / "file", os.O_CREAT | os.O_RDWR | os.O_DIRECT)
    assert os.pwritev(fd, [part], 0) == NBYTES
    ctypes.memset(address, 0, NBYTES)
    assert os.preadv(fd, [part], 0) == NBYTES
    os.close(fd)
    assert ctypes.string_at(address, NBYTES) == FILLED


def memfd():
    fd = os.memfd_create("kvtier-host", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.posix_fallocate(fd, 0, NBYTES)
    return fd


def fill(driver, address):
    do(driver, lambda stream: driver.fill(address, FILLED[0], NBYTES, stream))


def do(driver, work):
    work(stream := driver.stream())
    while not driver.idle(stream):
        time.sleep(0.001)
    driver.drop_stream(stream)


def export(sock: socket.socket) -> None:
    """Makes memory, fills it and sends its descriptor; ends with the standard input."""
    driver = Driver.open(devices.NAME)
    made = DeviceMemory.create(driver, NBYTES)
    fill(driver, made.address)
    socket.send_fds(sock, [(made.why_not or "made").encode()], [] if made.fd is None else [made.fd])
    sys.stdin.read()


if __name__ == "__main__":
    devices.prepare()
    export(socket.socket(fileno=int(sys.argv[1])))
