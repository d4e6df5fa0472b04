"""Lanes: which edges share a queue, how many threads serve it, and what stands in one batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvtierd.core.ids import DEVICE
from kvtierd.core.outcome import Move
from kvtierd.mover.runtime import CacheRuntime
from kvtierd.mover.work import Batch, CarryOut, Edge, Faults, Finish, Piece

RETIRES_PER_COPY: Final = 4
"""Deletions are cheap next to copies: a batch takes this many for each copy that it could take."""


@dataclass(slots=True, frozen=True)
class Lane:
    """A queue and its threads.

    ``batch_blocks`` bounds the copies of a batch, and with it how long a thread goes without a heartbeat. Behind others
    more are taken, as long as all are no more than ``batch_bytes``, so that what a batch costs besides is spread over
    many small blocks or some large ones. ``may_join`` is what the lane adds to the rules that hold for all: one cache a
    batch, in the order queued. ``halves``: the second half of a batch's work is done by another thread while the next
    one begins. ``finish_all``: does the second halves of several batches, in their order, as that of one; where
    there is none, each is done by itself. ``in_turn``: moves take turns, a piece each, so that a small one
    does not wait for all of a large one before it; else what is queued first is done first. ``hurried``: the first half
    of a batch is work of the interpreter for which the medium waits.
    """

    name: str
    edges: tuple[Edge, ...]
    threads: int
    batch_blocks: int
    carry_out: CarryOut
    may_join: Callable[[Batch, Batch], bool] = lambda batch, more: True
    halves: bool = False
    finish_all: Callable[[Sequence[Finish]], Faults] | None = None
    batch_bytes: int = 0
    in_turn: bool = False
    hurried: bool = False

    def blocks_at_once(self, runtime: CacheRuntime, move: Move) -> int:
        """How many items of a move a piece may have, so that it is no more than a batch."""
        if runtime.cuda is None or DEVICE not in (move.src, move.dst):
            return self.batch_blocks
        fit = runtime.cuda.batch_bytes // runtime.spec.record_bytes(move.group)
        return max(1, min(self.batch_blocks, fit))

    def hurries(self, piece: Piece) -> bool:
        """Whether the medium waits until a thread has prepared it."""
        return self.hurried and piece.move.dst is not None and piece.runtime.cuda is None

    def joins(self, batch: Batch, more: Batch, *, size: int = 1) -> bool:
        """Whether ``more``, which comes next in the queue, may be carried out together with ``batch``. ``size``: as
        many as make up so many batches may."""
        members = [*batch, *more]
        copying = [member for member in members if member.move.dst is not None]
        copies = sum(len(member.items) for member in copying)
        retires = sum(len(member.items) for member in members if member.move.dst is None)
        nbytes = sum(len(member.items) * _slot_bytes(member) for member in copying)
        blocks = size * self.batch_blocks
        small = copies <= blocks or nbytes <= size * self.batch_bytes
        fits = small and retires <= blocks * RETIRES_PER_COPY and _fits_device(members)
        return fits and batch[0].runtime is more[0].runtime and self.may_join(batch, more)


def _fits_device(members: Batch) -> bool:
    """Whether a GPU's part of it is small enough not to keep others waiting."""
    cuda = members[0].runtime.cuda
    touching = [member for member in members if DEVICE in (member.move.src, member.move.dst)]
    return cuda is None or sum(len(member.items) * _slot_bytes(member) for member in touching) <= cuda.batch_bytes


def _slot_bytes(piece: Piece) -> int:
    return piece.runtime.spec.record_bytes(piece.move.group)
