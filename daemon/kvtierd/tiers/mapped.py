"""Memory tiers that this process maps: the host tier, and the stand-in for a device tier without a GPU.

A GPU completes copies late and, between streams, in any order. The stand-in does the same with :class:`Chaos`, and its
freed slots are overwritten, so a program that forgets to wait reads wrong bytes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvtierd.core.ids import GroupId, SlotId, Tier
from kvtierd.tiers.arena import Arena
from kvtierd.tiers.base import Bytes

POISON: Final = 0xA5
POISONED: Final = 4096


class MappedStore:
    """Slots of one tier of an arena. Implements :class:`kvtierd.tiers.base.MemoryStore`.

    In the host tier, a slot's pools follow one another, each padded to 4096 bytes: the disk's record, byte for byte. A
    device tier has a region per pool.
    """

    def __init__(self, arena: Arena, tier: Tier) -> None:
        layout, data = arena.layout, arena.data(tier)
        self._exact: list[list[Bytes]] = []
        self._padded: list[list[tuple[memoryview, int]]] = []
        """All slots of a group in a pool, or as whole records, and the bytes of a slot there."""
        for index, group in enumerate(layout.groups):
            pools = range(len(group.pools))
            self._exact.append([layout.pool_view(data, tier, index, pool) for pool in pools])
            if tier is Tier.HOST:
                padded = [layout.record_view(data, index)]
            else:
                padded = [layout.pool_view(data, tier, index, pool, padding=True) for pool in pools]
            self._padded.append([(rows.reshape(-1).data, rows.shape[1]) for rows in padded])

    def parts(self, group: GroupId, slot: SlotId) -> Sequence[Bytes]:
        if slot < 0:  # numpy would count from the end and hand out another slot's bytes
            raise IndexError(f"slot {slot}")
        return [pool[slot] for pool in self._exact[group]]

    def padded_parts(self, group: GroupId, slot: SlotId) -> Sequence[memoryview]:
        parts = [rows[slot * nbytes : (slot + 1) * nbytes] for rows, nbytes in self._padded[group]]
        if slot < 0 or not all(parts):
            raise IndexError(f"slot {slot}")
        return parts

    def pool_array(self, group: GroupId, pool: int) -> Bytes:
        return self._exact[group][pool]

    def close(self) -> None:
        self._exact.clear()
        self._padded.clear()


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
