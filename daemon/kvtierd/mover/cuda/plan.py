"""Addresses of a cache's slots, the chunks of its host memory, and a batch's copies as rows of addresses."""

from __future__ import annotations

import enum
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.abi.cuda import driver as cuda
from kvtier.abi.cuda.driver import Address, Driver
from kvtier.abi.cuda.page_locks import CHUNK_BYTES, Chunk, PageLocks
from kvtier.abi.layout import ArenaLayout
from kvtierd.core.ids import DEVICE, HOST, GroupId, SlotId
from kvtierd.mover.cuda.staging import Buffer
from kvtierd.mover.runtime import Stretch
from kvtierd.tiers.base import Bytes
from kvtierd.tiers.cuda.pool import CudaDevice


class Direction(enum.Enum):
    TO_HOST = enum.auto()
    TO_DEVICE = enum.auto()


Copies = NDArray[np.int64]
"""Three rows: destination addresses, source addresses, bytes. A column is a copy."""

Pairs = Mapping[GroupId, tuple[Sequence[SlotId], Sequence[SlotId]]]
"""Source slots and destination slots of each group's copies."""

Parts = NDArray[np.int64]
"""Places of the parts of a group's slots: a row of addresses of slot 0's parts, and a row of strides in bytes. A column
is a pool."""


class Path(NamedTuple):
    """Target and source of a part of ``nbytes`` in each pool. ``parts``: of both sides, the target's first."""

    parts: NDArray[np.int64]
    """2 sides × 2 rows of :data:`Parts` × pools × 1."""
    nbytes: NDArray[np.int64]
    """Pools × 1."""


def plan(pairs: Pairs, paths: Mapping[GroupId, Path]) -> Copies:
    """Plans one copy for each pair of slots and each pool."""
    return np.concatenate([_copies(paths[group], *slots) for group, slots in pairs.items()], axis=1)


def _copies(path: Path, sources: Sequence[SlotId], targets: Sequence[SlotId]) -> Copies:
    copies = np.empty((3, len(path.nbytes), len(sources)), np.int64)
    copies[:2] = path.parts[:, 0] + path.parts[:, 1] * np.array([targets, sources], np.int64)[:, None]
    copies[2] = path.nbytes
    return copies.reshape(3, -1)


def joined(copies: Copies, ranges: NDArray[np.intp]) -> tuple[Copies, NDArray[np.intp]]:
    """Joins copies that continue each other on both sides.

    Args:
        ranges: The range of host memory of each copy. A joined copy stays in one range: the driver knows no relation
            between two ranges, even if they touch.
    """
    order = np.argsort(copies[0])
    copies, ranges = copies[:, order], ranges[order]
    apart = (copies[:2, 1:] != copies[:2, :-1] + copies[2, :-1]).any(axis=0) | (ranges[1:] != ranges[:-1])
    if apart.all():
        return copies, ranges
    firsts = np.flatnonzero(np.concatenate(([True], apart)))
    fewer = copies[:, firsts]
    fewer[2] = np.add.reduceat(copies[2], firsts)
    return fewer, ranges[firsts]


