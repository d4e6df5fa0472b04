"""Request traces: one JSON object a line with ``hash_ids``, an id per block of the prompt.

The format of the traces published with Mooncake (FAST'25, github.com/kvcache-ai/Mooncake). Equal ids mean equal
blocks with an equal prefix, so an id stands for a block and the id before it for its parent.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiofiles

from kvtier.errors import InvalidArgument

_KEY_PREFIX: Final = b"kvtier.replay.1\0"
_READ_BYTES: Final = 1 << 20
_MAX_ID: Final = 2**64 - 1


@dataclass(slots=True, frozen=True)
class Request:
    """One request's blocks, the first of its prompt first."""

    ids: tuple[int, ...]


async def read(path: Path, limit: int | None = None) -> list[Request]:
    """The first ``limit`` requests, in order of arrival. Raises :class:`InvalidArgument` naming the line at fault."""
    requests: list[Request] = []
    try:
        async with aiofiles.open(path, encoding="utf-8") as file:
            while lines := await file.readlines(_READ_BYTES):
                for line in lines:
                    if limit is not None and len(requests) == limit:
                        return requests
                    requests.append(_request(f"{path}:{len(requests) + 1}", line))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument("trace", str(path), f"a readable text file: {error}") from error
    return requests


def key_of(block: int) -> bytes:
    """The block's key, the same in every run: SHA-256 of a fixed prefix and the id as u64, little-endian."""
    return hashlib.sha256(_KEY_PREFIX + block.to_bytes(8, "little")).digest()


def hottest(requests: Iterable[Request]) -> int | None:
    """The id with most references, the smallest of them if several have as many; None for no references."""
    counts = Counter(block for request in requests for block in request.ids)
    return min(counts, key=lambda block: (-counts[block], block)) if counts else None


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
    return Request(tuple(ids))
