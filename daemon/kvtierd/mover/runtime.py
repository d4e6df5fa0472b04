"""What belongs to one open cache."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.abi.spec import CacheSpec
from kvtierd.core.ids import DEVICE, CacheId, GroupId, Tier
from kvtierd.core.manager import BlockManager
from kvtierd.core.outcome import Content, Ownership, SlotRef
from kvtierd.tiers.arena import Arena
from kvtierd.tiers.base import MemoryStore
from kvtierd.tiers.cuda.store import CudaDevice
from kvtierd.tiers.device import Chaos, StandInDevice
from kvtierd.tiers.disk import DiskStore
from kvtierd.tiers.host import HostStore

if TYPE_CHECKING:
    from kvtierd.mover.cuda.copies import CudaCopies  # whose batches have this module's runtimes


@dataclass(slots=True, frozen=True, eq=False)
class CacheRuntime:
    """One cache's core, shared memory and stores. A store is None where the cache has no such tier. ``cuda``: who
    copies where the device tier is a GPU's memory.

    Only the loop thread touches ``manager`` and ``arena``; worker threads touch the stores.
    """

    id: CacheId
    name: str
    spec: CacheSpec
    manager: BlockManager
    arena: Arena
    host: HostStore | None = None
    device: StandInDevice | CudaDevice | None = None
    disk: DiskStore | None = None
    cuda: CudaCopies | None = None

    @property
    def chaos(self) -> Chaos | None:
        return self.device.chaos if isinstance(self.device, StandInDevice) else None

    @property
    def store(self) -> DiskStore:
        if self.disk is None:
            raise LookupError(f"cache {self.name} has no disk tier")
        return self.disk

    def memory(self, tier: Tier) -> MemoryStore:
        """A tier whose bytes this process can read and write by itself; a GPU's it cannot."""
        store = (self.device, self.host, None)[tier]
        if store is None or isinstance(store, CudaDevice):
            raise LookupError(f"cache {self.name} has no {tier} memory that can be mapped")
        return store

    def begin_write(self, refs: Iterable[SlotRef]) -> None:
        """Before the slots' bytes may change. A stand-in's slot that had a block's is poisoned, so that who still reads
        it finds out; on a GPU that would take a copy of its own."""
        began, device = self.arena.begin_writes(refs), self.device
        if isinstance(device, StandInDevice):
            for group, tier, slot in began:
                if tier is DEVICE:
                    device.poison(group, slot)

    def note(self, contents: Iterable[Content]) -> None:
        """What slots hold from now on; before :meth:`end_write`."""
        if self.arena.keeps_records:
            for content in contents:
                self.arena.note(content)

    def restate(self, contents: Iterable[Content]) -> None:
        """What slots hold has other traits from now on."""
        if self.arena.keeps_records:
            for content in contents:
                self.arena.restate(content)

    def end_write(self, refs: Iterable[SlotRef]) -> None:
        """The slots' bytes are READY."""
        self.arena.end_writes(refs)

    def set_owners(self, ownerships: Iterable[Ownership]) -> None:
        self.arena.set_owners(ownerships)

    def pools(self, group: GroupId) -> int:
        return len(self.spec.groups[group].pools)
