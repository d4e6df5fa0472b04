"""Memory: what the machine has, what the cgroup allows, and whether sealed memfds can be had."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.doctor.finding import Finding, fail, ok, warn
from kvtier.words import size

OVERHEAD: Final = 512 << 20
"""Of the daemon besides its tiers: interpreter, index, events."""

_UNLIMITED_V1: Final = 1 << 62
"""cgroup v1 says "no limit" with a number near 2^63, rounded to pages."""


@dataclass(slots=True, frozen=True)
class CgroupMemory:
    """The tightest limit on the way to the root. ``path``: the file that says so."""

    path: Path
    limit: int
    used: int


@dataclass(slots=True, frozen=True)
class Memory:
    """``available``: what the kernel thinks can be had without swapping. ``cgroup``: None = no limit."""

    available: int
    total: int
    cgroup: CgroupMemory | None


def read(daemon: int | None) -> Memory:
    """``daemon``: its pid; without one, the cgroup is ours. Raises OSError."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    kilobytes = {name: int(fields[name].split()[0]) for name in ("MemAvailable", "MemTotal")}
    membership = Path(f"/proc/{daemon or 'self'}/cgroup").read_text()
    limits = list(cgroup_limits(membership, Path("/sys/fs/cgroup")))
    tightest = min(limits, key=lambda group: group.limit - group.used, default=None)
    return Memory(kilobytes["MemAvailable"] << 10, kilobytes["MemTotal"] << 10, tightest)


def cgroup_limits(membership: str, mount: Path) -> Iterator[CgroupMemory]:
    """All memory limits that hold for a process. ``membership``: its ``/proc/<pid>/cgroup``.

    Both hierarchies (v2, and v1's memory controller) are looked through; a group that the mount does not show, as in a
    container, counts by its visible ancestors.
    """
    for line in membership.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            yield from _up(mount, path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            yield from _up(mount / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes")


def _up(mount: Path, path: str, limit_file: str, used_file: str) -> Iterator[CgroupMemory]:
    group = mount / path.lstrip("/")
    while group.is_relative_to(mount):
        try:
            limit, used = ((group / name).read_text().strip() for name in (limit_file, used_file))
        except OSError:
            limit = used = "max"
        if limit != "max" and int(limit) < _UNLIMITED_V1:
            yield CgroupMemory(group / limit_file, int(limit), int(used))
        group = group.parent


def check_available(memory: Memory, needed: int, taken: int | None) -> Finding:
    """``taken``: of that, what the caches of a daemon that runs have already; None = none runs. A cache takes its
    memory when it is opened: a daemon without caches has none of it."""
    name = "memory"
    if taken is None:
        missing, has = needed + OVERHEAD, f"{size(needed)} are configured"
    else:
        missing, has = needed - taken, f"of {size(needed)} that are configured, caches have {size(taken)}"
    if memory.available >= missing:
        return ok(name, f"{size(memory.available)} available; {has}")
    return fail(
        name,
        f"{size(memory.available)} available of {size(memory.total)}; {has}"
        + ("" if taken is None else ": more caches will be refused"),
        "make host_bytes (or device_bytes, where there is no GPU) smaller, or end what uses the memory",
    )


def check_cgroup(memory: Memory, needed: int, running: bool) -> Finding:
    name = "cgroup memory"
    group = memory.cgroup
    if group is None:
        return ok(name, "no limit")
    room = group.limit if running else group.limit - group.used
    whole = f"{group.path} is {size(group.limit)}, {size(group.used)} used"
    if room >= needed + OVERHEAD:
        return ok(name, f"{whole}; {size(needed)} are configured")
    if running:
        found = f"{whole}; {size(needed)} are configured in memory: little is left for the daemon itself"
        return warn(name, found, f"systemctl edit kvtierd, [Service]: MemoryMax={(needed + 2 * OVERHEAD) >> 20}M")
    return fail(
        name,
        f"{whole}; {size(needed)} are configured in memory: the kernel would kill the daemon",
        f"systemctl edit kvtierd, [Service]: MemoryMax={(needed + 2 * OVERHEAD) >> 20}M; or smaller tiers",
    )


def probe_memfd() -> OSError | None:
    """None where a sealed memory file can be made, whole and read-only for others."""
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    try:
        fd = os.memfd_create("kvtier-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, 4096)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
            os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY))
        finally:
            os.close(fd)
    except OSError as error:
        return error
    return None


def check_memfd(error: OSError | None) -> Finding:
    """``/dev/shm`` and its size do not matter: a memfd lives on a mount of the kernel's own."""
    name = "shared memory"
    if error is None:
        return ok(name, "sealed memfds can be made (the size of /dev/shm does not matter)")
    advice = "allow memfd_create and F_ADD_SEALS in the sandbox's seccomp profile, and mount /proc"
    return fail(name, f"no sealed memfd: {error}", advice)
