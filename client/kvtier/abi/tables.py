"""The header and the tables of a control segment, as values: what the daemon writes, and what readers check.

The bytes are those in the docstring of :mod:`kvtier.abi.layout`; where things are in the segments that the tables point
into, and whether they are apart, is that module's business.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final

from kvtier.abi import records
from kvtier.abi.errors import AbiError, require_equal, require_int
from kvtier.abi.records import BUCKET_BYTES, BUCKET_ENTRIES, HEADER_BYTES, INDEX_SEED_BYTES
from kvtier.abi.regions import check_place
from kvtier.abi.spec import PAGE, padded
from kvtier.abi.words import as_state

ABI_VERSION: Final = 3
MAGIC: Final = b"KVTARENA"

RUN_ALIGNMENT: Final = 64
"""Of everything in ``control``: a cache line."""
NO_INDEX_SEED: Final = bytes(INDEX_SEED_BYTES)
MAX_GROUPS: Final = 64
MAX_POOLS: Final = 1024
MAX_SLOTS: Final = 2**31 - 1
"""Per group and tier: slot numbers travel as u32."""


@dataclass(slots=True, frozen=True)
class PoolLayout:
    """One pool of a group. ``record_offset`` is inside a host slot, ``device_offset`` inside the device segment."""

    block_bytes: int
    padded_bytes: int
    record_offset: int
    device_offset: int


@dataclass(slots=True, frozen=True)
class GroupLayout:
    """One window group. Tuples by tier have device first; ``slots`` counts the disk's too."""

    window_tokens: int
    slots: tuple[int, int, int]
    record_bytes: int
    host_offset: int
    generations: tuple[int, int]
    owners: tuple[int, int]
    records: tuple[int, int]
    pools: tuple[PoolLayout, ...]


def group_entry(group: GroupLayout, first_pool: int) -> dict[str, int | bytes]:
    device_slots, host_slots, disk_slots = group.slots
    return {
        "window_tokens": group.window_tokens,
        "first_pool": first_pool,
        "pool_count": len(group.pools),
        "device_slots": device_slots,
        "host_slots": host_slots,
        "disk_slots": disk_slots,
        "record_bytes": group.record_bytes,
        "host_offset": group.host_offset,
        "device_generations": group.generations[0],
        "host_generations": group.generations[1],
        "device_owners": group.owners[0],
        "host_owners": group.owners[1],
        "device_records": group.records[0],
        "host_records": group.records[1],
    }


def pool_entry(pool: PoolLayout) -> dict[str, int | bytes]:
    return {
        "block_bytes": pool.block_bytes,
        "padded_bytes": pool.padded_bytes,
        "record_offset": pool.record_offset,
        "device_offset": pool.device_offset,
    }


def read_header(control: memoryview) -> dict[str, Any]:
    """By field, all but the sum over it checked. Raises :class:`AbiError` naming the field at fault."""
    magic, version = struct.unpack_from("<8sI", control)
    # Magic and version first: no other field means anything before they are right.
    require_equal("header.magic", magic, MAGIC, AbiError)
    require_equal("header.abi_version", version, ABI_VERSION, AbiError)
    header = records.HEADER.unpack_from(control, 0, 0)
    fixed = {
        "header_bytes": HEADER_BYTES,
        "page_bytes": PAGE,
        "group_entry_bytes": records.GROUP.size,
        "pool_entry_bytes": records.POOL.size,
        "index_bucket_bytes": BUCKET_BYTES,
        "index_bucket_entries": BUCKET_ENTRIES,
    }
    for field, value in fixed.items():
        require_equal(f"header.{field}", header[field], value, AbiError)
    require_int("header.control_bytes", header["control_bytes"], HEADER_BYTES, len(control), AbiError)
    require_int("header.group_count", header["group_count"], 1, MAX_GROUPS, AbiError)
    require_int("header.pool_count", header["pool_count"], header["group_count"], MAX_POOLS, AbiError)
    if header["index_bytes"] % BUCKET_BYTES:
        raise AbiError("header.index_bytes", header["index_bytes"], f"a multiple of {BUCKET_BYTES}")
    _check_seed(header["index_seed"], indexed=header["index_bytes"] > 0)
    for table, count in (("group", header["group_count"]), ("pool", header["pool_count"])):
        size = count * header[f"{table}_entry_bytes"]
        field = f"{table}_table_offset"
        check_place(f"header.{field}", header[field], size, RUN_ALIGNMENT, header["control_bytes"])
    as_state(header["state"])
    return header


def read_groups(control: memoryview, header: dict[str, Any]) -> tuple[GroupLayout, ...]:
    """Both tables, each entry checked by itself. Raises :class:`AbiError` naming the field at fault."""
    groups: list[GroupLayout] = []
    first_pool = 0
    for index in range(header["group_count"]):
        where = f"groups[{index}]"
        entry = records.GROUP.unpack_from(control, header["group_table_offset"], index)
        require_equal(f"{where}.first_pool", entry["first_pool"], first_pool, AbiError)
        require_int(f"{where}.pool_count", entry["pool_count"], 1, header["pool_count"] - first_pool, AbiError)
        pools = tuple(
            _read_pool(control, header, f"{where}.pools[{number}]", first_pool + number)
            for number in range(entry["pool_count"])
        )
        first_pool += len(pools)
        groups.append(
            GroupLayout(
                window_tokens=entry["window_tokens"],
                slots=(entry["device_slots"], entry["host_slots"], entry["disk_slots"]),
                record_bytes=entry["record_bytes"],
                host_offset=entry["host_offset"],
                generations=(entry["device_generations"], entry["host_generations"]),
                owners=(entry["device_owners"], entry["host_owners"]),
                records=(entry["device_records"], entry["host_records"]),
                pools=pools,
            )
        )
        for field in ("device_slots", "host_slots", "disk_slots"):
            require_int(f"{where}.{field}", entry[field], 0, MAX_SLOTS, AbiError)
        require_equal(
            f"{where}.record_bytes", entry["record_bytes"], sum(pool.padded_bytes for pool in pools), AbiError
        )
    require_equal("header.pool_count", header["pool_count"], first_pool, AbiError)
    return tuple(groups)


def _read_pool(control: memoryview, header: dict[str, Any], where: str, number: int) -> PoolLayout:
    entry = records.POOL.unpack_from(control, header["pool_table_offset"], number)
    require_int(f"{where}.block_bytes", entry["block_bytes"], 1, 2**48, AbiError)
    require_equal(f"{where}.padded_bytes", entry["padded_bytes"], padded(entry["block_bytes"]), AbiError)
    return PoolLayout(**entry)


def odd_words(seed: bytes) -> bytes:
    """The seed with each of its four words made odd."""
    return bytes(byte | 1 if at % 8 == 0 else byte for at, byte in enumerate(seed))


def _check_seed(seed: bytes, *, indexed: bool) -> None:
    """Each of the four words is a multiplier that must lose nothing."""
    if not indexed:
        require_equal("header.index_seed", seed, NO_INDEX_SEED, AbiError)
    elif not all(seed[at] % 2 for at in range(0, INDEX_SEED_BYTES, 8)):
        raise AbiError("header.index_seed", seed.hex(), "four odd numbers")
