"""Records that stand side by side on disk, moved together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Final, NamedTuple

from kvtierd.core.ids import SlotId
from kvtierd.tiers.parts import Part

MAX_PARTS: Final = 1024
"""Most buffers Linux takes in one vectored call (IOV_MAX)."""
_MAX_RUN_BYTES: Final = 64 << 20


class Piece(NamedTuple):
    """One record to move. ``number`` is the caller's name for it."""

    number: int
    slot: SlotId
    parts: Sequence[Part]


class Run(NamedTuple):
    """Memory to move from or to one stretch of the file; aligned, where the file is open for direct I/O."""

    offset: int
    parts: Sequence[Part]


_BY_SLOT: Final = itemgetter(1)


def adjacent(pieces: Iterable[Piece], record_bytes: int) -> list[list[Piece]]:
    """Pieces of adjacent slots together, as far as one call can take them."""
    runs: list[list[Piece]] = []
    run: list[Piece] = []
    buffers = 0
    following = -1
    for piece in sorted(pieces, key=_BY_SLOT):
        _, slot, parts = piece
        full = buffers + len(parts) > MAX_PARTS or (len(run) + 1) * record_bytes > _MAX_RUN_BYTES
        if full or slot != following:
            run, buffers = [], 0
            runs.append(run)
        run.append(piece)
        buffers += len(parts)
        following = slot + 1
    return runs


def run_of(pieces: Sequence[Piece], record_bytes: int) -> Run:
    """Of adjacent slots."""
    first = pieces[0]
    if len(pieces) == 1:
        return Run(first.slot * record_bytes, first.parts)
    return Run(first.slot * record_bytes, [part for piece in pieces for part in piece.parts])
