"""What this host can do for a device tier: ``python -m tests.gpu.host`` prints a JSON list of fact and answer a line.

Where the host refuses, the answer is ``no`` and why. A call that never returns costs the facts after it, no others.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import resource
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from kvtier.abi.cuda.driver import Address, Driver
from kvtier.abi.cuda.memory import DeviceMemory
from kvtier.abi.cuda.opening import load_bindings, uuid_name
from tests import devices

NBYTES: Final = 16 << 20
_NEEDED: Final = ("kvtier", "torch", "numpy", "grpcio", "lmdb", "pydantic-settings", "pytest", "pytest-asyncio")
_BINDINGS: Final = () if devices.ON_FAKE else ("cuda-bindings",)
_BYTE: Final = 0xA5
_MODES: Final = {0: "default", 2: "prohibited", 3: "exclusive process"}
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_SO_PEERPIDFD: Final = 77
_WAIT_S: Final = 5.0


def packages(driver: Driver) -> str:
    return ", ".join(f"{name} {version(name)}" for name in _NEEDED + _BINDINGS)


def nvidia(driver: Driver) -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    if shutil.which(command[0]) is None:
        return "no nvidia-smi"
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=_WAIT_S).stdout
    return f"driver {said.split()[0]}"


def compute_mode(driver: Driver) -> str:
    cuda: Any = load_bindings()
    wanted = cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_MODE
    code, mode = cuda.cuDeviceGetAttribute(wanted, cuda.cuDeviceGet(driver.ordinal)[1])
    return f"no: status {int(code)}" if code else _MODES.get(mode, str(mode))


def memory(driver: Driver) -> str:
    free, total = driver.memory()
    return f"{free >> 20} of {total >> 20} MiB free"


def machine(driver: Driver) -> str:
    here = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    most = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    locks = "no limit of locked memory" if most == resource.RLIM_INFINITY else f"{most >> 10} KiB may be locked"
    return f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores, {here >> 30} GiB, {locks}"


def pidfd(driver: Driver) -> str:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child, os.fdopen(os.pidfd_open(child.pid)) as end:
        child.communicate()
        return _yes(bool(select.select([end], [], [], _WAIT_S)[0]), "it does not tell that the process has ended")


def peer_pidfd(driver: Driver) -> str:
    one, other = socket.socketpair()
    with one, other:
        os.close(one.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
    return "yes"


def sealed_memfd(driver: Driver) -> str:
    with _memfd() as fd:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        os.fchmod(fd, 0o400)
        os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY))
        return _yes(fcntl.fcntl(fd, fcntl.F_GET_SEALS) == _SEALS, "it has other seals")


def exported(driver: Driver, *, dead: bool) -> str:
    """Maps memory that another process made, while that process lives or after its end, and reads it."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "tests.gpu.host", str(theirs.fileno())]
    with theirs, subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.PIPE) as child, ours:
        theirs.close()
        why_not, fds, *_ = socket.recv_fds(ours, 4096, 1)
        if not fds:
            return f"no: {why_not.decode()}"
        if dead:
            child.communicate()
        imported = DeviceMemory.from_fd(driver, fds[0], NBYTES)
        os.close(fds[0])
        right = _read(driver, imported.address)
        imported.close()
        return _yes(right, "its bytes are wrong")


def export(driver: Driver, sock: socket.socket) -> None:
    """Makes memory, fills it and sends its descriptor; ends with the standard input."""
    made = DeviceMemory.create(driver, NBYTES)
    _fill(driver, made.address)
    socket.send_fds(sock, [(made.why_not or "made").encode()], [] if made.fd is None else [made.fd])
    sys.stdin.read()


def page_lock(driver: Driver, *, direct: bool) -> str:
    """Page-locks a memfd, as the host tier is, and has the device write into it, or a file on disk."""
    with _memfd() as fd:
        view = mmap.mmap(fd, NBYTES)  # until the process ends: a refusal must not hide behind an export of it
        address = Address(ctypes.addressof(ctypes.c_char.from_buffer(view)))
        driver.register(address, NBYTES)
        try:
            if direct:
                return _direct(address)
            source = driver.alloc(NBYTES)
            _fill(driver, source)
            _do(driver, lambda stream: driver.copy(address, source, NBYTES, stream))
            driver.free(source)
            return _yes(os.pread(fd, NBYTES, 0) == bytes([_BYTE]) * NBYTES, "others see wrong bytes in it")
        finally:
            driver.unregister(address)


