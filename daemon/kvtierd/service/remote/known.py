"""The daemon's knowledge of a store's objects: presence, and the last fetch. Bounded, and never certain."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import islice
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
    """Knowledge of objects by name. Above ``most`` objects the oldest knowledge goes. Loop thread only.

    It keeps a hash instead of a name, and a float instead of a record: a full book stays in the daemon's memory for
    good. Two names with the same hash cost a miss, never a wrong byte.
    """

    def __init__(self, clock: Callable[[], float], most: int = MOST) -> None:
        self._clock = clock
        self._most = most
        self._until: dict[int, float] = {}
        """Below zero: until then the object is believed absent."""
        self._used: dict[int, float] = {}
        self._holes_until = 0.0

    def __len__(self) -> int:
        return len(self._until)

    def of(self, name: str) -> bool | None:
        """Whether the object was there when it was last heard of; None: ask."""
        until = self._until.get(hash(name), 0.0)
        return until > 0 if abs(until) > self._clock() else None

    def note(self, names: Iterable[str], *, there: bool, seconds: float | None = None) -> None:
        """These objects are, or are not, there now, which is believed for ``seconds``."""
        until = self._clock() + (seconds or (THERE_S if there else ABSENT_S))
        if seconds is not None:
            self._holes_until = max(self._holes_until, until)
        self._keep(self._until, names, until if there else -until)

    def has_holes(self) -> bool:
        """Whether anything is believed for a time of its own."""
        return self._holes_until > self._clock()

    def use(self, names: Iterable[str]) -> None:
        """These objects were fetched now."""
        self._keep(self._used, names, time.time())

    def used_s(self, name: str) -> float:
        """When this daemon last fetched the object, in seconds since 1970; 0 = never, or others were fetched since."""
        return self._used.get(hash(name), 0.0)

    def _keep(self, times: dict[int, float], names: Iterable[str], at: float) -> None:
        """Puts the names last. The oldest go an eighth at a time: a dict takes long to find its first key."""
        for name in map(hash, names):
            times.pop(name, None)
            times[name] = at
        excess = len(times) - self._most
        if excess > 0:
            for name in list(islice(times, max(excess, self._most // 8))):
                del times[name]
