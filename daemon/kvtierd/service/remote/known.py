"""What is known of a store's objects: whether one is there, and when it was fetched. Bounded, and never certain."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final

MOST: Final = 1 << 15
THERE_S: Final = 600.0
"""A store may delete an object by its own rules; then a fetch finds out."""
ABSENT_S: Final = 5.0
"""Other hosts may write it any time."""


class Known:
    """By name. The oldest knowledge goes where there would be more than ``most`` objects. Loop thread only."""

    def __init__(self, clock: Callable[[], float], most: int = MOST) -> None:
        self._clock = clock
        self._most = most
        self._until: OrderedDict[str, tuple[bool, float]] = OrderedDict()
        self._used: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until)

    def of(self, name: str) -> bool | None:
        """Whether the object was there when it was last heard of; None: ask."""
        there, until = self._until.get(name, (None, 0.0))
        return there if until > self._clock() else None

    def note(self, names: Iterable[str], *, there: bool) -> None:
        """These objects are, or are not, there now."""
        until = self._clock() + (THERE_S if there else ABSENT_S)
        for name in names:
            self._until[name] = (there, until)
            self._until.move_to_end(name)
        while len(self._until) > self._most:
            self._until.popitem(last=False)

    def use(self, names: Iterable[str]) -> None:
        """These objects were fetched now."""
        for name in names:
            self._used[name] = time.time()
            self._used.move_to_end(name)
        while len(self._used) > self._most:
            self._used.popitem(last=False)

    def used_s(self, name: str) -> float:
        """When this daemon last fetched the object, in seconds since 1970; 0 = never, or others were fetched since."""
        return self._used.get(name, 0.0)
