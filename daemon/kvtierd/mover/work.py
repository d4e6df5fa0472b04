"""What worker threads are given, and what they report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import chain

from kvtierd.core.ids import GroupId, Key, SlotId, Tier
from kvtierd.core.outcome import Move, MoveItem
from kvtierd.mover.runtime import CacheRuntime

Edge = tuple[Tier, Tier | None]
"""(source, destination). A destination of None retires disk slots: their records are deleted, nothing is copied."""


@dataclass(slots=True, frozen=True, eq=False)
class Piece:
    """Consecutive items of one move, small enough to stand in one batch. ``first`` is their place in ``move.items``."""

    runtime: CacheRuntime
    move: Move
    first: int
    items: tuple[MoveItem, ...]
    submitted_ns: int


Concerns = tuple[GroupId, Set[SlotId | Key]]
"""What of one group's a piece is about."""


@dataclass(slots=True, frozen=True)
class Faults:
    """What did not work, as indices into the items of a batch, its pieces laid end to end. ``unaccounted``: items of
    which nobody can say whether hardware still works on them; the pieces that they are in are never reported."""

    failed: frozenset[int] = frozenset()
    corrupt: frozenset[int] = frozenset()
    unaccounted: frozenset[int] = frozenset()


@dataclass(slots=True, frozen=True)
class Report:
    """How a piece ended. Indices are into ``piece.move.items``.

    ``copy_ns`` is the piece's share of its batch's time, by blocks, so that the sum over an edge is the time it was
    busy.
    """

    piece: Piece
    failed: frozenset[int]
    corrupt: frozenset[int]
    queue_ns: int
    copy_ns: int


Batch = Sequence[Piece]
"""Pieces of one cache and one lane, in the order they were queued. Never empty."""

Finish = Callable[[], Faults]
"""The rest of a batch's work, for another thread."""

CarryOut = Callable[[Batch], Faults | Finish]
"""Does a batch's work, in a worker thread; or only its first half, and returns the rest. An exception means that every
item failed, unless it is :class:`Unaccounted`."""


class Unaccounted(Exception):
    """Nobody can say whether hardware still works on a batch. It is never reported: its slots are never used again."""


def items_of(batch: Batch) -> Iterator[tuple[Move, MoveItem]]:
    """Every item of ``batch`` with its move, in the order that :class:`Faults` counts."""
    return chain.from_iterable(((piece.move, item) for item in piece.items) for piece in batch)


def destination(item: MoveItem) -> SlotId:
    """The slot a copy goes to. Raises ValueError for an item that only retires its source."""
    if item.dst is None:
        raise ValueError(f"slot {item.src} is to be retired, not copied")
    return item.dst


def reports_of(batch: Batch, faults: Faults, started_ns: int, ended_ns: int) -> list[Report]:
    """Splits a batch's faults and times among its pieces, but for those that nobody can account for.

    Copies first: somebody may wait for them, while slots are freed for those to come, and the loop takes its time for
    each.
    """
    blocks = sum(len(piece.items) for piece in batch)
    reports = []
    base = 0
    for piece in batch:
        count = len(piece.items)
        if not _within(faults.unaccounted, base, piece):
            reports.append(
                Report(
                    piece=piece,
                    failed=_within(faults.failed, base, piece),
                    corrupt=_within(faults.corrupt, base, piece),
                    queue_ns=max(0, started_ns - piece.submitted_ns),  # it may have joined what had started
                    copy_ns=(ended_ns - started_ns) * count // blocks,
                )
            )
        base += count
    return sorted(reports, key=lambda report: report.piece.move.dst is None)


def _within(indices: frozenset[int], base: int, piece: Piece) -> frozenset[int]:
    return (
        frozenset(i - base + piece.first for i in indices if base <= i < base + len(piece.items))
        if indices
        else indices
    )
