"""The layout of an arena, computed from the cache's specification, its slots, and whether it has a key index.

An arena is up to three sealed memory segments. ``control`` describes the slots, ``host`` and ``device`` have the slots.
Sizes never change. In each segment, parts follow each other in this order, each at the next multiple of its alignment;
empty parts take no place::

    control   the header                                4096 bytes: kvtier.abi.control
              by group:                                 each 64-byte aligned
                device generations, host generations    u64 a slot
                device owners, host owners              u64 a slot
                device records, host records            192 bytes a slot: kvtier.abi.control
              the key index                             64-byte aligned: kvtier.abi.key_index
    host      by group: its host slots                  2 MiB aligned
    device    by group, by pool: the pool's slots       2 MiB aligned

A host slot is one record: the block's part in each pool, padded to 4096 bytes, one after another. A device slot has the
same index in every pool; its part there is padded to 4096 bytes. The control segment's size is padded to 4096 bytes.
The key index has 1.5 places for every slot of all tiers, in whole buckets of 8 places and 512 bytes.

**Generations.** One u64 per slot, changed by single aligned 8-byte stores, which only rises. A generation is
even exactly while the slot's bytes are READY, odd while they are written or meaningless. A fresh segment starts at
``(boot << 32) + 1``, so that no two segments of a cache share a value. To use bytes without a lease: read the
generation (odd: a miss), use the bytes, read it again; a change is a miss, and the bytes are void. x86-64 keeps this
order of loads and stores; other processors need a barrier before and after the copy.

**Owners.** One u64 per slot: the id of the session that leases it to write, or of the last session that leases it to
read; 0 = no session, 2^64 - 1 = several sessions to write. A restarted daemon reads the owners.

**Records.** The contents of each slot, for a restarted daemon. Clients find blocks by the key index or ask the daemon.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from kvtier.abi.control import HEADER_BYTES, MAX_SLOTS, SLOT_RECORD_BYTES, ArenaIdentity, Header, Segment, Slots
from kvtier.abi.spec import PAGE, AbiError, CacheSpec, padded, require_int

DEVICE: Final = 0
HOST: Final = 1
DISK: Final = 2
MEMORY_TIERS: Final = (DEVICE, HOST)
"""Tiers with a data segment, generations and owners."""

BUCKET_BYTES: Final = 512
BUCKET_ENTRIES: Final = 8
"""Places in a bucket of the key index."""
INDEXES_HERE: Final = platform.machine() in ("x86_64", "AMD64")
"""Whether this machine's processor keeps loads and stores in the order that the key index relies on."""

_LINE: Final = 64
_HUGE_PAGE: Final = 2 << 20
_WORD: Final = 8


def first_generation(boot: int) -> int:
    """Returns the first generation of a fresh segment: odd, and above all generations of earlier boots."""
    return (boot << 32) + 1


def is_ready(generation: int) -> bool:
    """Returns whether a slot with this generation holds a block's bytes."""
    return generation % 2 == 0


@dataclass(slots=True, frozen=True)
class PoolLayout:
    """A pool of a group. ``record_offset`` is inside a host slot, ``device_offset`` inside the device segment."""

    block_bytes: int
    padded_bytes: int
    record_offset: int
    device_offset: int


@dataclass(slots=True, frozen=True)
class GroupLayout:
    """A window group. Tuples by tier have device first; ``slots`` counts the disk's too."""

    slots: Slots
    record_bytes: int
    host_offset: int
    generations: tuple[int, int]
    owners: tuple[int, int]
    records: tuple[int, int]
    pools: tuple[PoolLayout, ...]


