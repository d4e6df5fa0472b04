"""A memory tier as numpy views over its data segment."""

from __future__ import annotations

from collections.abc import Sequence

from kvtierd.core.ids import GroupId, SlotId, Tier
from kvtierd.tiers.arena import Arena
from kvtierd.tiers.base import Bytes
from kvtierd.tiers.parts import Part, Rows

POISON = 0xA5
POISONED = 4096
_STAMP = bytes([POISON]) * POISONED


class MappedStore:
    """Slots of one tier of an arena. Implements :class:`kvtierd.tiers.base.MemoryStore`.

    One 2-D array per pool is made at the start; a slot is a row of it, so that asking for one is an indexing operation.
    """

    def __init__(self, arena: Arena, tier: Tier) -> None:
        self._tier = tier
        layout, data = arena.layout, arena.data(tier)
        self._exact: list[list[Bytes]] = []
        self._flat: list[list[Rows]] = []
        self._padded: list[list[Rows]] = []
        for index, group in enumerate(layout.groups):
            pools = range(len(group.pools))
            self._exact.append([layout.pool_view(data, tier, index, pool) for pool in pools])
            self._flat.append([Rows(data, pool) for pool in self._exact[-1]])
            whole = [layout.pool_view(data, tier, index, pool, padding=True) for pool in pools]
            self._padded.append([Rows(data, pool) for pool in whole])

    @property
    def tier(self) -> Tier:
        return self._tier

    def parts(self, group: GroupId, slot: SlotId) -> Sequence[Bytes]:
        """The slot's exact bytes: one 1-D array a pool. Raises IndexError for a slot that does not exist."""
        return _rows(self._exact[group], slot)

    def padded_parts(self, group: GroupId, slot: SlotId) -> Sequence[Part]:
        """The same with padding: address and length of each are multiples of 4096."""
        return [pool.part(slot) for pool in self._padded[group]]

    def pool_array(self, group: GroupId, pool: int) -> Bytes:
        """All slots' exact bytes in one pool: [slots, bytes]."""
        return self._exact[group][pool]

    def poison(self, group: GroupId, slot: SlotId) -> None:
        """Overwrites the first and last 4096 bytes of each part."""
        for pool in self._flat[group]:
            first = pool.start_of(slot)
            end = first + pool.nbytes
            stamp = _STAMP[: pool.nbytes]
            pool.memory[first : first + len(stamp)] = stamp
            pool.memory[end - len(stamp) : end] = stamp

    def close(self) -> None:
        """Lets go of the segment; views that others hold stay valid."""
        self._exact.clear()
        self._padded.clear()
        self._flat.clear()


def _rows(pools: list[Bytes], slot: SlotId) -> list[Bytes]:
    if slot < 0:  # numpy would count from the end and hand out somebody else's bytes
        raise IndexError(f"slot {slot}")
    return [pool[slot] for pool in pools]
