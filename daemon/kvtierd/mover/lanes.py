"""Lanes: which edges share a queue, how many threads serve it, and what stands in one batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvtierd.mover.work import Batch, CarryOut, Edge, Piece


@dataclass(slots=True, frozen=True)
class Lane:
    """A queue and its threads.

    ``batch_blocks`` bounds a batch, and with it how long a thread goes without a heartbeat. ``may_join`` is what the
    lane adds to the rules that hold for all: one cache a batch, in the order queued.
    """

    name: str
    edges: tuple[Edge, ...]
    threads: int
    batch_blocks: int
    carry_out: CarryOut
    may_join: Callable[[Batch, Piece], bool] = lambda batch, piece: True

    def joins(self, batch: Batch, piece: Piece) -> bool:
        """Whether ``piece``, which comes next in the queue, may be carried out together with ``batch``."""
        blocks = sum(len(queued.items) for queued in batch) + len(piece.items)
        same_cache = batch[0].runtime is piece.runtime
        return same_cache and blocks <= self.batch_blocks and self.may_join(batch, piece)
