"""Kinds of values: sizes, shares, durations, and the mark of a key that can change while the daemon runs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Self, cast

from annotated_types import Ge, Le
from pydantic import (
    BeforeValidator,
    ByteSize,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticKnownError


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
_SIZE_TEXT: Final = re.compile(r"\s*\d*\.?\d+\s*[a-z]*\s*", re.IGNORECASE | re.ASCII)
_SIZE_UNITS: Final = (("PiB", 1 << 50), ("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))

_SIZE_OR_SHARE_SAYS: Final = (
    "must be bytes, 0 or more, or text such as 8GiB; or a share of what is free, above 0% to 100%, such as 80%"
)
_PERCENT: Final = re.compile(r"(\d{1,3}(?:\.\d{1,6})?)\s*%")

_DURATION_SAYS: Final = "must be seconds, 0 or more, or text such as 30s, 5min or 1h30min"
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION_PART: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|min|h|d)")
_DURATION: Final = re.compile(rf"(?:{_DURATION_PART.pattern}\s*)+")


@dataclass(slots=True, frozen=True)
class FreeShare:
    """So many hundredths of what is free when the daemon starts: above 0, at most 100."""

    percent: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """``80%``, ``62.5 %``. Raises ValueError."""
        found = _PERCENT.fullmatch(text.strip())
        if found is None or not 0 < float(found[1]) <= 100:
            raise ValueError(_SIZE_OR_SHARE_SAYS)
        return cls(float(found[1]))

    def of(self, free: int) -> int:
        """Bytes, of ``free`` ones."""
        return int(free * self.percent / 100)

    def __str__(self) -> str:
        return f"{self.percent:.6f}".rstrip("0").rstrip(".") + "%"


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
    """Pydantic's own takes ``true`` for a byte and ``80%`` for 80, and its messages leave open what would be right."""
    if isinstance(value, bool) or (isinstance(value, str) and _SIZE_TEXT.fullmatch(value) is None):
        raise ValueError(_SIZE_SAYS)
    try:
        return cast(ByteSize, parse(value))
    except ValidationError as error:
        raise ValueError(_SIZE_SAYS) from error


def _size_or_share(value: object) -> ByteSize | FreeShare:
    if isinstance(value, FreeShare):
        return value
    if isinstance(value, str) and value.rstrip().endswith("%"):
        return FreeShare.parse(value)
    try:
        size = _SIZE.validate_python(value)
    except ValidationError as error:
        raise ValueError(_SIZE_OR_SHARE_SAYS) from error
    if not 0 <= size <= MOST_BYTES:
        raise PydanticKnownError("less_than_equal", {"le": MOST_BYTES})
    return size


def _show_size_or_share(value: int | FreeShare) -> str:
    return str(value) if isinstance(value, FreeShare) else show_size(value)


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


def _path(value: object) -> object:
    """Pydantic takes no text at all for the working directory, and a name that no system call takes for a path."""
    if value == "" or (isinstance(value, str) and "\0" in value):
        raise ValueError("must be a path, not empty and without NUL")
    return value


FilePath = Annotated[Path, BeforeValidator(_path)]
"""Of a file or a directory that need not be there."""

OptionalPath = Annotated[Path | None, BeforeValidator(_path)]

Size = Annotated[ByteSize, WrapValidator(_size), Kind("size", show_size)]
"""Bytes, or text such as ``8GiB``, ``500MB``. No range of its own: ``Annotated[Size, Field(ge=…, le=…)]``."""

MOST_BYTES: Final = 1 << 50
"""Of a tier."""

_SIZE: Final[TypeAdapter[ByteSize]] = TypeAdapter(Size)

SizeOrShare = Annotated[
    ByteSize | FreeShare,
    Ge(0),
    Le(MOST_BYTES),
    PlainValidator(_size_or_share),
    Kind("size or share", _show_size_or_share),
]
"""A size of a tier, or text such as ``80%``. The bounds are told from here, and checked by the validator."""

Duration = Annotated[float, BeforeValidator(_duration), Kind("duration", show_duration)]
"""Seconds, or text such as ``30s``, ``5min``, ``1h30min``, ``250ms``; finite."""
