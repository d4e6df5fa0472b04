"""Where a cache's slots are: addresses of the device pool, of the host segment, and of staged records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from kvtier.abi.cuda.driver import Address, Direction, Driver
from kvtier.abi.layout import ArenaLayout
from kvtierd.core.ids import DEVICE, HOST, GroupId, SlotId
from kvtierd.mover.cuda.loads import Load
from kvtierd.mover.cuda.pagelocks import Chunk, chunks_of, in_turn, slots_together
from kvtierd.mover.cuda.plan import Path, Paths, Place
from kvtierd.mover.runtime import Stretch


class DevicePool(Protocol):
    """The device tier's memory."""

    @property
    def driver(self) -> Driver: ...

    def address(self, group: GroupId, pool: int, slot: SlotId) -> Address: ...

    def stride(self, group: GroupId, pool: int) -> int:
        """Bytes from a slot's part to the next one's."""
        ...


class Sites:
    """``host_address``: of the host segment, unused where the cache has no host slots."""

    def __init__(self, layout: ArenaLayout, device: DevicePool, host_address: int) -> None:
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
