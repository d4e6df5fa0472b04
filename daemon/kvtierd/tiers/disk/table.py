"""What the index holds, in memory: answers readers without a transaction and the writer without a lookup."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvtierd.core.ids import Key, SlotId
from kvtierd.tiers.disk.checksum import CHECKSUM_BYTES
from kvtierd.tiers.disk.records import Counters


class GroupTable:
    """One group's committed blocks and the order of their use.

    The writer changes it after its transaction has committed, never before. Other threads may look up slots
    meanwhile; what they find of a slot that is being changed under them is theirs to verify by checksum.
    """

    __slots__ = ("_checksums", "_keys", "_slots", "counter", "last_use")

    def __init__(self, slots: int) -> None:
        self._keys: list[Key | None] = [None] * slots
        self._slots: dict[Key, SlotId] = {}
        self._checksums = bytearray(slots * CHECKSUM_BYTES)
        self.last_use: Counters = np.zeros(slots, np.uint64)
        self.counter = 1
        """The next use's place in the order. Counters of transactions that failed are never given out again."""

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def capacity(self) -> int:
        return len(self._keys)

    def slot_of(self, key: Key) -> SlotId | None:
        return self._slots.get(key)

    def key_at(self, slot: SlotId) -> Key | None:
        return self._keys[slot]

    def checksum_at(self, slot: SlotId) -> bytes:
        start = slot * CHECKSUM_BYTES
        return bytes(self._checksums[start : start + CHECKSUM_BYTES])

    def put(self, key: Key, slot: SlotId, checksum: bytes) -> None:
        """A key that had another slot moves here; one that stood here is gone."""
        self.discard(key)
        if (there := self._keys[slot]) is not None:
            self.discard(there)
        self._slots[key] = slot
        self._checksums[slot * CHECKSUM_BYTES : (slot + 1) * CHECKSUM_BYTES] = checksum
        self._keys[slot] = key

    def discard(self, key: Key) -> None:
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._keys[slot] = None

    def fill(
        self, keys: Sequence[Key], slots: NDArray[np.uint32], checksums: NDArray[np.void], last_use: Counters
    ) -> None:
        """Everything at once, into an empty table. ``last_use``: one a slot of the table, the rest one a key."""
        self._slots = dict(zip(keys, slots.tolist(), strict=True))
        for key, slot in self._slots.items():
            self._keys[slot] = key
        np.frombuffer(self._checksums, checksums.dtype)[slots] = checksums
        self.last_use = last_use
        self.counter = 1 + int(last_use.max(initial=0))

    def take_counters(self, count: int) -> int:
        """The first of ``count`` fresh counters."""
        first = self.counter
        self.counter += count
        return first

    def use(self, slots: Sequence[SlotId], first: int) -> None:
        """``slots`` were used in this order, from counter ``first`` on."""
        # Of a slot that stands there twice the later counter stays: numpy stores one after another.
        self.last_use[np.array(slots, np.intp)] = np.arange(first, first + len(slots), dtype=np.uint64)
