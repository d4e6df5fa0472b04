"""Where the key index puts a block: two buckets and a tag, from its key and its window group.

All arithmetic is modulo 2^64; ``w`` are the key's four 8-byte words, ``s`` the seed's, little-endian::

    t = w * s;  t ^= t >> 32;  t *= s                       for each word and its part of the seed
    h = t0 + t1 + t2 + t3 + (group + 1) * 0x9E3779B97F4A7C15
    h ^= h >> 32;  h *= 0xD6E8FEB86659FD93;  h ^= h >> 32
    first bucket  = (h >> 32) * buckets >> 32
    second bucket = (h mod 2^32) * buckets >> 32
    tag           = (h ^ h >> 32) mod 2^32

The seed is there for keys that somebody chose; the parts of it are odd, so no multiplication loses a bit of a key.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]

_MASK: Final = 2**64 - 1
_LOW: Final = 2**32 - 1
_GROUP: Final = 0x9E3779B97F4A7C15
_FINAL: Final = 0xD6E8FEB86659FD93
_WORDS: Final = struct.Struct("<4Q")


class Homes(NamedTuple):
    """Of many keys. Buckets are signed, as numpy's own indices: it looks these up in a fifth of the time."""

    first: I64
    second: I64
    tags: U32


class KeyMix:
    """``seed``: 32 bytes. ``buckets``: under 2^32."""

    def __init__(self, seed: bytes, buckets: int) -> None:
        self._seed = _WORDS.unpack(seed)
        self._seeds = np.frombuffer(seed, "<u8")[:, None]
        self._buckets = buckets
        self._count = np.array(buckets, np.uint64)

    def one(self, keys: bytes | memoryview, group: int, at: int = 0) -> tuple[int, int, int]:
        """First and second bucket and tag of the key that begins there."""
        w0, w1, w2, w3 = _WORDS.unpack_from(keys, at)
        s0, s1, s2, s3 = self._seed
        w0 = w0 * s0 & _MASK
        w1 = w1 * s1 & _MASK
        w2 = w2 * s2 & _MASK
        w3 = w3 * s3 & _MASK
        mixed = (w0 ^ w0 >> 32) * s0 + (w1 ^ w1 >> 32) * s1 + (w2 ^ w2 >> 32) * s2 + (w3 ^ w3 >> 32) * s3
        mixed = mixed + (group + 1) * _GROUP & _MASK
        mixed = (mixed ^ mixed >> 32) * _FINAL & _MASK
        high = mixed >> 32
        low = mixed & _LOW ^ high
        return high * self._buckets >> 32, low * self._buckets >> 32, low ^ high

    def many(self, keys: U64, group: int | U64) -> Homes:
        """The same of ``keys``, [n, 4], all of one group or each of its own."""
        both, tags = self.buckets_and_tags(keys, group)
        return Homes(both[: len(keys)], both[len(keys) :], tags)

    def buckets_and_tags(self, keys: U64, group: int | U64) -> tuple[I64, U32]:
        """The same, with the first bucket of each and after these the second of each in one array."""
        words = keys.T.copy()  # numpy goes through long rows several times as fast as through short ones
        words *= self._seeds
        words ^= words >> _HALF
        words *= self._seeds
        mixed, one, another, last = words
        mixed += one
        mixed += another
        mixed += last
        mixed += np.uint64((group + 1) * _GROUP & _MASK) if isinstance(group, int) else (group + _ONE) * _GROUP_U64
        mixed ^= mixed >> _HALF
        mixed *= _FINAL_U64
        count = len(mixed)
        halves = np.empty(2 * count, np.uint64)
        high, low = halves[:count], halves[count:]
        np.right_shift(mixed, _HALF, high)
        np.bitwise_and(mixed, _LOW_U64, low)
        tags = low.astype(np.uint32)
        low ^= high
        halves *= self._count
        halves >>= _HALF
        return halves.view(np.int64), tags


# Arrays of no dimension: numpy takes half as long with these as with its scalars.
_ONE: Final = np.array(1, np.uint64)
_HALF: Final = np.array(32, np.uint64)
_LOW_U64: Final = np.array(_LOW, np.uint64)
_GROUP_U64: Final = np.array(_GROUP, np.uint64)
_FINAL_U64: Final = np.array(_FINAL, np.uint64)
