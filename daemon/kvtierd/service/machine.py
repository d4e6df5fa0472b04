"""What no start can make work: tiers larger than this machine.

What is only not free yet is refused to the caches that do not fit, when they are opened: the other tiers are no worse
for it. What a GPU has is told by :mod:`kvtierd.service.gpu`.
"""

from __future__ import annotations

import os
from pathlib import Path

from kvtierd.config import Config
from kvtierd.core.ids import Tier
from kvtierd.tiers.base import TierConfigError
from kvtierd.tiers.memfd import total_bytes


def require_possible(config: Config) -> None:
    """Looks and touches nothing. Blocks. Raises :class:`TierConfigError`, naming the largest key of those at fault."""
    sizes = config.tier_bytes()
    in_memory = {"host_bytes": sizes.get(Tier.HOST, 0)}
    if config.cuda_device is None:
        in_memory["device_bytes"] = sizes.get(Tier.DEVICE, 0)
    wanted, has = sum(in_memory.values()), total_bytes()
    if wanted > has:
        name = max(in_memory, key=in_memory.__getitem__)
        limit = f"the tiers in memory take {wanted} bytes, and this machine has {has}, swap included"
        raise TierConfigError(name, in_memory[name], limit)
    if Tier.DISK in sizes:
        whole = _file_system_bytes(config.disk_path)
        if sizes[Tier.DISK] > whole > 0:  # some that are made as they are used say 0
            limit = f"more than the {whole} bytes of the whole file system of {config.disk_path}"
            raise TierConfigError("disk_bytes", sizes[Tier.DISK], limit)


def _file_system_bytes(path: Path) -> int:
    """0 where it may not be looked at: whoever opens it says why."""
    try:
        status = os.statvfs(next(each for each in (path, *path.absolute().parents) if each.exists()))
    except OSError:
        return 0
    return status.f_blocks * status.f_frsize
