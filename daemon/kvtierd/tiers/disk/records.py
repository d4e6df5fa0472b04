"""The values in the index, byte by byte. Integers are little-endian, except in keys that must sort.

==================  ===================  ==========================================================================
database            key                  value
==================  ===================  ==========================================================================
records-<group>     the block key, 32    ``record``: the seal; u8 version = 1, u8 flags (bit 0: has a parent, bit 1:
                                         has a checksum of its commit), u8 priority, u8 length of the event hash,
                                         u32 slot, u64 last use when written, u64 bytes of the record in the slab,
                                         16 bytes checksum, 32 bytes parent (zeros if none), u32 length of the
                                         tokens, u32 length of the scope, u32 duration in ms, u64 deadline in ns;
                                         then the event hash, the checksum of its commit, 16 bytes, the tokens and
                                         the scope
touches-<group>     u64 big-endian,      ``touches``: the seal; u64 first, then u32 slots: the n-th slot was used at
                    rising               ``first`` + n. A log that has grown long is replaced by one use of each slot
quarantine-<group>  u32 big-endian slot  empty
==================  ===================  ==========================================================================

A slot's last use is the greatest counter in its record and the touches. Counters only grow, so a block's
record outranks every counter of the slot's earlier block. Values stay under half a page: LMDB puts larger values on
runs of pages, which a nearly full map may not have.

A value begins with a seal: xxh3-64, 8 bytes big-endian, of the rest of the value and, in a record, of its key. LMDB has
no checksums of its pages, and clients get tokens, hashes and priorities as they are read. A value with a broken seal is
ignored: its block is a miss, its uses are forgotten. A flipped bit in the quarantine takes a sound slot out of use, or
releases a bad slot, whose bytes fail their checksum again.

A slot of memory has a record, too, which outlives the daemon: the block key, 32 bytes, and ``record`` without tokens
and scope. Its last use is the order in which slots were written, and the slot's generation replaces the bytes; slot
and checksum are 0. The record is true if its generation is even and the slot's. If the daemon dies while it writes the
record, the generation or the seal is wrong, and the block is forgotten.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvtier.abi.control import SLOT_RECORD_BYTES
from kvtierd.core.ids import (
    CHECKSUM_BYTES,
    EVENT_HASH_BYTES,
    KEY_BYTES,
    MAX_TOKEN_BYTES,
    NO_LABEL,
    Key,
    Label,
    SlotId,
    Traits,
)
from kvtierd.core.ids import rows as rows_of

VERSION: Final = 1
TOUCHES_PER_VALUE: Final = 470

Counters = NDArray[np.uint64]
Slots = NDArray[np.uint32]

_HAS_PARENT: Final = 1
_HAS_CHECKSUM: Final = 2
_SEAL_BYTES: Final = 8
_HEAD: Final = struct.Struct(f"<BBBBIQQ{CHECKSUM_BYTES}s{KEY_BYTES}sIIIQ")
HEAD_BYTES: Final = _SEAL_BYTES + _HEAD.size
_TOUCHES: Final = struct.Struct("<Q")

RECORD_DTYPE: Final = np.dtype(
    [
        ("seal", f"V{_SEAL_BYTES}"),
        ("version", "u1"),
        ("flags", "u1"),
        ("priority", "u1"),
        ("hash_bytes", "u1"),
        ("slot", "<u4"),
        ("last_use", "<u8"),
        ("size", "<u8"),
        ("checksum", f"V{CHECKSUM_BYTES}"),
        ("parent", f"V{KEY_BYTES}"),
        ("token_bytes", "<u4"),
        ("scope_bytes", "<u4"),
        ("duration_ms", "<u4"),
        ("deadline_ns", "<u8"),
    ]
)
"""The head of ``record`` as a numpy row, for decoding a whole index at once."""


_SLOT_DTYPE: Final = np.dtype(
    [("key", f"V{KEY_BYTES}"), ("head", RECORD_DTYPE), ("rest", f"V{SLOT_RECORD_BYTES - KEY_BYTES - HEAD_BYTES}")]
)
_ORDER: Final = struct.Struct(f"<{KEY_BYTES + _SEAL_BYTES + 8}xQ")


def encode_record(
    key: Key, slot: SlotId, last_use: int, size: int, checksum: bytes, parent: Key | None, traits: Traits
) -> bytes:
    """The record of a block: ``size`` bytes in ``slot``, last used at counter ``last_use`` when written."""
    priority, duration_ms, deadline_ns, label = traits
    label = label or NO_LABEL
    flags = (_HAS_PARENT if parent is not None else 0) | (_HAS_CHECKSUM if label.checksum else 0)
    head = _HEAD.pack(
        VERSION,
        flags,
        priority,
        len(label.event_hash),
        slot,
        last_use,
        size,
        checksum,
        parent or b"",
        len(label.tokens),
        len(label.scope),
        duration_ms,
        deadline_ns,
    )
    return _sealed(head + label.event_hash + label.checksum + label.tokens + label.scope, key)


def _sealed(body: bytes, key: bytes = b"") -> bytes:
    return xxhash.xxh3_64_digest(body + key) + body


def _is_whole(value: bytes, key: bytes = b"") -> bool:
    return value[:_SEAL_BYTES] == xxhash.xxh3_64_digest(value[_SEAL_BYTES:] + key)


def restated(key: Key, value: bytes, traits: Traits) -> bytes:
    """``record`` with the priority, duration and deadline of ``traits``; its label stays. A record with a broken seal
    stays as it is: a new seal would make it valid."""
    if not _is_whole(value, key):
        return value
    body, ending = value[_SEAL_BYTES:], struct.pack("<IQ", traits.duration_ms, traits.deadline_ns)
    head = body[:2] + bytes([traits.priority]) + body[3 : _HEAD.size - len(ending)] + ending
    return _sealed(head + body[_HEAD.size :], key)


def decode_records(keys: Sequence[Key], values: Sequence[bytes]) -> NDArray[Any]:
    """A ``RECORD_DTYPE`` row per value. The value's key is at the same place in ``keys``. A value with a broken seal,
    of another version or of a wrong length becomes a row of zeros: version 0 is invalid."""
    lengths = np.fromiter(map(len, values), np.int64, len(values))
    heads = values if (lengths == HEAD_BYTES).all() else [v[:HEAD_BYTES].ljust(HEAD_BYTES, b"\0") for v in values]
    rows = np.frombuffer(b"".join(heads), RECORD_DTYPE).copy()
    hash_bytes = rows["hash_bytes"].astype(np.int64)
    token_bytes = rows["token_bytes"].astype(np.int64) + rows["scope_bytes"]
    checksum_bytes = _checksum_bytes(rows)
    sizes_fit = np.isin(hash_bytes, EVENT_HASH_BYTES) & (token_bytes <= MAX_TOKEN_BYTES)
    sealed = np.fromiter(map(_is_whole, values, keys), bool, len(values))
    as_long = lengths == HEAD_BYTES + hash_bytes + checksum_bytes + token_bytes
    whole = sealed & (rows["version"] == VERSION) & sizes_fit & as_long
    rows[~whole] = np.zeros((), RECORD_DTYPE)
    return rows


def traits_of(rows: NDArray[Any], values: Sequence[bytes], places: NDArray[np.intp]) -> list[Traits]:
    """The traits of each row. ``places``: of the rows' values in ``values``. Rows of version 0 are not allowed."""
    labels: list[Label | None] = [None] * len(rows)
    hash_ends = HEAD_BYTES + rows["hash_bytes"].astype(np.int64)
    ends = hash_ends + _checksum_bytes(rows)
    token_ends = ends + rows["token_bytes"]
    for place in np.flatnonzero(token_ends - HEAD_BYTES).tolist():
        value, hash_end, end, token_end = values[int(places[place])], hash_ends[place], ends[place], token_ends[place]
        labels[place] = Label(value[HEAD_BYTES:hash_end], value[end:token_end], value[hash_end:end], value[token_end:])
    columns = (rows[name].tolist() for name in ("priority", "duration_ms", "deadline_ns"))
    return list(rows_of(Traits, *columns, labels))


