from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.abi.errors import AbiError
from kvtier.abi.slot_records import SLOT_RECORD_BYTES, SlotRecord

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
)


@given(records)
def test_a_record_is_read_back_from_its_place(record: SlotRecord) -> None:
    place = bytearray(SLOT_RECORD_BYTES)
    place[: len(record.pack())] = record.pack()
    assert SlotRecord.unpack(memoryview(place)) == record


@given(records, records, st.integers(1, 131))
def test_a_torn_record_is_none(before: SlotRecord, after: SlotRecord, written: int) -> None:
    """Whatever part of the new one has been written over the old one when the writer died."""
    old, new = before.pack(), after.pack()
    torn = new[:written] + old[written:]
    if torn in (old, new):
        return
    with pytest.raises(AbiError, match=r"record\.crc"):
        SlotRecord.unpack(torn)


def test_a_place_never_written_holds_nothing() -> None:
    with pytest.raises(AbiError, match=r"record\.crc"):
        SlotRecord.unpack(bytes(SLOT_RECORD_BYTES))
