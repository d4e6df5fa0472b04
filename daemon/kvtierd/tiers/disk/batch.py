"""One transaction in the making."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence, Set

from kvtierd.core.ids import KEY_BYTES, GroupId, Key, SlotId
from kvtierd.core.traits import Traits
from kvtierd.tiers.disk.changes import Changes
from kvtierd.tiers.disk.records import Place, encode_record, encode_touches
from kvtierd.tiers.disk.table import GroupTable
from kvtierd.tiers.disk.values import DiskWrite, Retirement, SlabShape


class Batch:
    """What a transaction is to do to the index, and to the tables once it has committed."""

    def __init__(self, tables: Mapping[GroupId, GroupTable]) -> None:
        self.changes: defaultdict[GroupId, Changes] = defaultdict(Changes)
        self._tables = tables
        self.discarded: list[tuple[GroupId, Key]] = []
        self._puts: defaultdict[GroupId, dict[Key, tuple[SlotId, bytes]]] = defaultdict(dict)
        self._uses: list[tuple[GroupId, Sequence[SlotId], int]] = []
        """Slots in the order of their use, and the first one's counter."""

    @property
    def stored(self) -> Collection[tuple[GroupId, Key]]:
        """The blocks it puts."""
        return [(group, key) for group, puts in self._puts.items() for key in puts]

    def discard(self, group: GroupId, key: Key) -> None:
        """Forgets a block; one that is put as well is forgotten first."""
        self.changes[group].deletes.append(key)
        self.discarded.append((group, key))

    def retire(self, retirements: Sequence[Retirement]) -> None:
        """Forgets those blocks that really are where they are to be retired from."""
        for group, key, slot in retirements:
            if self._tables[group].slot_of(key) == slot:
                self.discard(group, key)

    def put(self, writes: Sequence[DiskWrite], checksums: Sequence[bytes], failed: Set[int]) -> None:
        """All but the ``failed``. ``checksums``: one a write."""
        numbers: defaultdict[GroupId, list[int]] = defaultdict(list)
        for number, write in enumerate(writes):
            if number not in failed:
                numbers[write.group].append(number)
        for group, some in numbers.items():
            self._put(group, some, writes, checksums)

    def _put(
        self, group: GroupId, numbers: Sequence[int], writes: Sequence[DiskWrite], checksums: Sequence[bytes]
    ) -> None:
        """Those of one group."""
        table = self._tables[group]
        changes, puts = self.changes[group], self._puts[group]
        counter = first = table.take_counters(len(numbers))
        slots: list[SlotId] = []
        for number in numbers:
            _, slot, key, parent, traits, parts = writes[number]
            size = 0
            for part in parts:
                size += part.nbytes
            checksum = checksums[number]
            changes.puts.append((key, encode_record(Place(slot, counter, size, checksum), parent, traits)))
            puts[key] = (slot, checksum)
            slots.append(slot)
            counter += 1
        changes.lift += slots
        self._uses.append((group, slots, first))

    def restate(self, group: GroupId, key: Key, traits: Traits) -> None:
        """Gives a stored block, or one that is put, another priority, duration and deadline."""
        if self._slot_of(group, key) is not None:
            self.changes[group].restate.append((key, traits))

    def touch(self, group: GroupId, packed: bytes) -> None:
        """Notes that these keys were used, in this order and after all puts so far; those not on disk are ignored."""
        keys = (Key(packed[start : start + KEY_BYTES]) for start in range(0, len(packed), KEY_BYTES))
        slots = [slot for key in keys if (slot := self._slot_of(group, key)) is not None]
        if slots:
            first = self._tables[group].take_counters(len(slots))
            self.changes[group].touches += encode_touches(slots, first)
            self._uses.append((group, slots, first))

    def fold(self, group: GroupId) -> None:
        """Replaces the log of touches by the order that it led to; touches of this batch follow."""
        self.changes[group].recency = self._tables[group].last_use

    def condemn(self, group: GroupId, slot: SlotId) -> None:
        """Remembers that a slot's bytes were corrupt, unless the batch puts a block there."""
        self.changes[group].quarantine.append(slot)

    def apply(self) -> None:
        """Brings the tables to the committed state."""
        for group, key in self.discarded:
            self._tables[group].discard(key)
        for group, puts in self._puts.items():
            table = self._tables[group]
            for key, (slot, checksum) in puts.items():
                table.put(key, slot, checksum)
        for group, slots, first in self._uses:
            self._tables[group].use(slots, first)

    def _slot_of(self, group: GroupId, key: Key) -> SlotId | None:
        """Where a block will be."""
        put = self._puts[group].get(key) if group in self._puts else None
        return put[0] if put else self._tables[group].slot_of(key)


def without_parent(
    writes: Sequence[DiskWrite],
    failed: Set[int],
    leaving: Set[tuple[GroupId, Key]],
    tables: Mapping[GroupId, GroupTable],
    shapes: Mapping[GroupId, SlabShape],
) -> set[int]:
    """Indices of writes, besides those that ``failed``, that nobody could reach: their parent is not on disk, nor will
    it be after this batch. ``leaving``: blocks that are on disk and will not be, unless they are written."""
    arriving: set[tuple[GroupId, Key]] = set()
    waiting = [number for number in range(len(writes)) if number not in failed]
    while waiting:  # once, where parents stand before their children
        still: list[int] = []
        for number in waiting:
            group, _, key, parent, _, _ = writes[number]
            if parent is not None and not shapes[group].sliding and (group, parent) not in arriving:
                there = tables[group].slot_of(parent) is not None
                if not there or (group, parent) in leaving:
                    still.append(number)
                    continue
            arriving.add((group, key))
        if len(still) == len(waiting):
            break
        waiting = still
    return set(waiting)
