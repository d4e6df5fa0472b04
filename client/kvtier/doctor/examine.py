"""All checks, in the order in which a person would look."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from kvtier.doctor import clock, disk, gpu, kernel, limits, memory, sockets
from kvtier.doctor.finding import Finding, warn
from kvtier.doctor.service import Daemon, check_daemon, check_unit, read_unit
from kvtier.doctor.settings import Settings
from kvtier.types import Tier


def examine(settings: Settings, daemon: Daemon) -> Iterator[Finding]:
    """Reads the machine as it goes. What cannot be read is a warning, and the other checks go on."""
    pid = daemon.pid or None
    tiers = {Tier.HOST: settings.host_bytes}
    if settings.device == gpu.STAND_IN:
        tiers[Tier.DEVICE] = settings.device_bytes
    in_memory = sum(tiers.values())
    taken = sum(daemon.given.get(tier, 0) for tier in tiers) if pid is not None else None
    yield check_daemon(daemon)
    yield check_unit(read_unit(), daemon.pid)
    yield sockets.check_path(settings.runtime_dir)
    yield _seen(sockets.RIGHTS, lambda: sockets.check_rights(sockets.read(settings.runtime_dir)))
    bounds = limits.read(pid)
    yield limits.check_memlock(bounds, in_memory)
    yield limits.check_descriptors(bounds, settings.max_sessions)
    yield _seen("memory", lambda: memory.check_available(memory.read(pid), in_memory, taken))
    yield _seen("cgroup memory", lambda: memory.check_cgroup(memory.read(pid), in_memory, pid is not None))
    yield memory.check_memfd(memory.probe_memfd())
    if settings.disk_bytes:
        yield from _disk(settings.disk_dir, settings.disk_bytes)
    yield kernel.check(kernel.read())
    yield gpu.check(gpu.read(settings.device), settings.device_bytes, running=pid is not None)
    yield clock.check(*clock.read())


def _disk(directory: Path, needed: int) -> Iterator[Finding]:
    yield _seen(disk.SPACE, lambda: disk.check_space(disk.read_space(directory), needed))
    yield _seen(disk.DIRECT, lambda: disk.check_direct(disk.probe_direct(directory)))


def _seen(name: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except OSError as error:
        return warn(name, f"could not be looked at: {error}", "run kvtier doctor as root or as the daemon's user")
