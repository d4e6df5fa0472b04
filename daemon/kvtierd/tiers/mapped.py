"""Memory tiers that this process maps: the host tier, and the stand-in for a device tier without a GPU.

A GPU completes copies late and, between streams, in any order. The stand-in does the same with :class:`Chaos`, and its
freed slots are overwritten, so a program that forgets to wait reads wrong bytes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvtierd.core.ids import GroupId, SlotId, Tier
from kvtierd.tiers.arena import Arena
from kvtierd.tiers.base import Bytes

POISON: Final = 0xA5
POISONED: Final = 4096


class _Stretches(NamedTuple):
    """The places of a pool's slots, or of whole records, in a segment."""

    start: int
    stride: int
    nbytes: int
    slots: int

    @classmethod
    def of(cls, data: Bytes, rows: Bytes) -> _Stretches:
        """``rows``: [slots, bytes], a view of ``data``."""
        start = rows.ctypes.data - data.ctypes.data if rows.size else 0
        return cls(start, rows.strides[0], rows.shape[1], rows.shape[0])


class MappedStore:
    """Slots of one tier of an arena. Implements :class:`kvtierd.tiers.base.MemoryStore`.

    In the host tier, a slot's pools follow one another, each padded to 4096 bytes: the disk's record, byte for byte. A
    device tier has a region per pool.
    """

    def __init__(self, arena: Arena, tier: Tier) -> None:
        layout, data = arena.layout, arena.data(tier)
        self._exact: list[list[Bytes]] = []
        self._padded: list[list[_Stretches]] = []
        self._memory: memoryview = data.data
        for index, group in enumerate(layout.groups):
            pools = range(len(group.pools))
            self._exact.append([layout.pool_view(data, tier, index, pool) for pool in pools])
            if tier is Tier.HOST:
                padded = [layout.record_view(data, index)]
            else:
                padded = [layout.pool_view(data, tier, index, pool, padding=True) for pool in pools]
            self._padded.append([_Stretches.of(data, rows) for rows in padded])

    def parts(self, group: GroupId, slot: SlotId) -> Sequence[Bytes]:
        if slot < 0:  # numpy would count from the end and hand out another slot's bytes
            raise IndexError(f"slot {slot}")
        return [pool[slot] for pool in self._exact[group]]

    def padded_parts(self, group: GroupId, slot: SlotId) -> Sequence[memoryview]:
        # Slices of one memoryview are much faster to make than rows of an array.
        parts: list[memoryview] = []
        for start, stride, nbytes, slots in self._padded[group]:
            if not 0 <= slot < slots:
                raise IndexError(f"slot {slot}")
            first = start + slot * stride
            parts.append(self._memory[first : first + nbytes])
        return parts

    def pool_array(self, group: GroupId, pool: int) -> Bytes:
        return self._exact[group][pool]

    def close(self) -> None:
        self._exact.clear()
        self._padded.clear()
        self._memory = memoryview(b"")


class HostStore(MappedStore):
    def __init__(self, arena: Arena) -> None:
        super().__init__(arena, Tier.HOST)


@dataclass(slots=True, frozen=True)
class Chaos:
    """Delays of copies. The same seed gives every stream the same delays again."""

    seed: int
    max_delay_s: float = 0.002

    def delays(self, stream: str) -> Iterator[float]:
        """Endless delays in seconds, one per copy. Streams differ, so their completions overtake each other."""
        generator = random.Random(f"{self.seed}:{stream}")
        while True:
            yield generator.uniform(0.0, self.max_delay_s)


class StandInDevice(MappedStore):
    """A device tier in shared memory. ``chaos``: read by the threads that run the copies."""

    def __init__(self, arena: Arena, chaos: Chaos | None = None) -> None:
        super().__init__(arena, Tier.DEVICE)
        self.chaos: Final = chaos

    def poison(self, group: GroupId, slot: SlotId) -> None:
        """Overwrites the first and last 4096 bytes of each part, so that a late reader gets wrong bytes."""
        for part in self.parts(group, slot):
            part[:POISONED] = part[-POISONED:] = POISON
