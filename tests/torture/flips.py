"""Bits flipped in files behind a stopped daemon's back."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Final

ROOTS: Final = ("state", "disk")
"""Directories of a daemon's home that outlive it."""


def keep(home: Path, aside: Path) -> None:
    """Copies what a daemon has left."""
    for root in ROOTS:
        shutil.copytree(home / root, aside / root)


def bring_back(home: Path, aside: Path) -> None:
    """Makes everything as it was when it was kept."""
    for root in ROOTS:
        shutil.rmtree(home / root)
        shutil.copytree(aside / root, home / root)


def files_in(home: Path) -> list[Path]:
    """Those that hold anything, relative to ``home``."""
    found = [path for root in ROOTS for path in sorted((home / root).rglob("*")) if path.is_file()]
    return [path.relative_to(home) for path in found if path.stat().st_size]


def flip(path: Path, bits: int, rng: random.Random) -> None:
    """Half of them where the file holds anything but zeros, of which some files are full."""
    content = bytearray(path.read_bytes())
    written = [place for place, byte in enumerate(content) if byte]
    for _ in range(bits):
        place = rng.choice(written) if written and rng.random() < 0.5 else rng.randrange(len(content))
        content[place] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
