"""Arguments of the wrong kind: refused by name, instead of failing where something is first done with them.

Each looks once a call, never once a block.
"""

from __future__ import annotations

from operator import index
from typing import Final, SupportsIndex

import numpy as np

from kvtier.errors import InvalidArgument
from kvtier.types import Tier

MAX_COUNT: Final = (1 << 32) - 1
"""Of blocks in a message."""
A_TIER: Final = "a kvtier.Tier, as Tier.HOST"
_FLAGS: Final = (bool, np.bool_)


def is_number(value: object, low: float, high: float) -> bool:
    """Whether it is a number from ``low`` to ``high``. NaN is not, nor is True, nor what does not compare with any."""
    try:
        return bool(low <= value <= high) and not isinstance(value, _FLAGS)  # type: ignore[operator]
    except (TypeError, ValueError):  # of an array, numpy's
        return False


def is_integer(value: SupportsIndex, low: int, high: int) -> bool:
    """The same of an integer, numpy's too."""
    try:
        return low <= index(value) <= high and not isinstance(value, _FLAGS)
    except TypeError:
        return False


def quoted(value: object) -> object:
    """As an error shows it where a number is wanted: text in quotes, so that '1' is not taken for 1."""
    return repr(value) if isinstance(value, str) else value


def require_kind(field: str, value: object, kind: type | tuple[type, ...], limit: str) -> None:
    """Raises :class:`InvalidArgument` where the value is of another kind."""
    if not isinstance(value, kind):
        raise InvalidArgument(field, quoted(value), limit)


def require_flag(field: str, value: object) -> None:
    """What is done only where a flag says so is not done because of a word: ``dry_run="no"``."""
    require_kind(field, value, _FLAGS, "True or False")


def require_tier(field: str, value: Tier | None) -> None:
    """None: none is given."""
    if value is not None:
        require_kind(field, value, Tier, A_TIER)


def require_name(field: str, value: str | None) -> None:
    """Of a cache; the daemon says which names there can be. None: none is given, which on the wire is the empty one."""
    if value is not None:
        require_kind(field, value, str, "text")
        if not value:
            raise InvalidArgument(field, quoted(value), "a cache's name")
