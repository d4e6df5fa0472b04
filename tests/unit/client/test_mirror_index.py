"""A mirror's index: events in any doubling give the state, and prefixes are what the definition says."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import DaemonError
from kvtier.events import Event, SnapshotSlice
from kvtier.mirror.index import ALL_TIERS, MirroredBlock, MirrorIndex
from kvtier.types import Cause, EventType, Tier
from tests.unit.client.windows import (
    FLAT,
    FULL,
    KEYS,
    LENGTH,
    PACKED,
    SINKS,
    TOKENS,
    WINDOWS,
    holdings,
    longest,
    needed,
)

GROUPS: Final = [("a", 0), ("a", 1), ("b", 0)]

State = dict[tuple[str, int], dict[bytes, tuple[int, int]]]


def event(kind: EventType, where: tuple[str, int], rows: Sequence[tuple[bytes, int, int]] = ()) -> Event:
    """``rows``: key, residency, priority."""
    return Event(
        epoch=1,
        event_id=1,
        type=kind,
        cause=Cause.COMMIT,
        cache=where[0],
        group=where[1],
        time_ns=0,
        packed_keys=b"".join(key for key, _, _ in rows),
        residency=bytes(residency for _, residency, _ in rows),
        priorities=bytes(priority for _, _, priority in rows),
        tokens_per_block=TOKENS,
        all_window_tokens=(0,) * sum(cache == where[0] for cache, _ in GROUPS),
    )


def slice_of(where: tuple[str, int], rows: Sequence[tuple[bytes, int, int]]) -> SnapshotSlice:
    like = event(EventType.STORED, where, rows)
    return SnapshotSlice(
        cache=like.cache,
        group=like.group,
        packed_keys=like.packed_keys,
        packed_parents=bytes(32 * len(rows)),
        residency=like.residency,
        priorities=like.priorities,
        tokens_per_block=TOKENS,
        all_window_tokens=like.all_window_tokens,
    )


def model(events: Sequence[Event]) -> State:
    """The same, a block at a time."""
    state: State = {where: {} for where in GROUPS}
    for each in events:
        blocks = state[each.cache, each.group]
        if each.type in (EventType.CREATED, EventType.CLEARED):
            blocks.clear()
        for place, key in enumerate(each.keys):
            blocks.pop(key, None)
            if each.type is not EventType.REMOVED:
                blocks[key] = each.residency[place], each.priorities[place]
    return state


def state_of(indexes: dict[str, MirrorIndex]) -> State:
    return {
        (cache, group): {key: (residency, priority) for key, residency, priority in indexes[cache].blocks(group)}
        for cache, group in GROUPS
    }


rows = st.lists(
    st.tuples(st.sampled_from(KEYS[:8]), st.integers(1, 7), st.integers(0, 100)),
    min_size=1,
    unique_by=lambda row: row[0],
)
changes = st.builds(
    event, st.sampled_from([EventType.STORED, EventType.UPDATED, EventType.REMOVED]), st.sampled_from(GROUPS), rows
)
marks = st.builds(event, st.sampled_from([EventType.CREATED, EventType.CLEARED]), st.sampled_from(GROUPS))
streams = st.lists(st.one_of(changes, changes, changes, marks), max_size=25)


@given(streams, st.data())
def test_events_give_the_state_however_often_each_is_applied(events: list[Event], data: st.DataObject) -> None:
    indexes = {cache: MirrorIndex() for cache, _ in GROUPS}
    for each in events:
        for _ in range(data.draw(st.integers(1, 2))):
            indexes[each.cache].apply(replace(each))
    truth = model(events)
    assert state_of(indexes) == truth
    assert sum(map(len, indexes.values())) == sum(map(len, truth.values()))
    for (cache, group), blocks in truth.items():
        for key in KEYS[:8]:
            expected = MirroredBlock(key, *blocks[key]) if key in blocks else None
            assert indexes[cache].get(group, key) == expected


@given(streams, st.data())
def test_a_snapshot_taken_while_events_happen_ends_exact(events: list[Event], data: st.DataObject) -> None:
    """A cursor first, then slices, some twice, of states after it, then every event after the cursor."""
    cursor = data.draw(st.integers(0, len(events)))
    indexes = {cache: MirrorIndex() for cache, _ in GROUPS}
    for where in GROUPS:
        index = indexes[where[0]]
        index.apply(slice_of(where, []))
        for key in KEYS[:8]:
            for _ in range(data.draw(st.integers(1, 2))):
                found = model(events[: data.draw(st.integers(cursor, len(events)))])[where].get(key)
                if found is not None:
                    index.apply(slice_of(where, [(key, *found)]))
    for each in events[cursor:]:
        indexes[each.cache].apply(each)
    assert state_of(indexes) == model(events)


@settings(deadline=None)
@given(
    held=holdings,
    length=st.integers(0, LENGTH),
    tiers=st.sampled_from([ALL_TIERS, Tier.DEVICE.bit, Tier.HOST.bit | Tier.DISK.bit]),
    spread=st.lists(st.integers(1, 7), min_size=LENGTH, max_size=LENGTH),
    alike=st.booleans(),
)
def test_a_prefix_is_what_the_definition_says(
    held: tuple[set[int], ...], length: int, tiers: int, spread: list[int], alike: bool
) -> None:
    where = [2] * LENGTH if alike else spread
    index = MirrorIndex()
    for group, places in enumerate(held):
        part = slice_of(("a", group), [(KEYS[place], where[place], 35) for place in places])
        index.apply(replace(part, all_window_tokens=WINDOWS, all_sink_tokens=SINKS, all_flat=FLAT))
    in_tiers = [{place for place in places if where[place] & tiers} for places in held]
    expected = longest(dict(enumerate(in_tiers)), length)
    found = index.match(PACKED[: length * 32], tiers)
    for span in found:
        covered = [*range(span.sink_blocks), *range(span.first_block, expected)]
        assert span.blocks == expected
        assert set(covered) == needed(span.group, expected)
        assert list(span.residency) == [where[place] for place in covered]


def test_a_group_that_is_not_known_to_have_a_block_counts() -> None:
    """It exists, and has none of what a prefix needs."""
    index = MirrorIndex()
    index.apply(replace(slice_of(("a", FULL), [(key, 1, 35) for key in KEYS]), all_window_tokens=WINDOWS))
    assert [len(span.residency) for span in index.match(PACKED, ALL_TIERS)] == [0] * 5


def test_a_cache_made_anew_has_the_groups_that_it_has_now() -> None:
    index = MirrorIndex()
    for group in range(3):
        created = event(EventType.CREATED, ("a", group))
        index.apply(replace(created, all_window_tokens=WINDOWS))
    for group in range(3):
        index.apply(event(EventType.CLEARED, ("a", group)))
    index.apply(replace(event(EventType.CREATED, ("a", 0)), all_window_tokens=(0,)))
    index.apply(event(EventType.STORED, ("a", 0), [(KEYS[0], 1, 35)]))
    (span,) = index.match(PACKED, ALL_TIERS)
    assert span.residency == b"\1"


@pytest.mark.parametrize(
    "wrong",
    [
        replace(event(EventType.STORED, ("a", 0), [(KEYS[0], 1, 35)]), residency=b"\1\1"),
        replace(event(EventType.UPDATED, ("a", 0), [(KEYS[0], 1, 35)]), priorities=b""),
        replace(event(EventType.REMOVED, ("a", 0), [(KEYS[0], 1, 35)]), packed_keys=b"short"),
        replace(event(EventType.CREATED, ("a", 0)), tokens_per_block=0),
    ],
    ids=["residency", "priorities", "keys", "shape"],
)
def test_an_event_that_does_not_add_up_is_refused(wrong: Event) -> None:
    index = MirrorIndex()
    with pytest.raises(DaemonError) as refused:
        index.apply(wrong)
    assert refused.value.reason == "BAD_ANSWER"
    assert len(index) == 0


@pytest.mark.parametrize("tiers", [ALL_TIERS, Tier.HOST.bit])
def test_a_prefix_ends_before_a_block_whose_bytes_are_lost(tiers: int) -> None:
    index, where = MirrorIndex(), GROUPS[0]
    index.apply(event(EventType.CREATED, where))
    index.apply(event(EventType.STORED, where, [(key, Tier.HOST.bit, 35) for key in KEYS]))
    index.apply(event(EventType.UPDATED, where, [(KEYS[2], 0, 35)]))
    assert index.match(PACKED, tiers, where[1])[0].blocks == 2
