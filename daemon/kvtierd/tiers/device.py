"""The device tier without a GPU: shared memory with the device's layout and, on request, its bad manners.

A GPU completes copies late and, between streams, in any order; a freed slot is overwritten at once. A program that
forgets to wait passes every test on ordinary memory. With :class:`Chaos` it reads wrong bytes here instead.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from kvtierd.core.ids import Tier
from kvtierd.tiers.arena import Arena
from kvtierd.tiers.mapped import MappedStore


@dataclass(slots=True, frozen=True)
class Chaos:
    """How late copies are, from a seed: the same seed gives every stream the same delays again."""

    seed: int
    max_delay_s: float = 0.002

    def delays(self, stream: str) -> Iterator[float]:
        """Endless delays in seconds, one a copy. Streams differ, so their completions overtake each other."""
        generator = random.Random(f"{self.seed}:{stream}")
        while True:
            yield generator.uniform(0.0, self.max_delay_s)


class StandInDevice(MappedStore):
    """One region a pool, the same slot index in each. ``chaos`` is for whoever runs the copies."""

    def __init__(self, arena: Arena, chaos: Chaos | None = None) -> None:
        super().__init__(arena, Tier.DEVICE)
        self.chaos = chaos
