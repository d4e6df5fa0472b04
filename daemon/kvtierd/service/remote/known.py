"""The daemon's knowledge of a store's objects: presence, and the last fetch. Bounded, and never certain."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Final

MOST: Final = 1 << 15
THERE_S: Final = 600.0
"""Seconds that a present object is believed present. The store's own rules may delete it; a fetch then notices."""
ABSENT_S: Final = 5.0
"""Seconds that an absent object is believed absent. Another host may write it at any time."""
UNREADABLE_S: Final = 600.0
"""Seconds that an object counts as absent if the store has it but does not give it: an operator must repair it."""
HOLE_S: Final = 30.0
"""Seconds that an object counts as absent after a fetch missed it, although the store has a child of its block."""


class Known:
    """Maps names to knowledge; above ``most`` names the oldest are dropped. Loop thread only.

    Entries are a hash of the name and a float, since a full map stays in memory for good. Two names with the same hash
    cost a miss, never a wrong byte.
    """

    def __init__(self, clock: Callable[[], float], most: int = MOST) -> None:
        self._clock = clock
        self._most = most
        self._until: dict[int, float] = {}
        """When knowledge of an object expires, by the hash of its name; negative = the object is absent."""
        self._used: dict[int, float] = {}
        self._holes_until = 0.0

    def of(self, name: str) -> bool | None:
        """Whether the object is in the store; None = unknown, the store must be asked."""
        until = self._until.get(hash(name), 0.0)
        return until > 0 if abs(until) > self._clock() else None

    def note(self, names: Iterable[str], *, there: bool, seconds: float | None = None) -> None:
        """Notes that objects are, or are not, in the store. The note is valid for ``seconds``."""
        until = self._clock() + (seconds or (THERE_S if there else ABSENT_S))
        if seconds is not None:
            self._holes_until = max(self._holes_until, until)
        self._keep(self._until, names, until if there else -until)

    def has_holes(self) -> bool:
        """Whether any note with its own ``seconds`` is still valid."""
        return self._holes_until > self._clock()

    def use(self, names: Iterable[str]) -> None:
        """Notes that objects were fetched now."""
        self._keep(self._used, names, time.time())

    def used_s(self, name: str) -> float:
        """When this daemon last fetched the object, in seconds since 1970; 0 = never, or the note was dropped."""
        return self._used.get(hash(name), 0.0)

    def _keep(self, times: dict[int, float], names: Iterable[str], at: float) -> None:
        """Puts the names last. Drops the oldest an eighth at a time: a dict takes long to find its first key."""
        for name in map(hash, names):
            times.pop(name, None)
            times[name] = at
        excess = len(times) - self._most
        if excess > 0:
            for name in list(islice(times, max(excess, self._most // 8))):
                del times[name]
