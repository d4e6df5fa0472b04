"""A cache's memory on the fake of NVIDIA's bindings, and its copies."""

import os
from types import ModuleType

from kvtier.abi.control import ArenaIdentity
from kvtier.abi.cuda.driver import Driver
from kvtier.abi.layout import ArenaLayout
from kvtierd.core.ids import Tier
from kvtierd.mover.cuda.copies import CudaCopies
from kvtierd.tiers.arena import Arena
from kvtierd.tiers.cuda.pool import CudaDevice, DaemonGpu
from kvtierd.tiers.mapped import HostStore
from tests.fake_cuda import load_fake
from tests.unit.mover.rig import SPEC


class Rig:
    """The memory of a cache on a device and in host memory, and its copies. ``settings``: of the fake."""

    def __init__(self, **settings: object) -> None:
        self.fake: ModuleType = load_fake(**{"max_delay_ms": 1, **settings})
        self.gpu = DaemonGpu(Driver(self.fake, "cuda"))
        layout = ArenaLayout.plan(SPEC, {(0, tier): 8 for tier in (Tier.DEVICE, Tier.HOST)})
        segment = self.gpu.create("rig", layout.data_bytes(Tier.DEVICE))
        identity = ArenaIdentity(SPEC.fingerprint(), epoch=1, boot=1, pid=os.getpid())
        self.arena = Arena.create("rig", layout, identity, segment)
        self.device = CudaDevice(layout, segment)
        self.host = HostStore(self.arena)
        self.copies = CudaCopies("rig", layout, self.device, self.host, self.arena.data(Tier.HOST))

    def close(self) -> None:
        assert self.copies.close()
        self.arena.close()
        self.gpu.close()
        assert self.fake.fake_left() == {}
