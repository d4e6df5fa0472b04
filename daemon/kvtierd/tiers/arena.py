"""Arenas: the daemon's side of a cache's memory, which clients can map.

``control``, the slots of the host tier and the slots of a device tier without a GPU are shared memory. The slots of a
device tier on a GPU are GPU memory, which this process does not read. Both have generations, owners and records.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final, Self

import numpy as np

from kvtier.abi import attach
from kvtier.abi.control import (
    INDEX_SEED_BYTES,
    SLOT_RECORD_BYTES,
    ArenaIdentity,
    ArenaState,
    Header,
    write_state,
)
from kvtier.abi.layout import ArenaLayout, first_generation, is_ready
from kvtier.abi.spec import AbiError
from kvtierd.core.block import Block
from kvtierd.core.ids import GroupId, Key, SessionId, SlotId, Tier
from kvtierd.core.recovery import RecoveredBlock
from kvtierd.tiers.base import Bytes, NotAdoptable
from kvtierd.tiers.cuda.pool import CudaSegment, NoSegment
from kvtierd.tiers.disk.records import SlotContents, decode_slots, encode_slot, order_of
from kvtierd.tiers.key_index import NOWHERE, At, IndexedBlocks, KeyIndex
from kvtierd.tiers.memfd import Memfd, require_memory

SEGMENT_NAMES: Final = {Tier.HOST: attach.HOST, Tier.DEVICE: attach.DEVICE}
"""Names of data segments in shared memory."""
_INDEXED_AT_ONCE: Final = 4096


@dataclass(slots=True, frozen=True)
class Shared:
    """Segments for a client that maps an arena. ``fds``: by segment name, in the order of the attach protocol; they
    stay the arena's: dup, never close. ``cuda``: of the GPU segment. ``unmapped``: by tier, why it has no segment."""

    fds: dict[str, int]
    cuda: attach.CudaHandle | None = None
    unmapped: Mapping[str, str] = field(default_factory=dict)


