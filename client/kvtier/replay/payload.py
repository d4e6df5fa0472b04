"""Bytes that could belong to no other block: every 8-byte word depends on the whole key and on its position.

A misplaced, stale, torn or half-written block therefore fails comparison wherever it is wrong, and nothing has to be
remembered to check it.

Word i of a block is ``(mix(i) ^ a) * b`` modulo 2^64, with ``a`` and odd ``b`` folded from the key by splitmix64
(Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014), whose finaliser ``mix`` is a bijection.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import InvalidArgument

WORD_BYTES: Final = 8

_MASK: Final = 2**64 - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_FACTORS: Final = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class Payload:
    """The contents of blocks of ``block_bytes`` bytes, a multiple of 8. Safe to share between threads."""

    def __init__(self, block_bytes: int) -> None:
        if block_bytes < WORD_BYTES or block_bytes % WORD_BYTES:
            raise InvalidArgument("block_bytes", block_bytes, f"a positive multiple of {WORD_BYTES}")
        self._positions = _mixed(np.arange(block_bytes // WORD_BYTES, dtype=np.uint64))

    def write(self, key: bytes, block: NDArray[np.uint8]) -> None:
        """Fills a block's contiguous bytes in place."""
        self._write(key, block.view(np.uint64))

    def matches(self, key: bytes, block: NDArray[np.uint8]) -> bool:
        """Whether all of the block's bytes are those of ``key``."""
        expected = np.empty_like(self._positions)
        self._write(key, expected)
        return np.array_equal(block.view(np.uint64), expected)

    def _write(self, key: bytes, words: NDArray[np.uint64]) -> None:
        a, b = _seeds(key)
        np.bitwise_xor(self._positions, a, out=words)
        np.multiply(words, b, out=words)


def _seeds(key: bytes) -> tuple[np.uint64, np.uint64]:
    """Two numbers that each bit of a 32-byte key changes, the second one odd."""
    folded = 0
    for word in struct.unpack("<4Q", key):
        folded = _mix(folded ^ word)
    return np.uint64(folded), np.uint64(_mix((folded + _GOLDEN) & _MASK) | 1)


def _mix(value: int) -> int:
    value = (value ^ (value >> 30)) * _FACTORS[0] & _MASK
    value = (value ^ (value >> 27)) * _FACTORS[1] & _MASK
    return value ^ (value >> 31)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """:func:`_mix` of each, on a stream of odd steps as splitmix64 has it."""
    words = (values + np.uint64(1)) * np.uint64(_GOLDEN)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(_FACTORS[0])
    words = (words ^ (words >> np.uint64(27))) * np.uint64(_FACTORS[1])
    return words ^ (words >> np.uint64(31))
