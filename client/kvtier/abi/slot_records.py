"""What a slot of memory holds, written beside it: with these a restarted daemon finds its blocks again.

Only the daemon writes and reads them. One record a slot of a memory tier, 160 bytes, little-endian, zero where it was
never written::

       0   32  key
      32   32  parent              zero if it has none
      64   32  event_hash          zero-padded
      96  u64  generation          the even one for which the record holds
     104  u64  deadline_ns         wall time at which its priority falls; 0 = its clock stands
     112  u64  order               rises with every slot that is written in the cache
     120  u32  duration_ms
     124  u8   flags               bit 0: it has a parent
     125  u8   priority            its own
     126  u8   event_hash_bytes    0, 8 or 32
     127  u8   (zero)
     128  u32  crc                 CRC-32 (zlib) of the 128 bytes before
     132  28   (zero)

The record is written before the slot's generation becomes the one that it names, and the generation turns odd before
the slot's bytes change; so a record whose generation is the slot's, and even, tells the truth, and one that was torn
by the writer's end fails its sum or names another generation.

What is given to a block later, its priority, duration and deadline, is written over the record of a READY slot, in one
copy, with the same generation and order. Nobody reads it meanwhile: its reader is the daemon that comes after the
writer's end. Torn by that end it fails its sum, and the block is forgotten: what is found is never untrue.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

SLOT_RECORD_BYTES: Final = 160

_BODY: Final = struct.Struct("<32s32s32sQQQIBBBx")
_CRC: Final = struct.Struct("<I")
_HAS_PARENT: Final = 1
_HASH_BYTES: Final = (0, 8, 32)
_ROW: Final = np.dtype(
    [
        ("body", f"V{_BODY.size}"),
        ("crc", "<u4"),
        ("rest", f"V{SLOT_RECORD_BYTES - _BODY.size - _CRC.size}"),
    ]
)
_FIELDS: Final = np.dtype(
    [
        ("key", "V32"),
        ("parent", "V32"),
        ("event_hash", "V32"),
        ("generation", "<u8"),
        ("deadline_ns", "<u8"),
        ("order", "<u8"),
        ("duration_ms", "<u4"),
        ("flags", "u1"),
        ("priority", "u1"),
        ("event_hash_bytes", "u1"),
        ("zero", "u1"),
    ]
)
_ORDER: Final = struct.Struct("<112xQ")
_AT_ONCE: Final = 16384
"""Rows that are copied at a time."""


class SlotRecord(NamedTuple):
    """Key and parent are 32 bytes; ``parent`` None: the block is a root."""

    key: bytes
    parent: bytes | None
    priority: int
    duration_ms: int
    deadline_ns: int
    event_hash: bytes
    generation: int
    order: int

    def pack(self) -> bytes:
        """Everything up to the last zeros, which are written once, with the segment."""
        body = _BODY.pack(
            self.key,
            self.parent or b"",
            self.event_hash,
            self.generation,
            self.deadline_ns,
            self.order,
            self.duration_ms,
            0 if self.parent is None else _HAS_PARENT,
            self.priority,
            len(self.event_hash),
        )
        return body + _CRC.pack(zlib.crc32(body))


def order_of(records: memoryview, slot: int) -> int:
    """``order`` of a slot's record, as it stands. ``records``: bytes, ``SLOT_RECORD_BYTES`` a slot."""
    order: int = _ORDER.unpack_from(records, slot * SLOT_RECORD_BYTES)[0]
    return order


@dataclass(slots=True, frozen=True)
class SlotContents:
    """What slots hold, by column, one entry a slot: a restart reads hundreds of thousands. Columns are as in
    :class:`SlotRecord`."""

    slots: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    parents: list[bytes | None] = field(default_factory=list)
    priorities: list[int] = field(default_factory=list)
    durations_ms: list[int] = field(default_factory=list)
    deadlines_ns: list[int] = field(default_factory=list)
    event_hashes: list[bytes] = field(default_factory=list)
    orders: list[int] = field(default_factory=list)

    @classmethod
    def read(cls, records: NDArray[np.uint8], generations: NDArray[np.uint64]) -> SlotContents:
        """Of the slots whose generation is even and whose record is whole and names that generation, in the order of
        the slots. ``records``: [slots, ``SLOT_RECORD_BYTES``], C-contiguous; ``generations``: [slots]."""
        found = cls()
        rows = records.reshape(-1).view(_ROW)
        ready = np.flatnonzero(generations % 2 == 0)
        for first in range(0, len(ready), _AT_ONCE):
            slots = ready[first : first + _AT_ONCE]
            found._add(slots, rows[slots], generations[slots])
        return found

    def _add(self, slots: NDArray[np.intp], rows: NDArray[Any], generations: NDArray[np.uint64]) -> None:
        sums = np.fromiter(map(zlib.crc32, rows["body"].tolist()), np.uint32, len(rows))
        fields = np.ascontiguousarray(rows["body"]).view(_FIELDS)
        good = (sums == rows["crc"]) & (fields["generation"] == generations)
        good &= (fields["flags"] <= _HAS_PARENT) & np.isin(fields["event_hash_bytes"], _HASH_BYTES)
        slots, fields = slots[good], fields[good]
        has_parent = fields["flags"].tolist()
        self.slots.extend(slots.tolist())
        self.keys.extend(fields["key"].tolist())
        parents = fields["parent"].tolist()
        self.parents.extend(key if has else None for key, has in zip(parents, has_parent, strict=True))
        self.priorities.extend(fields["priority"].tolist())
        self.durations_ms.extend(fields["duration_ms"].tolist())
        self.deadlines_ns.extend(fields["deadline_ns"].tolist())
        hashes = zip(fields["event_hash"].tolist(), fields["event_hash_bytes"].tolist(), strict=True)
        self.event_hashes.extend(value[:length] for value, length in hashes)
        self.orders.extend(fields["order"].tolist())
