"""The walks detect planted faults soon, and succeed without a fault."""

from itertools import count
from typing import Final

import pytest

from tests.limits import LONG
from tests.simulation.faults import FAULTS
from tests.simulation.walk import WalkFailed, walk

STEPS_A_WALK: Final = 1_000
MOST_STEPS: Final = 40_000
RARE: Final = dict.fromkeys(
    ("stuck_parents_kept", "lost_block_waited_for", "lost_disk_waited_for", "new_holders_overlooked"), 120_000
)
"""More steps for faults in rare situations: a whole subtree must go, a call waits for bytes or a disk that are lost, or
a lease comes while a subtree goes."""
CAUGHT: Final = {
    "new_holders_overlooked": 47,
    "lost_block_waited_for": 45,
    "lost_disk_waited_for": 31,
    "demoted_amid_a_loss": 16,
    "queue_overtaken": 14,
    "stuck_parents_kept": 14,
    "hollow_blocks_matched": 11,
    "never_written_down": 10,
    "window_never_slides": 6,
    "sinks_slide_out": 6,
    "parent_dropped_before_child": 6,
}
"""A seed whose walk catches the fault. The walks begin with this seed, or with seed 0 in ``make test-long``. After a
change of the core another seed may catch it: the test then makes more walks."""
SILENT_WALKS: Final = 20 if LONG else 5


def steps_until_caught(name: str, *, inspect: bool) -> int:
    """Walks with one seed after another until a walk fails. Some walks have no disk, some no host, some no crash."""
    steps = 0
    for seed in count(0 if LONG else CAUGHT.get(name, 0)):
        try:
            steps += walk(seed, STEPS_A_WALK, inspect=inspect).steps
        except WalkFailed as failure:
            stale = isinstance(failure.__cause__, TypeError | AttributeError)
            assert not stale, f"what is planted does not fit the core as it is now: {failure}"
            return steps + failure.step
        assert steps < RARE.get(name, MOST_STEPS), f"not caught in {steps} steps"
    raise AssertionError("unreachable")


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name: str) -> None:
    with FAULTS[name].planted():
        steps_until_caught(name, inspect=True)


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.outside])
def test_a_planted_fault_shows_outside(name: str) -> None:
    """The world finds the fault without the core's own checker, by bytes, events, records and answers."""
    with FAULTS[name].planted():
        steps_until_caught(name, inspect=False)


def test_without_a_fault_the_same_walks_are_silent() -> None:
    """This also checks that planted faults leave nothing behind."""
    for fault in FAULTS.values():
        with fault.planted():
            pass
    for seed in range(SILENT_WALKS):
        walk(seed, STEPS_A_WALK)
