"""The arena: what a local client maps of a cache, byte by byte. ABI version 3.

An arena is up to three sealed memory segments. ``control`` says where everything is; ``host`` and ``device`` hold
slots. All integers are unsigned and little-endian; all offsets count from the start of the segment they point into, and
are 0 for what is empty; all bytes not named are zero. Only the daemon writes ``control``. Sizes never change:
compare a descriptor's ``fstat`` size with the header's once, then map it whole.

Control header, 4096 bytes at offset 0::

       0    8  magic               b"KVTARENA"
       8  u32  abi_version         3
      12  u32  header_bytes        4096
      16  u64  control_bytes       size of the control segment
      24  u32  page_bytes          4096: alignment of every part in the host segment
      28  u32  (zero)
      32   32  fingerprint         of the cache's specification (kvtier.abi.spec)
      64  u64  epoch               of the daemon that made the segments
      72  u64  boot                rises with every start of the daemon; boot >= epoch
      80  u64  pid                 of the daemon
      88  u64  device_bytes        size of the device segment, 0 = the cache has none
      96  u64  host_bytes          size of the host segment, 0 = the cache has none
     104  u32  group_count         1 to 64
     108  u32  group_entry_bytes   128
     112  u64  group_table_offset
     120  u32  pool_count          of all groups together, up to 1024
     124  u32  pool_entry_bytes    64
     128  u64  pool_table_offset
     136  u64  index_offset        of the key index (kvtier.abi.key_index), 64-byte aligned
     144  u64  index_bytes         a multiple of index_bucket_bytes; 0 = there is no index: ask the daemon
     152  u32  index_bucket_bytes  512
     156  u32  index_bucket_entries  8
     160   32  index_seed          four odd u64; all zero where there is no index
    4080  u32  table_crc           CRC-32 (zlib) of header bytes 0 to 4032, then the group table, then the pool table

and, the only ones that change after creation, each by single aligned stores::

    4032  u64  event_epoch         of the event that last_event names
    4040  u64  last_event          the last event whose effect the key index shows
    4048  u64  unindexed           blocks for which the key index had no place: unless 0, what it lacks may be there
    4088  u32  state               0 opening, 1 serving, 2 closed

Group entry, 128 bytes each, at group_table_offset::

       0  u32  window_tokens       0 = full attention
       4  u32  first_pool          index of the group's first entry in the pool table
       8  u32  pool_count          its pools are consecutive
      12  u32  device_slots
      16  u32  host_slots
      20  u32  disk_slots
      24  u64  record_bytes        stride of a host slot
      32  u64  host_offset         of host slot 0; a multiple of 2 MiB
      40  u64  device_generations  offset in control: u64 x device_slots, 64-byte aligned
      48  u64  host_generations    the same for host slots
      56  u64  device_owners       offset in control: u64 x device_slots, 64-byte aligned
      64  u64  host_owners         the same for host slots
      72  u64  device_records      offset in control: 160 bytes x device_slots, 64-byte aligned
      80  u64  host_records        the same for host slots

Pool entry, 64 bytes each, at pool_table_offset::

       0  u64  block_bytes         exact bytes of a block in this pool
       8  u64  padded_bytes        rounded up to 4096; stride of a device slot
      16  u64  record_offset       of this pool's part inside a host slot
      24  u64  device_offset       of device slot 0 in this pool; a multiple of 2 MiB

Where a slot's bytes are::

    host slot s:    host segment,   host_offset   + s * record_bytes + record_offset, block_bytes long, for each pool
    device slot s:  device segment, device_offset + s * padded_bytes,                 block_bytes long, for each pool

**Generations.** One u64 a slot, changed by single aligned 8-byte stores, that only ever rises. It is even exactly while
the slot's bytes are READY, odd while they are being written or mean nothing. A fresh segment starts at
``(boot << 32) + 1``, so that no two segments of a cache ever share a value. To use bytes without a lease: read the
generation (odd: a miss), use the bytes, read it again; a change is a miss and what was read is void. This order of
loads and stores holds by itself on x86-64; other processors need a barrier on either side of the copy.

**Owners.** One u64 a slot: id of the session that leases it, to write or, the last of several, to read; 0 = nobody. A
restarted daemon reads them.

**Key index.** Which blocks there are and where, for clients that look for themselves: :mod:`kvtier.abi.key_index`.

**Records.** What each slot holds, for a restarted daemon: ``kvtier.abi.slot_records``. Of no use to clients, whose way
to a block is the key index or the daemon.
"""

