"""Moves without a lease: up, down, and what the caller is told."""

import pytest

from kvtierd.core.transfers import BlockResult
from tests.unit.core.bench import BOB, DEVICE, DISK, GROUP, HOST, Bench, keys


def test_a_move_down_leaves_what_is_leased_above() -> None:
    bench = Bench(device=1, host=1)
    bench.store("a", session=BOB)
    ticket = bench.move("a", HOST)
    bench.land()
    assert bench.grants[ticket].results == (True,)
    assert bench.where("a") == {DEVICE, HOST}


@pytest.mark.parametrize("names", ["abcd", "abcdz", "zabcd"])
def test_a_move_of_more_than_fits_brings_what_fits(names: str) -> None:
    """As its dry run says. Nothing was moved at all."""
    bench = Bench(device=3, host=4)
    for name in "abcd":
        bench.put(name, HOST)
    bench.blank(DEVICE, 1, BOB)
    said = bench.core.plan_move(GROUP, DEVICE, keys(names))
    ticket = bench.move(names, DEVICE)
    bench.land()
    assert bench.grants[ticket].results == tuple(result is BlockResult.OK for result in said)
    assert [bench.where(name) for name in "abcd"] == [{DEVICE}, {DEVICE}, {HOST}, {HOST}]


def test_a_move_to_a_full_disk_takes_what_fits_with_its_ancestors() -> None:
    bench = Bench(device=5, disk=3)
    bench.put("x")
    bench.move("x", DISK)
    bench.land()
    bench.pin("x", DISK)
    bench.put("abc")
    bench.put("d")
    ticket = bench.move("cdbx", DISK)
    bench.land()
    assert bench.grants[ticket].results == (False, True, False, True)
    assert bench.where("d") == {DISK}


def test_a_move_waits_its_turn_and_is_answered_at_its_deadline() -> None:
    bench = Bench(device=1, host=2)
    bench.put("a", HOST)
    bench.put("x")
    ticket = bench.move("a", DEVICE)
    assert not bench.answered(ticket)
    bench.expire(ticket)
    assert bench.grants[ticket].results == (False,)


def test_a_move_says_which_copies_failed() -> None:
    """As against what found no room."""
    bench = Bench(device=2, host=3)
    bench.put("ab", HOST)
    lease = bench.store("x")
    ticket = bench.move("aq", DEVICE)
    bench.land(failed="a")
    assert (bench.grants[ticket].results, bench.grants[ticket].failed) == ((False, False), frozenset({0}))
    crowded = bench.move("ab", DEVICE)
    bench.land(failed="a")
    assert (bench.grants[crowded].results, bench.grants[crowded].failed) == ((False, False), frozenset({0}))
    bench.release(lease)


def test_what_was_fetched_ahead_of_need_is_not_the_next_to_go() -> None:
    bench = Bench(device=2, host=4)
    bench.put("a", HOST)
    bench.put("x")
    bench.put("y")
    bench.move("a", DEVICE)
    bench.land()
    bench.make_room(DEVICE, 1)
    assert DEVICE in bench.where("a")
