"""The checksum that stands between a block's bytes and whoever asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import xxhash

from kvtierd.core.ids import Key
from kvtierd.tiers.disk.values import DiskWrite
from kvtierd.tiers.parts import Part

CHECKSUM_BYTES: Final = 16


def checksum(parts: Sequence[Part], key: Key, fingerprint: bytes) -> bytes:
    """xxh3-128 over the padded record, the key and the cache's fingerprint: 16 bytes.

    Key and fingerprint are in it so that intact bytes of another block, or of another model, do not pass.
    """
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part.memory)
    digest.update(key + fingerprint)
    return digest.digest()


def checksums_of(writes: Sequence[DiskWrite], fingerprint: bytes) -> list[bytes]:
    """One each."""
    return [checksum(parts, key, fingerprint) for _, _, key, _, _, parts in writes]
