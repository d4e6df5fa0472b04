"""The object of a block in a store, which describes itself. Integers are little-endian.

========  =========================================================================================================
bytes     content
========  =========================================================================================================
16        xxh3-128 of everything after it
8         ``b"kvtier\\0\\1"``: the last byte is the version
4, 4      bytes of the header, after which the payload begins, and of the block's record
8         bytes of the payload
32        fingerprint of the cache's specification
4         window group
32        block key
n         the record of the disk's index (``tiers/disk/records.py``), with slot and last use 0
n         the payload: the block's bytes in each pool, in their order, without padding
========  =========================================================================================================

The name has the cache's name, fingerprint, group and key, so a namespace is a prefix: ``cache/print/v1/group/ab/key``.
After a reset or a drop the name ends in the block's revision: ``.../key.revision``.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import xxhash

from kvtierd.core.ids import KEY_BYTES, MAX_TOKEN_BYTES, GroupId, Key, SlotId, Traits
from kvtierd.tiers.base import Bytes
from kvtierd.tiers.disk.records import HEAD_BYTES, RECORD_DTYPE, decode_records, encode_record, parents_of, traits_of
from kvtierd.tiers.remote.base import CHECKSUM_BYTES

VERSION: Final = 1
"""Format version of objects. Every change of the header, or of the record in it, needs a new number."""
_MAGIC: Final = b"kvtier\0"
_NUMBERED: Final = re.compile(r"v[1-9]\d{0,3}")
FINGERPRINT_BYTES: Final = 32
_HEAD: Final = struct.Struct(f"<{CHECKSUM_BYTES}s7sBIIQ{FINGERPRINT_BYTES}sI{KEY_BYTES}s")
LINK_BYTES: Final = _HEAD.size + HEAD_BYTES
"""The first bytes of an object, which name the parent of its block."""
MAX_HEADER_BYTES: Final = _HEAD.size + 512 + MAX_TOKEN_BYTES


@dataclass(slots=True, frozen=True)
class GroupPrefix:
    """Names the blocks of a window group of a cache. ``cache``: its name, which has no ``/``. ``revision``: the time
    when the blocks were last forgotten, see ``service/forgotten.py``; 0 = never."""

    cache: str
    fingerprint: bytes
    group: GroupId
    revision: int = 0

    @property
    def prefix(self) -> str:
        return f"{self.cache}/{self.fingerprint.hex()}/v{VERSION}/{self.group}/"

    def name(self, key: Key) -> str:
        """Name of a block's object. The first byte of the key spreads objects over directories."""
        digits = key.hex()
        end = f".{self.revision}" if self.revision else ""
        return f"{self.prefix}{digits[:2]}/{digits}{end}"


def parse(name: str) -> tuple[GroupPrefix, Key] | None:
    """The place and key in an object's name of any version; None = not an object of a block."""
    parts = name.split("/")
    try:
        cache, fingerprint, version, group, _, last = parts
        key, _, revision = last.partition(".")
        place = GroupPrefix(cache, bytes.fromhex(fingerprint), GroupId(int(group)), int(revision or 0))
        found = Key(bytes.fromhex(key))
    except ValueError:
        return None
    parts[2] = f"v{VERSION}" if _NUMBERED.fullmatch(version) else ""
    whole = len(found) == KEY_BYTES and len(place.fingerprint) == FINGERPRINT_BYTES
    return (place, found) if whole and place.name(found).split("/") == parts else None


class BadObject(Exception):
    """An object does not fit its name. The message tells the difference."""


class OtherObjectVersion(Exception):
    """An object of another version of kvtier, which may be sound."""

    def __init__(self, version: int) -> None:
        super().__init__(f"it is of version {version}; this daemon reads version {VERSION}")


def object_bytes(payload_bytes: int) -> int:
    """Most bytes of the object of a block."""
    return MAX_HEADER_BYTES + payload_bytes


def header(place: GroupPrefix, key: Key, parent: Key | None, traits: Traits, nbytes: int) -> bytes:
    """The part of a block's object between its checksum and its ``nbytes`` of payload."""
    record = encode_record(key, SlotId(0), 0, 0, b"", parent, traits)
    head = _HEAD.pack(
        b"", _MAGIC, VERSION, _HEAD.size + len(record), len(record), nbytes, place.fingerprint, place.group, key
    )
    return head[CHECKSUM_BYTES:] + record


def encode(place: GroupPrefix, key: Key, parent: Key | None, traits: Traits, parts: Sequence[Bytes]) -> bytes:
    """The object of a block. ``parts``: its bytes by pool. If they change meanwhile, the object is invalid."""
    before = header(place, key, parent, traits, sum(len(part) for part in parts))
    checksum = xxhash.xxh3_128(before)
    for part in parts:
        checksum.update(part.data)
    return b"".join([checksum.digest(), before, *(part.data for part in parts)])


def decode(
    place: GroupPrefix, key: Key, payload_bytes: int, found: memoryview
) -> tuple[Key | None, Traits, memoryview]:
    """Reads an object. Returns parent and traits of its block, and the payload inside ``found``.

    Raises:
        OtherObjectVersion: the object is of another version, and was not read further.
        BadObject: the object is another block's, or damaged.
    """
    number_at = CHECKSUM_BYTES + len(_MAGIC)
    if len(found) <= number_at or bytes(found[CHECKSUM_BYTES:number_at]) != _MAGIC:
        raise BadObject("it is not an object of kvtier")
    if found[number_at] != VERSION:
        raise OtherObjectVersion(found[number_at])
    if len(found) < _HEAD.size:
        raise BadObject(f"it has {len(found)} bytes, fewer than a header")
    checksum, _, _, start, record_bytes, nbytes, fingerprint, group, named = _HEAD.unpack_from(found)
    if (fingerprint, group, named) != (place.fingerprint, place.group, key):
        raise BadObject(f"it is the block {named.hex()} of group {group} of another name")
    if (start, start + nbytes, nbytes) != (_HEAD.size + record_bytes, len(found), payload_bytes):
        raise BadObject(f"it has {len(found)} bytes, {nbytes} of them payload; the block has {payload_bytes}")
    if xxhash.xxh3_128_digest(found[CHECKSUM_BYTES:]) != checksum:
        raise BadObject("its bytes do not have its checksum")
    values = [bytes(found[_HEAD.size : start])]
    rows = decode_records([key], values)
    if not rows["version"][0]:
        raise BadObject("its record cannot be read")
    (traits,) = traits_of(rows, values, np.zeros(1, np.intp))
    (parent,) = parents_of(rows)
    return None if parent is None else Key(parent), traits, found[start:]


def parent_in(begin: bytes) -> Key | None:
    """The parent of a block, from the first ``LINK_BYTES`` of its object, unverified; None = none, or unknown."""
    number_at = CHECKSUM_BYTES + len(_MAGIC)
    if len(begin) < LINK_BYTES or begin[CHECKSUM_BYTES : number_at + 1] != _MAGIC + bytes([VERSION]):
        return None
    (parent,) = parents_of(np.frombuffer(begin, RECORD_DTYPE, 1, _HEAD.size))
    return None if parent is None else Key(parent)
