"""Numbers and words of a few columns, as a person reads them at a glance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.cells import cell_len, set_cell_size

from kvtier.words import duration

UNKNOWN: Final = "–"
_STEPS: Final = "▂▃▄▅▆▇█"
_NONE: Final = "▁"


def count(number: float) -> str:
    """At most five columns up to 10^15: ``9999``, ``10.0k``, ``1.2M``."""
    if abs(number) < 9999.5:
        return f"{number:.0f}"
    for unit in ("k", "M", "G", "T"):
        number /= 1000
        if abs(number) < 99.95:
            return f"{number:.1f}{unit}"
        if abs(number) < 999.5:
            return f"{number:.0f}{unit}"
    return f"{number:.0f}T"


def rate(number: float | None) -> str:
    """A small one with a decimal, so that what is rare is not shown as nothing."""
    if number is None:
        return UNKNOWN
    if 0 < abs(number) < 0.05:
        return "<0.1"
    return f"{number:.1f}" if 0 < abs(number) < 9.95 else count(number)


def share(part: float | None) -> str:
    """Of one, in percent. Only all is 100%, only nothing 0%."""
    if part is None:
        return UNKNOWN
    if 0 < part < 1:
        part = min(max(part, 0.001), 0.999)
    return f"{part:.1%}" if part < 1 else "100%"


def ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def bar(part: float, columns: int) -> str:
    """So much of one, filled; something is shown of anything, and a gap of anything that is missing."""
    filled = round(part * columns)
    if 0 < part < 1:
        filled = min(max(filled, 1), columns - 1)
    return "█" * filled + "░" * (columns - filled)


def sparkline(values: Sequence[float | None]) -> str:
    """A column for each value, from nothing to the highest; a blank where a value is not known."""
    most = max((value for value in values if value is not None), default=0.0)
    return "".join(_step(value, most) for value in values)


def _step(value: float | None, most: float) -> str:
    if value is None:
        return " "
    if value <= 0 or most <= 0:
        return _NONE
    return _STEPS[min(len(_STEPS) - 1, int(value / most * len(_STEPS)))]


def left(text: str, columns: int) -> str:
    """In exactly so many columns, with a sign that something was cut off."""
    if cell_len(text) <= columns:
        return set_cell_size(text, columns)
    return f"{set_cell_size(text, columns - 1)}…" if columns > 1 else set_cell_size(text, columns)


def right(text: str, columns: int) -> str:
    return " " * (columns - cell_len(text)) + text if cell_len(text) <= columns else left(text, columns)


def age(ns: float) -> str:
    """Under a minute as ``1.2ms`` or ``59.9s``, then as :func:`clock`."""
    return duration(ns) if ns < 59.95e9 else clock(ns / 1e9)


def clock(seconds: float) -> str:
    """``1:02:03``, with days before it where it takes some."""
    whole = max(0, int(seconds))
    days, rest = divmod(whole, 86400)
    text = f"{rest // 3600}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}d {text}" if days else text
