"""What a watcher reads: lines for people, JSON for programs."""

import json
import re
import time
from dataclasses import replace
from typing import Any

import click
import pytest

from kvtier.cli.watch import Moment, moment_of
from kvtier.cli.watch_lines import json_lines, plain_lines, text_lines
from kvtier.events import (
    Disconnected,
    Event,
    Gap,
    Heartbeat,
    Reconnected,
    SnapshotEnd,
    SnapshotSlice,
    SnapshotStart,
    WatchItem,
    event_from_wire,
)
from kvtier.types import Cause, Cursor, EventType, Tier
from kvtier.v1 import events_pb2

KEYS = [bytes([n]) * 32 for n in (0xAB, 0xCD)]
COMMON = {"event_id": 42, "epoch": 3, "cache": "llama", "group": 0, "time_ns": 1_700_000_000_123_456_789}


def event(kind: EventType, cause: Cause | int, **fields: object) -> Event:
    return Event(type=kind, cause=cause, **COMMON, **fields)  # type: ignore[arg-type]


STORED = event(
    EventType.STORED,
    Cause.COMMIT,
    packed_keys=b"".join(KEYS),
    packed_parents=bytes(32) + KEYS[0],
    residency=bytes([1, 1]),
    priorities=bytes([35, 80]),
)
MOVED = event(
    EventType.UPDATED,
    Cause.CAPACITY,
    packed_keys=b"".join(KEYS),
    residency=bytes([2, 2]),
    priorities=bytes([35, 35]),
    moved_from=Tier.DEVICE,
    moved_to=Tier.HOST,
    moved_bytes=131072,
    queue_ns=1_500_000,
    copy_ns=250_000,
)
REMOVED = event(EventType.REMOVED, Cause.ANCESTOR, packed_keys=b"".join(KEYS), residency=bytes(2))
CREATED = event(EventType.CREATED, Cause.EXPLICIT, num_blocks_per_cache_level=(200, 800, 6000))
CLEARED = event(EventType.CLEARED, Cause.RESET)
REPRIORITISED = event(
    EventType.UPDATED, Cause.COMMIT, packed_keys=KEYS[0], residency=bytes([5]), priorities=bytes([90])
)
TOP = {"cache_level": 0, "residency": ["device"]}
BELOW = {"cache_level": 1, "residency": ["host"]}


def as_json(item: WatchItem) -> Any:
    (line,) = json_lines(item)
    assert "\n" not in line
    return json.loads(line)


@pytest.mark.parametrize(
    ("item", "fields"),
    [
        (
            STORED,
            {
                "type": "stored",
                "cause": "commit",
                "blocks": [
                    {"block_hash": KEYS[0].hex(), "parent_hash": None, "priority": 35, **TOP},
                    {"block_hash": KEYS[1].hex(), "parent_hash": KEYS[0].hex(), "priority": 80, **TOP},
                ],
            },
        ),
        (
            MOVED,
            {
                "type": "updated",
                "cause": "capacity",
                "blocks": [{"block_hash": key.hex(), "priority": 35, **BELOW} for key in KEYS],
                "cache_level": {"type": "event_diff", "old_value": 0, "new_value": 1},
                "moved_from": "device",
                "moved_to": "host",
                "moved_bytes": 131072,
                "queue_ns": 1_500_000,
                "copy_ns": 250_000,
            },
        ),
        (REMOVED, {"type": "removed", "cause": "ancestor", "block_hashes": [key.hex() for key in KEYS]}),
        (CREATED, {"type": "created", "cause": "explicit", "num_blocks_per_cache_level": [200, 800, 6000]}),
        (CLEARED, {"type": "cleared", "cause": "reset"}),
        (
            REPRIORITISED,
            {
                "type": "updated",
                "cause": "commit",
                "cache_level": None,
                "blocks": [
                    {"block_hash": KEYS[0].hex(), "cache_level": 0, "residency": ["device", "disk"], "priority": 90}
                ],
            },
        ),
    ],
    ids=["stored", "moved", "removed", "created", "cleared", "another priority"],
)
def test_an_event_as_json(item: Event, fields: dict[str, object]) -> None:
    assert as_json(item) == COMMON | fields


