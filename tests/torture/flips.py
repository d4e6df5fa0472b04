"""Flips bits in the files of a stopped daemon."""

import random
import shutil
from pathlib import Path
from typing import Final

ROOTS: Final = ("state", "disk")
"""Directories of a daemon's home that outlive it."""


def keep(home: Path, aside: Path) -> None:
    """Copies the directories of a stopped daemon."""
    for root in ROOTS:
        shutil.copytree(home / root, aside / root)


def bring_back(home: Path, aside: Path) -> None:
    """Restores the directories that :func:`keep` copied."""
    for root in ROOTS:
        shutil.rmtree(home / root)
        shutil.copytree(aside / root, home / root)


def files_in(home: Path) -> list[Path]:
    """Returns the files that are not empty, relative to ``home``."""
    found = [path for root in ROOTS for path in sorted((home / root).rglob("*")) if path.is_file()]
    return [path.relative_to(home) for path in found if path.stat().st_size]


def flip(path: Path, bits: int, rng: random.Random) -> None:
    """Flips bits of a file, half of them in bytes that are not zero, since some files are mostly zeros."""
    content = bytearray(path.read_bytes())
    written = [place for place, byte in enumerate(content) if byte]
    for _ in range(bits):
        place = rng.choice(written) if written and rng.random() < 0.5 else rng.randrange(len(content))
        content[place] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
