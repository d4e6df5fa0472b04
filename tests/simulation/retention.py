"""A client's knowledge of retentions: the own priorities that a block may have, and when they must have fallen.

A client does not see everything, for example how long a waiting request holds its blocks. Every clock therefore has two
times: the earliest and the latest possible start.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kvtierd.core.ids import Key, Traits
from kvtierd.core.policy import DEFAULT_PRIORITY
from tests.simulation.violation import Violation

Kept = tuple[int, int]
"""(own priority, duration in ms)"""

_FALLEN: Kept = (DEFAULT_PRIORITY, 0)


@dataclass(slots=True, eq=False)
class _Block:
    """``states``: possible retentions. ``first``, ``last``: earliest and latest start of the block's clock."""

    states: set[Kept]
    first: int
    last: int


class Retentions:
    """The retentions of all blocks that were ever stored, by key."""

    def __init__(self) -> None:
        self._blocks: dict[Key, _Block] = {}

    def give(self, key: Key, priority: int, duration_ms: int, now: int, *, certain: bool = True) -> None:
        states = {(priority, duration_ms)}
        if not certain:
            states |= self._blocks[key].states
            now = min(now, self._blocks[key].first)
        self._blocks[key] = _Block(states, now, now)

    def recover(self, key: Key, traits: Traits, now: int) -> None:
        started = traits.deadline_ns - traits.duration_ms * 1_000_000 if traits.deadline_ns else now
        self._blocks[key] = _Block({(traits.priority, traits.duration_ms)}, started, started)

    def held(self, keys: Iterable[Key], now: int) -> None:
        """Notes that a lease or a pin holds these blocks now."""
        for key in keys:
            self._blocks[key].first = self._blocks[key].last = now

    def matched(self, keys: Iterable[Key], now: int) -> None:
        """Notes that an acquire restarted the clocks of these blocks."""
        for key in keys:
            self._blocks[key].first = max(self._blocks[key].first, now)
        self.wanted(keys, now)

    def wanted(self, keys: Iterable[Key], now: int) -> None:
        """Notes that a client may hold these blocks now."""
        for key in keys:
            if key in self._blocks:
                self._blocks[key].last = now

    def may_expire(self, now: int) -> None:
        for block in self._blocks.values():
            if any(_runs(kept) and block.first + kept[1] * 1_000_000 <= now for kept in block.states):
                block.states.add(_FALLEN)

    def must_expire(self, now: int) -> None:
        for block in self._blocks.values():
            block.states = {
                _FALLEN if _runs(kept) and block.last + kept[1] * 1_000_000 <= now else kept for kept in block.states
            }

    def verify_own(self, key: Key, priority: int) -> None:
        """Checks the block's own priority, as a move carries it."""
        self._narrow(key, {kept for kept in self._blocks[key].states if kept[0] == priority}, "own", priority)

    def verify(self, key: Key, effective: int, children: int) -> None:
        """Checks the block's effective priority. ``children``: the highest effective priority of its children."""
        states = self._blocks[key].states
        self._narrow(key, {kept for kept in states if max(kept[0], children) == effective}, "effective", effective)

    def _narrow(self, key: Key, states: set[Kept], what: str, priority: int) -> None:
        if not states:
            given = sorted(self._blocks[key].states)
            raise Violation(f"a block's {what} priority is {priority}, and one of {given} was given")
        self._blocks[key].states = states


def _runs(kept: Kept) -> bool:
    return kept[1] > 0 and kept[0] != DEFAULT_PRIORITY
