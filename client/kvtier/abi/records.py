"""The records of a control segment: the tables in the docstring of ``kvtier.abi.layout``, as data."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, Final

from kvtier.abi.errors import AbiError

HEADER_BYTES: Final = 4096
CHANGING_OFFSET: Final = 4032
"""From here on header bytes change while the arena lives, so the sum over the header ends here."""
EVENT_EPOCH_OFFSET: Final = 4032
LAST_EVENT_OFFSET: Final = 4040
UNINDEXED_OFFSET: Final = 4048
TABLE_CRC_OFFSET: Final = 4080
STATE_OFFSET: Final = 4088
INDEX_SEED_BYTES: Final = 32
BUCKET_BYTES: Final = 512
"""Of the key index; ``kvtier.abi.key_index`` says what stands in one."""
BUCKET_ENTRIES: Final = 8


class Record:
    """A fixed-size record of named little-endian fields; bytes between them are zero."""

    def __init__(self, name: str, size: int, fields: Mapping[str, tuple[int, str]]) -> None:
        self.name = name
        self.size = size
        self._fields = {field: (offset, struct.Struct(f"<{code}")) for field, (offset, code) in fields.items()}

    def pack_into(self, data: memoryview, table: int, index: int, values: Mapping[str, int | bytes]) -> None:
        """Writes record ``index`` of the table that starts at ``table``, into zeroed memory."""
        start = table + index * self.size
        for field, (offset, code) in self._fields.items():
            code.pack_into(data, start + offset, values[field])

    def unpack_from(self, data: memoryview, table: int, index: int) -> dict[str, Any]:
        """Reads it back. Raises :class:`AbiError` where a byte that has no name is not zero."""
        start = table + index * self.size
        rest = bytearray(data[start : start + self.size])
        values: dict[str, Any] = {}
        for field, (offset, code) in self._fields.items():
            (values[field],) = code.unpack_from(data, start + offset)
            rest[offset : offset + code.size] = bytes(code.size)
        if any(rest):
            raise AbiError(f"{self.name}.reserved", "bytes that have no name", "zero in this ABI version")
        return values


HEADER: Final = Record(
    "header",
    HEADER_BYTES,
    {
        "magic": (0, "8s"),
        "abi_version": (8, "I"),
        "header_bytes": (12, "I"),
        "control_bytes": (16, "Q"),
        "page_bytes": (24, "I"),
        "fingerprint": (32, "32s"),
        "epoch": (64, "Q"),
        "boot": (72, "Q"),
        "pid": (80, "Q"),
        "device_bytes": (88, "Q"),
        "host_bytes": (96, "Q"),
        "group_count": (104, "I"),
        "group_entry_bytes": (108, "I"),
        "group_table_offset": (112, "Q"),
        "pool_count": (120, "I"),
        "pool_entry_bytes": (124, "I"),
        "pool_table_offset": (128, "Q"),
        "index_offset": (136, "Q"),
        "index_bytes": (144, "Q"),
        "index_bucket_bytes": (152, "I"),
        "index_bucket_entries": (156, "I"),
        "index_seed": (160, "32s"),
        "event_epoch": (EVENT_EPOCH_OFFSET, "Q"),
        "last_event": (LAST_EVENT_OFFSET, "Q"),
        "unindexed": (UNINDEXED_OFFSET, "Q"),
        "table_crc": (TABLE_CRC_OFFSET, "I"),
        "state": (STATE_OFFSET, "I"),
    },
)
GROUP: Final = Record(
    "group",
    128,
    {
        "window_tokens": (0, "I"),
        "first_pool": (4, "I"),
        "pool_count": (8, "I"),
        "device_slots": (12, "I"),
        "host_slots": (16, "I"),
        "disk_slots": (20, "I"),
        "record_bytes": (24, "Q"),
        "host_offset": (32, "Q"),
        "device_generations": (40, "Q"),
        "host_generations": (48, "Q"),
        "device_owners": (56, "Q"),
        "host_owners": (64, "Q"),
        "device_records": (72, "Q"),
        "host_records": (80, "Q"),
    },
)
POOL: Final = Record(
    "pool",
    64,
    {"block_bytes": (0, "Q"), "padded_bytes": (8, "Q"), "record_offset": (16, "Q"), "device_offset": (24, "Q")},
)