class Arena:
    """Control and data segments of one cache. All methods except :meth:`create` and :meth:`prefault` are cheap, and for
    the loop thread, the only writer of generations."""

    def __init__(
        self,
        layout: ArenaLayout,
        control: Memfd,
        data: Mapping[Tier, Memfd],
        epoch: int,
        gpu_memory: CudaSegment | NoSegment | None = None,
    ) -> None:
        """``epoch``: of the events of this life. ``gpu_memory``: of the device tier, if ``data`` has none."""
        self.layout = layout
        self.keeps_records = False
        """Whether a restarted daemon may find the segments again, so that slots are recorded."""
        self.index = KeyIndex(layout, control.array, epoch) if layout.index_bytes else None
        self.gpu_memory: Final = gpu_memory
        self._order = 0
        self._control = control
        self._data = dict(data)
        self.tiers = tuple(sorted({*data, *((Tier.DEVICE,) if gpu_memory is not None else ())}))
        """Memory tiers that the cache has, the fastest first."""
        slots = [(tier, GroupId(group)) for tier in self.tiers for group in range(len(layout.groups))]
        self._generations = {place: layout.generations(control.array, *place) for place in slots}
        self._owners = {place: layout.owners(control.array, *place) for place in slots}
        # The same arrays as words, which are much faster to read and write than elements of an array.
        self._generation_words = {place: words.data for place, words in self._generations.items()}
        self._owner_words = {place: words.data for place, words in self._owners.items()}
        self._records = {place: layout.slot_records(control.array, *place).reshape(-1).data for place in slots}

    @classmethod
    def create(
        cls, name: str, layout: ArenaLayout, identity: ArenaIdentity, gpu_memory: CudaSegment | NoSegment | None = None
    ) -> Self:
        """Fresh segments for cache ``name``: state OPENING, no slot ready, no slot leased. Blocks; call from a thread.
        ``gpu_memory``: fresh as well, and the arena's from now on.

        Raises :class:`TierConfigError` if memory is short; all segments are then released, and ``gpu_memory`` stays the
        caller's.
        """
        sizes = _memfd_bytes(layout, gpu_memory)
        require_memory(f"arena of {name}", sum(sizes.values()))
        with ExitStack() as undo:
            made: dict[str, Memfd] = {}
            for segment, size in sizes.items():
                made[segment] = Memfd.create(f"kvtier:{name}:{segment}", size)
                undo.callback(made[segment].close)
            undo.pop_all()
        layout.initialise(made[attach.CONTROL].array, identity, secrets.token_bytes(INDEX_SEED_BYTES))
        return cls(layout, made[attach.CONTROL], _by_tier(made), identity.epoch, gpu_memory)

    @classmethod
    def adopt(
        cls,
        name: str,
        layout: ArenaLayout,
        identity: ArenaIdentity,
        fds: Mapping[str, int],
        gpu_memory: CudaSegment | NoSegment | None = None,
    ) -> Self:
        """Adopts the segments that an earlier daemon made for cache ``name``, with their content. ``fds``, by segment
        name without the GPU's, and ``gpu_memory`` are the arena's from now on. ``identity``: as for a new arena. If
        ``gpu_memory`` is fresh, all slots of the device tier become void and lose their owners.

        Raises :class:`NotAdoptable` if the segments differ from :meth:`create`'s in any way; ``fds`` and ``gpu_memory``
        then stay the caller's.
        """
        wanted = _memfd_bytes(layout, gpu_memory)
        if set(fds) != set(wanted):
            lost = " and ".join(sorted(fds.keys() - wanted.keys()))
            raise NotAdoptable(f"no room for its {lost} tier any more" if lost else "a part was not kept")
        adopted: dict[str, Memfd] = {}
        try:
            for segment, size in wanted.items():
                adopted[segment] = Memfd.adopt(f"kvtier:{name}:{segment}", fds[segment], size)
            _check_control(adopted[attach.CONTROL].array, layout, identity)
        except NotAdoptable:
            for memfd in adopted.values():
                os.close(memfd.read_only_fd)
            raise
        arena = cls(layout, adopted[attach.CONTROL], _by_tier(adopted), identity.epoch, gpu_memory)
        if gpu_memory is not None and gpu_memory.fresh:
            arena._void(Tier.DEVICE)
        return arena

    def _void(self, tier: Tier) -> None:
        """Makes every generation of a tier odd and every slot unleased."""
        for group in range(len(self.layout.groups)):
            place = (tier, GroupId(group))
            generations = self._generations[place]
            generations += (generations % 2 == 0).astype(generations.dtype)
            self._owners[place][:] = 0

    @property
    def kept_fds(self) -> dict[str, int]:
        """Writable descriptors for a successor, by segment name: the arena's own, and the GPU memory's."""
        named = {attach.CONTROL: self._control.fd}
        named |= {segment: self._data[tier].fd for tier, segment in SEGMENT_NAMES.items() if tier in self._data}
        if self.gpu_memory is not None and self.gpu_memory.fd is not None:
            named[attach.CUDA] = self.gpu_memory.fd
        return named

    def data(self, tier: Tier) -> Bytes:
        """A tier's whole data segment, writable. Raises KeyError for a tier on a GPU."""
        return self._data[tier].array

    def generation(self, tier: Tier, group: GroupId, slot: SlotId) -> int:
        """A slot's generation: odd unless the slot's bytes are READY."""
        generation: int = self._generation_words[tier, group][slot]
        return generation

    def begin_writes(self, tier: Tier, group: GroupId, slots: Iterable[SlotId]) -> list[SlotId]:
        """Makes generations odd. Call before slots are granted to a writer or a copy into them is issued. Returns the
        slots whose generation was even. The other slots have not changed."""
        generations = self._generation_words[tier, group]
        began: list[SlotId] = []
        for slot in slots:
            value: int = generations[slot]
            if not value & 1:
                generations[slot] = value + 1
                began.append(slot)
        return began

    def end_writes(self, tier: Tier, group: GroupId, slots: Iterable[SlotId]) -> None:
        """Makes generations even: the slots' bytes are READY. Raises AssertionError if a write was not announced."""
        generations = self._generation_words[tier, group]
        for slot in slots:
            value: int = generations[slot]
            if not value & 1:
                where = f"{tier} group {group} slot {slot}"
                raise AssertionError(f"end_writes without begin_writes: {where}, generation {value}")
            generations[slot] = value + 1

    def note(self, tier: Tier, group: GroupId, blocks: Mapping[SlotId, Block]) -> None:
        """Records the blocks of slots for the slots' next generation."""
        generations = self._generation_words[tier, group]
        for slot, block in blocks.items():
            self._order += 1
            self._record(tier, group, slot, block, generations[slot] + 1, self._order)

    def restate(self, tier: Tier, group: GroupId, blocks: Mapping[SlotId, Block]) -> None:
        """Records other traits for the blocks of READY slots. Generations and the order of use stay. Raises
        AssertionError for a slot that is not READY."""
        generations, records = self._generation_words[tier, group], self._records[tier, group]
        for slot, block in blocks.items():
            if not is_ready(generations[slot]):
                raise AssertionError(f"restated: {tier} group {group} slot {slot} is no block's")
            self._record(tier, group, slot, block, generations[slot], order_of(records, slot))

    def disown(self, tier: Tier, group: GroupId, slots: Iterable[SlotId]) -> None:
        """Records that slots have no block."""
        for slot in slots:
            self._write_record(tier, group, slot, bytes(SLOT_RECORD_BYTES))

    def _record(self, tier: Tier, group: GroupId, slot: SlotId, block: Block, generation: int, order: int) -> None:
        packed = encode_slot(block.key, block.parent_key, block.traits, generation, order)
        self._write_record(tier, group, slot, packed)

    def _write_record(self, tier: Tier, group: GroupId, slot: SlotId, packed: bytes) -> None:
        start = slot * SLOT_RECORD_BYTES
        self._records[tier, group][start : start + len(packed)] = packed

    def contents(self, tier: Tier, group: GroupId) -> SlotContents:
        """READY slots of an adopted arena whose record is whole and of the slot's generation. Blocks noted from now on
        come later in order."""
        rows = self.layout.slot_records(self._control.array, tier, group)
        found = decode_slots(rows, self._generations[tier, group])
        self._order = max(self._order, max(found.orders, default=0))
        return found

    def ready_slots(self, tier: Tier, group: GroupId) -> list[SlotId]:
        """Slots whose generation is even."""
        return [SlotId(slot) for slot in np.flatnonzero(self._generations[tier, group] % 2 == 0).tolist()]

    def owned(self, tier: Tier, group: GroupId) -> dict[SlotId, SessionId]:
        """Leased slots and their sessions. A block with several readers has the last reader's session."""
        owners = self._owners[tier, group]
        return {SlotId(slot): SessionId(int(owners[slot])) for slot in np.flatnonzero(owners).tolist()}

    def set_owners(self, tier: Tier, group: GroupId, owners: Mapping[SlotId, SessionId | None]) -> None:
        """Notes the session that leases each slot; None = not leased."""
        words = self._owner_words[tier, group]
        for slot, session in owners.items():
            words[slot] = session or 0

    def rebuild_index(self, recovered: Mapping[GroupId, Sequence[RecoveredBlock]]) -> None:
        """Makes the key index hold just these blocks."""
        if self.index is not None:
            self.index.rebuild(
                self._indexed(group, blocks[start : start + _INDEXED_AT_ONCE])
                for group, blocks in recovered.items()
                for start in range(0, len(blocks), _INDEXED_AT_ONCE)
            )

    def _indexed(self, group: GroupId, blocks: Sequence[RecoveredBlock]) -> IndexedBlocks:
        residencies = {block.key: sum(tier.bit for tier in block.places) for block in blocks}
        host = {block.key: block.host for block in blocks if block.host is not None}
        device = {block.key: block.device for block in blocks if block.device is not None}
        return IndexedBlocks(group, residencies, self.at(Tier.HOST, group, host), self.at(Tier.DEVICE, group, device))

    def at(self, tier: Tier, group: GroupId, slots: Mapping[Key, SlotId]) -> Mapping[Key, At]:
        """The slots of blocks with their generations."""
        if not slots:
            return NOWHERE
        generations = self._generation_words[tier, group]
        return {key: (slot, generations[slot]) for key, slot in slots.items()}

    def outlive(self, former: Arena) -> None:
        """Sets the generations of fresh segments above the former segments', so that no reader mistakes a slot."""
        highest = max((int(words.max()) for words in former._generations.values() if len(words)), default=0)
        for words in self._generations.values():
            words.fill((highest | 1) + 2)

    def copy_slot(self, tier: Tier, group: GroupId, slot: SlotId, former: Arena, old: SlotId) -> None:
        """Copies the bytes of a slot of another layout."""
        for pool in range(len(self.layout.groups[group].pools)):
            into = self.layout.pool_view(self.data(tier), tier, group, pool, padding=True)
            into[slot] = former.layout.pool_view(former.data(tier), tier, group, pool, padding=True)[old]

    def set_state(self, state: ArenaState) -> None:
        write_state(self._control.array, state)

    def shared(self, *, write: bool) -> Shared:
        """Segments for a client. ``control`` is always read-only, the data segments unless ``write``. GPU memory has no
        read-only form, so it is shared with ``write`` or not at all."""
        fds = {attach.CONTROL: self._control.read_only_fd}
        for tier, segment in SEGMENT_NAMES.items():
            if tier in self._data:
                memfd = self._data[tier]
                fds[segment] = memfd.fd if write else memfd.read_only_fd
        if self.gpu_memory is None:
            return Shared(fds)
        offer = self.gpu_memory.offer(write=write)
        if isinstance(offer, str):
            return Shared(fds, unmapped={attach.DEVICE: offer})
        return Shared(fds | {attach.CUDA: offer}, self.gpu_memory.described)

    def prefault(self) -> None:
        """Runs :meth:`Memfd.prefault`, control first. GPU memory needs none."""
        for memfd in (self._control, *self._data.values()):
            memfd.prefault()

    def close(self, *, for_successor: bool = False) -> None:
        """Ends the daemon's mappings with the last array over them, the mapping of GPU memory at once. Clients that
        still map the arena see state CLOSED. With ``for_successor`` they can go on reading."""
        if not for_successor:
            self.set_state(ArenaState.CLOSED)
        self.index = None
        self._generation_words.clear()
        self._owner_words.clear()
        self._generations.clear()
        self._owners.clear()
        self._records.clear()
        for memfd in (self._control, *self._data.values()):
            memfd.close()
        if self.gpu_memory is not None:
            self.gpu_memory.close()


