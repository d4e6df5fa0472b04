"""Moments as people write them."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.cli.watch_moments import Instant, Moment, MomentType, moment
from kvtier.types import Cursor

ZONE = timezone(timedelta(hours=1))
NOW = datetime(2026, 11, 22, 15, 30, 0, 250_000, ZONE)


def at(text: str) -> Instant:
    return Instant(round(datetime.fromisoformat(text).timestamp() * 1_000_000) * 1000)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("7", Cursor(0, 7)),
        ("3:7", Cursor(3, 7)),
        ("0", Cursor(0, 0)),
        (":7", Cursor(0, 7)),
        ("014:05", Cursor(14, 5)),
        ("20261122", Cursor(0, 20261122)),
        ("14:05", at("2026-11-22T14:05+01:00")),
        ("14:05:09.5", at("2026-11-22T14:05:09.5+01:00")),
        ("2026-11-22T01:00", at("2026-11-22T01:00+01:00")),
        ("2026-11-22 01:00:02", at("2026-11-22T01:00:02+01:00")),
        ("2026-11-22", at("2026-11-22T00:00+01:00")),
        ("2026-11-22T01:00Z", at("2026-11-22T01:00+00:00")),
        ("2026-11-22T01:00:00.123456-05:30", at("2026-11-22T06:30:00.123456+00:00")),
        ("5m", at("2026-11-22T15:25:00.25+01:00")),
        ("-5m", at("2026-11-22T15:25:00.25+01:00")),
        ("1h30m", at("2026-11-22T14:00:00.25+01:00")),
        ("250ms", at("2026-11-22T15:30:00+01:00")),
        ("1.5d", at("2026-11-21T03:30:00.25+01:00")),
        ("+10s", at("2026-11-22T15:30:10.25+01:00")),
    ],
)
def test_a_moment_is_a_cursor_or_a_time(text: str, found: Moment) -> None:
    assert moment(text, NOW) == found


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "1:",
        "1:2:3",
        "-1",
        "1:-2",
        "1.5",
        "yesterday",
        "5 m",
        "m",
        "5y",
        "2026-13-01",
        "29:00",
        "1960-01-01",
        "9999-12-31T23:59:59Z",
    ],
)
def test_what_is_no_moment_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        MomentType().convert(text, None, None)


@pytest.mark.parametrize("text", [f"{1 << 64}", f"{1 << 64}:1", "999999999999d", "2600-01-01", "+300000d"])
def test_what_no_cursor_and_no_clock_can_hold_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        MomentType().convert(text, None, None)


@given(st.text(alphabet="0123456789:.+-TZsmhd ", max_size=20))
def test_anything_is_a_moment_or_is_refused(text: str) -> None:
    try:
        found = MomentType().convert(text, None, None)
    except click.BadParameter:
        return
    assert MomentType().convert(found, None, None) == found


@given(st.integers(0, (1 << 64) - 1), st.integers(0, (1 << 64) - 1))
def test_every_cursor_is_read_as_it_is_shown_unless_it_looks_like_a_time(epoch: int, event_id: int) -> None:
    cursor = Cursor(epoch, event_id)
    shown = str(cursor)
    if len(shown) == 5 and shown[2] == ":" and epoch < 30 and event_id < 60:
        shown = f"0{shown}"
    assert moment(shown, NOW) == cursor
