"""Finds the records of an index that a store may serve, and the order of their use.

Vectorised: a daemon should serve within half a second per 100,000 blocks, the core's share included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.abi.keys import KEY_DTYPE
from kvtierd.core.ids import GroupId, Key, SlotId
from kvtierd.core.ids import rows as rows_of
from kvtierd.core.recovery import RecoveredBlock, reachable
from kvtierd.tiers.disk.batch import GroupTable
from kvtierd.tiers.disk.index import StoredGroup
from kvtierd.tiers.disk.records import Counters, decode_records, decode_touches, parents_of, traits_of
from kvtierd.tiers.disk.slab import SlabShape


@dataclass(slots=True, frozen=True)
class Recovery:
    """The content of a store at its opening.

    ``records``: per group, parents before children, otherwise least recently used first. ``quarantined``: slots whose
    bytes were found corrupt, without a block. ``corrupt``: keys of damaged records. ``dropped``: the number of records
    deleted because they were corrupt, not trusted or not reachable.
    """

    records: Mapping[GroupId, Sequence[RecoveredBlock]]
    quarantined: Mapping[GroupId, frozenset[SlotId]]
    corrupt: Mapping[GroupId, Sequence[Key]]
    dropped: int


@dataclass(slots=True, frozen=True)
class RecoveredGroup:
    records: Sequence[RecoveredBlock]
    corrupt: Sequence[Key]
    dropped: Sequence[Key]
    table: GroupTable


def recover_group(stored: StoredGroup, shape: SlabShape) -> RecoveredGroup:
    """Splits the records into records to serve and records to delete, and rebuilds the table."""
    rows = decode_records(stored.keys, stored.records)
    corrupt = [stored.keys[place] for place in np.flatnonzero(rows["version"] == 0).tolist()]
    sound = _sound(rows, stored, shape)
    slots = rows["slot"][sound]
    last_use = _last_uses(stored, shape)
    last_use[slots] = np.maximum(last_use[slots], rows["last_use"][sound])

    by_use = sound[np.argsort(last_use[slots], kind="stable")]
    rows = rows[by_use]
    # Made anew in this order: a pass over objects that are scattered in memory is slow.
    keys: list[Key] = np.frombuffer(b"".join(stored.keys), KEY_DTYPE)[by_use].tolist()
    parents = parents_of(rows)
    if shape.chained:
        order = reachable(keys, parents)
        if order != list(range(len(keys))):
            rows, by_use = rows[order], by_use[order]
            keys = [keys[place] for place in order]
            parents = [parents[place] for place in order]
    traits = traits_of(rows, stored.records, by_use)
    none = repeat(None)
    records = list(rows_of(RecoveredBlock, rows["slot"].tolist(), keys, parents, traits, none, none))
    table = GroupTable(shape)
    table.fill(keys, rows["slot"], rows["checksum"], last_use)
    return RecoveredGroup(records, corrupt, _others(stored.keys, keys), table)


def _others(all_keys: Sequence[Key], served: Sequence[Key]) -> list[Key]:
    if len(served) == len(all_keys):
        return []
    kept = set(served)
    return [key for key in all_keys if key not in kept]


def _last_uses(stored: StoredGroup, shape: SlabShape) -> Counters:
    """The last use of every slot by the touches; 0 = none."""
    last_use: Counters = np.zeros(shape.slots, np.uint64)
    for value in stored.touches:
        slots, counters = decode_touches(value)
        inside = slots < shape.slots
        np.maximum.at(last_use, slots[inside], counters[inside])
    return last_use


def _sound(rows: NDArray[Any], stored: StoredGroup, shape: SlabShape) -> NDArray[np.intp]:
    """Places of readable rows on usable slots. If several rows have the same slot, the row written last counts."""
    usable = (rows["version"] > 0) & (rows["slot"] < shape.slots) & (rows["size"] == shape.record_bytes)
    if stored.quarantined:
        usable &= ~np.isin(rows["slot"], list(stored.quarantined))
    candidates = np.flatnonzero(usable)
    candidates = candidates[np.argsort(rows["last_use"][candidates], kind="stable")]
    winner = np.full(shape.slots, -1, np.intp)
    winner[rows["slot"][candidates]] = candidates  # numpy keeps the last of repeated slots
    return winner[winner >= 0]
