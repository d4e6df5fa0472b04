"""Memory as a disk is told of it: by address."""

from __future__ import annotations

from kvtierd.core.ids import SlotId
from kvtierd.tiers.base import Bytes


class Part:
    """``nbytes`` at ``address``. ``memory``: the same bytes, which stay there while anyone holds it."""

    __slots__ = ("address", "memory", "nbytes")

    def __init__(self, memory: memoryview, address: int, nbytes: int) -> None:
        self.memory = memory
        self.address = address
        self.nbytes = nbytes


class Rows:
    """``slots`` stretches of ``nbytes`` each in a piece of memory, ``stride`` apart, from ``start`` on. A row of
    an array takes five times as long to make."""

    __slots__ = ("_address", "memory", "nbytes", "slots", "start", "stride")

    def __init__(self, data: Bytes, rows: Bytes) -> None:
        """``rows``: [slots, nbytes], a view of ``data``."""
        base, first = data.__array_interface__["data"][0], rows.__array_interface__["data"][0]
        self.memory = data.data
        self.start = first - base if rows.size else 0
        self.stride = rows.strides[0]
        self.slots, self.nbytes = rows.shape
        self._address = base

    def start_of(self, slot: SlotId) -> int:
        """Where in the memory it begins. Raises IndexError for a slot that does not exist."""
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot}")
        return self.start + slot * self.stride

    def part(self, slot: SlotId) -> Part:
        """Raises IndexError likewise."""
        first = self.start_of(slot)
        return Part(self.memory[first : first + self.nbytes], self._address + first, self.nbytes)
