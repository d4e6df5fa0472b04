"""A memory tier's slots, as clients that map them see them.

A block's bytes are its key. Other contents belong to no block, so both a wrong block and a torn block are detected.
"""

from typing import Final

import numpy as np

from kvtier.abi.control import SLOT_RECORD_BYTES
from kvtierd.core.ids import KEY_BYTES, Key, SessionId, SlotId
from kvtierd.tiers.disk.records import SlotContents, decode_slots, encode_slot, order_of
from tests.simulation.violation import Violation
from tests.slot_rows import Content as Noted

Content = bytes

POISON: Final[Content] = b"poison"
TORN: Final[Content] = b"torn"
ROT: Final[Content] = b"rot"


def is_block(content: Content) -> bool:
    return len(content) == KEY_BYTES


class Memory:
    """Contents, generations and owners of a tier's slots.

    A generation is odd unless the slot's bytes are a block's. Two contents never have the same even generation: a
    client that reads it before and after a copy knows whether the copy is good, with or without a lease.
    """

    def __init__(self, name: str, slots: int) -> None:
        self.name = name
        self.contents: list[Content] = [POISON] * slots
        self.generations = [1] * slots
        self.owners: list[SessionId | None] = [None] * slots
        self._promised: list[Content] = [POISON] * slots
        self._records = np.zeros((slots, SLOT_RECORD_BYTES), np.uint8)

    def begin_write(self, slot: SlotId) -> None:
        self.invalidate(slot)
        self.contents[slot] = POISON

    def invalidate(self, slot: SlotId) -> None:
        """Makes the generation odd: the bytes stay, but readers see that they are no block's."""
        if self.generations[slot] % 2 == 0:
            self.generations[slot] += 1

    def end_write(self, slot: SlotId) -> None:
        if self.generations[slot] % 2 == 1:
            self.generations[slot] += 1
            self._promised[slot] = self.contents[slot]
        if not is_block(self.contents[slot]):
            raise Violation(f"{self.name} slot {slot} shows an even generation over no block's bytes")

    def note(self, noted: Noted, order: int) -> None:
        """Writes the record of the slot's contents from its next generation on, or clears it."""
        (_, _, slot), key, _, _ = noted
        if key is None:
            self._records[slot] = 0
        else:
            self._record(noted, key, self.generations[slot] + 1, order)

    def restate(self, noted: Noted) -> None:
        """Writes new traits into the record of the slot's present block."""
        (_, _, slot), key, _, _ = noted
        generation = self.generations[slot]
        if key is None or self._found_in(slot) != key:
            raise Violation(f"{self.name} slot {slot} is restated as another block's")
        self._record(noted, key, generation, order_of(self._records.reshape(-1).data, slot))

    def _found_in(self, slot: SlotId) -> Key | None:
        """Returns the block that a daemon would find in the slot when it adopts the memory."""
        found = decode_slots(self._records[slot : slot + 1], np.array(self.generations[slot : slot + 1], np.uint64))
        return found.keys[0] if found.keys else None

    def _record(self, noted: Noted, key: Key, generation: int, order: int) -> None:
        (_, _, slot), _, parent, traits = noted
        packed = encode_slot(key, parent, traits, generation, order)
        self._records[slot, : len(packed)] = np.frombuffer(packed, np.uint8)

    def found(self) -> SlotContents:
        """Returns the contents that a daemon finds when it adopts the memory."""
        return decode_slots(self._records, np.array(self.generations, np.uint64))

    def slots_of(self, content: Content) -> list[SlotId]:
        """Returns the READY slots with these bytes."""
        slots = (SlotId(n) for n, found in enumerate(self.contents) if found == content)
        return [slot for slot in slots if self.ready(slot)]

    def ready(self, slot: SlotId) -> bool:
        return self.generations[slot] % 2 == 0

    def verify(self) -> None:
        """Checks that no bytes changed under an even generation."""
        for slot, content in enumerate(self.contents):
            if self.generations[slot] % 2 == 0 and content != self._promised[slot]:
                raise Violation(f"{self.name} slot {slot} changed under generation {self.generations[slot]}")