def chunks_of(start: int, slots: int, record_bytes: int) -> Iterator[Chunk]:
    """Yields chunks of whole slots of one group, whose slot 0 is at ``start``, to the end of the last host page. Chunks
    ascend like slots, which are handed out from the lowest number up.

    A chunk begins at a page of the host, which may be larger than a slot. No other group is in the last page: groups
    begin at multiples of huge pages.
    """
    page = cuda.HOST_PAGE
    step = page // math.gcd(page, record_bytes)  # this many slots fill whole pages
    together = max(1, CHUNK_BYTES // record_bytes // step) * step
    for first in range(0, slots, together):
        nbytes = min(together, slots - first) * record_bytes
        yield Chunk(start + first * record_bytes, -(-nbytes // page) * page)


def in_turn(groups: Sequence[Iterator[Chunk]]) -> list[Chunk]:
    """Returns the first chunk of every group, then the second, and so on: slots used first are ready first."""
    return [chunk for chunk in chain.from_iterable(zip_longest(*groups)) if chunk is not None]


class SegmentLocks(PageLocks):
    """Page locks of one cache's host segment."""

    def __init__(self, name: str, driver: Driver, chunks: Sequence[Chunk]) -> None:
        super().__init__(name, driver, chunks)
        by_address = sorted((chunk.address, chunk.nbytes, number) for number, chunk in enumerate(chunks))
        self._starts, nbytes, self._numbers = np.array([(0, 0, -1), *by_address]).T
        self._ends = self._starts + nbytes

    def chunks_at(self, addresses: NDArray[np.int64]) -> NDArray[np.int64]:
        """Numbers of the chunks at these addresses; -1 for an address outside the host segment."""
        places = np.searchsorted(self._starts, addresses, "right") - 1
        return np.where(addresses < self._ends[places], self._numbers[places], -1)


class Sites:
    """Places of a cache's slots. ``host_address``: of the host segment, unused if the cache has no host slots."""

    def __init__(self, layout: ArenaLayout, device: CudaDevice, host_address: int) -> None:
        self.layout: Final = layout
        self._device = device
        self._host_address = host_address
        groups = [GroupId(number) for number, group in enumerate(layout.groups) if group.slots[DEVICE]]
        self.between_tiers: Final = {
            direction: {group: self._path(direction, group, self._host_parts(group)) for group in groups}
            for direction in Direction
        }

    def to_staging(self, direction: Direction, load: StagedRecords) -> Mapping[GroupId, Path]:
        """Paths between device slots and the load's records."""
        return {group: self._path(direction, group, load.parts(group)) for group in load.groups}

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

    def host_chunks(self) -> list[Chunk]:
        """The host slots as chunks, in the order in which they are page-locked."""
        return in_turn(
            [
                chunks_of(self._host_address + group.host_offset, group.slots[HOST], group.record_bytes)
                for group in self.layout.groups
            ]
        )

    def _path(self, direction: Direction, group: GroupId, others: Parts) -> Path:
        device = self._device_parts(group)
        both = (others, device) if direction is Direction.TO_HOST else (device, others)
        nbytes = [[pool.block_bytes] for pool in self.layout.groups[group].pools]
        return Path(np.stack(both)[..., None], np.array(nbytes, np.int64))

    def _device_parts(self, group: GroupId) -> Parts:
        pools, first = range(len(self.layout.groups[group].pools)), SlotId(0)
        return _parts([(self._device.address(group, pool, first), self._device.stride(group, pool)) for pool in pools])

    def _host_parts(self, group: GroupId) -> Parts:
        place = self.layout.groups[group]
        start = self._host_address + place.host_offset
        return _parts([(start + pool.record_offset, place.record_bytes) for pool in place.pools])


def _parts(of_pools: Sequence[tuple[int, int]]) -> Parts:
    return np.array(of_pools, np.int64).T


Wanted = Mapping[int, tuple[GroupId, SlotId]]
"""Device slots of items, by the items' places in a batch, in ascending order."""


class DeviceRecord(NamedTuple):
    """A staged record: ``number`` in its group, of device ``slot``, for the item at ``place``."""

    place: int
    group: GroupId
    slot: SlotId
    number: SlotId


class StagedRecords:
    """Staged records of the ``wanted`` items, in the format of the disk: parts in pool order, each padded to 4096
    bytes. The buffer must hold all records."""

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

    def parts(self, group: GroupId) -> Parts:
        """Places of a group's records; the slot number of a record is its ``number``."""
        record = self._layout.groups[group]
        start = self.buffer.address + self._starts[group]
        return _parts([(start + pool.record_offset, record.record_bytes) for pool in record.pools])

    @property
    def groups(self) -> Sequence[GroupId]:
        return list(self._starts)

    def numbered(self) -> list[DeviceRecord]:
        """The records group by group, in the order of their places."""
        return [
            DeviceRecord(place, group, self.wanted[place][1], SlotId(number))
            for group, places in self._places.items()
            for number, place in enumerate(places)
        ]

    def pairs(self, places: Collection[int]) -> Pairs:
        """Device slots and record numbers of the items at these places."""
        pairs: dict[GroupId, tuple[list[SlotId], list[SlotId]]] = {group: ([], []) for group in self.groups}
        for place, group, slot, number in self.numbered():
            if place in places:
                pairs[group][0].append(slot)
                pairs[group][1].append(number)
        return pairs

    def records(self) -> dict[int, Sequence[memoryview]]:
        """The bytes of each record in the buffer, by place."""
        rows = {group: self._rows(group) for group in self._starts}
        return {one.place: (rows[one.group][one.number].data,) for one in self.numbered()}

    def blank_padding(self) -> None:
        """Zeroes the padding of the parts: the buffer held other records before."""
        for group in self._starts:
            rows = self._rows(group)
            for pool in self._layout.groups[group].pools:
                rows[:, pool.record_offset + pool.block_bytes : pool.record_offset + pool.padded_bytes] = 0

    def _rows(self, group: GroupId) -> Bytes:
        start, nbytes = self._starts[group], self._layout.groups[group].record_bytes
        count = len(self._places[group])
        return self.buffer.memory[start : start + count * nbytes].reshape(count, nbytes)
