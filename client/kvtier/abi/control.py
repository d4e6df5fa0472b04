"""An arena's ``control`` segment: its header, and the records of its slots' contents.

The header has 4096 bytes at offset 0. Integers are unsigned and little-endian, bytes not named are zero. Only the
daemon writes::

       0    8  magic               b"KVTARENA"
       8  u32  abi_version         1
      12  u32  indexed             1 = there is a key index, 0 = ask the daemon
      16   32  fingerprint         of the cache's specification (kvtier.abi.spec)
      48  u64  epoch               of the daemon that made the segments
      56  u64  boot                rises with every start of the daemon; boot >= epoch
      64  u64  pid                 of the daemon
      72   32  index_seed          four odd u64
     104  u32 x 3 x 16  slots      by group: of the device, host and disk tier
     296  u32  crc                 CRC-32 (zlib) of the bytes before

The other fields change while the arena lives, each by single aligned stores::

    4032  u64  event_epoch         of the event that last_event names
    4040  u64  last_event          the last event whose effect the key index shows
    4048  u64  unindexed           blocks for which the key index has no place
    4088  u32  state               0 opening, 1 serving, 2 closed

:mod:`kvtier.abi.layout` says where everything else is.

Each slot of a memory tier has a record of 160 bytes, zero if it was never written. A restarted daemon finds its blocks
by these records; only the daemon reads and writes them::

       0   32  key
      32   32  parent              zero if it has none
      64   32  event_hash          zero-padded
      96  u64  generation          the even generation for which the record is true
     104  u64  deadline_ns         wall time at which its priority falls; 0 = the time does not run
     112  u64  order               rises with every slot that is written in the cache
     120  u32  duration_ms
     124  u8   flags               bit 0: it has a parent
     125  u8   priority            its own
     126  u8   event_hash_bytes    0, 8 or 32
     127  u8   (zero)
     128  16   checksum            xxh3-128 of its bytes at its commit; zero if it has none
     144  u32  crc                 CRC-32 (zlib) of the 144 bytes before
     148  12   (zero)

The daemon writes the record before it sets the slot's generation to the record's. The daemon makes the generation odd
before the slot's bytes change. A record is true if its generation is even and equals the slot's. If the daemon dies
while it writes a record, the sum or the generation is wrong.

A new priority, duration or deadline is written over the record of a READY slot, in one copy, with the same generation
and order. If the daemon dies meanwhile, the sum is wrong, and the block is forgotten.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from kvtier.abi.spec import MAX_GROUPS, AbiError

ABI_VERSION: Final = 1
MAGIC: Final = b"KVTARENA"
HEADER_BYTES: Final = 4096
INDEX_SEED_BYTES: Final = 32
MAX_SLOTS: Final = 2**31 - 1
"""Slots of one group in one tier: slot numbers travel as u32."""

EVENT_EPOCH_OFFSET: Final = 4032
LAST_EVENT_OFFSET: Final = 4040
UNINDEXED_OFFSET: Final = 4048
STATE_OFFSET: Final = 4088

_FIXED: Final = struct.Struct(f"<8sII32sQQQ32s{3 * MAX_GROUPS}I")
_CRC: Final = struct.Struct("<I")
_WORD: Final = 8
_TRIES: Final = 3

Segment = NDArray[np.uint8]
"""A mapped segment: ``numpy.frombuffer(mapping, numpy.uint8)``."""

Slots = tuple[int, int, int]
"""Slots of a window group on the device, host and disk tier."""

SLOT_RECORD_BYTES: Final = 160

_BODY: Final = struct.Struct("<32s32s32sQQQIBBBx16s")
_HAS_PARENT: Final = 1
_HASH_BYTES: Final = (0, 8, 32)
_ROW: Final = np.dtype(
    [("body", f"V{_BODY.size}"), ("crc", "<u4"), ("rest", f"V{SLOT_RECORD_BYTES - _BODY.size - _CRC.size}")]
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
        ("checksum", "V16"),
    ]
)
_ORDER: Final = struct.Struct("<112xQ")
_AT_ONCE: Final = 16384
"""Records copied at a time."""


class ArenaState(IntEnum):
    OPENING = 0
    SERVING = 1
    CLOSED = 2


class Shown(NamedTuple):
    """The last event whose effect the key index shows. An event id counts in its epoch only."""

    epoch: int
    event: int


@dataclass(slots=True, frozen=True)
class ArenaIdentity:
    """The cache and the daemon of the segments. The process ``pid`` made them."""

    fingerprint: bytes
    epoch: int
    boot: int
    pid: int


@dataclass(slots=True, frozen=True)
class Header:
    """The fields that do not change while the arena lives. ``slots``: by window group."""

    identity: ArenaIdentity
    slots: tuple[Slots, ...]
    indexed: bool
    index_seed: bytes

    def write(self, control: Segment) -> None:
        """Writes the header into a zeroed segment. Makes each word of the seed odd: a multiplier that loses no bits."""
        seed = bytes(byte | 1 if at % _WORD == 0 else byte for at, byte in enumerate(self.index_seed))
        counts = [count for group in self.slots for count in group]
        counts += [0] * (3 * MAX_GROUPS - len(counts))
        own = self.identity
        who = (own.fingerprint, own.epoch, own.boot, own.pid)
        fixed = _FIXED.pack(MAGIC, ABI_VERSION, self.indexed, *who, seed, *counts)
        control.data[: _FIXED.size + _CRC.size] = fixed + _CRC.pack(zlib.crc32(fixed))
        write_shown(words_of(control), Shown(own.epoch, 0))

    @classmethod
    def read(cls, control: Segment, groups: int) -> Self:
        """Reads the header of a cache with ``groups`` window groups. Raises AbiError if the segment is not of this ABI
        version, or its bytes are damaged."""
        if len(control) < HEADER_BYTES:
            raise AbiError("control", f"{len(control)} bytes", f"at least {HEADER_BYTES} bytes")
        fixed, (crc,) = bytes(control[: _FIXED.size]), _CRC.unpack_from(control.data, _FIXED.size)
        magic, version, indexed, fingerprint, epoch, boot, pid, seed, *counts = _FIXED.unpack(fixed)
        # Magic and version first: other fields have a meaning only if these are right.
        if magic != MAGIC:
            raise AbiError("header.magic", magic, repr(MAGIC))
        if version != ABI_VERSION:
            raise AbiError("header.abi_version", version, str(ABI_VERSION))
        if crc != zlib.crc32(fixed):
            raise AbiError("header.crc", crc, f"{zlib.crc32(fixed)}, the sum over the header")
        if max(counts) > MAX_SLOTS or any(counts[3 * groups :]):
            raise AbiError("header.slots", counts, f"at most {MAX_SLOTS} each, of {groups} groups")
        slots = tuple((counts[at], counts[at + 1], counts[at + 2]) for at in range(0, 3 * groups, 3))
        return cls(ArenaIdentity(fingerprint, epoch, boot, pid), slots, bool(indexed), seed)


def write_state(control: Segment, state: ArenaState) -> None:
    """Writes the arena's state. For the daemon only."""
    control[STATE_OFFSET : STATE_OFFSET + 4].view("<u4")[0] = state