from __future__ import annotations

import platform
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from kvtier.abi import records
from kvtier.abi.errors import AbiError, require_equal, require_int
from kvtier.abi.records import BUCKET_BYTES, BUCKET_ENTRIES, CHANGING_OFFSET, HEADER_BYTES
from kvtier.abi.regions import Cursor, Region, check_apart
from kvtier.abi.slot_records import SLOT_RECORD_BYTES
from kvtier.abi.spec import FINGERPRINT_BYTES, PAGE, CacheSpec, padded
from kvtier.abi.tables import (
    ABI_VERSION,
    MAGIC,
    MAX_SLOTS,
    NO_INDEX_SEED,
    RUN_ALIGNMENT,
    GroupLayout,
    PoolLayout,
    group_entry,
    odd_words,
    pool_entry,
    read_groups,
    read_header,
)
from kvtier.abi.words import ArenaState, read_state, write_state

__all__ = [
    "ABI_VERSION",
    "DEVICE",
    "DISK",
    "HEADER_BYTES",
    "HOST",
    "INDEXES_HERE",
    "MEMORY_TIERS",
    "AbiError",
    "ArenaIdentity",
    "ArenaLayout",
    "ArenaState",
    "Segment",
    "first_generation",
    "is_ready",
    "read_state",
    "write_state",
]

DEVICE: Final = 0
HOST: Final = 1
DISK: Final = 2
MEMORY_TIERS: Final = (DEVICE, HOST)
"""Tiers with a data segment, generations and owners."""

REGION_ALIGNMENT: Final = 2 << 20
"""Of every group's host slots and every pool's device slots: a huge page."""
INDEXES_HERE: Final = platform.machine() in ("x86_64", "AMD64")
"""Whether this machine's processor keeps loads and stores in the order that the key index relies on."""
Segment = NDArray[np.uint8]
"""A mapped segment: ``numpy.frombuffer(mapping, numpy.uint8)``."""


def first_generation(boot: int) -> int:
    """Where the generations of a fresh segment start: odd, and above all that earlier boots gave out."""
    return (boot << 32) + 1


def is_ready(generation: int) -> bool:
    """Whether a slot with this generation holds a block's bytes."""
    return generation % 2 == 0


@dataclass(slots=True, frozen=True)
class ArenaIdentity:
    """Whose segments these are; ``pid`` made them. Raises :class:`AbiError` for values that cannot be."""

    fingerprint: bytes
    epoch: int
    boot: int
    pid: int

    def __post_init__(self) -> None:
        require_equal("header.fingerprint length", len(self.fingerprint), FINGERPRINT_BYTES, AbiError)
        require_int("header.epoch", self.epoch, 0, 2**32 - 1, AbiError)
        require_int("header.boot", self.boot, self.epoch, 2**32 - 1, AbiError)

    @classmethod
    def read(cls, control: Segment) -> Self:
        """From a control segment that :meth:`ArenaLayout.read` has accepted."""
        header = records.HEADER.unpack_from(control.data, 0, 0)
        return cls(header["fingerprint"], header["epoch"], header["boot"], header["pid"])


