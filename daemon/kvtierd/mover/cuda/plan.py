"""Addresses of a cache's slots and staged records, and a batch's copies as rows of addresses."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.abi.cuda.driver import Address, Copies
from kvtier.abi.layout import ArenaLayout
from kvtierd.core.ids import DEVICE, GroupId, SlotId
from kvtierd.mover.cuda.staging import Buffer
from kvtierd.mover.runtime import Stretch
from kvtierd.tiers.cuda.pool import CudaDevice


class Direction(enum.Enum):
    TO_HOST = enum.auto()
    TO_DEVICE = enum.auto()


Records = Mapping[GroupId, tuple[Sequence[SlotId], Sequence[int] | NDArray[np.int64]]]
"""Device slots of each group, and the addresses of their records in memory of the host: a block's parts in pool order,
each padded to 4096 bytes."""


class Sites:
    """Places of a cache's slots. ``host_address``: of the host segment, unused if the cache has no host slots."""

    def __init__(self, layout: ArenaLayout, device: CudaDevice, host_address: int) -> None:
        self.layout: Final = layout
        self._device = device
        self._host_address = host_address
        self._pools = {GroupId(n): self._of_group(GroupId(n)) for n, g in enumerate(layout.groups) if g.slots[DEVICE]}

    def _of_group(self, group: GroupId) -> NDArray[np.int64]:
        """Four columns, a row a pool: address of slot 0, stride between slots, place in a record, bytes."""
        pools = [
            (
                self._device.address(group, n, SlotId(0)),
                self._device.stride(group, n),
                part.record_offset,
                part.block_bytes,
            )
            for n, part in enumerate(self.layout.groups[group].pools)
        ]
        return np.array(pools, np.int64).T[..., None]

    def plan(self, direction: Direction, records: Records) -> Copies:
        """Plans one copy for each record and pool."""
        planned: list[Copies] = []
        for group, (slots, starts) in records.items():
            address, stride, place, nbytes = self._pools[group]
            device, host = address + stride * np.array(slots, np.int64), place + np.array(starts, np.int64)
            ends = (host, device) if direction is Direction.TO_HOST else (device, host)
            planned.append(np.stack((*ends, np.broadcast_to(nbytes, device.shape))).reshape(3, -1))
        return np.concatenate(planned, axis=1)

    def host_records(self, group: GroupId, slots: Sequence[SlotId]) -> NDArray[np.int64]:
        """Addresses of host slots."""
        place = self.layout.groups[group]
        return self._host_address + place.host_offset + place.record_bytes * np.array(slots, np.int64)

    def on_device(self, group: GroupId, stretch: Stretch) -> list[tuple[Address, int]]:
        """Address and size of each part of a stretch of a device slot's block, in order."""
        slot, start, stop = stretch
        found: list[tuple[Address, int]] = []
        begin = 0
        for number, pool in enumerate(self.layout.groups[group].pools):
            first, last = max(start, begin), min(stop, begin + pool.block_bytes)
            if first < last:
                found.append((Address(self._device.address(group, number, slot) + first - begin), last - first))
            begin += pool.block_bytes
        return found


Wanted = Mapping[int, tuple[GroupId, SlotId]]
"""Device slots of items, by the items' places in a batch, in ascending order."""


class StagedRecords:
    """Records of the ``wanted`` items in a staging buffer, one after another. The buffer must hold all records."""

    def __init__(self, layout: ArenaLayout, buffer: Buffer, wanted: Wanted) -> None:
        self.wanted: Final = wanted
        self._layout = layout
        self._buffer = buffer
        ends = list(accumulate((layout.groups[group].record_bytes for group, _ in wanted.values()), initial=0))
        if ends[-1] > len(buffer.memory):
            raise ValueError(f"records of {ends[-1]} bytes: the staging buffer has {len(buffer.memory)}")
        self._spans = {place: slice(*span) for place, span in zip(wanted, pairwise(ends), strict=True)}

    def at(self, places: Collection[int]) -> Records:
        """Device slots and staged records of the items at these places."""
        found: defaultdict[GroupId, tuple[list[SlotId], list[int]]] = defaultdict(lambda: ([], []))
        for place in places:
            group, slot = self.wanted[place]
            found[group][0].append(slot)
            found[group][1].append(self._buffer.address + self._spans[place].start)
        return found

    def records(self) -> dict[int, Sequence[memoryview]]:
        """The bytes of each record in the buffer, by place."""
        return {place: (self._buffer.memory[span].data,) for place, span in self._spans.items()}

    def blank_padding(self) -> None:
        """Zeroes the padding of the parts: the buffer held other records before."""
        for place, span in self._spans.items():
            record = self._buffer.memory[span]
            for pool in self._layout.groups[self.wanted[place][0]].pools:
                record[pool.record_offset + pool.block_bytes : pool.record_offset + pool.padded_bytes] = 0
