"""One transaction in the making."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from kvtierd.core.ids import KEY_BYTES, GroupId, Key, SlotId
from kvtierd.core.traits import Traits
from kvtierd.tiers.disk.index import Changes
from kvtierd.tiers.disk.records import Place, encode_record, encode_touches
from kvtierd.tiers.disk.table import GroupTable
from kvtierd.tiers.disk.values import DiskWrite


class Batch:
    """What a transaction is to do to the index, and to the tables once it has committed."""

    def __init__(self, tables: Mapping[GroupId, GroupTable]) -> None:
        self.changes: defaultdict[GroupId, Changes] = defaultdict(Changes)
        self._tables = tables
        self._discards: list[tuple[GroupId, Key]] = []
        self._puts: dict[tuple[GroupId, Key], tuple[SlotId, bytes]] = {}
        self._uses: list[tuple[GroupId, Sequence[SlotId], int]] = []
        """Slots in the order of their use, and the first one's counter."""

    @property
    def stored(self) -> Collection[tuple[GroupId, Key]]:
        """The blocks it puts."""
        return self._puts.keys()

    def discard(self, group: GroupId, key: Key) -> None:
        """Forgets a block; one that is put as well is forgotten first."""
        self.changes[group].deletes.append(key)
        self._discards.append((group, key))

    def put(self, write: DiskWrite, checksum: bytes) -> None:
        table = self._tables[write.group]
        counter = table.take_counters(1)
        size = sum(part.nbytes for part in write.parts)
        record = encode_record(Place(write.slot, counter, size, checksum), write.parent, write.traits)
        changes = self.changes[write.group]
        changes.puts.append((write.key, record))
        changes.lift.append(write.slot)
        self._puts[write.group, write.key] = (write.slot, checksum)
        self._uses.append((write.group, (write.slot,), counter))

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
        for group, key in self._discards:
            self._tables[group].discard(key)
        for (group, key), (slot, checksum) in self._puts.items():
            self._tables[group].put(key, slot, checksum)
        for group, slots, first in self._uses:
            self._tables[group].use(slots, first)

    def _slot_of(self, group: GroupId, key: Key) -> SlotId | None:
        """Where a block will be."""
        put = self._puts.get((group, key))
        return put[0] if put else self._tables[group].slot_of(key)
