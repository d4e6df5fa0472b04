"""The work of a batch: its items, copies between memory tiers, and reports to the loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from itertools import chain, groupby
from operator import itemgetter
from typing import Generic, TypeVar

import numpy as np

from kvtierd.core.ids import GroupId, Key, SlotId, Tier
from kvtierd.core.outcome import Move, MoveItem
from kvtierd.mover.runtime import Batch, CopyPiece, Faults, Finish

Edge = tuple[Tier, Tier | None]
"""Source and destination. A destination of None retires disk slots: their records are deleted, and nothing is
copied."""

Concerns = Set[tuple[GroupId, SlotId | Key]]


@dataclass(slots=True, frozen=True)
class CopyReport:
    """How a piece ended. Indices are into ``piece.move.items``. ``copy_ns``: the piece's share of its batch's time, by
    blocks, so that the sum over an edge is the time it was busy."""

    piece: CopyPiece
    failed: frozenset[int]
    corrupt: frozenset[int]
    queue_ns: int
    copy_ns: int


CarryOut = Callable[[Batch], Faults | Finish]
"""Does a batch's work in a worker thread, or does its first half and returns the second. An exception means that every
item failed, except :class:`Unaccounted`."""


def items_of(batch: Batch) -> Iterator[tuple[Move, MoveItem]]:
    """Every item of ``batch`` with its move, in the order that :class:`Faults` counts."""
    return chain.from_iterable(((piece.move, item) for item in piece.items) for piece in batch)


def destination(item: MoveItem) -> SlotId:
    """The slot a copy goes to. Raises ValueError for an item that only retires its source."""
    if item.dst is None:
        raise ValueError(f"slot {item.src} is to be retired, not copied")
    return item.dst


def target(move: Move) -> Tier:
    """The tier a copy goes to. Raises ValueError for a move that retires disk slots."""
    if move.dst is None:
        raise ValueError(f"move {move.id} copies nothing")
    return move.dst


def reports_of(batch: Batch, faults: Faults, started_ns: int, ended_ns: int) -> list[CopyReport]:
    """Splits a batch's faults and times among its pieces. Leaves out unaccounted pieces. Reports of copies come first,
    because callers may wait for copies."""
    blocks = sum(len(piece.items) for piece in batch)
    reports = []
    base = 0
    for piece in batch:
        count = len(piece.items)
        if not _within(faults.unaccounted, base, piece):
            reports.append(
                CopyReport(
                    piece=piece,
                    failed=_within(faults.failed, base, piece),
                    corrupt=_within(faults.corrupt, base, piece),
                    queue_ns=max(0, started_ns - piece.submitted_ns),  # the piece may have joined a started batch
                    copy_ns=(ended_ns - started_ns) * count // blocks,
                )
            )
        base += count
    return sorted(reports, key=lambda report: report.piece.move.dst is None)


def _within(indices: frozenset[int], base: int, piece: CopyPiece) -> frozenset[int]:
    return frozenset(i - base + piece.first for i in indices if base <= i < base + len(piece.items))


def runs(copies: Iterable[tuple[GroupId, SlotId, SlotId]]) -> Iterator[tuple[GroupId, slice, slice]]:
    """Joins (group, source, destination) copies that are adjacent on both sides, whose slots rise with their place in
    the order. The copies of a batch touch no slot twice, so they may run in any order."""
    placed = [(group, src - place, dst - place, place) for place, (group, src, dst) in enumerate(sorted(copies))]
    for (group, src, dst), run in groupby(placed, itemgetter(0, 1, 2)):
        places = [place for *_, place in run]
        first, end = places[0], places[-1] + 1
        yield group, slice(src + first, src + end), slice(dst + first, dst + end)


def copy(batch: Batch) -> Faults:
    """Copies every item's bytes from the source tier's slot to the destination's. Each run and pool is one
    ``np.copyto``, which releases the GIL. Many small copies beside a busy thread would be much slower."""
    runtime = batch[0].runtime
    sources, targets = runtime.memory(batch[0].move.src), runtime.memory(target(batch[0].move))
    for group, src, dst in runs((move.group, item.src, destination(item)) for move, item in items_of(batch)):
        for pool in range(runtime.pools(group)):
            np.copyto(targets.pool_array(group, pool)[dst], sources.pool_array(group, pool)[src])
    return Faults()


T = TypeVar("T")


class Mailbox(Generic[T]):
    """Values that any thread posts and the loop thread takes.

    The flag is cleared before the values are taken, and set after they are appended: a value is either seen by the
    drain that is due, or schedules the next drain. Two drains for one burst are possible and harmless.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, drain: Callable[[], None]) -> None:
        self._loop = loop
        self._drain = drain
        self._values: deque[T] = deque()
        self._due = False
        self._closed = False

    def post(self, values: Iterable[T]) -> None:
        """Adds values. Any thread."""
        self._values.extend(values)
        if not self._due and not self._closed:
            self._due = True
            self._loop.call_soon_threadsafe(self._drain)

    def take(self, budget: int, size: Callable[[T], int]) -> list[T]:
        """Takes values until their sizes reach ``budget``; none after :meth:`close`. Loop thread. If values are left,
        the drain is called again."""
        self._due = False
        taken: list[T] = []
        while self._values and not self._closed and budget > 0:
            taken.append(self._values.popleft())
            budget -= size(taken[-1])
        if self._values and not self._due and not self._closed:
            self._due = True
            self._loop.call_soon(self._drain)
        return taken

    def close(self) -> None:
        """Forgets values that were not taken; the loop may close. Loop thread."""
        self._closed = True
