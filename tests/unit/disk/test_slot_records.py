import struct
from typing import Final, NamedTuple

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvtier.abi.control import SLOT_RECORD_BYTES
from kvtierd.core.ids import Key, Label, SlotId, Traits
from kvtierd.tiers.disk.records import decode_slots, encode_slot, order_of

KEYS = st.binary(min_size=32, max_size=32).map(Key)
U64 = st.integers(0, 2**64 - 1)
PLAIN: Final = Traits(35)


class Record(NamedTuple):
    key: Key
    parent: Key | None
    traits: Traits
    generation: int
    order: int


labels = st.builds(
    Label, event_hash=st.sampled_from([b"", b"\1" * 8, b"\2" * 32]), checksum=st.sampled_from([b"", b"\3" * 16])
).map(lambda label: None if label == Label() else label)
traits = st.builds(Traits, st.integers(0, 100), st.integers(0, 2**32 - 1), U64, labels)
records = st.builds(Record, KEYS, st.none() | KEYS, traits, U64, U64)


def read(*places: bytes, generations: list[int]) -> list[Record]:
    """What the slots hold whose places in the segment look so."""
    padded = b"".join(place.ljust(SLOT_RECORD_BYTES, b"\0") for place in places)
    rows = np.frombuffer(padded, np.uint8).reshape(-1, SLOT_RECORD_BYTES)
    found = decode_slots(rows, np.array(generations, np.uint64))
    of_slots = [generations[slot] for slot in found.slots]
    return [Record(*row) for row in zip(found.keys, found.parents, found.traits, of_slots, found.orders, strict=True)]


@given(st.lists(records, max_size=4))
def test_records_are_read_back_from_their_places(records: list[Record]) -> None:
    generations = [record.generation for record in records]
    places = [encode_slot(*record) for record in records]
    assert read(*places, generations=generations) == [record for record in records if record.generation % 2 == 0]
    packed = memoryview(b"".join(place.ljust(SLOT_RECORD_BYTES, b"\0") for place in places))
    assert [order_of(packed, SlotId(slot)) for slot in range(len(records))] == [record.order for record in records]


def test_a_record_is_without_tokens_and_scope() -> None:
    label = Label(b"\1" * 8, bytes(400), b"\3" * 16, b"scope")
    place = encode_slot(Key(bytes(32)), None, Traits(35, label=label), 2, 1)
    assert len(place) <= SLOT_RECORD_BYTES
    (found,) = read(place, generations=[2])
    assert found.traits.label == Label(label.event_hash, b"", label.checksum)


@given(records)
def test_a_record_of_another_generation_tells_nothing(record: Record) -> None:
    assert read(encode_slot(*record), generations=[(record.generation + 2) % 2**64]) == []


@given(records, records, st.integers(1, 187))
def test_a_torn_record_is_none(before: Record, after: Record, written: int) -> None:
    """Whatever part of the new one has been written over the old one when the writer died."""
    old, new = (encode_slot(*record).ljust(SLOT_RECORD_BYTES, b"\0") for record in (before, after))
    torn = new[:written] + old[written:]
    whole = [encode_slot(*record) for record in (before, after)]
    if any(torn.startswith(each) for each in whole):
        return
    (generation,) = struct.unpack_from("<Q", torn, 64)
    assert read(torn, generations=[generation]) == []


def test_a_place_never_written_holds_nothing() -> None:
    assert read(b"", generations=[0]) == []


@pytest.mark.parametrize(("at", "value"), [(40, 2), (43, 9)], ids=["version", "hash_bytes"])
def test_a_whole_record_of_values_unknown_tells_nothing(at: int, value: int) -> None:
    key = Key(bytes(32))
    place = bytearray(encode_slot(key, None, PLAIN, 2, 1))
    place[at] = value
    place[32:40] = xxhash.xxh3_64_digest(place[40:] + key)
    assert read(bytes(place), generations=[2]) == []
