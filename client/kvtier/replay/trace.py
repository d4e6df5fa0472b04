"""A request trace, and the bytes that each of its blocks has.

A trace has one JSON object a line, with one id per block of the prompt in ``hash_ids``: the format published with
Mooncake (FAST'25, github.com/kvcache-ai/Mooncake). Equal ids are equal blocks with an equal prefix; the id before is
the block's parent.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from itertools import islice
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvtier.abi.spec import CacheSpec
from kvtier.errors import InvalidArgument

_KEY_PREFIX: Final = b"kvtier.replay.1\0"
_MAX_ID: Final = 2**64 - 1

BLOCK_GRAIN: Final = 256
MAX_BLOCK_BYTES: Final = 16 << 20
_KEY_WORDS: Final = 2
"""8-byte words of the key that go into a block's bytes."""


Request: TypeAlias = tuple[int, ...]
"""The ids of a request's blocks, in the order of its prompt."""


async def arrivals(path: Path, limit: int | None = None) -> list[float]:
    """Seconds at which the first ``limit`` requests arrive, by their ``timestamp`` in milliseconds; without, a second
    apart. Call :func:`read` first, which checks the lines."""
    lines = map(json.loads, await asyncio.to_thread(_lines, path, limit))
    return [line.get("timestamp", 1000 * number) / 1000 for number, line in enumerate(lines)]


async def read(path: Path, limit: int | None = None) -> list[Request]:
    """The first ``limit`` requests, in order of arrival. Raises :class:`InvalidArgument` with the line at fault."""
    try:
        lines = await asyncio.to_thread(_lines, path, limit)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument("trace", str(path), f"a readable text file: {error}") from error
    return [_request(f"{path}:{number}", line) for number, line in enumerate(lines, start=1)]


def _lines(path: Path, limit: int | None) -> list[str]:
    with path.open(encoding="utf-8") as file:
        return list(islice(file, limit))


def _request(where: str, line: str) -> Request:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise InvalidArgument(where, line.strip(), "a JSON object") from error
    ids = fields.get("hash_ids") if isinstance(fields, dict) else None
    if not isinstance(ids, list) or not all(type(each) is int and 0 <= each <= _MAX_ID for each in ids):
        raise InvalidArgument(f"{where}: hash_ids", ids, "a list of ids from 0 to 2^64-1")
    if len(set(ids)) != len(ids):
        raise InvalidArgument(f"{where}: hash_ids", ids, "ids that are all different")
    return tuple(ids)


def key_of(block: int) -> bytes:
    """The block's key: SHA-256 of a fixed prefix and the id as u64, little-endian."""
    return hashlib.sha256(_KEY_PREFIX + block.to_bytes(8, "little")).digest()


def replay_spec(block_bytes: int) -> CacheSpec:
    """A specification with blocks of ``block_bytes`` in one pool. Raises :class:`InvalidArgument`."""
    if block_bytes % BLOCK_GRAIN or not 0 < block_bytes <= MAX_BLOCK_BYTES:
        limit = f"a multiple of {BLOCK_GRAIN}, at most {MAX_BLOCK_BYTES}"
        raise InvalidArgument("block_bytes", block_bytes, limit)
    head_size = block_bytes // BLOCK_GRAIN
    return CacheSpec.single(
        "kvtier-replay", "uint8", tokens_per_block=16, layers=16, kv_heads=1, head_size=head_size, kv_factor=1
    )


class Payload:
    """The bytes of blocks: one random pattern for all positions, combined with the key. Threads may share it.

    Two blocks differ in every 8-byte word, and so do two places of one block. A misplaced, stale or half-written block
    fails the comparison.
    """

    def __init__(self, block_bytes: int) -> None:
        words = np.random.Generator(np.random.PCG64(0)).bytes(block_bytes)
        self._pattern = np.frombuffer(words, np.uint64).reshape(-1, _KEY_WORDS)

    def write(self, key: bytes, block: NDArray[np.uint8]) -> None:
        words = np.frombuffer(key, np.uint64, _KEY_WORDS)
        np.bitwise_xor(self._pattern, words, out=block.view(np.uint64).reshape(-1, _KEY_WORDS))

    def matches(self, key: bytes, block: NDArray[np.uint8]) -> bool:
        expected = np.empty_like(block)
        self.write(key, expected)
        return np.array_equal(block, expected)