def test_gaps_snapshots_and_breaks_are_lines_too_and_heartbeats_are_none() -> None:
    gap = as_json(Gap(1, 5, 9, "slow"))
    assert gap == {"type": "gap", "epoch": 1, "first_id": 5, "last_id": 9, "reason": "slow"}
    assert as_json(SnapshotEnd(Cursor(1, 7))) == {"type": "snapshot_end", "epoch": 1, "event_id": 7}
    assert as_json(Disconnected("gone")) == {"type": "disconnected", "reason": "gone"}
    assert list(json_lines(Heartbeat(Cursor(1, 7)))) == []
    empty = SnapshotSlice("llama", 0, b"", b"", b"", b"")
    for silent in (Heartbeat(Cursor(1, 7)), SnapshotStart(), empty):
        assert list(plain_lines(silent)) == []


@pytest.mark.parametrize(
    ("item", "parts"),
    [
        (STORED, ["3:42", "stored ", " 2 ", "abababab…", "→ device", "commit", "llama"]),
        (MOVED, ["updated", "device → host", "capacity", "128.0 KiB in 1.8ms"]),
        (REMOVED, ["removed", "→ gone", "ancestor"]),
        (CREATED, ["created", "200/800/6000 slots"]),
        (CLEARED, ["cleared", "reset"]),
        (REPRIORITISED, ["updated", " 1 ", "in device+disk"]),
        (Gap(1, 5, 9, "slow"), ["gap", "events 1:5 to 9 were lost", "slow"]),
        (Gap(1, 5, 9, "unclean-stop"), ["gap", "unlogged events from 1:5 on", "unclean-stop", "next id 10"]),
        (SnapshotEnd(Cursor(1, 7)), ["snapshot", "1:7"]),
        (SnapshotSlice("llama", 0, KEYS[0], bytes(32), bytes([4]), bytes([35])), ["1 block", "disk", "llama"]),
        (Disconnected("killed"), ["away", "killed"]),
        (Reconnected(2, 3, restarted=True), ["back", "restarted", "epoch 2", "boot 3"]),
        (Reconnected(2, 3, restarted=False), ["back", "the same process"]),
    ],
)
def test_a_line_tells_a_person_all_of_it(item: Event, parts: list[str]) -> None:
    (line,) = plain_lines(item)
    for part in parts:
        assert part in line
    assert "\n" not in line


def test_lines_begin_with_the_time_and_their_columns_stand_below_each_other() -> None:
    lines = [next(plain_lines(item)) for item in (STORED, MOVED, REMOVED, CREATED, CLEARED, REPRIORITISED)]
    for line, cause in zip(lines, ("commit", "capacity", "ancestor", "explicit", "reset", "commit"), strict=True):
        assert re.match(r"\d\d-\d\d \d\d:\d\d:\d\d ", line)
        assert line.index(cause) == lines[0].index("commit")
        assert "3:42" in line[:80] and "llama" in line[:80]


def test_a_long_name_is_cut_for_the_cause() -> None:
    (line,) = text_lines(replace(MOVED, cache="a-cache-with-a-long-name"), 80)
    assert re.search(r" a\S+…  capacity$", line.plain[:80])
    assert (
        "a-cache-with-a-long-name  capacity" in next(text_lines(replace(MOVED, cache="a-cache-with-a-long-name"))).plain
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("7", Cursor(0, 7)),
        ("3:7", Cursor(3, 7)),
        (f"14:{(1 << 64) - 1}", Cursor(14, (1 << 64) - 1)),
        ("20261122", Cursor(0, 20261122)),
        ("999999999999d", 0),
    ],
)
def test_a_moment_is_a_cursor_or_a_time(text: str, found: Moment) -> None:
    assert moment_of(text) == found


@pytest.mark.parametrize(("text", "seconds"), [("30s", 30), ("5m", 300), ("2h", 7200), ("1.5d", 129_600)])
def test_a_moment_is_so_long_ago(text: str, seconds: int) -> None:
    before = time.time_ns()
    found = moment_of(text)
    assert isinstance(found, int) and before <= found + seconds * 10**9 <= time.time_ns()


@pytest.mark.parametrize(
    "text", ["", "x", "1:", "1:2:3", "-1", "1:-2", "5 m", "5y", "2026-13-01", f"{1 << 64}", f"{1 << 64}:1"]
)
def test_what_is_no_moment_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match=r"none of|64 bits"):
        moment_of(text)


def test_a_cause_of_a_newer_daemon_stays_a_number() -> None:
    message = events_pb2.Event(id=1, type=events_pb2.EVENT_TYPE_CLEARED, cache="c")
    message.MergeFromString(b"\x18\x63")  # field 3, cause = 99
    item = event_from_wire(1, message)
    assert item.cause == 99
    assert as_json(item)["cause"] == "99"
