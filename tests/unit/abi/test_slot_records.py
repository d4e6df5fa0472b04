import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.abi.control import SLOT_RECORD_BYTES, SlotContents, SlotRecord

KEYS = st.binary(min_size=32, max_size=32)
U64 = st.integers(0, 2**64 - 1)

records = st.builds(
    SlotRecord,
    key=KEYS,
    parent=st.none() | KEYS,
    priority=st.integers(0, 100),
    duration_ms=st.integers(0, 2**32 - 1),
    deadline_ns=U64,
    event_hash=st.sampled_from([b"", b"\1" * 8, b"\2" * 32]),
    generation=U64,
    order=U64,
    checksum=st.sampled_from([b"", b"\3" * 16]),
)


def read(*places, generations):
    """What the slots hold whose places in the segment look so."""
    padded = b"".join(place.ljust(SLOT_RECORD_BYTES, b"\0") for place in places)
    rows = np.frombuffer(padded, np.uint8).reshape(-1, SLOT_RECORD_BYTES)
    found = SlotContents.read(rows, np.array(generations, np.uint64))
    return [
        SlotRecord(key, parent, priority, duration, deadline, event_hash, generations[slot], order, checksum)
        for slot, key, parent, priority, duration, deadline, event_hash, order, checksum in zip(
            found.slots,
            found.keys,
            found.parents,
            found.priorities,
            found.durations_ms,
            found.deadlines_ns,
            found.event_hashes,
            found.orders,
            found.checksums,
            strict=True,
        )
    ]


@given(st.lists(records, max_size=4))
def test_records_are_read_back_from_their_places(records):
    generations = [record.generation for record in records]
    places = [record.pack() for record in records]
    assert read(*places, generations=generations) == [record for record in records if record.generation % 2 == 0]


@given(records)
def test_a_record_of_another_generation_tells_nothing(record):
    assert read(record.pack(), generations=[(record.generation + 2) % 2**64]) == []


@given(records, records, st.integers(1, 147))
def test_a_torn_record_is_none(before, after, written):
    """Whatever part of the new one has been written over the old one when the writer died."""
    old, new = before.pack(), after.pack()
    torn = new[:written] + old[written:]
    if torn in (old, new):
        return
    (generation,) = struct.unpack_from("<Q", torn, 96)
    assert read(torn, generations=[generation]) == []


def test_a_place_never_written_holds_nothing():
    assert read(b"", generations=[0]) == []


@pytest.mark.parametrize(("at", "value"), [(124, 2), (126, 9)], ids=["flags", "event_hash_bytes"])
def test_a_whole_record_of_values_unknown_tells_nothing(at, value):
    body = bytearray(SlotRecord(bytes(32), None, 35, 0, 0, b"", 2, 1, b"").pack()[:144])
    body[at] = value
    assert read(bytes(body) + struct.pack("<I", zlib.crc32(body)), generations=[2]) == []


def test_more_records_than_are_read_at_a_time():
    count = 40_000
    packed = [SlotRecord(slot.to_bytes(32, "big"), None, 35, 0, 0, b"", 2, slot, b"").pack() for slot in range(count)]
    assert [record.order for record in read(*packed, generations=[2] * count)] == list(range(count))
