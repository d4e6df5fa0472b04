"""Which of an index's records a store may serve, and in which order they were used."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtierd.core.ids import Key
from kvtierd.tiers.disk.index import Stored
from kvtierd.tiers.disk.records import (
    VERSION,
    Counters,
    decode_recency,
    decode_records,
    decode_touches,
    parents_of,
)
from kvtierd.tiers.disk.table import GroupTable
from kvtierd.tiers.disk.values import DiskRecord, SlabShape


@dataclass(slots=True, frozen=True)
class Recovered:
    records: Sequence[DiskRecord]
    dropped: Sequence[Key]
    table: GroupTable


def recover_group(stored: Stored, shape: SlabShape) -> Recovered:
    """Sorts the records into those that can be served and those to delete, and rebuilds the table."""
    rows = decode_records(stored.records)
    table = GroupTable(shape.slots)
    table.last_use = _last_uses(stored, rows, shape)
    table.counter = 1 + max(int(table.last_use.max(initial=0)), int(rows["last_use"].max(initial=0)))
    sound = _sound(rows, stored, shape)
    keys = [stored.keys[row] for row in sound.tolist()]
    rows = rows[sound]
    parents = parents_of(rows)
    slots = rows["slot"]
    last_use = np.maximum(rows["last_use"], table.last_use[slots])
    table.last_use[slots] = last_use
    order = _reachable(keys, parents, last_use)

    places = slots.tolist()
    found = list(map(DiskRecord, places, keys, parents, rows["priority"].tolist(), last_use.tolist()))
    checksums = rows["checksum"].tolist()
    for row in order:
        table.put(keys[row], places[row], checksums[row])
    dropped = [key for key in stored.keys if table.slot_of(key) is None]
    return Recovered([found[row] for row in order], dropped, table)


def _last_uses(stored: Stored, rows: NDArray[Any], shape: SlabShape) -> Counters:
    """What recency and touches say of every slot, 0 where nothing."""
    last_use: Counters = np.zeros(shape.slots, np.uint64)
    for first, value in stored.recency:
        counters = decode_recency(value)[: max(0, shape.slots - first)]
        last_use[first : first + len(counters)] = counters
    for value in stored.touches:
        slots, counters = decode_touches(value)
        inside = slots < shape.slots
        np.maximum.at(last_use, slots[inside], counters[inside])
    return last_use


def _sound(rows: NDArray[Any], stored: Stored, shape: SlabShape) -> NDArray[np.intp]:
    """Rows that can be read and lie on a slot that may be used; of several on one slot the one written last."""
    usable = (rows["version"] == VERSION) & (rows["slot"] < shape.slots) & (rows["size"] == shape.record_bytes)
    if stored.quarantined:
        usable &= ~np.isin(rows["slot"], list(stored.quarantined))
    candidates = np.flatnonzero(usable)
    candidates = candidates[np.argsort(rows["last_use"][candidates], kind="stable")]
    winner = np.full(shape.slots, -1, np.intp)
    winner[rows["slot"][candidates]] = candidates  # where slots repeat numpy keeps the last
    return winner[winner >= 0]


def _reachable(keys: Sequence[Key], parents: Sequence[Key | None], last_use: Counters) -> list[int]:
    """Rows whose ancestors are all there, each after its parent, otherwise by ``last_use`` ascending."""
    by_rank = np.argsort(last_use, kind="stable")
    rank_of = np.empty(len(keys), np.intp)
    rank_of[by_rank] = np.arange(len(keys))
    ranks: list[int] = rank_of.tolist()
    rows: list[int] = by_rank.tolist()

    children: dict[Key, list[int]] = {}
    ready: list[int] = []
    for rank, parent in zip(ranks, parents, strict=True):
        if parent is None:
            ready.append(rank)
        else:
            children.setdefault(parent, []).append(rank)
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        row = rows[heapq.heappop(ready)]
        order.append(row)
        for rank in children.get(keys[row], ()):
            heapq.heappush(ready, rank)
    return order
