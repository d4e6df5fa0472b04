"""Named tuples by the column: one each for many blocks at once, without a call of Python's for each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, TypeVar, cast

Row = TypeVar("Row", bound=tuple[Any, ...])


def rows(kind: type[Row], *columns: Iterable[object]) -> Iterator[Row]:
    """A ``kind`` of each place in the columns, one a field in their order, until the shortest of them ends: three times
    as quick as to call the class. Nobody checks that the fields are all there."""
    return map(cast("partial[Row]", partial(tuple.__new__, kind)), zip(*columns, strict=False))
