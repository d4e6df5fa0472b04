"""What the torture test stores: blocks large enough that copies and writes meet, whose bytes say whose they are."""

import hashlib
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier import CacheSpec, PoolSpec, WindowGroupSpec

SPEC: Final = CacheSpec(
    model="torture",
    dtype="uint8",
    tokens_per_block=16,
    groups=(WindowGroupSpec(pools=(PoolSpec(2, 4, 256), PoolSpec(1, 1, 520))),),
)
"""Two pools: 64 KiB, and one that is not of whole pages."""
SLOT_BYTES: Final = SPEC.record_bytes(0)
BLOCK_BYTES: Final = SPEC.block_bytes(0)
CHAINS: Final = 40
CHAIN_BLOCKS: Final = 6
GARBAGE: Final = 0xEE
"""What a slot holds whose writer has not come to its bytes yet."""

_PLACES: Final = np.arange(BLOCK_BYTES // 8, dtype=np.uint64)


def chain(number: int) -> list[bytes]:
    """The keys of a chain."""
    return [hashlib.sha256(f"{number}/{index}".encode()).digest() for index in range(CHAIN_BLOCKS)]


def block(key: bytes) -> NDArray[np.uint8]:
    """The bytes that belong to a key: of each of their words it can be told whose it is, and where it belongs."""
    words = np.tile(np.frombuffer(key, np.uint64), BLOCK_BYTES // 32) ^ _PLACES
    return words.view(np.uint8)


def fault_in(key: bytes, found: NDArray[np.uint8]) -> str:
    """What is wrong with a block; empty where nothing is."""
    right = block(key)
    if np.array_equal(right, found):
        return ""
    wrong = np.flatnonzero(right.view(np.uint64) != found.view(np.uint64))
    words = found.view(np.uint64)[wrong]
    garbage = np.count_nonzero(words == np.uint64(GARBAGE * 0x0101010101010101))
    return f"{len(wrong)} of {len(_PLACES)} words are wrong, from {wrong[0]} to {wrong[-1]}, {garbage} of them blank"
