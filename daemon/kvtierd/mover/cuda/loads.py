"""Records of device slots, side by side in a staging buffer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from kvtier.abi.layout import ArenaLayout
from kvtierd.core.ids import GroupId, SlotId
from kvtierd.mover.cuda.plan import Place
from kvtierd.mover.cuda.staging import Buffer
from kvtierd.tiers.base import Bytes
from kvtierd.tiers.mapped import Rows

Wanted = Mapping[int, tuple[GroupId, SlotId]]
"""The device slot of each of some items, which are named by their places in a batch, in that order."""


class Record(NamedTuple):
    """The ``number``-th record of its group is that of device ``slot``."""

    place: int
    group: GroupId
    slot: SlotId
    number: SlotId


class Load:
    """A record for each of ``wanted``, as the disk has them: parts in pool order, each padded to 4096 bytes.

    The buffer must hold them all.
    """

    def __init__(self, layout: ArenaLayout, buffer: Buffer, wanted: Wanted) -> None:
        self.buffer: Final = buffer
        self.wanted: Final = wanted
        self._layout = layout
        self._places: defaultdict[GroupId, list[int]] = defaultdict(list)
        for place, (group, _) in wanted.items():
            self._places[group].append(place)
        self._starts: dict[GroupId, int] = {}
        end = 0
        for group, places in self._places.items():
            self._starts[group] = end
            end += len(places) * layout.groups[group].record_bytes
        if end > len(buffer.memory):
            raise ValueError(f"records of {end} bytes: the staging buffer has {len(buffer.memory)}")

    def sites(self, group: GroupId) -> Sequence[Place]:
        """Where a group's parts are, one a pool; "slots" are counted by :meth:`numbered`."""
        record = self._layout.groups[group]
        start = self.buffer.address + self._starts[group]
        return [Place(start + pool.record_offset, record.record_bytes) for pool in record.pools]

    @property
    def groups(self) -> Sequence[GroupId]:
        return list(self._starts)

    def numbered(self) -> list[Record]:
        """Group by group, in the order of the places."""
        return [
            Record(place, group, self.wanted[place][1], SlotId(number))
            for group, places in self._places.items()
            for number, place in enumerate(places)
        ]

    def records(self) -> dict[int, Sequence[memoryview]]:
        """The bytes of each, in the buffer."""
        rows = {group: Rows(self.buffer.memory, self._rows(group)) for group in self._starts}
        return {one.place: (rows[one.group].row(one.number),) for one in self.numbered()}

    def blank_padding(self) -> None:
        """Zeroes what lies between the parts: the buffer had other records before."""
        for group in self._starts:
            rows = self._rows(group)
            for pool in self._layout.groups[group].pools:
                rows[:, pool.record_offset + pool.block_bytes : pool.record_offset + pool.padded_bytes] = 0

    def _rows(self, group: GroupId) -> Bytes:
        start, nbytes = self._starts[group], self._layout.groups[group].record_bytes
        count = len(self._places[group])
        return self.buffer.memory[start : start + count * nbytes].reshape(count, nbytes)
