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
UNREADABLE_S: Final = 600.0
"""The store has it and does not give it: an operator's work."""
HOLE_S: Final = 30.0
"""A fetch missed it, although the store has a child of the block."""


class Known:
    """By name. The oldest knowledge goes where there would be more than ``most`` objects. Loop thread only."""

    def __init__(self, clock: Callable[[], float], most: int = MOST) -> None:
        self._clock = clock
        self._most = most
        self._until: OrderedDict[str, tuple[bool, float]] = OrderedDict()
        self._used: OrderedDict[str, float] = OrderedDict()
        self._holes_until = 0.0

    def __len__(self) -> int:
        return len(self._until)

    def of(self, name: str) -> bool | None:
        """Whether the object was there when it was last heard of; None: ask."""
        there, until = self._until.get(name, (None, 0.0))
        return there if until > self._clock() else None

    def note(self, names: Iterable[str], *, there: bool, seconds: float | None = None) -> None:
        """These objects are, or are not, there now, which is believed for ``seconds``."""
        until = self._clock() + (seconds or (THERE_S if there else ABSENT_S))
        for name in names:
            self._until[name] = (there, until)
            self._until.move_to_end(name)
        if seconds is not None:
            self._holes_until = max(self._holes_until, until)
        while len(self._until) > self._most:
            self._until.popitem(last=False)

    def has_holes(self) -> bool:
        """Whether anything is believed for a time of its own."""
        return self._holes_until > self._clock()

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
