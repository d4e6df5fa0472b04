"""Disk batches: what the writer and reader threads hand to the store."""

from __future__ import annotations

from collections.abc import Iterable

from kvtierd.core.ids import GroupId, SlotId
from kvtierd.core.outcome import Move, MoveItem
from kvtierd.mover.work import Batch, Faults, Piece, destination, items_of
from kvtierd.tiers.disk import DiskRead, DiskWrite


def write(batch: Batch) -> Faults:
    """Stores blocks and retires slots, all in one transaction. Raises ``TierIOError`` if nothing was stored."""
    runtime = batch[0].runtime
    writes: list[DiskWrite] = []
    places: list[int] = []
    retires = []
    for place, (move, item) in enumerate(items_of(batch)):
        if item.dst is None:
            retires.append((move.group, item.key, item.src))
            continue
        parts = runtime.memory(move.src).padded_parts(move.group, item.src)
        writes.append(DiskWrite(move.group, item.dst, item.key, item.parent, item.priority, parts))
        places.append(place)
    failed = runtime.store.write(writes, retires)
    return Faults(failed=_translate(failed, places))


def read(batch: Batch) -> Faults:
    """Reads blocks into memory, verified, in slot order so that neighbours become one read."""
    runtime = batch[0].runtime
    items = list(items_of(batch))
    places = sorted(range(len(items)), key=lambda place: (items[place][0].group, items[place][1].src))
    reads = [_read_of(batch, *items[place]) for place in places]
    report = runtime.store.read(reads)
    return Faults(failed=_translate(report.failed, places), corrupt=_translate(report.corrupt, places))


def _read_of(batch: Batch, move: Move, item: MoveItem) -> DiskRead:
    if move.dst is None:
        raise ValueError("a reader cannot retire slots")
    parts = batch[0].runtime.memory(move.dst).padded_parts(move.group, destination(item))
    return DiskRead(move.group, item.src, item.key, parts)


def no_slot_twice(batch: Batch, piece: Piece) -> bool:
    """Whether a writer's batch and ``piece`` concern different disk slots.

    A slot may be written only after the transaction that deleted its old record, and its record deleted only after
    the one that put it there; inside a batch payloads come first, then deletions, then records.
    """
    return _disk_slots(items_of(batch)).isdisjoint(_disk_slots(items_of([piece])))


def _disk_slots(items: Iterable[tuple[Move, MoveItem]]) -> set[tuple[GroupId, SlotId]]:
    return {(move.group, item.src if item.dst is None else item.dst) for move, item in items}


def _translate(indices: Iterable[int], places: list[int]) -> frozenset[int]:
    return frozenset(places[index] for index in indices)
