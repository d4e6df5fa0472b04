"""The on-disk formats are pinned: a daemon reads what an earlier one wrote."""

from typing import Any

import numpy as np
import pytest
import xxhash
from numpy.typing import NDArray

from kvtierd.core.ids import MAX_TOKEN_BYTES, Key, Label, SlotId, Traits
from kvtierd.tiers.disk import records
from kvtierd.tiers.disk.records import checksum
from tests.unit.disk.disk_blocks import buffers, parts_of

PARENT = Key(bytes(range(32)))
PLACED = bytes.fromhex(
    "07000000 0500000000000000 0030000000000000"
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
    "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
)
KEY = Key(bytes(range(100, 132)))
BARE = bytes.fromhex("c6dcdc2afc7f8545 01 01 23 00") + PLACED + bytes(20)
FULL = (
    bytes.fromhex("81634a1eda0c38f6 01 01 5a 08")
    + PLACED
    + bytes.fromhex("0c000000 05000000 e8030000 0010a5d4e8000000")
    + b"\x11\x22\x33\x44\x55\x66\x77\x88"
    + b"three tokens"
    + b"scope"
)
PLACE = (SlotId(7), 5, 12288, b"\xaa" * 16)
TRAITS = Traits(90, 1000, 1_000_000_000_000, Label(bytes.fromhex("1122334455667788"), b"three tokens", scope=b"scope"))


def decoded(values: list[bytes]) -> list[Traits]:
    return records.traits_of(decode(values), values, np.arange(len(values)))


def decode(values: list[bytes]) -> NDArray[Any]:
    return records.decode_records([KEY] * len(values), values)


def sealed(body: bytes) -> bytes:
    return xxhash.xxh3_64_digest(body + KEY) + body


def test_a_record_has_the_documented_bytes() -> None:
    assert records.encode_record(KEY, *PLACE, PARENT, Traits(35)) == BARE
    assert records.encode_record(KEY, *PLACE, PARENT, TRAITS) == FULL
    assert (sealed(BARE[8:]), sealed(FULL[8:])) == (BARE, FULL)


def test_records_decode_together() -> None:
    root = records.encode_record(KEY, SlotId(1), 2**40, 4096, bytes(16), None, Traits(90))
    rows = decode([BARE, b"too short", root, FULL])
    assert rows["version"].tolist() == [1, 0, 1, 1]
    assert rows["slot"].tolist() == [7, 0, 1, 7]
    assert rows["last_use"].tolist() == [5, 0, 2**40, 5]
    assert rows["size"].tolist() == [12288, 0, 4096, 12288]
    assert rows["checksum"].tolist() == [b"\xaa" * 16, bytes(16), bytes(16), b"\xaa" * 16]
    assert records.parents_of(rows) == [PARENT, None, None, PARENT]
    assert decoded([FULL, BARE]) == [TRAITS, Traits(35)]


def test_a_label_of_each_kind_comes_back() -> None:
    labels = [
        Label(bytes(range(32))),
        Label(tokens=b"tokens", checksum=bytes(range(16))),
        Label(bytes(range(8)), bytes(MAX_TOKEN_BYTES)),
        Label(tokens=b"tokens", checksum=bytes(range(16)), scope=b"scope"),
    ]
    values = [records.encode_record(KEY, *PLACE, None, Traits(35, label=label)) for label in labels]
    assert [traits.label for traits in decoded(values)] == labels


@pytest.mark.parametrize("value", [FULL, BARE])
def test_a_record_with_any_bit_flipped_is_none(value: bytes) -> None:
    damaged = [flipped(value, bit) for bit in range(8 * len(value))]
    assert not decode(damaged)["version"].any()
    assert not records.decode_records([Key(flipped(KEY, bit)) for bit in range(256)], [value] * 256)["version"].any()
    restated = [records.restated(KEY, one, Traits(7)) for one in damaged]
    assert not decode(restated)["version"].any(), "a new priority makes none of them true"


def flipped(value: bytes, bit: int) -> bytes:
    damaged = bytearray(value)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


BODY = BARE[8:]
ODD_HASH = BODY[:3] + b"\x05" + BODY[4:] + b"12345"


@pytest.mark.parametrize("body", [FULL[8:-1], FULL[8:] + b"x", BODY[:-1], BODY + b"x", b"\x02" + BODY[1:], ODD_HASH])
def test_what_is_not_as_long_as_it_says_or_of_another_version_is_no_record(body: bytes) -> None:
    assert decode([sealed(body)])["version"].tolist() == [0]


@pytest.mark.parametrize("value", [FULL, BARE])
def test_a_restated_record_changes_in_nothing_but_what_was_stated(value: bytes) -> None:
    restated = records.restated(KEY, value, Traits(7, 5, 9))
    before, (after,) = decode([value]), decode([restated])
    assert decoded([restated]) == [Traits(7, 5, 9, decoded([value])[0].label)]
    for name in ("flags", "slot", "last_use", "size", "checksum", "parent"):
        assert after[name] == before[0][name]


def test_touches_have_the_documented_bytes() -> None:
    values = list(records.encode_touches([SlotId(3), SlotId(1)], first=9))
    assert values == [bytes.fromhex("6a7607c532273f18 0900000000000000 03000000 01000000")]


def test_damaged_touches_say_nothing() -> None:
    (value,) = records.encode_touches([SlotId(3)], first=9)
    for odd in (b"", value[:5], value[:-1], *(flipped(value, bit) for bit in range(8 * len(value)))):
        slots, counters = records.decode_touches(odd)
        assert len(slots) == len(counters) == 0


def test_the_checksum_is_xxh3_128_of_the_bytes_in_order() -> None:
    parts = parts_of(buffers((4096, 4096)))
    assert checksum(parts, Key(bytes(32)), bytes(32)).hex() == "4c0aff5f7ac8642060401269e023867c"
