"""A planned transaction, and the committed blocks that it is planned against."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence, Set
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtierd.core.ids import CHECKSUM_BYTES, KEY_BYTES, GroupId, Key, SlotId, Traits
from kvtierd.tiers.disk.index import IndexChanges
from kvtierd.tiers.disk.records import Counters, encode_record, encode_touches
from kvtierd.tiers.disk.slab import SlabShape


class GroupTable:
    """A group's committed blocks and the order of their use, in memory. The writer changes the table only after its
    transaction has committed. Other threads may look up slots meanwhile, and verify blocks by checksum."""

    def __init__(self, shape: SlabShape) -> None:
        self.shape = shape
        self._keys: list[Key | None] = [None] * shape.slots
        self._slots: dict[Key, SlotId] = {}
        self._checksums = bytearray(shape.slots * CHECKSUM_BYTES)
        self.last_use: Counters = np.zeros(shape.slots, np.uint64)
        self.counter = 1
        """The counter of the next use. Counters of failed transactions are never given out again."""

    def slot_of(self, key: Key) -> SlotId | None:
        return self._slots.get(key)

    def key_at(self, slot: SlotId) -> Key | None:
        return self._keys[slot]

    def checksum_at(self, slot: SlotId) -> bytes:
        start = slot * CHECKSUM_BYTES
        return bytes(self._checksums[start : start + CHECKSUM_BYTES])

    def put(self, key: Key, slot: SlotId, checksum: bytes, use: int) -> None:
        """Puts a key into a slot. The key leaves its former slot, and the slot its former key."""
        if key in self._slots:
            self.discard(key)
        if (there := self._keys[slot]) is not None:
            del self._slots[there]
        self._slots[key] = slot
        self._checksums[slot * CHECKSUM_BYTES : (slot + 1) * CHECKSUM_BYTES] = checksum
        self._keys[slot] = key
        self.last_use[slot] = use

    def discard(self, key: Key) -> None:
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._keys[slot] = None

    def fill(
        self, keys: Sequence[Key], slots: NDArray[np.uint32], checksums: NDArray[np.void], last_use: Counters
    ) -> None:
        """Fills an empty table. ``last_use``: by slot; the other arguments: by key."""
        self._slots = dict(zip(keys, slots.tolist(), strict=True))
        for key, slot in self._slots.items():
            self._keys[slot] = key
        np.frombuffer(self._checksums, checksums.dtype)[slots] = checksums
        self.last_use = last_use
        self.counter = 1 + int(last_use.max(initial=0))

    def use(self, slots: Sequence[SlotId], first: int) -> None:
        """Notes that ``slots`` were used in this order, from counter ``first`` on."""
        # A repeated slot keeps its later counter: numpy stores in order. A slot of a folded log may have a new block.
        places, counters = np.array(slots, np.intp), np.arange(first, first + len(slots), dtype=np.uint64)
        self.last_use[places] = np.maximum(self.last_use[places], counters)


class DiskWrite(NamedTuple):
    """A block to store. ``parts``: page-aligned, padded, in pool order, together exactly one record of the group."""

    group: GroupId
    slot: SlotId
    key: Key
    parent: Key | None
    traits: Traits
    parts: Sequence[memoryview]


Retirement = tuple[GroupId, Key, SlotId]
"""A block to forget, if it is in this slot."""

Restatement = tuple[GroupId, Key, Traits]
"""A block with new priority, duration and deadline. Its label stays as it was written."""


class Batch:
    """Changes of a transaction to the index, and to the tables after its commit."""

    def __init__(self, tables: Mapping[GroupId, GroupTable]) -> None:
        self.changes: defaultdict[GroupId, IndexChanges] = defaultdict(IndexChanges)
        self._tables = tables
        self._discarded: set[tuple[GroupId, Key]] = set()
        self._puts: dict[tuple[GroupId, Key], tuple[SlotId, bytes, int]] = {}
        """Slot, checksum and counter of each block."""
        self._touches: list[tuple[GroupId, Sequence[SlotId], int]] = []
        """Slots in the order of their use, and the counter of the first."""

    @property
    def stored(self) -> Collection[tuple[GroupId, Key]]:
        return self._puts.keys()

    def discard(self, group: GroupId, key: Key) -> None:
        """Forgets a block. If the batch puts the block as well, it is forgotten first."""
        self.changes[group].deletes.append(key)
        self._discarded.add((group, key))

    def retire(self, retirements: Sequence[Retirement]) -> None:
        """Forgets the blocks that are still in the given slots."""
        for group, key, slot in retirements:
            if self._tables[group].slot_of(key) == slot:
                self.discard(group, key)

    def put(
        self,
        writes: Sequence[DiskWrite],
        checksums: Sequence[bytes],
        lost: Set[int],
        doubtful: Set[tuple[GroupId, Key]],
    ) -> frozenset[int]:
        """Stores blocks, after all retirements.

        Args:
            checksums: one per write.
            lost: indices of writes whose bytes did not reach the disk.
            doubtful: blocks in the tables that the transaction will delete.

        Returns:
            Indices of the writes that are not stored: lost writes, and writes whose parent will not be on disk.
        """
        failed = lost | self._without_parent(writes, lost, doubtful | self._discarded)
        for number, (group, slot, key, parent, traits, parts) in enumerate(writes):
            if number in failed:
                continue
            table, changes, checksum = self._tables[group], self.changes[group], checksums[number]
            counter = table.counter
            table.counter += 1
            record = encode_record(key, slot, counter, sum(map(len, parts)), checksum, parent, traits)
            changes.puts.append((key, record))
            changes.lift.append(slot)
            self._puts[group, key] = (slot, checksum, counter)
        return frozenset(failed)

    def restate(self, group: GroupId, key: Key, traits: Traits) -> None:
        """Gives a block that is stored, or that the batch puts, another priority, duration and deadline."""
        if self._slot_of(group, key) is not None:
            self.changes[group].restate.append((key, traits))

    def touch(self, group: GroupId, packed: bytes) -> None:
        """Notes that keys were used, in this order and after all puts so far. Keys not on disk are ignored."""
        keys = (Key(packed[start : start + KEY_BYTES]) for start in range(0, len(packed), KEY_BYTES))
        slots = [slot for key in keys if (slot := self._slot_of(group, key)) is not None]
        if slots:
            self._use(group, slots)

    def fold(self, group: GroupId) -> None:
        """Begins the log of touches anew, with one use of each slot in the present order. Call this before the puts and
        touches of the batch, which come later in the order."""
        last_use = self._tables[group].last_use
        order = np.argsort(last_use, kind="stable")
        self.changes[group].anew = True
        self._use(group, order[last_use[order] > 0].tolist())

    def _use(self, group: GroupId, slots: Sequence[SlotId]) -> None:
        table = self._tables[group]
        first = table.counter
        table.counter += len(slots)
        self.changes[group].touches += encode_touches(slots, first)
        self._touches.append((group, slots, first))

    def condemn(self, group: GroupId, slot: SlotId) -> None:
        """Remembers that a slot's bytes were corrupt, unless the batch puts a block there."""
        self.changes[group].quarantine.append(slot)

    def apply(self) -> None:
        """Brings the tables to the committed state."""
        for group, key in self._discarded:
            self._tables[group].discard(key)
        for (group, key), (slot, checksum, counter) in self._puts.items():
            self._tables[group].put(key, slot, checksum, counter)
        for group, slots, first in self._touches:
            self._tables[group].use(slots, first)

    def _slot_of(self, group: GroupId, key: Key) -> SlotId | None:
        """The slot of a block after the commit; None if it is not on disk."""
        put = self._puts.get((group, key))
        return put[0] if put is not None else self._tables[group].slot_of(key)

    def _without_parent(
        self, writes: Sequence[DiskWrite], lost: Set[int], leaving: Set[tuple[GroupId, Key]]
    ) -> set[int]:
        """Indices of writes that no reader could reach: their parent will not be on disk after this batch. ``leaving``:
        blocks that leave the disk with this batch, unless it writes them."""
        arriving: set[tuple[GroupId, Key]] = set()
        waiting = [number for number in range(len(writes)) if number not in lost]
        while waiting:  # once, if parents come before their children
            still: list[int] = []
            for number in waiting:
                group, _, key, parent, _, _ = writes[number]
                table = self._tables[group]
                if (
                    parent is None
                    or not table.shape.chained
                    or (group, parent) in arriving
                    or (table.slot_of(parent) is not None and (group, parent) not in leaving)
                ):
                    arriving.add((group, key))
                else:
                    still.append(number)
            if len(still) == len(waiting):
                break
            waiting = still
        return set(waiting)
