"""An open cache, and the pieces of work on its slots that worker threads get."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvtier.abi.cuda.page_locks import PageLocks
from kvtier.abi.key_index import ABSENT, IndexEntry
from kvtier.abi.spec import CacheSpec
from kvtierd.core.block import Block, Copy
from kvtierd.core.errors import InvariantViolation
from kvtierd.core.events import RECOVERED, REMOVED, STORED
from kvtierd.core.ids import DEVICE, HOST, CacheId, GroupId, Key, SlotId, Tier
from kvtierd.core.manager import BlockManager
from kvtierd.core.outcome import Move, MoveItem, Outcome, SlotChanges
from kvtierd.tiers.arena import Arena
from kvtierd.tiers.base import Bytes, MemoryStore
from kvtierd.tiers.cuda.pool import CudaDevice
from kvtierd.tiers.disk.store import DiskStore
from kvtierd.tiers.key_index import NOWHERE, At, IndexedBlocks
from kvtierd.tiers.mapped import Chaos, HostStore, StandInDevice


class Unaccounted(Exception):
    """Hardware may still work on a batch. The batch is never reported, so its slots are never used again."""


class Stretch(NamedTuple):
    """Bytes [``start``, ``stop``) of the block in a slot."""

    slot: SlotId
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(slots=True, frozen=True)
class Faults:
    """Failed items, as indices into the items of a batch, its pieces laid end to end. ``unaccounted``: hardware may
    still work on these items, so their pieces are never reported."""

    failed: frozenset[int] = frozenset()
    corrupt: frozenset[int] = frozenset()
    unaccounted: frozenset[int] = frozenset()


Finish = Callable[[], Faults]
"""The second half of a batch's work, for another thread."""


@dataclass(slots=True, frozen=True, eq=False)
class CopyPiece:
    """Consecutive items of one move that fit in one batch. ``first``: their place in ``move.items``."""

    runtime: CacheRuntime
    move: Move
    first: int
    items: Sequence[MoveItem]
    submitted_ns: int


Batch = Sequence[CopyPiece]
"""Pieces of one cache and one lane, in the order they were queued. Never empty."""


class GpuCopies(Protocol):
    """Copies for a cache whose device tier is a GPU's memory; see :class:`kvtierd.mover.cuda.copies.CudaCopies`."""

    @property
    def batch_bytes(self) -> int:
        """Limit of bytes that a batch copies to or from the device, unless a single block is larger."""

    @property
    def locks(self) -> PageLocks: ...
    def copy(self, batch: Batch) -> Faults | Finish: ...
    def write(self, batch: Batch) -> Finish: ...
    def read(self, batch: Batch) -> Faults | Finish: ...
    def fetch(self, group: GroupId, stretches: Sequence[Stretch]) -> Bytes: ...
    def put(self, group: GroupId, stretches: Sequence[Stretch], data: Bytes) -> Bytes: ...


@dataclass(slots=True, frozen=True, eq=False)
class CacheRuntime:
    """The core, shared memory and stores of a cache. A store is None if the cache lacks the tier."""

    id: CacheId
    name: str
    spec: CacheSpec
    manager: BlockManager
    arena: Arena
    host: HostStore | None = None
    device: StandInDevice | CudaDevice | None = None
    disk: DiskStore | None = None
    cuda: GpuCopies | None = None

    @property
    def chaos(self) -> Chaos | None:
        return self.device.chaos if isinstance(self.device, StandInDevice) else None

    @property
    def store(self) -> DiskStore:
        if self.disk is None:
            raise LookupError(f"cache {self.name} has no disk tier")
        return self.disk

    def memory(self, tier: Tier) -> MemoryStore:
        """The store of a tier whose bytes this process can read and write. Raises ``LookupError`` for a GPU's
        memory."""
        store = (self.device, self.host, None)[tier]
        if store is None or isinstance(store, CudaDevice):
            raise LookupError(f"cache {self.name} has no {tier} memory that can be mapped")
        return store

    def begin(self, changes: SlotChanges) -> None:
        """Opens slots whose bytes may change from now on, and sets their owners. A stand-in's slot that held a block is
        poisoned, so that a late reader finds out."""
        tier, group, device = changes.tier, changes.group, self.device
        began = self.arena.begin_writes(tier, group, changes.begun)
        if tier is DEVICE and isinstance(device, StandInDevice):
            for slot in began:
                device.poison(group, slot)
        self.arena.set_owners(tier, group, changes.owners)

    def end(self, changes: SlotChanges) -> None:
        """Records the blocks that slots hold from now on, and marks the bytes of filled slots as READY."""
        tier, group, arena = changes.tier, changes.group, self.arena
        if arena.keeps_records:
            arena.note(tier, group, changes.filled)
            arena.disown(tier, group, changes.disowned)
        arena.end_writes(tier, group, changes.filled)
        if arena.keeps_records:
            arena.restate(tier, group, changes.restated)

    def pools(self, group: GroupId) -> int:
        return len(self.spec.groups[group].pools)


def follow(arena: Arena, outcome: Outcome) -> None:
    """Shows an outcome in the key index: after its last generation has changed and before any request is answered.

    A block that has arrived in a memory tier is in a filled slot. Recovered blocks are in the index already, by
    :meth:`Arena.rebuild_index`.
    """
    index = arena.index
    if index is None or not outcome.events:
        return
    arrived: dict[tuple[Tier, GroupId], Mapping[Key, At]] = {}
    for changes in outcome.slots:
        slots = {block.key: slot for slot, block in changes.filled.items()}
        arrived[changes.tier, changes.group] = arena.at(changes.tier, changes.group, slots)
    for event in outcome.events:
        if event.cause is RECOVERED:
            continue
        keys, group = event.blocks.keys, event.group
        if event.type is REMOVED:
            blocks = IndexedBlocks(group, dict.fromkeys(keys, 0))
        else:
            places = (arrived.get((tier, group), NOWHERE) for tier in (HOST, DEVICE))
            blocks = IndexedBlocks(group, dict(zip(keys, event.blocks.residencies, strict=True)), *places)
        index.put(blocks, new=event.type is STORED)
    index.show(outcome.events[-1].id)


def check_index(manager: BlockManager, arena: Arena) -> None:
    """Compares the key index with the core. Raises :class:`InvariantViolation` for a difference."""
    if arena.index is None:
        return
    shown = arena.index.contents()
    known = {
        (group, block.key): _entry(arena, group, block)
        for group, window in manager.windows.items()
        for block in window.state.index
    }
    for group, key in shown.keys() | known.keys():
        is_ = known.get((group, key))
        shows = shown.get((group, key), ABSENT)
        if is_ is None or shows not in (is_, None):
            raise InvariantViolation(f"key index: block {key.hex()} of group {group} is {is_} and shown as {shows}")


def _entry(arena: Arena, group: GroupId, block: Block) -> IndexEntry:
    host = _place(arena, group, Tier.HOST, block.copies[Tier.HOST])
    device = _place(arena, group, Tier.DEVICE, block.copies[Tier.DEVICE])
    return IndexEntry(block.residency, *host, *device)


def _place(arena: Arena, group: GroupId, tier: Tier, copy: Copy | None) -> tuple[int, int]:
    if copy is None or not copy.valid:
        return 0, 0
    return copy.slot, arena.generation(tier, group, copy.slot)
