"""The host tier: CPU memory, one contiguous record a slot."""

from __future__ import annotations

from kvtierd.core.ids import GroupId, Tier
from kvtierd.tiers.arena import Arena
from kvtierd.tiers.base import Bytes
from kvtierd.tiers.mapped import MappedStore


class HostStore(MappedStore):
    """A slot's pools stand one after another, each padded to 4096 bytes: the disk's record, byte for byte."""

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena, Tier.HOST)
        data = arena.data(Tier.HOST)
        self._records = [arena.layout.record_view(data, group) for group in range(len(arena.layout.groups))]

    def records(self, group: GroupId) -> Bytes:
        """All slots with their padding, [slots, record bytes], contiguous and page-aligned."""
        return self._records[group]

    def close(self) -> None:
        super().close()
        self._records.clear()
