"""Lanes: which edges share a queue, how many threads serve it, and what stands in one batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvtierd.core.ids import DEVICE, GroupId, Key, SlotId
from kvtierd.core.outcome import Move
from kvtierd.mover.runtime import CacheRuntime
from kvtierd.mover.work import CarryOut, Concerns, Edge, Faults, Finish, Piece

RETIRES_PER_COPY: Final = 4
"""Deletions are cheap next to copies: a batch takes this many for each copy that it could take."""


@dataclass(slots=True, frozen=True)
class Lane:
    """A queue and its threads.

    ``batch_blocks`` bounds the copies of a batch, and with it how long a thread goes without a heartbeat. Behind others
    more are taken, as long as all are no more than ``batch_bytes``, so that what a batch costs besides is spread over
    many small blocks or some large ones. A batch is of one cache, in the order queued, and no two of its pieces are
    about the same, where ``concerns`` says about what. ``halves``: the second half of a batch's work is done by another
    thread while the next one begins. ``finish_all``: does the second halves of several batches, in their order, as that
    of one; where there is none, each is done by itself. ``in_turn``: moves take turns, a piece each, so that a
    small one does not wait for all of a large one before it; else what is queued first is done first.
    """

    name: str
    edges: tuple[Edge, ...]
    threads: int
    batch_blocks: int
    carry_out: CarryOut
    concerns: Callable[[Piece], Concerns] | None = None
    halves: bool = False
    finish_all: Callable[[Sequence[Finish]], Faults] | None = None
    batch_bytes: int = 0
    in_turn: bool = False

    def blocks_at_once(self, runtime: CacheRuntime, move: Move) -> int:
        """How many items of a move a piece may have, so that it is no more than a batch."""
        if runtime.cuda is None or DEVICE not in (move.src, move.dst):
            return self.batch_blocks
        fit = runtime.cuda.batch_bytes // runtime.spec.record_bytes(move.group)
        return max(1, min(self.batch_blocks, fit))


class Gathering:
    """Pieces that will be carried out together, one at least; what of them bounds a batch is counted as they come."""

    __slots__ = ("_about", "_copied_bytes", "_copies", "_device_bytes", "_lane", "_retires", "pieces")

    def __init__(self, lane: Lane, first: Piece) -> None:
        self._lane = lane
        self._copies = self._retires = self._copied_bytes = self._device_bytes = 0
        self._about: dict[GroupId, set[SlotId | Key]] = {}
        self.pieces: list[Piece] = []
        self._take(first, self._concerns(first))

    def add(self, piece: Piece) -> bool:
        """``piece``, which comes next in the queue, joins, if it may."""
        other = piece.runtime is not self.pieces[0].runtime
        if other or not self._fits(*_sizes(piece), size=1):
            return False
        concerns = self._concerns(piece)
        if not self._independent(concerns):
            return False
        self._take(piece, concerns)
        return True

    def add_all(self, more: Gathering, *, size: int) -> bool:
        """All of ``more``, which comes next, joins, if it may: as many as make up so many batches may."""
        other = more.pieces[0].runtime is not self.pieces[0].runtime
        if other or not self._fits(more._copies, more._retires, more._copied_bytes, more._device_bytes, size=size):
            return False
        if not all(map(self._independent, more._about.items())):
            return False
        self._copies += more._copies
        self._retires += more._retires
        self._copied_bytes += more._copied_bytes
        self._device_bytes += more._device_bytes
        for group, about in more._about.items():
            self._about.setdefault(group, set()).update(about)
        self.pieces += more.pieces
        return True

    def _fits(self, copies: int, retires: int, copied_bytes: int, device_bytes: int, *, size: int) -> bool:
        lane = self._lane
        blocks = size * lane.batch_blocks
        small = self._copies + copies <= blocks or self._copied_bytes + copied_bytes <= size * lane.batch_bytes
        cuda = self.pieces[0].runtime.cuda
        # a GPU's part of it is small enough not to keep others waiting
        fits_device = cuda is None or self._device_bytes + device_bytes <= cuda.batch_bytes
        return small and fits_device and self._retires + retires <= blocks * RETIRES_PER_COPY

    def _concerns(self, piece: Piece) -> Concerns | None:
        return None if self._lane.concerns is None else self._lane.concerns(piece)

    def _independent(self, concerns: Concerns | None) -> bool:
        if concerns is None:
            return True
        group, about = concerns
        return group not in self._about or self._about[group].isdisjoint(about)

    def _take(self, piece: Piece, concerns: Concerns | None) -> None:
        copies, retires, copied_bytes, device_bytes = _sizes(piece)
        self._copies += copies
        self._retires += retires
        self._copied_bytes += copied_bytes
        self._device_bytes += device_bytes
        if concerns is not None:
            group, about = concerns
            self._about.setdefault(group, set()).update(about)
        self.pieces.append(piece)


def _sizes(piece: Piece) -> tuple[int, int, int, int]:
    """Blocks that it copies and that it retires, bytes that it copies, and bytes of these from or to the device."""
    count, move = len(piece.items), piece.move
    nbytes = count * piece.runtime.spec.record_bytes(move.group)
    copies = count if move.dst is not None else 0
    on_device = nbytes if DEVICE in (move.src, move.dst) else 0
    return copies, count - copies, nbytes if copies else 0, on_device
