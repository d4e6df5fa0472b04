"""The index's log: what transactions put and delete, until many of them are carried over to the records at once.

Block keys are random, so each record that is put or deleted in the tree of records rewrites a page of its own, and a
batch waits until all of those have reached the disk. The same changes in a row take a page for thirty.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Final

from kvtierd.core.ids import KEY_BYTES, Key

MOST_INLINE: Final = 1990
"""Longest value that LMDB keeps inside a page."""
_VERSION: Final = b"\x01" + bytes(7)
_LENGTH: Final = struct.Struct("<H")
_HEAD_BYTES: Final = KEY_BYTES + _LENGTH.size

Ops = Mapping[Key, bytes | None]
"""Records by key, as they are after the change; None = deleted."""


def journal_bytes(ops: Ops) -> int:
    """About what they take in the log."""
    nbytes = len(ops) * _HEAD_BYTES
    for record in ops.values():
        if record is not None:
            nbytes += len(record)
    return nbytes


def fit(ops: Ops) -> bool:
    """Whether a value of the log can hold each record."""
    most = MOST_INLINE - len(_VERSION) - _HEAD_BYTES
    return not any(record is not None and len(record) > most for record in ops.values())


def encode_journal(ops: Ops) -> list[bytes]:
    """In as many values as they need."""
    values: list[bytes] = []
    parts = [_VERSION]
    nbytes = len(_VERSION)
    for key, record in ops.items():
        length = 0 if record is None else len(record)
        if nbytes + _HEAD_BYTES + length > MOST_INLINE and len(parts) > 1:
            values.append(b"".join(parts))
            parts, nbytes = [_VERSION], len(_VERSION)
        parts += (key, _LENGTH.pack(length))
        if record is not None:
            parts.append(record)
        nbytes += _HEAD_BYTES + length
    if len(parts) > 1:
        values.append(b"".join(parts))
    return values


def decode_journal(values: Iterable[bytes]) -> dict[Key, bytes | None]:
    """What all of these, in their order, come to. Raises ValueError for a value that is not the log's."""
    ops: dict[Key, bytes | None] = {}
    for value in values:
        if value[: len(_VERSION)] != _VERSION:
            raise ValueError(f"a log of version {value[:1].hex()}; this daemon reads version {_VERSION[:1].hex()}")
        place = len(_VERSION)
        while place < len(value):
            start = place + _HEAD_BYTES
            length = int.from_bytes(value[start - _LENGTH.size : start], "little")
            if start + length > len(value):
                raise ValueError("a log that ends in the middle of a record")
            ops[Key(value[place : place + KEY_BYTES])] = value[start : start + length] if length else None
            place = start + length
    return ops
