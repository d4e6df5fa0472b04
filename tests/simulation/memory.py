"""A memory tier's slots as a client that maps them sees them.

A block's bytes are its key: contents of any other kind are no block's, so a wrong block and a torn one both show.
"""

from __future__ import annotations

from typing import Final

from kvtierd.core.ids import KEY_BYTES, SessionId, SlotId
from tests.simulation.violation import Violation

Content = bytes

POISON: Final[Content] = b"poison"
TORN: Final[Content] = b"torn"
ROT: Final[Content] = b"rot"


def is_block(content: Content) -> bool:
    return len(content) == KEY_BYTES


class Memory:
    """Contents, generations and owners of one tier's slots.

    A generation is odd unless the slot's bytes are a block's, and never the same even number for two contents: who
    reads it before and after a copy knows whether the copy is good, lease or no lease.
    """

    def __init__(self, name: str, slots: int) -> None:
        self.name = name
        self.contents: list[Content] = [POISON] * slots
        self.generations = [1] * slots
        self.owners: list[SessionId | None] = [None] * slots
        self._promised: list[Content] = [POISON] * slots

    def begin_write(self, slot: SlotId) -> None:
        if self.generations[slot] % 2 == 0:
            self.generations[slot] += 1
        self.contents[slot] = POISON

    def end_write(self, slot: SlotId) -> None:
        if self.generations[slot] % 2 == 1:
            self.generations[slot] += 1
            self._promised[slot] = self.contents[slot]
        if not is_block(self.contents[slot]):
            raise Violation(f"{self.name} slot {slot} shows an even generation over no block's bytes")

    def ready(self, slot: SlotId) -> bool:
        return self.generations[slot] % 2 == 0

    def verify(self) -> None:
        """No bytes changed under an even generation."""
        for slot, content in enumerate(self.contents):
            if self.generations[slot] % 2 == 0 and content != self._promised[slot]:
                raise Violation(f"{self.name} slot {slot} changed under generation {self.generations[slot]}")
