"""Which slot a key is in: a hash table of slots in an array, beside the keys by slot, which the table has anyway.

A dictionary would take 31 to 62 bytes a block instead of 8 to 16, and while it grows as much again.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

from kvtierd.core.ids import Key, SlotId

_FREE: Final = -1


class SlotIndex:
    """Open addressing: a slot stands at its key's home, which is the key's hash, or as close behind it as no other
    stands, so a search ends at the first free place. At most half of the places are taken.

    ``keys``: by slot; the caller changes it, after :meth:`add` and after :meth:`remove`. One thread at a time.
    """

    __slots__ = ("_keys", "_length", "_mask", "_places")

    def __init__(self, keys: Sequence[Key | None]) -> None:
        """Empty, whatever ``keys`` says."""
        places = 1 << (2 * len(keys)).bit_length()
        self._keys = keys
        self._mask = places - 1
        self._places = array("i", [_FREE]) * places
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def find(self, key: Key) -> SlotId | None:
        place = self._place_of(key)
        return None if place is None else SlotId(self._places[place])

    def add(self, key: Key, slot: SlotId) -> None:
        """The key is in no slot yet."""
        places, mask = self._places, self._mask
        place = hash(key) & mask
        while places[place] != _FREE:
            place = place + 1 & mask
        places[place] = slot
        self._length += 1

    def remove(self, key: Key) -> SlotId | None:
        """The slot that it was in."""
        gap = self._place_of(key)
        if gap is None:
            return None
        places, mask, keys = self._places, self._mask, self._keys
        slot = SlotId(places[gap])
        place = gap
        while (other := places[place := place + 1 & mask]) != _FREE:
            # What a search would no longer reach moves into the gap: a slot whose home is not behind that.
            if (place - hash(keys[other]) & mask) >= (place - gap & mask):
                places[gap] = other
                gap = place
        places[gap] = _FREE
        self._length -= 1
        return slot

    def _place_of(self, key: Key) -> int | None:
        places, mask, keys = self._places, self._mask, self._keys
        place = hash(key) & mask
        while (slot := places[place]) != _FREE:
            if keys[slot] == key:
                return place
            place = place + 1 & mask
        return None
