"""Superblocks: the file that says a directory is ours, in which format, and what it holds.

A line ``kvtier <kind> <format version> <crc>`` and a JSON object. The crc is zlib's crc32, 8 hex digits, over the
line without it and the object's bytes, so that neither can be exchanged.
"""

from __future__ import annotations

import errno
import json
import zlib
from pathlib import Path
from typing import Any, Final

from kvtierd.tiers.base import DamagedDirectory, TierIOError
from kvtierd.tiers.disk.files import io_errors, swap_in, write_atomically

SUPERBLOCK: Final = "SUPERBLOCK"
FORMAT_VERSION: Final = 1
MAGIC: Final = "kvtier"
_MAX_BYTES: Final = 1 << 20


def write_superblock(directory: Path, kind: str, content: dict[str, Any], *, often: bool = False) -> None:
    """Replaces it whole. ``often``: so that it can be done again on a full disk. Raises OSError, and
    :class:`TierIOError` for more than can be read back."""
    head = f"{MAGIC} {kind} {FORMAT_VERSION}"
    body = json.dumps(content, indent=2, sort_keys=True).encode() + b"\n"
    whole = f"{head} {_crc(head, body)}\n".encode() + body
    if len(whole) > _MAX_BYTES:
        raise TierIOError(
            errno.EFBIG, f"{directory / SUPERBLOCK} would have {len(whole)} bytes of at most {_MAX_BYTES}"
        )
    (swap_in if often else write_atomically)(directory / SUPERBLOCK, whole)


def read_superblock(directory: Path, kind: str) -> dict[str, Any] | None:
    """The content, None where there is no such file. Raises :class:`DamagedDirectory` for one not to be trusted."""
    with io_errors(f"cannot read {directory / SUPERBLOCK}"):
        try:
            with open(directory / SUPERBLOCK, "rb") as file:
                line, _, body = file.read(_MAX_BYTES).partition(b"\n")
        except (FileNotFoundError, NotADirectoryError):
            return None
    words = line.decode("ascii", "replace").split(" ")
    if len(words) != 4 or words[0] != MAGIC:
        raise DamagedDirectory(directory, f"its {SUPERBLOCK} is not kvtier's")
    if words[1] != kind:
        raise DamagedDirectory(directory, f"its {SUPERBLOCK} is of a {words[1]}, not of a {kind}")
    if words[2] != str(FORMAT_VERSION):
        raise DamagedDirectory(directory, f"format version {words[2]}; this daemon reads version {FORMAT_VERSION}")
    if words[3] != _crc(" ".join(words[:3]), body):
        raise DamagedDirectory(directory, f"its {SUPERBLOCK} does not match its checksum")
    try:
        content = json.loads(body)
    except ValueError as error:
        raise DamagedDirectory(directory, f"its {SUPERBLOCK} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise DamagedDirectory(directory, f"its {SUPERBLOCK} is not a JSON object")
    return content


def _crc(head: str, body: bytes) -> str:
    return f"{zlib.crc32(body, zlib.crc32(head.encode())):08x}"
