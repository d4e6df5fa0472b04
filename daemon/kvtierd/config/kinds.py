"""Kinds of values: sizes, durations, and the mark of a key that can change while the daemon runs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final, cast

from pydantic import BeforeValidator, ByteSize, ValidationError, ValidatorFunctionWrapHandler, WrapValidator


@dataclass(slots=True, frozen=True)
class Kind:
    """What a reader is told of values of this kind, and how one is written so that it can be read back."""

    name: str
    show: Callable[[Any], str]


@dataclass(slots=True, frozen=True)
class Live:
    """Marks a key whose change takes effect at a reload (SIGHUP); every other key waits for a restart."""


LIVE: Final = Live()

_SIZE_SAYS: Final = "must be bytes, 0 or more, or text such as 8GiB"
_SIZE_UNITS: Final = (("PiB", 1 << 50), ("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))

_DURATION_SAYS: Final = "must be seconds, 0 or more, or text such as 30s, 5min or 1h30min"
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION_PART: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|min|h|d)")
_DURATION: Final = re.compile(rf"(?:{_DURATION_PART.pattern}\s*)+")


def show_size(size: float) -> str:
    """``8GiB`` where that says it exactly, else bytes."""
    for unit, scale in _SIZE_UNITS:
        if size and not size % scale:
            return f"{int(size // scale)}{unit}"
    return f"{int(size)}B"


def show_duration(seconds: float) -> str:
    """The largest unit in which it is a whole number, else seconds."""
    for unit in ("d", "h", "min", "s", "ms"):
        count = seconds / _SECONDS[unit]
        if seconds and math.isclose(count, round(count), rel_tol=1e-12):
            return f"{round(count)}{unit}"
    return f"{seconds:g}s"


def _size(value: object, parse: ValidatorFunctionWrapHandler) -> ByteSize:
    """Pydantic's own takes ``true`` for a byte, and its messages leave open what would be right."""
    if isinstance(value, bool):
        raise ValueError(_SIZE_SAYS)
    try:
        return cast(ByteSize, parse(value))
    except ValidationError as error:
        raise ValueError(_SIZE_SAYS) from error


def _duration(value: object) -> float:
    if isinstance(value, str):
        return _seconds(value.strip())
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    raise ValueError(_DURATION_SAYS)


def _seconds(text: str) -> float:
    if _DURATION.fullmatch(text):
        return sum(float(count) * _SECONDS[unit] for count, unit in _DURATION_PART.findall(text))
    try:
        seconds = float(text)
    except ValueError:
        raise ValueError(_DURATION_SAYS) from None
    if not math.isfinite(seconds):
        raise ValueError(_DURATION_SAYS)
    return seconds


Size = Annotated[ByteSize, WrapValidator(_size), Kind("size", show_size)]
"""Bytes, or text such as ``8GiB``, ``500MB``. No range of its own: ``Annotated[Size, Field(ge=…, le=…)]``."""

Duration = Annotated[float, BeforeValidator(_duration), Kind("duration", show_duration)]
"""Seconds, or text such as ``30s``, ``5min``, ``1h30min``, ``250ms``; finite."""
