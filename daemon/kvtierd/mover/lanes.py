"""Lanes: which edges share a queue, how many threads serve it, and what stands in one batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvtierd.mover.work import Batch, CarryOut, Edge, Piece

RETIRES_PER_COPY: Final = 4
"""Deletions are cheap next to copies: a batch takes this many for each copy that it could take."""


@dataclass(slots=True, frozen=True)
class Lane:
    """A queue and its threads.

    ``batch_blocks`` bounds the copies of a batch, and with it how long a thread goes without a heartbeat. ``may_join``
    is what the lane adds to the rules that hold for all: one cache a batch, in the order queued. ``halves``: the second
    half of a batch's work is done by another thread while the next one begins.
    """

    name: str
    edges: tuple[Edge, ...]
    threads: int
    batch_blocks: int
    carry_out: CarryOut
    may_join: Callable[[Batch, Piece], bool] = lambda batch, piece: True
    halves: bool = False

    def joins(self, batch: Batch, piece: Piece) -> bool:
        """Whether ``piece``, which comes next in the queue, may be carried out together with ``batch``."""
        members = [*batch, piece]
        copies = sum(len(member.items) for member in members if member.move.dst is not None)
        retires = sum(len(member.items) for member in members if member.move.dst is None)
        fits = copies <= self.batch_blocks and retires <= self.batch_blocks * RETIRES_PER_COPY
        return fits and batch[0].runtime is piece.runtime and self.may_join(batch, piece)
