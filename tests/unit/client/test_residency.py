"""The residency table: events alone give the state, and applying one twice gives nothing new."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvtier.events import Event, Gap, SnapshotSlice, SnapshotStart, WatchItem
from kvtier.residency import Mismatch, ResidencyTable
from kvtier.types import Cause, EventType, Tier

KEYS = [hashlib.sha256(bytes([n])).digest() for n in range(6)]
DEVICE, HOST, DISK = (tier.bit for tier in Tier)


def event(kind: EventType, keys: list[bytes], residency: int = 0, cache: str = "c") -> Event:
    return Event(
        epoch=1,
        event_id=1,
        type=kind,
        cause=Cause.COMMIT,
        cache=cache,
        group=0,
        time_ns=0,
        packed_keys=b"".join(keys),
        residency=bytes([residency] * len(keys)),
    )


def table_of(*items: WatchItem) -> ResidencyTable:
    table = ResidencyTable()
    for item in items:
        table.apply(item)
    return table


def test_a_block_is_followed_through_its_life() -> None:
    table = table_of(event(EventType.STORED, KEYS[:2], DEVICE))
    assert table.blocks("c") == {KEYS[0]: DEVICE, KEYS[1]: DEVICE}
    table.apply(event(EventType.UPDATED, KEYS[:1], DEVICE | DISK))
    assert table.blocks("c") == {KEYS[0]: DEVICE | DISK, KEYS[1]: DEVICE}
    table.apply(event(EventType.REMOVED, KEYS[1:2]))
    assert table.blocks("c") == {KEYS[0]: DEVICE | DISK}


def test_cleared_and_created_empty_their_group_only() -> None:
    for kind in (EventType.CLEARED, EventType.CREATED):
        table = table_of(event(EventType.STORED, KEYS, DEVICE), event(EventType.STORED, KEYS, HOST, cache="other"))
        table.apply(event(kind, []))
        assert table.blocks("c") == {}
        assert len(table.blocks("other")) == len(KEYS)


def test_removing_what_is_not_there_is_no_error() -> None:
    # A fuzzy snapshot is followed by events older than its slices.
    assert table_of(event(EventType.REMOVED, KEYS)).blocks("c") == {}


def test_a_snapshot_that_begins_anew_forgets_the_one_before() -> None:
    slice_ = SnapshotSlice("c", 0, b"".join(KEYS[:2]), bytes(64), bytes([HOST, DISK]), bytes(2))
    table = table_of(event(EventType.STORED, KEYS, DEVICE), SnapshotStart(), slice_)
    assert table.blocks("c") == {KEYS[0]: HOST, KEYS[1]: DISK}


def test_gaps_say_nothing_about_blocks() -> None:
    table = table_of(event(EventType.STORED, KEYS, DEVICE), Gap(1, 2, 9, "slow"))
    assert len(table.blocks("c")) == len(KEYS)


def test_differences_name_the_blocks_and_both_opinions() -> None:
    table = table_of(event(EventType.STORED, KEYS[:3], DEVICE))
    listed = {KEYS[0]: DEVICE, KEYS[1]: DEVICE | HOST, KEYS[3]: DISK}
    assert table.differences("c", 0, listed) == sorted(
        [
            Mismatch(KEYS[1], DEVICE, DEVICE | HOST),
            Mismatch(KEYS[2], DEVICE, None),
            Mismatch(KEYS[3], None, DISK),
        ],
        key=lambda mismatch: mismatch.key,
    )
    assert table.differences("c", 0, dict(table.blocks("c"))) == []


CHANGES = st.tuples(
    st.sampled_from([EventType.STORED, EventType.UPDATED, EventType.REMOVED]),
    st.lists(st.sampled_from(KEYS), min_size=1, unique=True),
    st.integers(1, 7),
)


@given(st.lists(CHANGES, max_size=20))
def test_applying_each_event_twice_changes_nothing(changes: list[tuple[EventType, list[bytes], int]]) -> None:
    events = [event(*change) for change in changes]
    once = table_of(*events)
    twice = table_of(*[each for one in events for each in (one, replace(one))])
    assert once.blocks("c") == twice.blocks("c")


@given(st.lists(CHANGES, max_size=20), st.data())
def test_a_snapshot_taken_anywhere_and_followed_by_older_events_ends_exact(
    changes: list[tuple[EventType, list[bytes], int]], data: st.DataObject
) -> None:
    """The daemon's fuzzy snapshot: a cursor first, slices of later states, then all events after the cursor."""
    events = [event(*change) for change in changes]
    cursor = data.draw(st.integers(0, len(events)))
    table = ResidencyTable()
    table.apply(SnapshotStart())
    for key in KEYS:
        seen_at = data.draw(st.integers(cursor, len(events)))
        residency = table_of(*events[:seen_at]).blocks("c").get(key)
        if residency is not None:
            table.apply(SnapshotSlice("c", 0, key, bytes(32), bytes([residency]), bytes(1)))
    for each in events[cursor:]:
        table.apply(each)
    assert table.blocks("c") == table_of(*events).blocks("c")
