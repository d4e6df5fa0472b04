"""Segments: sealed shared memory that clients map and the daemon can still rely on.

A segment is a sealed memfd, never a named file. Seals keep it from shrinking or growing under the daemon (SIGBUS). Its
pages are allocated before use (a sparse segment dies of SIGBUS when memory is short). No other uid can re-open it
writable through /proc. Huge pages and memory near a GPU are used if the kernel allows them.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Self
from weakref import ref

import numpy as np

from kvtier.abi import memory
from kvtierd.tiers.base import Bytes, NotAdoptable, TierConfigError, TierIOError

# SEAL besides the two that protect the daemon: a client holding a writable descriptor could otherwise add FUTURE_WRITE
# and lock a restarted daemon out of its own memory.
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
# Most bytes of one allocation: a signal makes the kernel undo the call and Python repeat it.
_ALLOCATION_STEP: Final = 256 << 20
_PREFERRED: Final = 1
_POLICY_CALLS: Final = {"x86_64": (238, 239), "aarch64": (237, 236)}.get(os.uname().machine)
"""Numbers of the system calls set_mempolicy and get_mempolicy, which the C library does not have."""

_libc: Final = ctypes.CDLL(None, use_errno=True)
_log = logging.getLogger(__name__)


class Memfd:
    """A sealed, allocated, mapped segment. The mapping lives as long as any array over it, so :meth:`close` does not
    harm a thread that copies."""

    def __init__(self, fd: int, read_only_fd: int, array: Bytes) -> None:
        self.fd = fd
        self.read_only_fd = read_only_fd
        self.array = array

    @classmethod
    def create(cls, name: str, size: int) -> Self:
        """A zeroed segment of ``size`` bytes. ``name``: its name in /proc/<pid>/maps.

        Blocks for about 0.1 s per GiB. Raises :class:`TierConfigError` naming ``name`` if memory is short,
        :class:`TierIOError` at a limit of this process.
        """
        require_memory(name, size)
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            array = memory.mapped(fd, size, write=True)
            for start in range(0, size, _ALLOCATION_STEP):
                memory.allocate(fd, array[start : start + _ALLOCATION_STEP], start)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            # Before any descriptor is sent: with the initial mode, another uid could re-open a read-only one writable.
            os.fchmod(fd, 0o400)
            read_only_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.EFBIG):
                raise TierIOError(error.errno, f"{name}: no shared memory: {error.strerror}") from error
            raise TierConfigError(name, size, f"cannot allocate shared memory: {error.strerror}") from error
        return cls(fd, read_only_fd, array)

    @classmethod
    def adopt(cls, name: str, fd: int, size: int) -> Self:
        """A segment that an earlier daemon made by :meth:`create`. ``fd`` is the segment's from now on. Raises
        :class:`NotAdoptable`; ``fd`` then stays the caller's."""
        status = os.fstat(fd)
        facts = {
            "is a regular file": (stat.S_ISREG(status.st_mode), True),
            "owner": (status.st_uid, os.geteuid()),
            "mode": (oct(stat.S_IMODE(status.st_mode)), oct(0o400)),
            "size": (status.st_size, size),
            "open for writing": (fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR, True),
        }
        for fact, (is_, wanted) in facts.items():
            if is_ != wanted:
                raise NotAdoptable(f"{name}: {fact}: {is_}, not {wanted}")
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as error:
            raise NotAdoptable(f"{name}: not a memfd: {error.strerror}") from error
        if seals != _SEALS:
            raise NotAdoptable(f"{name}: seals {seals:#x}, not {_SEALS:#x}")
        try:
            array = memory.mapped(fd, size, write=True)
            read_only_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise NotAdoptable(f"{name}: cannot be mapped: {error.strerror}") from error
        return cls(fd, read_only_fd, array)

    def prefault(self) -> None:
        """See :func:`kvtier.abi.memory.touch`."""
        memory.touch(ref(self.array))

    def close(self) -> None:
        """Closes both descriptors and releases the mapping."""
        os.close(self.fd)
        os.close(self.read_only_fd)
        self.array = np.empty(0, dtype=np.uint8)