def _checksum_bytes(rows: NDArray[Any]) -> NDArray[np.int64]:
    """Bytes of the checksum of each block's commit, by row."""
    return np.where(rows["flags"] & _HAS_CHECKSUM, np.int64(CHECKSUM_BYTES), np.int64(0))


def parents_of(rows: NDArray[Any]) -> list[Key | None]:
    has_parent = (rows["flags"] & _HAS_PARENT).astype(bool).tolist()
    return [parent if has else None for has, parent in zip(has_parent, rows["parent"].tolist(), strict=True)]


def encode_slot(key: Key, parent: Key | None, traits: Traits, generation: int, order: int) -> bytes:
    """The record of a memory slot whose bytes are the block's at ``generation``."""
    if traits.label is not None:
        traits = traits._replace(label=replace(traits.label, tokens=b"", scope=b""))
    return key + encode_record(key, SlotId(0), order, generation, b"", parent, traits)


def order_of(records: memoryview, slot: SlotId) -> int:
    """The order in a slot's record. ``records``: ``SLOT_RECORD_BYTES`` per slot."""
    order: int = _ORDER.unpack_from(records, slot * SLOT_RECORD_BYTES)[0]
    return order


class SlotContents(NamedTuple):
    """The blocks in memory slots, a column a field. ``orders``: a later written slot has a greater number."""

    slots: Sequence[SlotId]
    keys: Sequence[Key]
    parents: Sequence[Key | None]
    traits: Sequence[Traits]
    orders: Sequence[int]


