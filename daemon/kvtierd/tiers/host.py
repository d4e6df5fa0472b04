"""The host tier: CPU memory, one contiguous record a slot."""

from __future__ import annotations

from collections.abc import Sequence

from kvtierd.core.ids import GroupId, SlotId, Tier
from kvtierd.tiers.arena import Arena
from kvtierd.tiers.base import Bytes
from kvtierd.tiers.mapped import MappedStore
from kvtierd.tiers.parts import Part, Rows


class HostStore(MappedStore):
    """A slot's pools stand one after another, each padded to 4096 bytes: the disk's record, byte for byte."""

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena, Tier.HOST)
        data = arena.data(Tier.HOST)
        self._records = [arena.layout.record_view(data, group) for group in range(len(arena.layout.groups))]
        self._whole = [Rows(data, records) for records in self._records]

    def records(self, group: GroupId) -> Bytes:
        """All slots with their padding, [slots, record bytes], contiguous and page-aligned."""
        return self._records[group]

    def padded_parts(self, group: GroupId, slot: SlotId) -> Sequence[Part]:
        """The whole record as one."""
        return (self._whole[group].part(slot),)

    def close(self) -> None:
        super().close()
        self._records.clear()
        self._whole.clear()
