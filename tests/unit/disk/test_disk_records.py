"""The on-disk formats: pinned, because a daemon reads what an older one wrote."""

from __future__ import annotations

import numpy as np

from kvtierd.core.ids import Key, SlotId
from kvtierd.tiers.disk import records
from kvtierd.tiers.disk.checksum import checksum
from tests.unit.disk.disk_blocks import FINGERPRINT, buffers, key, payload

PARENT = Key(bytes(range(32)))
RECORD = bytes.fromhex(
    "01 01 23 00 07000000 0500000000000000 0030000000000000"
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
    "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
)


def test_a_record_has_the_documented_bytes() -> None:
    assert records.encode_record(SlotId(7), PARENT, 35, 5, 12288, b"\xaa" * 16) == RECORD


def test_records_decode_together() -> None:
    root = records.encode_record(SlotId(1), None, 90, 2**40, 4096, b"\x00" * 16)
    rows = records.decode_records([RECORD, b"too short", root])
    assert rows["version"].tolist() == [1, 0, 1]
    assert rows["slot"].tolist() == [7, 0, 1]
    assert rows["last_use"].tolist() == [5, 0, 2**40]
    assert rows["size"].tolist() == [12288, 0, 4096]
    assert rows["priority"].tolist() == [35, 0, 90]
    assert rows["checksum"].tolist() == [b"\xaa" * 16, bytes(16), bytes(16)]
    assert records.parents_of(rows) == [PARENT, None, None]


def test_touches_have_the_documented_bytes() -> None:
    values = list(records.encode_touches([SlotId(3), SlotId(1)], first=9))
    assert values == [bytes.fromhex("01 00000000000000 0900000000000000 03000000 01000000")]


def test_touches_split_over_values_that_fit_half_a_page() -> None:
    slots = [SlotId(n) for n in range(2000)]
    values = list(records.encode_touches(slots, first=100))
    assert len(values) > 1
    assert max(map(len, values)) < 2000
    decoded = [records.decode_touches(value) for value in values]
    assert np.concatenate([found for found, _ in decoded]).tolist() == slots
    assert np.concatenate([counters for _, counters in decoded]).tolist() == list(range(100, 2100))


def test_touches_of_another_version_or_length_say_nothing() -> None:
    (value,) = records.encode_touches([SlotId(3)], first=9)
    for odd in (b"", value[:5], value[:-1], b"\x02" + value[1:]):
        slots, counters = records.decode_touches(odd)
        assert len(slots) == len(counters) == 0


def test_recency_round_trip() -> None:
    table = np.arange(1000, dtype=np.uint64) + 2**40
    entries = list(records.encode_recency(table))
    assert [int.from_bytes(place, "big") for place, _ in entries] == list(range(0, 1000, records.RECENCY_SLOTS))
    assert max(len(value) for _, value in entries) < 2000
    assert np.concatenate([records.decode_recency(value) for _, value in entries]).tolist() == table.tolist()


def test_the_checksum_covers_every_part_the_key_and_the_fingerprint() -> None:
    parts = payload(key(1))
    right = checksum(parts, key(1), FINGERPRINT)
    assert right == checksum(payload(key(1)), key(1), FINGERPRINT)
    assert len(right) == 16
    others = {checksum(parts, key(2), FINGERPRINT), checksum(parts, key(1), bytes(32))}
    for part in parts:
        for place in (0, len(part) - 1):
            part[place] ^= 1
            others.add(checksum(parts, key(1), FINGERPRINT))
            part[place] ^= 1
    assert len(others) == 6
    assert right not in others


def test_the_checksum_is_xxh3_128_of_the_bytes_in_order() -> None:
    parts = buffers((4096, 4096))
    assert checksum(parts, Key(bytes(32)), bytes(32)).hex() == "4c0aff5f7ac8642060401269e023867c"
