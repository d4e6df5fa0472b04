"""Where a cache's slots are, and a batch's copies in as few pieces as the hardware takes: arithmetic on addresses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from kvtier.abi.cuda.driver import Address, Direction
from kvtier.abi.layout import ArenaLayout
from kvtierd.core.ids import DEVICE, HOST, GroupId, SlotId
from kvtierd.mover.cuda.page_locks import Chunk, chunks_of, in_turn, slots_together
from kvtierd.mover.cuda.staging import Buffer
from kvtierd.mover.runtime import Stretch
from kvtierd.mover.work import Run, runs
from kvtierd.tiers.base import Bytes
from kvtierd.tiers.cuda.store import CudaDevice

EVERYWHERE: Final = 1 << 62
"""``Place.together`` where all slots lie in one allocation."""


class Place(NamedTuple):
    """A pool's part of the slots of one group: of slot s it begins ``s * stride`` bytes after ``start``.

    ``together``: so many slots from slot 0 on lie in one page-locked range, the next as many in the next one. No copy
    may span two ranges: to the driver they are strangers, even where one ends at the other's first byte.
    """

    start: int
    stride: int
    together: int = EVERYWHERE


class Path(NamedTuple):
    """Where ``nbytes`` of every slot of a group come from and go to."""

    source: Place
    target: Place
    nbytes: int


Paths = Mapping[GroupId, Sequence[Path]]
"""One a pool."""


class Rows(NamedTuple):
    """``rows`` times ``nbytes``, ``src_stride`` apart at the source and ``dst_stride`` at the destination."""

    dst: int
    src: int
    nbytes: int
    rows: int = 1
    dst_stride: int = 0
    src_stride: int = 0

    def singles(self) -> Iterator[tuple[int, int, int]]:
        """(destination, source, bytes) of each row."""
        for row in range(self.rows):
            yield self.dst + row * self.dst_stride, self.src + row * self.src_stride, self.nbytes


def plan(copies: Iterable[tuple[GroupId, SlotId, SlotId]], paths: Paths, max_pitch: int) -> list[Rows]:
    """The pieces of (group, source, destination) copies, whose destinations differ.

    Adjacent slots are one piece where their bytes are contiguous on both sides, else rows of one. A stride over
    ``max_pitch`` is more than the hardware takes as rows: then every slot is a piece.
    """
    return [
        piece
        for run in runs(copies)
        for path in paths[run.group]
        for part in _within_ranges(run, path)
        for piece in _pieces(part, path, max_pitch)
    ]


def _within_ranges(run: Run, path: Path) -> Iterator[Run]:
    source, target = path.source.together, path.target.together
    src, dst, left = run.src, run.dst, run.count
    while left:
        count = min(left, source - src % source, target - dst % target)
        yield Run(run.group, src, dst, count)
        src, dst, left = SlotId(src + count), SlotId(dst + count), left - count


def _pieces(run: Run, path: Path, max_pitch: int) -> Iterator[Rows]:
    source, target, nbytes = path
    src, dst = source.start + run.src * source.stride, target.start + run.dst * target.stride
    if run.count == 1 or source.stride == target.stride == nbytes:
        yield Rows(dst, src, nbytes * run.count)
        return
    rows = Rows(dst, src, nbytes, run.count, target.stride, source.stride)
    if max(source.stride, target.stride) <= max_pitch:
        yield rows
    else:
        yield from (Rows(*single) for single in rows.singles())


class Sites:
    """``host_address``: of the host segment, unused where the cache has no host slots."""

    def __init__(self, layout: ArenaLayout, device: CudaDevice, host_address: int) -> None:
        self.layout: Final = layout
        self._device = device
        self._host_address = host_address
        groups = [GroupId(group) for group in range(len(layout.groups))]
        self._on_device = {group: self._device_places(group) for group in groups}
        on_host = {group: self._host_places(group) for group in groups}
        self._paths: dict[Direction, Paths] = {
            direction: {group: self._joined(direction, group, on_host[group]) for group in groups}
            for direction in (Direction.TO_HOST, Direction.TO_DEVICE)
        }

    def between_tiers(self, direction: Direction) -> Paths:
        """Of device and host slots."""
        return self._paths[direction]

    def to_staging(self, direction: Direction, load: Load) -> Paths:
        """Of device slots and the load's records."""
        return {group: self._joined(direction, group, load.sites(group)) for group in load.groups}

    def on_device(self, group: GroupId, stretch: Stretch) -> list[tuple[Address, int]]:
        """(address, bytes) of the bytes of a device slot's block, in order."""
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
        """The host slots, in ranges to be page-locked one after another."""
        return in_turn(
            [
                chunks_of(self._host_address + group.host_offset, group.slots[HOST], group.record_bytes)
                for group in self.layout.groups
            ]
        )

    def _device_places(self, group: GroupId) -> Sequence[Place]:
        if not self.layout.groups[group].slots[DEVICE]:
            return []
        pools = range(len(self.layout.groups[group].pools))
        first = SlotId(0)
        return [Place(self._device.address(group, pool, first), self._device.stride(group, pool)) for pool in pools]

    def _host_places(self, group: GroupId) -> Sequence[Place]:
        place = self.layout.groups[group]
        start, together = self._host_address + place.host_offset, slots_together(place.record_bytes)
        return [Place(start + pool.record_offset, place.record_bytes, together) for pool in place.pools]

    def _joined(self, direction: Direction, group: GroupId, others: Sequence[Place]) -> Sequence[Path]:
        """Of a group without device slots there are none."""
        pools = zip(self._on_device[group], others, self.layout.groups[group].pools, strict=False)
        if direction is Direction.TO_HOST:
            return [Path(device, other, pool.block_bytes) for device, other, pool in pools]
        return [Path(other, device, pool.block_bytes) for device, other, pool in pools]


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
        rows = {group: self._rows(group) for group in self._starts}
        return {one.place: (rows[one.group][one.number].data,) for one in self.numbered()}

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
