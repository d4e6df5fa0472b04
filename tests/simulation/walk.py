"""A seeded random walk through a world. The command reproduces a walk:

``python -m tests.simulation.walk --seed 7 --steps 1000 [--plant NAME]``
"""

import argparse
import time
from bisect import bisect_right
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from tests.simulation.actions import WEIGHTS
from tests.simulation.chooser import Chooser
from tests.simulation.faults import FAULTS
from tests.simulation.setup import Setup
from tests.simulation.world import World

_ACTIONS: Final = tuple(WEIGHTS)
_BOUNDS: Final = tuple(accumulate(WEIGHTS.values()))


class WalkFailed(AssertionError):
    """A walk failed. The message has the command that reproduces it."""

    def __init__(self, seed: int, step: int, action: str, cause: Exception) -> None:
        super().__init__(
            f"seed {seed}, step {step}, in {action}: {type(cause).__name__}: {cause}\n"
            f"again: python -m tests.simulation.walk --seed {seed} --steps {step}"
        )
        self.step = step


@dataclass(slots=True, frozen=True)
class Walked:
    """``steps``: calls of the core. ``seen``: counts of events."""

    steps: int
    seen: Counter[str]


def walk(seed: int, steps: int, *, inspect: bool = True, kind: type[World] = World) -> Walked:
    """Walks for at least ``steps`` calls of the core. Raises :class:`WalkFailed`."""
    choose = Chooser.seeded(seed)
    world = kind(Setup.draw(choose), inspect=inspect)
    while world.steps < steps:
        action = _ACTIONS[bisect_right(_BOUNDS, choose.below(_BOUNDS[-1]))]
        try:
            world.progress(choose)
            action(world, choose)
        except Exception as error:
            raise WalkFailed(seed, world.steps, action.__name__, error) from error
    return Walked(world.steps, world.seen)


def main() -> None:
    parser = argparse.ArgumentParser(description="A seeded random walk of the core under a simulated mover.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--plant", choices=sorted(FAULTS), help="plant this fault into the core")
    parser.add_argument("--outside", action="store_true", help="without the core's own checker")
    arguments = parser.parse_args()
    begun = time.process_time()
    with FAULTS[arguments.plant].planted() if arguments.plant else nullcontext():
        walked = walk(arguments.seed, arguments.steps, inspect=not arguments.outside)
    seconds = time.process_time() - begun
    for what, times in sorted(walked.seen.items()):
        print(f"{times:8} {what}")
    print(
        f"seed {arguments.seed}: {walked.steps} steps in {seconds:.1f} s of CPU, {walked.steps / seconds:.0f} a second"
    )


if __name__ == "__main__":
    main()
