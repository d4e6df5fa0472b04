"""What a client can tell of retentions: which own priorities a block may have, and when they must have fallen.

Whoever calls does not see everything: how long a request that waits holds its blocks, say. So there are two times for
every clock, before which it cannot have started and after which it must have.
"""

from __future__ import annotations

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
    """``states``: what it may have. ``first``, ``last``: when its clock started, at the earliest and latest."""

    states: set[Kept]
    first: int
    last: int


class Retentions:
    """Of all blocks that were ever stored, by key."""

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
        """Somebody holds these."""
        for key in keys:
            self._blocks[key].first = self._blocks[key].last = now

    def matched(self, keys: Iterable[Key], now: int) -> None:
        """An acquire started the clocks of these anew."""
        for key in keys:
            self._blocks[key].first = max(self._blocks[key].first, now)
        self.wanted(keys, now)

    def wanted(self, keys: Iterable[Key], now: int) -> None:
        """Somebody may hold these."""
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
        """A move tells of the block's own priority."""
        self._narrow(key, {kept for kept in self._blocks[key].states if kept[0] == priority}, "own", priority)

    def verify(self, key: Key, effective: int, children: int) -> None:
        """The block's effective priority, the highest of its children's being ``children``."""
        states = self._blocks[key].states
        self._narrow(key, {kept for kept in states if max(kept[0], children) == effective}, "effective", effective)

    def _narrow(self, key: Key, states: set[Kept], what: str, priority: int) -> None:
        if not states:
            given = sorted(self._blocks[key].states)
            raise Violation(f"a block's {what} priority is {priority}, and one of {given} was given")
        self._blocks[key].states = states


def _runs(kept: Kept) -> bool:
    return kept[1] > 0 and kept[0] != DEFAULT_PRIORITY
