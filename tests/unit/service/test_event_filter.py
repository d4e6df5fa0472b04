"""What passes a filter, held against a model that looks at one block at a time."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.v1 import common_pb2, events_pb2
from kvtierd.event_log import EventRun
from kvtierd.service.errors import CallRefused
from kvtierd.service.watch import MAX_PREFIXES, MAX_VALUES, EventFilter, every_cache, no_cache

T = TypeVar("T")

STORED, REMOVED = events_pb2.EVENT_TYPE_STORED, events_pb2.EVENT_TYPE_REMOVED
UPDATED, CLEARED = events_pb2.EVENT_TYPE_UPDATED, events_pb2.EVENT_TYPE_CLEARED
HOST, DISK = common_pb2.TIER_HOST, common_pb2.TIER_DISK

# Few different bytes, so that prefixes match keys, other keys' middles, parents and hashes.
keys = st.lists(st.sampled_from(b"\x00\x01\xff"), min_size=32, max_size=32).map(bytes)
first_bytes = st.binary(min_size=1, max_size=1) | st.sampled_from([b"\x00", b"\x01", b"\xff", b"\x00\x01"])
prefixes = st.lists(first_bytes | keys | keys.map(lambda key: key[:9]), min_size=1, max_size=6)


@dataclass(frozen=True)
class Block:
    key: bytes
    parent: bytes
    residency: int
    priority: int
    event_hash: bytes
    parent_hash: bytes
    tokens: bytes


blocks = st.builds(
    Block,
    keys,
    keys,
    st.integers(0, 7),
    st.integers(0, 100),
    st.binary(min_size=8, max_size=8),
    st.binary(min_size=8, max_size=8),
    st.binary(min_size=4, max_size=4),
)


def packed(event: events_pb2.Event, rows: Sequence[Block]) -> events_pb2.Event:
    event.keys = b"".join(row.key for row in rows)
    event.residency = bytes(row.residency for row in rows)
    event.event_hashes = b"".join(row.event_hash for row in rows)
    if event.type != REMOVED:
        event.priorities = bytes(row.priority for row in rows)
    if event.type == STORED:
        event.parents = b"".join(row.parent for row in rows)
        event.parent_hashes = b"".join(row.parent_hash for row in rows)
        event.tokens.extend(events_pb2.BlockTokens(token_ids=row.tokens) for row in rows)
    return event


@st.composite
def happenings(draw: st.DrawFn) -> tuple[events_pb2.Event, list[Block]]:
    kind = draw(st.sampled_from([STORED, REMOVED, UPDATED, CLEARED]))
    rows = [] if kind == CLEARED else draw(st.lists(blocks, min_size=1, max_size=6))
    event = events_pb2.Event(id=1, type=kind, cache=draw(st.sampled_from(["one", "two"])))
    event.cause = draw(st.sampled_from([common_pb2.CAUSE_COMMIT, common_pb2.CAUSE_CAPACITY]))
    event.group = draw(st.integers(0, 2))
    if kind == UPDATED:
        event.moved_from, event.moved_to, event.moved_bytes = HOST, draw(st.sampled_from([HOST, DISK])), 100 * len(rows)
    return packed(event, rows), rows


def expected(
    wanted: events_pb2.WatchFilter, happened: Iterable[tuple[events_pb2.Event, list[Block]]]
) -> list[events_pb2.Event]:
    """A block at a time, as the protocol says it."""
    seen = []
    for whole, rows in happened:
        left = [row for row in rows if any(row.key.startswith(prefix) for prefix in wanted.key_prefixes or [b""])]
        event = events_pb2.Event()
        event.CopyFrom(whole)
        for field in ("keys", "parents", "residency", "priorities", "event_hashes", "parent_hashes", "tokens"):
            event.ClearField(field)
        if event.moved_bytes:
            event.moved_bytes = 100 * len(left)
        stored_in = event.type == STORED and any(row.residency & 1 << tier - 1 for row in left for tier in wanted.tiers)
        if (
            (not rows or left)
            and (not wanted.types or event.type in wanted.types)
            and (not wanted.causes or event.cause in wanted.causes)
            and (not wanted.caches or event.cache in wanted.caches)
            and (not wanted.groups or event.group in wanted.groups)
            and (not wanted.tiers or {event.moved_from, event.moved_to} & set(wanted.tiers) or stored_in)
        ):
            seen.append(packed(event, left) if rows else event)
    return seen


def passed(wanted: EventFilter, events: Sequence[events_pb2.Event]) -> list[events_pb2.Event]:
    run = EventRun.of(1, 1, 1, events_pb2.WatchBatch(events=events))
    return list(events_pb2.WatchBatch.FromString(wanted.look_at(run)).events)


def mostly_all(some: list[T]) -> st.SearchStrategy[list[T]]:
    """A filter's field: with all of them set almost nothing would pass."""
    return st.sampled_from([[], [], [], [], some])


