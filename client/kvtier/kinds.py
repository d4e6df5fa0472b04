"""Arguments of the wrong kind: refused by name, instead of failing where something is first done with them.

Each looks once a call, never once a block.
"""

from __future__ import annotations

from operator import index
from typing import SupportsIndex

from kvtier.errors import InvalidArgument


def is_number(value: object, low: float, high: float) -> bool:
    """Whether it is a number from ``low`` to ``high``. NaN is not, nor is what does not compare with numbers."""
    try:
        return bool(low <= value <= high)  # type: ignore[operator]
    except (TypeError, ValueError):  # of an array, numpy's
        return False


def is_integer(value: SupportsIndex, low: int, high: int) -> bool:
    """The same of an integer, numpy's too."""
    try:
        return low <= index(value) <= high
    except TypeError:
        return False


def quoted(value: object) -> object:
    """As an error shows it where a number is wanted: text in quotes, so that '1' is not taken for 1."""
    return repr(value) if isinstance(value, str) else value


def require_kind(field: str, value: object, kind: type | tuple[type, ...], limit: str) -> None:
    """Raises :class:`InvalidArgument` where the value is of another kind."""
    if not isinstance(value, kind):
        raise InvalidArgument(field, quoted(value), limit)


def require_name(field: str, value: str | None) -> None:
    """Of a cache; the daemon says which names there can be. None: none is given."""
    if value is not None:
        require_kind(field, value, str, "text")
