"""Disk batches: what the writer and reader threads hand to the store."""

from __future__ import annotations

from collections.abc import Iterable

from kvtierd.core.ids import GroupId, Key, SlotId
from kvtierd.core.outcome import Move, MoveItem
from kvtierd.mover.runtime import CacheRuntime
from kvtierd.mover.work import Batch, Faults, Finish, Piece, destination, items_of
from kvtierd.tiers.disk import DiskRead, DiskWrite


def write(batch: Batch) -> Finish:
    """Stores blocks and retires slots, all in one transaction. Raises ``TierIOError`` if nothing was stored.

    While one batch is made durable, the bytes of the next are written.
    """
    runtime = batch[0].runtime
    writes: list[DiskWrite] = []
    places: list[int] = []
    retires = []
    for place, (move, item) in enumerate(items_of(batch)):
        if item.dst is None:
            retires.append((move.group, item.key, item.src))
            continue
        parts = runtime.memory(move.src).padded_parts(move.group, item.src)
        writes.append(DiskWrite(move.group, item.dst, item.key, item.parent, item.traits, parts))
        places.append(place)
    begun = runtime.store.begin(writes)

    def finish() -> Faults:
        failed = runtime.store.finish(begun, retires)
        return Faults(failed=frozenset(places[index] for index in failed))

    return finish


def read(batch: Batch) -> Faults:
    """Reads blocks into memory and verifies them."""
    runtime = batch[0].runtime
    report = runtime.store.read([_read_of(runtime, move, item) for move, item in items_of(batch)])
    return Faults(failed=report.failed, corrupt=report.corrupt)


def _read_of(runtime: CacheRuntime, move: Move, item: MoveItem) -> DiskRead:
    if move.dst is None:
        raise ValueError("a reader cannot retire slots")
    return DiskRead(
        move.group, item.src, item.key, runtime.memory(move.dst).padded_parts(move.group, destination(item))
    )


def independent(batch: Batch, piece: Piece) -> bool:
    """Whether a writer's batch and ``piece`` concern different disk slots and different blocks.

    A slot is written only after the transaction that deleted its old record, and a record deleted only after the one
    that put it there; inside a transaction payloads come first, then deletions, then records.
    """
    return _concerns(items_of(batch)).isdisjoint(_concerns(items_of([piece])))


def _concerns(items: Iterable[tuple[Move, MoveItem]]) -> set[tuple[GroupId, SlotId | Key]]:
    concerns: set[tuple[GroupId, SlotId | Key]] = set()
    for move, item in items:
        concerns.add((move.group, item.src if item.dst is None else item.dst))
        concerns.add((move.group, item.key))
    return concerns
