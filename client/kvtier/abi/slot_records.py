"""What a slot of memory holds, written beside it: with these a restarted daemon finds its blocks again.

Only the daemon writes and reads them. One record a slot of a memory tier, 160 bytes, little-endian, zero where it was
never written::

       0   32  key
      32   32  parent              zero if it has none
      64   32  event_hash          zero-padded
      96  u64  generation          the even one for which the record holds
     104  u64  deadline_ns         wall time at which its priority falls; 0 = its clock stands
     112  u64  order               rises with every record that the daemon writes for the cache
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
"""

from __future__ import annotations

import struct
import zlib
from typing import Final, NamedTuple

from kvtier.abi.errors import AbiError

SLOT_RECORD_BYTES: Final = 160

_BODY: Final = struct.Struct("<32s32s32sQQQIBBBx")
_CRC: Final = struct.Struct("<I")
_HAS_PARENT: Final = 1
_HASH_BYTES: Final = (0, 8, 32)


class SlotRecord(NamedTuple):
    """Key and parent are 32 bytes; ``parent`` None: the block is a root. A tuple, as a restart reads one a slot."""

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

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> SlotRecord:
        """Raises :class:`AbiError` where the bytes are not a whole record."""
        body = data[: _BODY.size]
        (crc,) = _CRC.unpack_from(data, _BODY.size)
        if crc != zlib.crc32(body):
            raise AbiError("record.crc", crc, f"{zlib.crc32(body)}, the sum over the record")
        key, parent, event_hash, generation, deadline_ns, order, duration_ms, flags, priority, length = _BODY.unpack(
            body
        )
        if flags & ~_HAS_PARENT:
            raise AbiError("record.flags", flags, "0 or 1")
        if length not in _HASH_BYTES:
            raise AbiError("record.event_hash_bytes", length, "0, 8 or 32")
        parent = parent if flags else None
        return cls(key, parent, priority, duration_ms, deadline_ns, event_hash[:length], generation, order)
