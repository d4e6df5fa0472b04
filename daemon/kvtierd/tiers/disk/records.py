"""What the index stores, byte by byte. Integers are little-endian, except in keys that must sort.

==================  ===================  ==========================================================================
database            key                  value
==================  ===================  ==========================================================================
records-<group>     the block key, 32    ``record``, 72 bytes: u8 version = 1, u8 flags (bit 0: has a parent), u8
                                         priority, u8 0, u32 slot, u64 last use when written, u64 bytes of the
                                         record in the slab, 16 bytes checksum, 32 bytes parent (zeros if none)
touches-<group>     u64 big-endian,      ``touches``: u8 version = 1, 7 bytes 0, u64 first, then u32 slots: the n-th
                    rising               slot was used at ``first`` + n
recency-<group>     u32 big-endian,      ``recency``: u64 last use of up to ``RECENCY_SLOTS`` slots from this one on;
                    first slot           older than anything in the touches
quarantine-<group>  u32 big-endian slot  empty
==================  ===================  ==========================================================================

A slot's last use is the greatest counter that any of its record, the recency and the touches gives it: counters only
grow, so whatever was said of a slot's earlier tenant is outranked by its record. Values stay under half a page: LMDB
puts larger ones on runs of pages, which a nearly full map may not have.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtierd.core.ids import KEY_BYTES, Key, SlotId
from kvtierd.tiers.disk.checksum import CHECKSUM_BYTES

VERSION: Final = 1
RECENCY_SLOTS: Final = 240
TOUCHES_PER_VALUE: Final = 470

Counters = NDArray[np.uint64]
Slots = NDArray[np.uint32]

_HAS_PARENT: Final = 1
_RECORD: Final = struct.Struct(f"<BBBxIQQ{CHECKSUM_BYTES}s{KEY_BYTES}s")
_TOUCHES: Final = struct.Struct("<B7xQ")
RECORD_BYTES: Final = _RECORD.size

RECORD_DTYPE: Final = np.dtype(
    [
        ("version", "u1"),
        ("flags", "u1"),
        ("priority", "u1"),
        ("zero", "u1"),
        ("slot", "<u4"),
        ("last_use", "<u8"),
        ("size", "<u8"),
        ("checksum", f"V{CHECKSUM_BYTES}"),
        ("parent", f"V{KEY_BYTES}"),
    ]
)
"""``record`` as a numpy row, to decode a whole index at once."""


def encode_record(slot: SlotId, parent: Key | None, priority: int, last_use: int, size: int, checksum: bytes) -> bytes:
    flags = 0 if parent is None else _HAS_PARENT
    return _RECORD.pack(VERSION, flags, priority, slot, last_use, size, checksum, parent or b"")


def decode_records(values: Sequence[bytes]) -> NDArray[Any]:
    """One ``RECORD_DTYPE`` row a value. A value of another length becomes a row of version 0, which is no version."""
    if any(len(value) != RECORD_BYTES for value in values):
        values = [value if len(value) == RECORD_BYTES else bytes(RECORD_BYTES) for value in values]
    return np.frombuffer(b"".join(values), dtype=RECORD_DTYPE)


def parents_of(rows: NDArray[Any]) -> list[Key | None]:
    has_parent = (rows["flags"] & _HAS_PARENT).astype(bool).tolist()
    return [parent if has else None for has, parent in zip(has_parent, rows["parent"].tolist(), strict=True)]


def encode_touches(slots: Sequence[SlotId], first: int) -> Iterator[bytes]:
    """``slots`` in the order of their use, the first at counter ``first``, in as many values as they need."""
    for start in range(0, len(slots), TOUCHES_PER_VALUE):
        run = np.asarray(slots[start : start + TOUCHES_PER_VALUE], dtype="<u4")
        yield _TOUCHES.pack(VERSION, first + start) + run.tobytes()


def decode_touches(value: bytes) -> tuple[Slots, Counters]:
    """Slots and the counter each was used at; empty if the value is of another version or torn."""
    if len(value) < _TOUCHES.size or value[0] != VERSION or (len(value) - _TOUCHES.size) % 4:
        return np.empty(0, np.uint32), np.empty(0, np.uint64)
    _, first = _TOUCHES.unpack_from(value)
    slots = np.frombuffer(value, dtype="<u4", offset=_TOUCHES.size)
    return slots, np.arange(first, first + len(slots), dtype=np.uint64)


def encode_recency(last_use: Counters) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values that hold the whole table."""
    for start in range(0, len(last_use), RECENCY_SLOTS):
        yield slot_key(start), last_use[start : start + RECENCY_SLOTS].astype("<u8").tobytes()


def decode_recency(value: bytes) -> Counters:
    return np.frombuffer(value[: len(value) // 8 * 8], dtype="<u8")


def slot_key(slot: int) -> bytes:
    return slot.to_bytes(4, "big")


def sequence_key(sequence: int) -> bytes:
    return sequence.to_bytes(8, "big")