def asked(message: events_pb2.WatchFilter, *, private: bool = True) -> EventFilter:
    return EventFilter.of(message).allowed(every_cache, every_cache if private else no_cache)


@given(
    st.lists(happenings(), max_size=6),
    st.builds(
        events_pb2.WatchFilter,
        types=mostly_all([STORED, UPDATED]),
        causes=mostly_all([common_pb2.CAUSE_CAPACITY]),
        caches=mostly_all(["two"]),
        tiers=mostly_all([DISK]),
        groups=mostly_all([0, 2]),
        key_prefixes=st.just([]) | prefixes,
    ),
)
def test_what_passes_is_what_the_model_lets_through(
    happened: list[tuple[events_pb2.Event, list[Block]]], message: events_pb2.WatchFilter
) -> None:
    events = [event for event, _ in happened]
    assert passed(asked(message), events) == expected(message, happened)


def test_what_a_run_gave_is_not_given_for_another() -> None:
    wanted = asked(events_pb2.WatchFilter(types=[STORED]))
    for first, kind in ((1, STORED), (1, STORED), (2, REMOVED), (3, STORED)):
        run = EventRun.of(1, first, first, events_pb2.WatchBatch(events=[events_pb2.Event(id=first, type=kind)]))
        found = events_pb2.WatchBatch.FromString(wanted.look_at(run)).events
        assert [event.id for event in found] == [first] * (kind == STORED)


def test_filters_are_equal_where_they_let_the_same_through() -> None:
    def message() -> events_pb2.WatchFilter:
        return events_pb2.WatchFilter(caches=["one", "two"], key_prefixes=[b"b", b"a", b"b"])

    assert asked(message()) == asked(message())
    assert asked(message()) == asked(events_pb2.WatchFilter(caches=["two", "one"], key_prefixes=[b"a", b"b"]))
    assert asked(message()) != asked(events_pb2.WatchFilter(caches=["two", "one"], key_prefixes=[b"a", b"c"]))
    assert asked(message()) != asked(message(), private=False)
    assert asked(message()) != EventFilter.of(message()).allowed(lambda name: True, every_cache)


def test_tokens_are_cut_with_their_blocks_and_kept_from_those_who_may_not_see_them() -> None:
    rows = [Block(bytes([n]) * 32, bytes(32), 1, 35, bytes(8), bytes(8), bytes([n]) * 4) for n in (1, 2, 3)]
    events = [packed(events_pb2.Event(id=1, type=STORED, cache="one"), rows)]
    message = events_pb2.WatchFilter(key_prefixes=[b"\x03", b"\x01\x01"])
    (event,) = passed(asked(message), events)
    assert [each.token_ids for each in event.tokens] == [b"\x01" * 4, b"\x03" * 4]
    (event,) = passed(asked(message, private=False), events)
    assert (len(event.keys), len(event.tokens)) == (64, 0)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (events_pb2.WatchFilter(groups=[0, 16]), "filter.groups[1]"),
        (events_pb2.WatchFilter(key_prefixes=[b"a", b""]), "filter.key_prefixes[1]"),
        (events_pb2.WatchFilter(key_prefixes=[bytes(33)]), "filter.key_prefixes[0]"),
        (events_pb2.WatchFilter(key_prefixes=[b"a"] * (MAX_PREFIXES + 1)), "filter.key_prefixes"),
        (events_pb2.WatchFilter(types=[STORED] * (MAX_VALUES + 1)), "filter.types"),
        (events_pb2.WatchFilter(causes=[common_pb2.CAUSE_CAPACITY] * (MAX_VALUES + 1)), "filter.causes"),
        (events_pb2.WatchFilter(tiers=[DISK] * (MAX_VALUES + 1)), "filter.tiers"),
        (events_pb2.WatchFilter(caches=["one"] * (MAX_VALUES + 1)), "filter.caches"),
        (events_pb2.WatchFilter(groups=[0] * (MAX_VALUES + 1)), "filter.groups"),
    ],
)
def test_what_is_no_filter_is_refused(message: events_pb2.WatchFilter, field: str) -> None:
    with pytest.raises(CallRefused) as refused:
        asked(message)
    assert refused.value.detail.field == field