def staging(driver: Driver) -> str:
    address = driver.alloc_host(NBYTES)
    try:
        return _direct(address)
    finally:
        driver.free_host(address)


def _direct(address: Address) -> str:
    """Writes page-locked memory to a file past the page cache, and reads it back."""
    part = (ctypes.c_char * NBYTES).from_address(address)
    wanted = os.urandom(NBYTES)
    ctypes.memmove(address, wanted, NBYTES)
    with tempfile.NamedTemporaryFile() as file:
        fd = os.open(file.name, os.O_RDWR | os.O_DIRECT)
        try:
            written = os.pwritev(fd, [part], 0)
            ctypes.memset(address, 0, NBYTES)
            read = os.preadv(fd, [part], 0)
        finally:
            os.close(fd)
    return _yes((written, read, bytes(part)) == (NBYTES, NBYTES, wanted), f"{written} bytes written, {read} read")


FACTS: Final[Mapping[str, Callable[[Driver], str]]] = {
    "packages": packages,
    "kernel": lambda driver: Path("/proc/version").read_text().strip(),
    "machine": machine,
    "device": lambda driver: driver.name,
    "uuid": lambda driver: f"{uuid_name(driver.uuid)} at {driver.pci_address()}",
    "driver": nvidia,
    "cuda": lambda driver: "CUDA {}.{}".format(*divmod(driver.features.driver_version // 10, 100)),
    "features": lambda driver: ", ".join(name for name, there in asdict(driver.features).items() if there),
    "memory": memory,
    "compute mode": compute_mode,
    "pidfd": pidfd,
    "pidfd of a socket's peer": peer_pidfd,
    "memfd with seals": sealed_memfd,
    "device memory of another process": partial(exported, dead=False),
    "device memory of a process that has ended": partial(exported, dead=True),
    "page-locks on a memfd": partial(page_lock, direct=False),
    "O_DIRECT on a page-locked memfd": partial(page_lock, direct=True),
    "O_DIRECT on page-locked memory of the driver": staging,
}


@contextmanager
def _memfd() -> Iterator[int]:
    fd = os.memfd_create("kvtier-host", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, NBYTES)
        yield fd
    finally:
        os.close(fd)


def _yes(so: bool, why_not: str) -> str:
    return "yes" if so else f"no: {why_not}"


def _fill(driver: Driver, address: Address) -> None:
    _do(driver, lambda stream: driver.fill(address, _BYTE, NBYTES, stream))


def _read(driver: Driver, address: Address) -> bool:
    """Whether all bytes are as :func:`_fill` left them."""
    host = driver.alloc_host(NBYTES)
    _do(driver, lambda stream: driver.copy(host, address, NBYTES, stream))
    right = ctypes.string_at(host, NBYTES) == bytes([_BYTE]) * NBYTES
    driver.free_host(host)
    return right


def _do(driver: Driver, work: Callable[[Any], None]) -> None:
    work(stream := driver.stream())
    while not driver.idle(stream):
        time.sleep(0.001)
    driver.drop_stream(stream)


def main() -> None:
    driver = Driver.open(devices.NAME)
    if sys.argv[1:]:
        export(driver, socket.socket(fileno=int(sys.argv[1])))
        return
    for fact, probe in FACTS.items():
        try:
            answer = probe(driver)
        except Exception as error:  # noqa: BLE001  a refusal is an answer, whoever refuses
            answer = f"no: {type(error).__name__}: {error}"
        print(json.dumps([fact, answer]), flush=True)
        if fact == "packages" and answer.startswith("no"):
            sys.exit(f"{sys.executable}: {answer}; `make gpu-wheels` carries all but the host's own")


if __name__ == "__main__":
    devices.prepare()
    main()
