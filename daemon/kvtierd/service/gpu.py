"""The GPU at a start: opened before anything is touched, and what the tiers' sizes come to with it.

A start waits for it, seconds at worst, before it serves anybody: which tiers a cache has is decided when it is opened,
so whoever came earlier would get one without a device tier.
"""

from __future__ import annotations

import logging

from kvtier.v1 import admin_pb2
from kvtierd.config import Config
from kvtierd.core.ids import Tier
from kvtierd.service.keeping import Keeper
from kvtierd.tiers.base import TierConfigError, TierIOError
from kvtierd.tiers.cuda.pool import Gpu

_log = logging.getLogger(__name__)


def open_gpu(config: Config, keeper: Keeper) -> Gpu | None:
    """What the device tier is to be on. Blocks.

    Raises :class:`TierConfigError`, which says what is missing; :class:`TierIOError` where the GPU worked in the life
    before: then the manager starts the daemon again, and keeps the memory until the GPU is back.
    """
    if config.cuda_device is not None:
        try:
            return Gpu.open(config.cuda_device)
        except TierConfigError as error:
            if keeper.has_memory:
                raise TierIOError(0, str(error)) from error
            raise
    if Tier.DEVICE in config.tiers:
        _log.info("the device tier is a stand-in in shared memory device=%s", config.device)
    return None


def described(config: Config, gpu: Gpu | None) -> admin_pb2.DeviceStats | None:
    """What the device tiers are on, for operators; None where there are none."""
    if gpu is not None:
        return admin_pb2.DeviceStats(kind="cuda", name=gpu.driver.name, uuid=gpu.uuid, memory_bytes=gpu.total)
    return admin_pb2.DeviceStats(kind=config.device) if Tier.DEVICE in config.tiers else None


def tier_sizes(config: Config, gpu: Gpu | None, keeper: Keeper) -> dict[Tier, int]:
    """Bytes by tier. Of the GPU's memory all counts as free that no other process has: what was kept for this daemon is
    taken over, or let go. Blocks.

    Raises :class:`TierConfigError` where the GPU can never have so much. What is only not free yet is refused to the
    caches that do not fit, when they are opened: the other tiers are no worse for it.
    """
    if gpu is None:
        return config.tier_bytes()
    free, total = gpu.memory()[0], gpu.total
    free = min(total, free + keeper.kept_on_gpu(gpu.driver.uuid.hex()))
    sizes = config.tier_bytes(free)
    device = sizes[Tier.DEVICE]
    if not 0 < device <= total:
        limit = f"it is {device} bytes: must be 1 to the {total} that {gpu.driver.name} has, of which {free} are free"
        raise TierConfigError("device_bytes", config.device_bytes, limit)
    _log.info("the device tier is on a GPU uuid=%s device_bytes=%d free=%d", gpu.uuid, device, free)
    if device > free:
        _log.warning("the device tier is larger than what is free there device_bytes=%d free=%d", device, free)
    return sizes