@dataclass(slots=True, frozen=True)
class ArenaLayout:
    """The layout of a cache's segments."""

    groups: tuple[GroupLayout, ...]
    index_offset: int
    index_bytes: int
    control_bytes: int
    device_bytes: int
    host_bytes: int

    @classmethod
    def plan(cls, spec: CacheSpec, slots: Mapping[tuple[int, int], int], *, indexed: bool = INDEXES_HERE) -> Self:
        """Lays out an arena.

        Args:
            slots: a count by (group, tier); absent = 0. Disk slots only size the key index.

        Raises:
            AbiError: for counts out of range, and for groups or tiers that do not exist.
        """
        for (group, tier), count in slots.items():
            if not 0 <= group < len(spec.groups) or tier not in (DEVICE, HOST, DISK):
                raise AbiError(f"slots[{group}, {tier}]", count, "a group of the specification and a tier")
            require_int(f"slots[{group}, {tier}]", count, 0, MAX_SLOTS, AbiError)
        control, device, host = _End(HEADER_BYTES), _End(), _End()
        counts: list[Slots] = [
            (slots.get((group, DEVICE), 0), slots.get((group, HOST), 0), slots.get((group, DISK), 0))
            for group in range(len(spec.groups))
        ]
        groups = tuple(_group(spec, group, count, control, device, host) for group, count in enumerate(counts))
        buckets = -(-sum(map(sum, counts)) * 3 // (2 * BUCKET_ENTRIES)) if indexed else 0
        index_offset = control.take(buckets * BUCKET_BYTES, _LINE)
        return cls(groups, index_offset, buckets * BUCKET_BYTES, padded(control.end), device.end, host.end)

    @classmethod
    def read(cls, control: Segment, spec: CacheSpec) -> Self:
        """Reads the layout of a cache with this specification from its control segment. Raises AbiError if the segment
        is damaged, of another specification, or shorter than its slots need."""
        header = Header.read(control, len(spec.groups))
        if header.identity.fingerprint != spec.fingerprint():
            raise AbiError("header.fingerprint", header.identity.fingerprint.hex(), "that of the specification")
        slots = {(group, tier): count for group, counts in enumerate(header.slots) for tier, count in enumerate(counts)}
        layout = cls.plan(spec, slots, indexed=header.indexed)
        if layout.control_bytes > len(control):
            raise AbiError("control", f"{len(control)} bytes", f"{layout.control_bytes} bytes")
        return layout

    def initialise(self, control: Segment, identity: ArenaIdentity, seed: bytes) -> None:
        """Writes header and first generations into a zeroed segment. The state is then OPENING.

        Args:
            seed: 32 random bytes for the key index.
        """
        Header(identity, tuple(group.slots for group in self.groups), self.index_bytes > 0, seed).write(control)
        for tier in MEMORY_TIERS:
            for number in range(len(self.groups)):
                self.generations(control, tier, number).fill(first_generation(identity.boot))

    def data_bytes(self, tier: int) -> int:
        """Size of a memory tier's data segment; 0 = the cache has none."""
        return self.device_bytes if tier == DEVICE else self.host_bytes

    def pool_view(self, data: Segment, tier: int, group: int, pool: int, *, padding: bool = False) -> NDArray[np.uint8]:
        """All slots of a group in one pool, [slots, bytes], as a view of the tier's data segment."""
        place = self.groups[group]
        part = place.pools[pool]
        nbytes = part.padded_bytes if padding else part.block_bytes
        if tier == DEVICE:
            return _rows(data, place.slots[tier], nbytes, part.padded_bytes, part.device_offset)
        return _rows(data, place.slots[tier], nbytes, place.record_bytes, place.host_offset + part.record_offset)

    def record_view(self, data: Segment, group: int) -> NDArray[np.uint8]:
        """All host slots of a group with their padding, [slots, record bytes]."""
        place = self.groups[group]
        return _rows(data, place.slots[HOST], place.record_bytes, place.record_bytes, place.host_offset)

    def generations(self, control: Segment, tier: int, group: int) -> NDArray[np.uint64]:
        """The generations of a group's slots in a memory tier: a view, writable if the segment is."""
        place = self.groups[group]
        return np.frombuffer(control, dtype="<u8", count=place.slots[tier], offset=place.generations[tier])

    def owners(self, control: Segment, tier: int, group: int) -> NDArray[np.uint64]:
        """The owners of a group's slots in a memory tier: a view, writable if the segment is."""
        place = self.groups[group]
        return np.frombuffer(control, dtype="<u8", count=place.slots[tier], offset=place.owners[tier])

    def slot_records(self, control: Segment, tier: int, group: int) -> NDArray[np.uint8]:
        """The records of a group's slots in a memory tier, [slots, ``SLOT_RECORD_BYTES``], as a view."""
        place = self.groups[group]
        return _rows(control, place.slots[tier], SLOT_RECORD_BYTES, SLOT_RECORD_BYTES, place.records[tier])


class _End:
    """The end of the parts that are laid out in a segment so far."""

    def __init__(self, end: int = 0) -> None:
        self.end = end

    def take(self, size: int, alignment: int) -> int:
        """Returns the offset of the next part; 0 for an empty part."""
        if not size:
            return 0
        start = -(-self.end // alignment) * alignment
        self.end = start + size
        return start


def _group(spec: CacheSpec, group: int, slots: Slots, control: _End, device: _End, host: _End) -> GroupLayout:
    def runs(slot_bytes: int) -> tuple[int, int]:
        return control.take(slots[DEVICE] * slot_bytes, _LINE), control.take(slots[HOST] * slot_bytes, _LINE)

    pools, record = [], _End()
    for pool in range(len(spec.groups[group].pools)):
        exact = spec.pool_bytes(group, pool)
        places = record.take(padded(exact), PAGE), device.take(slots[DEVICE] * padded(exact), _HUGE_PAGE)
        pools.append(PoolLayout(exact, padded(exact), *places))
    return GroupLayout(
        slots=slots,
        record_bytes=record.end,
        host_offset=host.take(slots[HOST] * record.end, _HUGE_PAGE),
        generations=runs(_WORD),
        owners=runs(_WORD),
        records=runs(SLOT_RECORD_BYTES),
        pools=tuple(pools),
    )


def _rows(data: Segment, count: int, nbytes: int, stride: int, start: int) -> NDArray[np.uint8]:
    if not count:
        return np.empty((0, nbytes), dtype=np.uint8)
    return np.ndarray((count, nbytes), dtype=np.uint8, buffer=data, offset=start, strides=(stride, 1))
