"""Moments in the event stream as a person writes them: a cursor, a time, or how long ago."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, time, timedelta
from typing import Any, Final

import click

from kvtier.types import Cursor

_CURSOR: Final = re.compile(r"(?:(\d*):)?(\d+)")
_TIME_OF_DAY: Final = re.compile(r"[0-2]\d:[0-5]\d(:[0-5]\d(\.\d+)?)?")
_SPAN: Final = re.compile(r"([+-]?)((?:\d+(?:\.\d+)?(?:ms|[smhd]))+)")
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhd])")
_SECONDS: Final = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}

_MAX_NUMBER: Final = (1 << 64) - 1

FORMS: Final = "[EPOCH:]ID, a time (2026-11-22T01:00, with Z or +01:00; 14:05) or how long ago (5m, 1h30m; +5m: ahead)"


@dataclass(slots=True, frozen=True)
class Instant:
    """By the wall clock: nanoseconds since the Unix epoch."""

    time_ns: int


Moment = Cursor | Instant


def moment(text: str, now: datetime) -> Moment:
    """What is written: see :data:`FORMS`. ``now`` has a time zone; times without one are of it.

    Two digits, a colon and two digits are a time of today, not an epoch and an id. Raises :class:`ValueError`.
    """
    if _TIME_OF_DAY.fullmatch(text):
        return _instant(datetime.combine(now.date(), time.fromisoformat(text), now.tzinfo))
    if cursor := _CURSOR.fullmatch(text):
        epoch, event_id = int(cursor[1] or 0), int(cursor[2])
        if max(epoch, event_id) > _MAX_NUMBER:
            raise ValueError(f"{text!r}: epochs and ids have 64 bits")
        return Cursor(epoch, event_id)
    if span := _SPAN.fullmatch(text):
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(span[2]))
        return _instant(now + _seconds(seconds if span[1] == "+" else -seconds))
    try:
        at = datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is none of {FORMS}") from error
    return _instant(at if at.tzinfo else at.replace(tzinfo=now.tzinfo))


class MomentType(click.ParamType[Moment]):
    """A :data:`Moment`; times without a zone are local."""

    name = "moment"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Moment:
        if isinstance(value, (Cursor, Instant)):
            return value
        try:
            return moment(str(value), datetime.now().astimezone())
        except (ValueError, OverflowError) as error:
            self.fail(str(error), param, ctx)


def _seconds(seconds: float) -> timedelta:
    return timedelta(microseconds=round(seconds * 1e6))


def _instant(at: datetime) -> Instant:
    """Raises :class:`ValueError` before 1970, and after what 64 bits of nanoseconds can say."""
    since = at - datetime.fromisoformat("1970-01-01T00:00Z")
    if since < timedelta(0):
        raise ValueError(f"{at.isoformat()} lies before 1970")
    time_ns = since // timedelta(microseconds=1) * 1000
    if time_ns > _MAX_NUMBER:
        raise ValueError(f"{at.isoformat()} lies after July 2554")
    return Instant(time_ns)
