"""Seeded random walks: all promises hold after every step, and every kind of event happens often enough."""

from collections import Counter
from functools import cache
from typing import Final

import pytest

from tests.simulation.walk import walk

STEPS_A_WALK: Final = 1_000
WALKS_A_TEST: Final = 10
TESTS: Final = 10
LONG_TESTS: Final = 100
MOST_TESTS: Final = 3 * TESTS
"""Number of tests on whose walks everything must have happened."""

HAPPENS: Final = (
    "STORED COMMIT",
    "STORED RECOVERED",
    "UPDATED CAPACITY",
    "UPDATED DEMAND",
    "UPDATED PREFETCH",
    "UPDATED EXPLICIT",
    "UPDATED EXPIRED",
    "UPDATED WRITE_THROUGH",
    "UPDATED CORRUPT",
    "UPDATED IO_ERROR",
    "UPDATED REMOTE",
    "offered and not taken",
    "REMOVED CAPACITY",
    "REMOVED EXPLICIT",
    "REMOVED CORRUPT",
    "REMOVED IO_ERROR",
    "REMOVED ANCESTOR",
    "device>host CAPACITY",
    "device>host WATERMARK",
    "device>disk WATERMARK",
    "host>disk WATERMARK",
    "device>host WRITE_THROUGH",
    "device>disk CAPACITY",
    "host>disk CAPACITY",
    "host>disk WRITE_THROUGH",
    "device>disk WRITE_THROUGH",
    "host>device DEMAND",
    "device>host DEMAND",
    "disk>device DEMAND",
    "disk>host DEMAND",
    "disk>nowhere CAPACITY",
    "commit OK",
    "commit EXISTS",
    "commit PARENT_MISSING",
    "commit PARENT_CONFLICT",
    "commit and release",
    "leased ahead",
    "commit for several",
    "joined",
    "given back in part",
    "a partial block was outgrown",
    "retain OK",
    "retain NOT_FOUND",
    "pin OK",
    "pin NOT_READY",
    "pin OVER_CAP",
    "unpin OK",
    "reset",
    "reset refused",
    "REMOVED RESET",
    "drop OK",
    "drop HELD",
    "drop HELD when a part had gone",
    "called while blocks were being dropped",
    "gone on",
    "device bytes lost",
    "host bytes lost",
    "disk bytes lost",
    "hollow",
    "commit PARENT_MISSING under a hollow block",
    "granted slots",
    "granted all matched in a full group",
    "granted less than matched in a full group",
    "granted all matched across groups, of a window",
    "granted less than matched across groups, of a window",
    "granted nothing matched across groups",
    "granted all matched in a window",
    "granted less than matched in a window",
    "granted a move",
    "refused TIER_FULL",
    "refused DEADLINE",
    "refused TOO_SHORT",
    "refused TIER_OFFLINE",
    "copies failed",
    "copies corrupt",
    "restart after a crash",
    "memory adopted",
    "found in memory",
    "restored blank",
    "restored held",
    "died in the middle of a call",
    "died while it adopted",
    "called while the disk was being lost",
    "called while the device was being lost",
    "refused, the device is lost",
    "restart clean",
    "settled",
    "written down, through",
    "written down, selective",
)
"""Events that the walks must have seen, so that their success means something."""


@cache
def run_walks(first_seed: int, walks: int, steps: int) -> Counter[str]:
    """Walks with several seeds, at least ``steps`` each. Returns the counts of events. Cached for all tests."""
    seen: Counter[str] = Counter()
    taken = 0
    for seed in range(first_seed, first_seed + walks):
        walked = walk(seed, steps)
        taken += walked.steps
        seen += walked.seen
    assert taken >= walks * steps
    return seen


@pytest.mark.parametrize("part", range(TESTS))
def test_random_walks_keep_every_promise(part: int) -> None:
    run_walks(part * WALKS_A_TEST, WALKS_A_TEST, STEPS_A_WALK)


def test_the_walks_are_long_enough() -> None:
    assert TESTS * WALKS_A_TEST * STEPS_A_WALK >= 100_000
    assert LONG_TESTS * WALKS_A_TEST * STEPS_A_WALK >= 1_000_000


def test_everything_happens_on_a_walk() -> None:
    """Uses the random walks, and more walks if needed: the setup of a world rules many events out."""
    seen: Counter[str] = Counter()
    for part in range(MOST_TESTS):
        seen += run_walks(part * WALKS_A_TEST, WALKS_A_TEST, STEPS_A_WALK)
        if part + 1 >= TESTS and all(seen[what] for what in HAPPENS):
            return
    assert [what for what in HAPPENS if not seen[what]] == []


def test_a_seed_is_a_walk() -> None:
    assert walk(3, 500) == walk(3, 500)


@pytest.mark.long
@pytest.mark.parametrize("part", range(LONG_TESTS))
def test_a_million_steps(part: int) -> None:
    run_walks(100_000 + part * WALKS_A_TEST, WALKS_A_TEST, STEPS_A_WALK)


def test_a_loss_ends_though_blocks_are_written_through() -> None:
    """On this walk a block was copied to disk again each time that the loss of its parent removed it from disk."""
    walk(900043, 3003)