def words_of(control: Segment) -> memoryview:
    """Returns the segment as u64, each read and written by one aligned access."""
    return control[: len(control) // _WORD * _WORD].data.cast("Q")


def read_shown(words: memoryview) -> Shown:
    """Reads the last shown event from :func:`words_of` the segment. While the epoch changes, the event is 0."""
    epoch = words[EVENT_EPOCH_OFFSET // _WORD]
    for _ in range(_TRIES):
        before, event = epoch, words[LAST_EVENT_OFFSET // _WORD]
        epoch = words[EVENT_EPOCH_OFFSET // _WORD]
        if epoch == before:
            return Shown(epoch, event)
    return Shown(epoch, 0)


def write_shown(words: memoryview, shown: Shown) -> None:
    """Writes the last shown event. For the daemon only."""
    if words[EVENT_EPOCH_OFFSET // _WORD] != shown.epoch:
        words[LAST_EVENT_OFFSET // _WORD] = 0
        words[EVENT_EPOCH_OFFSET // _WORD] = shown.epoch
    words[LAST_EVENT_OFFSET // _WORD] = shown.event


def read_unindexed(words: memoryview) -> int:
    """Returns the number of blocks for which the key index has no place."""
    return int(words[UNINDEXED_OFFSET // _WORD])


def write_unindexed(words: memoryview, count: int) -> None:
    """Writes the number of blocks for which the key index has no place. For the daemon only."""
    words[UNINDEXED_OFFSET // _WORD] = count


class SlotRecord(NamedTuple):
    """The contents of a slot. Key and parent are 32 bytes; ``parent`` None: the block is a root."""

    key: bytes
    parent: bytes | None
    priority: int
    duration_ms: int
    deadline_ns: int
    event_hash: bytes
    generation: int
    order: int
    checksum: bytes

    def pack(self) -> bytes:
        """Returns the record without its trailing zeros."""
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
            self.checksum,
        )
        return body + _CRC.pack(zlib.crc32(body))


def order_of(records: memoryview, slot: int) -> int:
    """Returns the ``order`` in a slot's record. ``records``: ``SLOT_RECORD_BYTES`` per slot."""
    order: int = _ORDER.unpack_from(records, slot * SLOT_RECORD_BYTES)[0]
    return order


@dataclass(slots=True, frozen=True)
class SlotContents:
    """The contents of many slots: a column for each field of :class:`SlotRecord`."""

    slots: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    parents: list[bytes | None] = field(default_factory=list)
    priorities: list[int] = field(default_factory=list)
    durations_ms: list[int] = field(default_factory=list)
    deadlines_ns: list[int] = field(default_factory=list)
    event_hashes: list[bytes] = field(default_factory=list)
    orders: list[int] = field(default_factory=list)
    checksums: list[bytes] = field(default_factory=list)

    @classmethod
    def read(cls, records: NDArray[np.uint8], generations: NDArray[np.uint64]) -> SlotContents:
        """Reads the true records, in the order of the slots.

        Args:
            records: [slots, ``SLOT_RECORD_BYTES``], C-contiguous.
            generations: [slots].
        """
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
        self.checksums.extend(value if any(value) else b"" for value in fields["checksum"].tolist())
