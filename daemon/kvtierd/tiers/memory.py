"""How much memory can still be had.

A memfd has no quota of its own: the kernel grants pages until the machine is out of memory and then kills somebody. So
the question is asked before the first page is taken.
"""

from __future__ import annotations

from pathlib import Path

from kvtierd.tiers.base import TierConfigError

_MEMINFO = Path("/proc/meminfo")
_OWN_CGROUP = Path("/proc/self/cgroup")
_CGROUP_ROOT = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """What the machine has left, or less where a control group (version 2) limits this process."""
    available = _kernel_table(_MEMINFO)["MemAvailable:"] * 1024
    return min([available, *(_headroom(group) for group in _own_cgroups() if (group / "memory.max").exists())])


def total_bytes() -> int:
    """What the machine has in all, swap included: no arena larger than this can ever be had."""
    table = _kernel_table(_MEMINFO)
    return (table["MemTotal:"] + table.get("SwapTotal:", 0)) * 1024


def require_memory(field: str, nbytes: int) -> None:
    """Raises :class:`TierConfigError` naming ``field`` where ``nbytes`` are not to be had."""
    available = available_bytes()
    if nbytes > available:
        raise TierConfigError(field, nbytes, f"not enough memory: {available} bytes are available")


def _own_cgroups() -> list[Path]:
    """Directories of this process's control group and its ancestors; none where version 2 is not in use."""
    for line in _OWN_CGROUP.read_text().splitlines():
        if line.startswith("0::/"):
            own = _CGROUP_ROOT / line.removeprefix("0::/")
            return [own, *(parent for parent in own.parents if parent.is_relative_to(_CGROUP_ROOT))]
    return []


def _headroom(cgroup: Path) -> int:
    limit = (cgroup / "memory.max").read_text().strip()
    if limit == "max":
        return 1 << 63
    used = _kernel_table(cgroup / "memory.stat")
    # The rest of what the group uses is page cache, which gives way.
    return max(0, int(limit) - used["anon"] - used["shmem"])


def _kernel_table(path: Path) -> dict[str, int]:
    return {fields[0]: int(fields[1]) for line in path.read_text().splitlines() if len(fields := line.split()) > 1}