@dataclass(slots=True, frozen=True)
class ArenaLayout:
    """Where everything is in a cache's segments. A value: planned by the daemon, read back by clients."""

    groups: tuple[GroupLayout, ...]
    group_table_offset: int
    pool_table_offset: int
    index_offset: int
    index_bytes: int
    control_bytes: int
    device_bytes: int
    host_bytes: int

    @classmethod
    def plan(cls, spec: CacheSpec, slots: Mapping[tuple[int, int], int], *, indexed: bool = INDEXES_HERE) -> Self:
        """Lays out an arena. ``slots`` maps (group, tier) to a count; absent = 0. Disk slots only size the key index,
        which there is if ``indexed``.

        Raises :class:`AbiError` for counts out of range and for groups or tiers that do not exist.
        """
        for (group, tier), count in slots.items():
            field = f"slots[{group}, {tier}]"
            if not 0 <= group < len(spec.groups) or tier not in (DEVICE, HOST, DISK):
                raise AbiError(field, count, "a group of the specification and a tier")
            require_int(field, count, 0, MAX_SLOTS, AbiError)

        control, device, host = Cursor(HEADER_BYTES), Cursor(0), Cursor(0)
        group_table = control.take(len(spec.groups) * records.GROUP.size, RUN_ALIGNMENT)
        pool_table = control.take(sum(len(group.pools) for group in spec.groups) * records.POOL.size, RUN_ALIGNMENT)
        counts = [
            (slots.get((group, DEVICE), 0), slots.get((group, HOST), 0), slots.get((group, DISK), 0))
            for group in range(len(spec.groups))
        ]
        groups = tuple(_plan_group(spec, group, count, control, device, host) for group, count in enumerate(counts))
        buckets = -(-sum(map(sum, counts)) * 3 // (2 * BUCKET_ENTRIES)) if indexed else 0
        index_bytes = buckets * BUCKET_BYTES
        index_offset = control.take(index_bytes, RUN_ALIGNMENT)
        return cls(
            groups=groups,
            group_table_offset=group_table,
            pool_table_offset=pool_table,
            index_offset=index_offset,
            index_bytes=index_bytes,
            control_bytes=padded(control.end),
            device_bytes=device.end,
            host_bytes=host.end,
        )

    @classmethod
    def read(cls, control: Segment) -> Self:
        """Reads a control segment back, checking everything: raises :class:`AbiError` naming the field at fault."""
        view = control.data
        if len(view) < HEADER_BYTES:
            raise AbiError("control", f"{len(view)} bytes", f"at least {HEADER_BYTES} bytes")
        header = read_header(view)
        ArenaIdentity.read(control)
        groups = read_groups(view, header)
        layout = cls(
            groups=groups,
            group_table_offset=header["group_table_offset"],
            pool_table_offset=header["pool_table_offset"],
            index_offset=header["index_offset"],
            index_bytes=header["index_bytes"],
            control_bytes=header["control_bytes"],
            device_bytes=header["device_bytes"],
            host_bytes=header["host_bytes"],
        )
        layout._check_regions()
        crc = layout._table_crc(view)
        if header["table_crc"] != crc:
            raise AbiError("header.table_crc", header["table_crc"], f"{crc}, the sum over header and tables")
        return layout

    def initialise(self, control: Segment, identity: ArenaIdentity, seed: bytes = NO_INDEX_SEED) -> None:
        """Writes header, tables and first generations into a zeroed segment. The state is then OPENING.

        ``seed``: of the key index, 32 random bytes, made odd here; not looked at where there is none.
        """
        view = control.data
        first_pool = 0
        for index, group in enumerate(self.groups):
            records.GROUP.pack_into(view, self.group_table_offset, index, group_entry(group, first_pool))
            for number, pool in enumerate(group.pools, start=first_pool):
                records.POOL.pack_into(view, self.pool_table_offset, number, pool_entry(pool))
            first_pool += len(group.pools)
        header = self._header_entry(identity, first_pool, odd_words(seed) if self.index_bytes else NO_INDEX_SEED)
        records.HEADER.pack_into(view, 0, 0, header)
        records.HEADER.pack_into(view, 0, 0, header | {"table_crc": self._table_crc(view)})
        for tier in MEMORY_TIERS:
            for number in range(len(self.groups)):
                self.generations(control, tier, number).fill(first_generation(identity.boot))

    def holds(self, spec: CacheSpec) -> bool:
        """Whether its slots have the sizes of this specification's blocks."""
        sizes = [[pool.block_bytes for pool in group.pools] for group in self.groups]
        return sizes == [
            [spec.pool_bytes(group, pool) for pool in range(len(spec.groups[group].pools))]
            for group in range(len(spec.groups))
        ]

    def data_bytes(self, tier: int) -> int:
        """Size of a memory tier's data segment; 0 = the cache has none."""
        return self.device_bytes if tier == DEVICE else self.host_bytes

    def parts(self, tier: int, group: int, slot: int) -> list[tuple[int, int]]:
        """(offset, bytes) of a slot's exact bytes in the tier's data segment, one a pool. Raises :class:`AbiError`."""
        return [(start, pool.block_bytes) for start, pool in self._places(tier, group, slot)]

    def padded_parts(self, tier: int, group: int, slot: int) -> list[tuple[int, int]]:
        """The same with padding up to the next multiple of 4096."""
        return [(start, pool.padded_bytes) for start, pool in self._places(tier, group, slot)]

    def pool_view(self, data: Segment, tier: int, group: int, pool: int, *, padding: bool = False) -> NDArray[np.uint8]:
        """All slots of a group in one pool, [slots, bytes], as a view of the tier's data segment."""
        place = self.groups[group].pools[pool]
        stride, start = self._stride_and_start(tier, group, pool)
        nbytes = place.padded_bytes if padding else place.block_bytes
        return _rows(data, self.groups[group].slots[tier], nbytes, stride, start)

    def record_view(self, data: Segment, group: int) -> NDArray[np.uint8]:
        """All host slots of a group with their padding, [slots, record bytes]: one contiguous piece."""
        place = self.groups[group]
        return _rows(data, place.slots[HOST], place.record_bytes, place.record_bytes, place.host_offset)

    def generations(self, control: Segment, tier: int, group: int) -> NDArray[np.uint64]:
        """The generations of a group's slots in a memory tier: a view, writable where the segment is."""
        place = self.groups[group]
        return np.frombuffer(control, dtype="<u8", count=place.slots[tier], offset=place.generations[tier])

    def owners(self, control: Segment, tier: int, group: int) -> NDArray[np.uint64]:
        """The owners of a group's slots in a memory tier, likewise."""
        place = self.groups[group]
        return np.frombuffer(control, dtype="<u8", count=place.slots[tier], offset=place.owners[tier])

    def slot_records(self, control: Segment, tier: int, group: int) -> NDArray[np.uint8]:
        """The records of a group's slots in a memory tier, [slots, ``SLOT_RECORD_BYTES``], likewise."""
        place = self.groups[group]
        return _rows(control, place.slots[tier], SLOT_RECORD_BYTES, SLOT_RECORD_BYTES, place.records[tier])

    def _places(self, tier: int, group: int, slot: int) -> Iterator[tuple[int, PoolLayout]]:
        if tier not in MEMORY_TIERS:
            raise AbiError("tier", tier, "device (0) or host (1)")
        if not 0 <= group < len(self.groups):
            raise AbiError("group", group, f"from 0 to {len(self.groups) - 1}")
        if not 0 <= slot < self.groups[group].slots[tier]:
            raise AbiError("slot", slot, f"below {self.groups[group].slots[tier]}")
        for number, pool in enumerate(self.groups[group].pools):
            stride, start = self._stride_and_start(tier, group, number)
            yield start + slot * stride, pool

    def _stride_and_start(self, tier: int, group: int, pool: int) -> tuple[int, int]:
        place = self.groups[group].pools[pool]
        if tier == DEVICE:
            return place.padded_bytes, place.device_offset
        return self.groups[group].record_bytes, self.groups[group].host_offset + place.record_offset

    def _header_entry(self, identity: ArenaIdentity, pool_count: int, index_seed: bytes) -> dict[str, int | bytes]:
        return {
            "magic": MAGIC,
            "abi_version": ABI_VERSION,
            "header_bytes": HEADER_BYTES,
            "control_bytes": self.control_bytes,
            "page_bytes": PAGE,
            "fingerprint": identity.fingerprint,
            "epoch": identity.epoch,
            "boot": identity.boot,
            "pid": identity.pid,
            "device_bytes": self.device_bytes,
            "host_bytes": self.host_bytes,
            "group_count": len(self.groups),
            "group_entry_bytes": records.GROUP.size,
            "group_table_offset": self.group_table_offset,
            "pool_count": pool_count,
            "pool_entry_bytes": records.POOL.size,
            "pool_table_offset": self.pool_table_offset,
            "index_offset": self.index_offset,
            "index_bytes": self.index_bytes,
            "index_bucket_bytes": BUCKET_BYTES,
            "index_bucket_entries": BUCKET_ENTRIES,
            "index_seed": index_seed,
            "event_epoch": identity.epoch,
            "last_event": 0,
            "unindexed": 0,
            "table_crc": 0,
            "state": ArenaState.OPENING,
        }

    def _table_crc(self, control: memoryview) -> int:
        crc = zlib.crc32(control[:CHANGING_OFFSET])
        for table in self._tables():
            crc = zlib.crc32(control[table.start : table.start + table.size], crc)
        return crc

    def _tables(self) -> tuple[Region, Region]:
        groups = len(self.groups) * records.GROUP.size
        pools = sum(len(group.pools) for group in self.groups) * records.POOL.size
        return (
            Region("header.group_table_offset", self.group_table_offset, groups, RUN_ALIGNMENT),
            Region("header.pool_table_offset", self.pool_table_offset, pools, RUN_ALIGNMENT),
        )

    def _check_regions(self) -> None:
        control = [
            Region("header", 0, HEADER_BYTES, PAGE),
            *self._tables(),
            Region("header.index_offset", self.index_offset, self.index_bytes, RUN_ALIGNMENT),
        ]
        device: list[Region] = []
        host: list[Region] = []
        for index, group in enumerate(self.groups):
            where = f"groups[{index}]"
            for tier, name in ((DEVICE, "device"), (HOST, "host")):
                run = group.slots[tier] * 8
                control.append(Region(f"{where}.{name}_generations", group.generations[tier], run, RUN_ALIGNMENT))
                control.append(Region(f"{where}.{name}_owners", group.owners[tier], run, RUN_ALIGNMENT))
                run = group.slots[tier] * SLOT_RECORD_BYTES
                control.append(Region(f"{where}.{name}_records", group.records[tier], run, RUN_ALIGNMENT))
            size = group.slots[HOST] * group.record_bytes
            host.append(Region(f"{where}.host_offset", group.host_offset, size, REGION_ALIGNMENT))
            record = []
            for number, pool in enumerate(group.pools):
                field = f"{where}.pools[{number}]"
                record.append(Region(f"{field}.record_offset", pool.record_offset, pool.padded_bytes, PAGE))
                size = group.slots[DEVICE] * pool.padded_bytes
                device.append(Region(f"{field}.device_offset", pool.device_offset, size, REGION_ALIGNMENT))
            check_apart(record, group.record_bytes)
        check_apart(control, self.control_bytes)
        for field, regions, size in (
            ("header.device_bytes", device, self.device_bytes),
            ("header.host_bytes", host, self.host_bytes),
        ):
            if size and not any(region.size for region in regions):
                raise AbiError(field, size, "0, for the tier has no slots")
            check_apart(regions, size)


def _plan_group(
    spec: CacheSpec, group: int, slots: tuple[int, int, int], control: Cursor, device: Cursor, host: Cursor
) -> GroupLayout:
    pools = []
    record = Cursor(0)
    for pool in range(len(spec.groups[group].pools)):
        exact = spec.pool_bytes(group, pool)
        place = PoolLayout(
            block_bytes=exact,
            padded_bytes=padded(exact),
            record_offset=record.take(padded(exact), PAGE),
            device_offset=device.take(slots[DEVICE] * padded(exact), REGION_ALIGNMENT),
        )
        pools.append(place)
    return GroupLayout(
        window_tokens=spec.groups[group].window_tokens,
        slots=slots,
        record_bytes=record.end,
        host_offset=host.take(slots[HOST] * record.end, REGION_ALIGNMENT),
        generations=(control.take(slots[DEVICE] * 8, RUN_ALIGNMENT), control.take(slots[HOST] * 8, RUN_ALIGNMENT)),
        owners=(control.take(slots[DEVICE] * 8, RUN_ALIGNMENT), control.take(slots[HOST] * 8, RUN_ALIGNMENT)),
        records=(
            control.take(slots[DEVICE] * SLOT_RECORD_BYTES, RUN_ALIGNMENT),
            control.take(slots[HOST] * SLOT_RECORD_BYTES, RUN_ALIGNMENT),
        ),
        pools=tuple(pools),
    )


def _rows(data: Segment, count: int, nbytes: int, stride: int, start: int) -> NDArray[np.uint8]:
    if not count:
        return np.empty((0, nbytes), dtype=np.uint8)
    return np.ndarray((count, nbytes), dtype=np.uint8, buffer=data, offset=start, strides=(stride, 1))
