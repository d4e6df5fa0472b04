"""What belongs to one open cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvtier.abi.spec import CacheSpec
from kvtierd.core.ids import DEVICE, CacheId, GroupId, Tier
from kvtierd.core.manager import BlockManager
from kvtierd.core.outcome import Content, SlotChanges, SlotRef
from kvtierd.core.traits import Traits
from kvtierd.tiers.arena import Arena
from kvtierd.tiers.base import MemoryStore
from kvtierd.tiers.cuda.store import CudaDevice
from kvtierd.tiers.device import Chaos, StandInDevice
from kvtierd.tiers.disk import DiskStore
from kvtierd.tiers.host import HostStore

if TYPE_CHECKING:
    from kvtierd.mover.cuda.copies import CudaCopies  # whose batches have this module's runtimes


_NONE: Final = Traits(0)
"""Of a slot whose bytes nobody should find again."""


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

    def begin_write(self, changes: SlotChanges) -> None:
        """Before the slots' bytes may change. A stand-in's slot that had a block's is poisoned, so that who still reads
        it finds out; on a GPU that would take a copy of its own."""
        tier, group, device = changes.tier, changes.group, self.device
        began = self.arena.begin_writes(tier, group, changes.begun)
        if tier is DEVICE and isinstance(device, StandInDevice):
            for slot in began:
                device.poison(group, slot)

    def set_owners(self, changes: SlotChanges) -> None:
        self.arena.set_owners(changes.tier, changes.group, changes.owners)

    def note(self, changes: SlotChanges) -> None:
        """What slots hold from now on; before :meth:`end_write`."""
        if self.arena.keeps_records:
            group, tier = changes.group, changes.tier
            for slot, block in changes.filled.items():
                self.arena.note(Content(SlotRef(group, tier, slot), block.key, block.parent_key, block.traits))
            for slot in changes.disowned:
                self.arena.note(Content(SlotRef(group, tier, slot), None, None, _NONE))

    def end_write(self, changes: SlotChanges) -> None:
        """The slots' bytes are READY."""
        self.arena.end_writes(changes.tier, changes.group, changes.filled)

    def restate(self, changes: SlotChanges) -> None:
        """What slots hold has other traits from now on."""
        if self.arena.keeps_records:
            group, tier = changes.group, changes.tier
            for slot, block in changes.restated.items():
                self.arena.restate(Content(SlotRef(group, tier, slot), block.key, block.parent_key, block.traits))

    def pools(self, group: GroupId) -> int:
        return len(self.spec.groups[group].pools)
