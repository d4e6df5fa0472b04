"""A simulated disk tier: an index that changes by transactions, and a slab that changes without.

Committed records survive a crash. Payloads are written into the slab before the commit.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvtierd.core.ids import Key, SlotId, Traits
from kvtierd.core.recovery import RecoveredBlock
from tests.simulation.memory import POISON, ROT, Content, is_block
from tests.simulation.violation import require


@dataclass(slots=True, frozen=True)
class Record:
    slot: SlotId
    parent: Key | None
    traits: Traits
    last_use: int


@dataclass(slots=True, frozen=True)
class Write:
    key: Key
    parent: Key | None
    traits: Traits
    slot: SlotId
    content: Content


class Disk:
    """The disk tier of a group. ``bad``: slots found corrupt, which never hold a block again. ``chained``: a block
    needs its ancestors."""

    def __init__(self, slots: int, *, chained: bool) -> None:
        self.chained = chained
        self.slab: list[Content] = [POISON] * slots
        self.records: dict[Key, Record] = {}
        self.bad: set[SlotId] = set()
        self._holders: dict[SlotId, Key] = {}
        self._clock = 0

    def put_payload(self, slot: SlotId, content: Content) -> None:
        """Writes a payload before its commit. The index must not name this slot any more."""
        holder = self._holders.get(slot)
        require(holder is None, f"disk slot {slot} is written before the deletion of its block has committed")
        require(slot not in self.bad, f"disk slot {slot} is written again though it is known bad")
        self.slab[slot] = content

    def commit(self, writes: Sequence[Write], retired: Iterable[tuple[Key, SlotId]]) -> set[Key]:
        """Commits one transaction, deletions first. Returns the keys refused because their parent is not stored."""
        for key, slot in retired:
            if key in self.records and self.records[key].slot == slot:
                self._delete(key)
        refused: set[Key] = set()
        for write in writes:
            if self._lacks_parent(write.parent):
                refused.add(write.key)
                continue
            if write.key in self.records:
                self._delete(write.key)
            self._clock += 1
            self.records[write.key] = Record(write.slot, write.parent, write.traits, self._clock)
            self._holders[write.slot] = write.key
        return refused

    def _lacks_parent(self, parent: Key | None) -> bool:
        return parent is not None and parent not in self.records and self.chained

    def read(self, key: Key, slot: SlotId) -> Content | None:
        """Returns the block's bytes; None if the checksum does not match."""
        content = self.slab[slot]
        if content == ROT:
            return None
        require(content == key, f"disk slot {slot} is read for a block that it does not hold")
        return content

    def touch(self, key: Key) -> None:
        """Notes a use of the block: recovery lists it after blocks that were not used since."""
        self._clock += 1
        self.records[key] = replace(self.records[key], last_use=self._clock)

    def rot(self, slot: SlotId) -> None:
        """Flips bytes of the slot on the medium."""
        if is_block(self.slab[slot]):
            self.slab[slot] = ROT

    def empty(self) -> None:
        """Empties the disk, as after its replacement."""
        self.records.clear()
        self._holders.clear()

    def recover(self) -> list[RecoveredBlock]:
        """Returns the reachable records, parents before children, else least recently used first; deletes the rest."""
        order: list[RecoveredBlock] = []
        children: dict[Key | None, list[Key]] = {}
        for key, record in self.records.items():
            if record.slot not in self.bad:
                children.setdefault(record.parent if self.chained else None, []).append(key)
        ready = [(self.records[key].last_use, key) for key in children.get(None, ())]
        heapq.heapify(ready)
        while ready:
            _, key = heapq.heappop(ready)
            record = self.records[key]
            order.append(RecoveredBlock(record.slot, key, record.parent, record.traits))
            for child in children.get(key, ()):
                heapq.heappush(ready, (self.records[child].last_use, child))
        for key in self.records.keys() - {record.key for record in order}:
            self._delete(key)
        return order

    def _delete(self, key: Key) -> None:
        record = self.records.pop(key)
        self._holders.pop(record.slot, None)
