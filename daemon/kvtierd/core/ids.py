"""Integer ids, each a type of its own, and the tiers.

Mixing up a slot, a block and an event number is this field's classic bug, so none of them is a bare ``int``.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NewType

CacheId = NewType("CacheId", int)
GroupId = NewType("GroupId", int)
SlotId = NewType("SlotId", int)
LeaseId = NewType("LeaseId", int)
SessionId = NewType("SessionId", int)
TicketId = NewType("TicketId", int)
MoveId = NewType("MoveId", int)
EventId = NewType("EventId", int)

Key = NewType("Key", bytes)
"""A block key: exactly ``KEY_BYTES`` bytes."""

KEY_BYTES: Final = 32


class Tier(IntEnum):
    """Where bytes live, the fastest first. The value is TensorRT-LLM's cache level."""

    DEVICE = 0
    HOST = 1
    DISK = 2

    @property
    def bit(self) -> int:
        """This tier's bit in a residency set (1 device, 2 host, 4 disk)."""
        return BITS[self]

    def __str__(self) -> str:
        return _NAMES[self]

    __hash__ = int.__hash__
    """An enum's own is a Python call, and tiers are in the keys of tables that every block's every step looks into."""


DEVICE: Final = Tier.DEVICE
HOST: Final = Tier.HOST
DISK: Final = Tier.DISK
"""The same. To look a member up in its class takes ten times as long as a global (Python 3.11), and the core does so
dozens of times a block: hence such names beside its enumerations."""

BITS: Final[tuple[int, ...]] = (1, 2, 4)
_NAMES: Final[tuple[str, ...]] = ("device", "host", "disk")
