"""An arena's ``control`` segment: its header, and the records of its slots' contents.

The header has 4096 bytes at offset 0. Integers are unsigned and little-endian, bytes not named are zero. Only the
daemon writes::

       0    8  magic               b"KVTARENA"
       8  u32  abi_version         2
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

Each slot of a memory tier has a record of 192 bytes, zero if it was never written. A restarted daemon finds its blocks
by these records, which only the daemon reads and writes: see ``kvtierd/tiers/disk/records.py``. The daemon writes the
record before it sets the slot's generation to the record's, and makes the generation odd before the slot's bytes
change.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from kvtier.abi.spec import MAX_GROUPS, AbiError

ABI_VERSION: Final = 2
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

SLOT_RECORD_BYTES: Final = 192


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
