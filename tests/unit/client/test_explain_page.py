"""What `kvtier explain` prints, and what values of a newer daemon become."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvtier.causes import change_of, why_gone
from kvtier.cli.explain import page
from kvtier.events import Gap
from kvtier.explaining import (
    BlockExplained,
    CopyExplained,
    CopyState,
    Departure,
    Explanation,
    LeaseExplained,
    Obstacle,
    Past,
    Precision,
)
from kvtier.types import Cause, Cursor, EventType, Tier

KEY = bytes(range(32))
COPY = CopyExplained(Tier.HOST, 7, CopyState.READY, 0, 0, 0, 0, 30, (), Departure.DEMOTED, 3, Precision.EXACT, 2, 50)
BLOCK = BlockExplained("c", 0, 0, None, 0, 0, Tier.HOST.bit, 35, 35, 0, 0, False, 0, (COPY,), (), (), Cursor(1, 9))
PAST = Past(Cursor(1, 4), 10**18, EventType.STORED, Cause.COMMIT, "c", 0, 0, Tier.HOST.bit, 35)
TOLD = Explanation(KEY, KEY, (BLOCK,), (PAST,), (), (), False, None, Cursor(1, 9), 10**18)


def text(told: Explanation) -> str:
    return "\n".join(page(told))


def of_copy(**changes: object) -> str:
    return text(replace(TOLD, blocks=(replace(BLOCK, copies=(replace(COPY, **changes),)),)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "slot 7, ready; 3 of 50 go before it; it is copied down first; 2 slots free"),
        ({"ahead": 0}, "the next to go of 50"),
        ({"precision": Precision.AT_LEAST}, "at least 3 of 50"),
        ({"precision": Precision.ABOUT}, "about 3 of 50"),
        ({"departure": Departure.FREED}, "so it goes without a copy"),
        ({"departure": Departure.DROPPED, "threshold": 101}, "there is no tier below"),
        ({"departure": Departure.DROPPED, "threshold": 40}, "only from priority 40 on"),
        ({"departure": Departure.DROPPED}, "used a second time"),
        ({"departure": Departure.NEVER, "obstacles": (Obstacle.PINNED, Obstacle.LEASED)}, "is pinned and it is leased"),
        ({"obstacles": (Obstacle.CHILDREN,)}, "stays until what needs it has gone"),
        ({"state": CopyState.LEAVING}, "going down now"),
        ({"departure": Departure.NEVER, "obstacles": (Obstacle(99),)}, "that this client does not know"),
    ],
)
def test_why_a_copy_stays_or_goes(changes: dict[str, object], says: str) -> None:
    assert says in of_copy(**changes)


def test_what_another_process_calls_itself_does_nothing_to_the_terminal() -> None:
    lease = LeaseExplained(5, Tier.HOST, 0, True, 3, 44, 0, "evil\x1b[2J")
    shown = text(replace(TOLD, blocks=(replace(BLOCK, leases=(lease,)),)))
    assert "pid 44 evil?[2J, whose connection broke" in shown


def test_retention_in_words() -> None:
    held = replace(BLOCK, duration_ms=1500)
    assert "for 1.5s after its release; the clock stands" in text(replace(TOLD, blocks=(held,)))
    running = replace(held, deadline_ns=10**18 + 500_000_000)
    assert "for 1.5s: 500.0ms left" in text(replace(TOLD, blocks=(running,)))


def test_the_end_of_a_block_in_words() -> None:
    gone = replace(PAST, cursor=Cursor(1, 6), type=EventType.REMOVED, cause=Cause.CORRUPT, before=2, residency=0)
    told = replace(TOLD, blocks=(), past=(PAST, replace(gone, priority=None)), gaps=(Gap(1, 7, 8, "compacted"),))
    assert told.state == "gone"
    shown = text(told)
    assert why_gone(Cause.CORRUPT) in shown
    assert "host → gone" in shown and "1:7 to 8 are lost: compacted" in shown
    assert "the event that says why is lost" in text(replace(told, past=(PAST,)))


def test_who_may_not_watch_is_told_so() -> None:
    told = replace(TOLD, blocks=(), past=None)
    assert (told.state, list(told.endings())) == ("unknown", [])
    assert "for who may watch" in text(told)


def test_all_of_it_is_json() -> None:
    said = json.loads(json.dumps(TOLD.to_json()))
    assert (said["state"], said["key"], said["as_of"]) == ("stored", KEY.hex(), "1:9")
    (block,) = said["blocks"]
    assert (block["residency"], block["parent"]) == (["host"], None)
    assert (block["copies"][0]["tier"], block["copies"][0]["precision"]) == ("host", "exact")
    assert (said["past"][0]["cause"], said["past"][0]["before"]) == ("commit", [])


def test_causes_of_a_newer_daemon_stay_numbers() -> None:
    assert "cause 77" in change_of(77)
    assert "77" in why_gone(77)