def decode_slots(records: NDArray[np.uint8], generations: NDArray[np.uint64]) -> SlotContents:
    """Reads the true records of slots. ``records``: [slots, ``SLOT_RECORD_BYTES``], C-contiguous."""
    places = records.reshape(-1).view(_SLOT_DTYPE)
    ready = np.flatnonzero((generations % 2 == 0) & (places["head"]["size"] == generations))
    heads, keys = places["head"][ready], places["key"][ready].tolist()
    lengths = (HEAD_BYTES + heads["hash_bytes"].astype(np.int64) + _checksum_bytes(heads)).tolist()
    values = [bytes(place[:nbytes]) for place, nbytes in zip(records[ready, KEY_BYTES:], lengths, strict=True)]
    rows = decode_records(keys, values)
    (sound,) = rows["version"].nonzero()
    rows, keys = rows[sound], [keys[place] for place in sound.tolist()]
    slots, traits = ready[sound].tolist(), traits_of(rows, values, sound)
    return SlotContents(slots, keys, parents_of(rows), traits, rows["last_use"].tolist())


def encode_touches(slots: Sequence[SlotId], first: int) -> Iterator[bytes]:
    """Values for ``slots`` in the order of their use, the first at counter ``first``."""
    for start in range(0, len(slots), TOUCHES_PER_VALUE):
        run = np.asarray(slots[start : start + TOUCHES_PER_VALUE], dtype="<u4")
        yield _sealed(_TOUCHES.pack(first + start) + run.tobytes())


def decode_touches(value: bytes) -> tuple[Slots, Counters]:
    """Slots, and the counter of each use; empty if the seal is broken."""
    if not _is_whole(value):
        return np.empty(0, np.uint32), np.empty(0, np.uint64)
    (first,) = _TOUCHES.unpack_from(value, _SEAL_BYTES)
    slots = np.frombuffer(value, dtype="<u4", offset=_SEAL_BYTES + _TOUCHES.size)
    return slots, np.arange(first, first + len(slots), dtype=np.uint64)


def slot_key(slot: int) -> bytes:
    return slot.to_bytes(4, "big")


def sequence_key(sequence: int) -> bytes:
    return sequence.to_bytes(8, "big")


def checksum(parts: Sequence[memoryview], key: Key, fingerprint: bytes) -> bytes:
    """xxh3-128 over the padded record, the key and the cache's fingerprint: 16 bytes. With key and fingerprint, intact
    bytes of another block or another model do not pass."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    digest.update(key + fingerprint)
    return digest.digest()