def _memfd_bytes(layout: ArenaLayout, gpu_memory: CudaSegment | NoSegment | None) -> dict[str, int]:
    """Sizes of the segments in shared memory, by name."""
    tiers = [tier for tier in SEGMENT_NAMES if gpu_memory is None or tier is not Tier.DEVICE]
    sizes = {SEGMENT_NAMES[tier]: layout.data_bytes(tier) for tier in tiers}
    return {attach.CONTROL: layout.control_bytes} | {segment: size for segment, size in sizes.items() if size}


def _by_tier(segments: Mapping[str, Memfd]) -> dict[Tier, Memfd]:
    return {tier: segments[name] for tier, name in SEGMENT_NAMES.items() if name in segments}


def _check_control(control: Bytes, layout: ArenaLayout, ours: ArenaIdentity) -> None:
    try:
        header = Header.read(control, len(layout.groups))
    except AbiError as error:
        raise NotAdoptable(str(error)) from error
    identity = header.identity
    if identity.fingerprint != ours.fingerprint:
        raise NotAdoptable("the fingerprint is another specification's")
    if identity.boot >= ours.boot:
        raise NotAdoptable(f"it was made in boot {identity.boot}, and this is {ours.boot}: another state directory's")
    slots = tuple(group.slots for group in layout.groups)
    if (header.slots, header.indexed) != (slots, layout.index_bytes > 0):
        raise NotAdoptable("the layout is not that of the cache's budgets")
    for tier in SEGMENT_NAMES:
        for group in range(len(layout.groups)):
            generations = layout.generations(control, tier, group)
            if len(generations) and not first_generation(identity.boot) <= int(generations.min()):
                raise NotAdoptable(f"a generation of {tier} group {group} is below the segment's first")