_PCI_DEVICES = Path("/sys/bus/pci/devices")


def node_of(pci_address: str) -> int | None:
    """The NUMA node of a device; None = unknown."""
    try:
        node = int((_PCI_DEVICES / pci_address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


@contextmanager
def near(node: int | None) -> Iterator[None]:
    """Places this thread's new memory on the NUMA node during the body, if the node has room. No effect for None or if
    the kernel refuses."""
    if node is None or _POLICY_CALLS is None:
        yield
        return
    number, ask = _POLICY_CALLS
    mode, before, wanted = ctypes.c_int(), (ctypes.c_ulong * 16)(), (ctypes.c_ulong * 16)()
    wanted[node // 64] = 1 << node % 64
    bits = ctypes.c_ulong(1024)
    refused = _libc.syscall(ask, ctypes.byref(mode), before, bits, None, ctypes.c_ulong(0))
    if refused or _libc.syscall(number, _PREFERRED, wanted, bits):
        _log.warning("memory is not placed near its GPU node=%d why=%r", node, os.strerror(ctypes.get_errno()))
        yield
        return
    try:
        yield
    finally:
        _libc.syscall(number, mode, before, bits)


_MEMINFO = Path("/proc/meminfo")
_OWN_CGROUP = Path("/proc/self/cgroup")
_CGROUP_ROOT = Path("/sys/fs/cgroup")


@dataclass(slots=True, frozen=True)
class _Controller:
    """Memory in one version of control groups. ``used``: rows of ``memory.stat``; the other rows are page cache, which
    the kernel can free."""

    name: str
    limit: str
    used: tuple[str, str]


_CONTROLLERS: Final = (
    _Controller("", "memory.max", ("anon", "shmem")),
    _Controller("memory", "memory.limit_in_bytes", ("total_rss", "total_shmem")),
)
"""Version 2 has a single tree, version 1 a tree for each controller."""
_NO_LIMIT: Final = 1 << 62
"""Without a limit, version 1 has a number above this, version 2 a word."""


def available_bytes() -> int:
    """Free memory of the machine, or less if a control group limits this process."""
    return min([_kernel_table(_MEMINFO)["MemAvailable:"] * 1024, *_headrooms()])


def total_bytes() -> int:
    """Memory and swap of the machine: no arena can be larger."""
    table = _kernel_table(_MEMINFO)
    return (table["MemTotal:"] + table.get("SwapTotal:", 0)) * 1024


def require_memory(field: str, nbytes: int) -> None:
    """Raises :class:`TierConfigError` naming ``field`` if fewer than ``nbytes`` are free."""
    available = available_bytes()
    if nbytes > available:
        raise TierConfigError(field, nbytes, f"not enough memory: {available} bytes are available")


def _headrooms() -> Iterator[int]:
    """Free bytes under the limit of each control group of this process."""
    for limit, controller in _limits(_OWN_CGROUP.read_text(), _CGROUP_ROOT):
        most = limit.read_text().strip()
        if most.isdigit() and int(most) < _NO_LIMIT:
            used = _kernel_table(limit.with_name("memory.stat"))
            yield max(0, int(most) - sum(used.get(row, 0) for row in controller.used))


@cache
def _limits(own: str, root: Path) -> list[tuple[Path, _Controller]]:
    """The limit files of the groups in ``own``, the kernel's list, and of the groups above them."""
    found = []
    for _, names, path in (line.split(":", 2) for line in own.splitlines()):
        for controller in (each for each in _CONTROLLERS if each.name in names.split(",")):
            tree = root / controller.name
            group = tree / path.lstrip("/")  # absent in a container that sees only its own part of the tree
            above = [each for each in (group, *group.parents) if each.is_relative_to(tree)]
            found += [(limit, controller) for each in above if (limit := each / controller.limit).exists()]
    return found


def _kernel_table(path: Path) -> dict[str, int]:
    return {fields[0]: int(fields[1]) for line in path.read_text().splitlines() if len(fields := line.split()) > 1}
