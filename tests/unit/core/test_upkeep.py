"""Pins and resets."""

import pytest

from kvtierd.core.errors import ResetRefused
from kvtierd.core.policy import Policy
from kvtierd.core.transfers import BlockResult
from tests.unit.core.bench import DEVICE, HOST, Bench

OK, HELD = BlockResult.OK, BlockResult.HELD


def reset(bench: Bench, *, force: bool = False) -> tuple[int, int]:
    """(dropped, kept) over all slices."""
    dropped = kept = 0
    following = None
    while True:
        report, outcome = bench.core.reset(bench.now, force=force, following=following)
        bench.apply(outcome)
        dropped, kept, following = dropped + report.dropped, kept + report.kept, report.following
        if following is None:
            return dropped, kept


# -- pins ------------------------------------------------------------------------------------------------------------


def test_a_pin_during_a_demotion_keeps_both_copies() -> None:
    bench = Bench(device=1, host=1, policy=Policy(max_pinned=1.0))
    bench.put("a")
    waiting = bench.reserve(DEVICE, 1)
    bench.pin("a")
    bench.land()
    assert bench.where("a") == {DEVICE, HOST}
    assert waiting in bench.refusals


def test_a_pin_outlives_its_session() -> None:
    bench = Bench(device=2)
    bench.put("a")
    bench.pin("a")
    bench.end()
    assert bench.drop("a") == ([HELD], 0)
    bench.pin("a", unpin=True)
    assert bench.drop("a") == ([OK], 1)


def test_a_pinned_blocks_clock_stands() -> None:
    bench = Bench(device=2)
    bench.put("a", priority=80, duration_ms=100)
    bench.pin("a")
    bench.pass_ms(1000)
    assert bench.priority("a") == 80
    bench.pin("a", unpin=True)
    bench.pass_ms(100)
    assert bench.priority("a") == 35


# -- resets ----------------------------------------------------------------------------------------------------------


def test_a_reset_is_refused_while_anything_is_pinned() -> None:
    bench = Bench(device=3)
    bench.put("a")
    bench.pin("a")
    with pytest.raises(ResetRefused) as caught:
        bench.core.reset(bench.now, force=False)
    assert caught.value.pinned == 1


def test_a_forced_reset_keeps_what_is_needed_and_what_that_stands_on() -> None:
    bench = Bench(device=8)
    bench.put("ab")
    bench.put("c", under="b")
    bench.put("d", under="b")
    bench.put("x")
    bench.put("y", under="x")
    bench.acquire("abc")
    bench.pin("x")
    plan = bench.core.reset_plan()
    assert (plan.dropped, plan.kept) == (2, 4)
    assert reset(bench, force=True) == (2, 4)
    assert bench.stored() == "abcx"


def test_a_great_reset_comes_in_slices() -> None:
    names = [chr(0x4E00 + n) for n in range(11)]
    bench = Bench(host=len(names), policy=Policy(blocks_a_call=4))
    for name in names:
        bench.put(name, HOST)
    report, outcome = bench.core.reset(bench.now, force=False)
    bench.apply(outcome)
    assert (report.dropped, report.kept) == (4, 0)
    assert report.following is not None
    assert reset(bench) == (7, 0)
