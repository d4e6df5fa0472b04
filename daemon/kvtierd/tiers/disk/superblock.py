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
CACHE_VERSION: Final = 2
"""Of caches: an index of version 2 has a journal, without which a daemon that knows none would misread it."""
STATE_VERSION: Final = 2
"""Of states: one of version 2 names its history, which a daemon that knows none would drop."""
_VERSIONS: Final = {"cache": CACHE_VERSION, "state": STATE_VERSION}
MAGIC: Final = "kvtier"
_MAX_BYTES: Final = 1 << 20


def write_superblock(directory: Path, kind: str, content: dict[str, Any], *, often: bool = False) -> None:
    """Replaces it whole. ``often``: so that it can be done again on a full disk. Raises OSError, and
    :class:`TierIOError` for more than can be read back."""
    head = f"{MAGIC} {kind} {_version(kind)}"
    body = json.dumps(content, indent=2, sort_keys=True).encode() + b"\n"
    whole = f"{head} {_crc(head, body)}\n".encode() + body
    if len(whole) > _MAX_BYTES:
        raise TierIOError(
            errno.EFBIG, f"{directory / SUPERBLOCK} would have {len(whole)} bytes of at most {_MAX_BYTES}"
        )
    (swap_in if often else write_atomically)(directory / SUPERBLOCK, whole)


def read_superblock(directory: Path, kind: str) -> dict[str, Any] | None:
    """The content, None where there is no such file. Raises :class:`DamagedDirectory` for one not to be trusted."""
    found = _read(directory, kind)
    return None if found is None else found[1]


def renew_superblock(directory: Path, kind: str) -> None:
    """One of an older version becomes one of the present: before what only this version knows is written beside it.
    Raises as the others do, and OSError."""
    found = _read(directory, kind)
    if found is not None and found[0] != _version(kind):
        write_superblock(directory, kind, found[1])


def _version(kind: str) -> int:
    return _VERSIONS.get(kind, FORMAT_VERSION)


def _read(directory: Path, kind: str) -> tuple[int, dict[str, Any]] | None:
    """Its version and its content."""
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
    versions = range(FORMAT_VERSION, _version(kind) + 1)
    if words[2] not in map(str, versions):
        raise DamagedDirectory(directory, f"format version {words[2]}; this daemon reads up to version {versions[-1]}")
    if words[3] != _crc(" ".join(words[:3]), body):
        raise DamagedDirectory(directory, f"its {SUPERBLOCK} does not match its checksum")
    try:
        content = json.loads(body)
    except ValueError as error:
        raise DamagedDirectory(directory, f"its {SUPERBLOCK} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise DamagedDirectory(directory, f"its {SUPERBLOCK} is not a JSON object")
    return int(words[2]), content


def _crc(head: str, body: bytes) -> str:
    return f"{zlib.crc32(body, zlib.crc32(head.encode())):08x}"
