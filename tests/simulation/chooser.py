"""The source of the simulation's choices, behind a small class."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


class Chooser:
    """``below(n)`` chooses a whole number from 0 to n - 1; all other choices use it.

    Zero is the tame choice everywhere: no action, the first value, the smallest value.
    """

    def __init__(self, below: Callable[[int], int]) -> None:
        self.below = below

    @classmethod
    def seeded(cls, seed: int) -> Chooser:
        return cls(random.Random(seed).randrange)

    def chance(self, percent: int) -> bool:
        return self.below(100) >= 100 - percent

    def between(self, low: int, high: int) -> int:
        """Chooses a whole number from ``low`` to ``high``, both included."""
        return low + self.below(high - low + 1)

    def pick(self, values: Sequence[T]) -> T:
        return values[self.below(len(values))]

    def some(self, values: Sequence[T], most: int) -> list[T]:
        """Chooses one to ``most`` different values, in any order."""
        left = list(values)
        return [left.pop(self.below(len(left))) for _ in range(self.between(1, min(most, len(left))))]

    def each(self, values: Sequence[T], percent: int) -> list[T]:
        """Chooses each value with this chance."""
        return [value for value in values if self.chance(percent)]
