"""Blocks of a sliding window stand each for themselves, and their holders let go of what the window has left."""

from __future__ import annotations

import pytest

from kvtierd.core.errors import BadArgument
from kvtierd.core.ids import LeaseId
from kvtierd.core.policy import GroupShape
from kvtierd.core.transfers import BlockResult, CommitItem
from tests.unit.core.bench import ALICE, DISK, HOST, key, name_of
from tests.unit.core.groups_bench import FULL, SLIDING, GroupsBench


def held(bench: GroupsBench, lease: LeaseId) -> str:
    return "".join(name_of(block.key) for block in bench.core.leases[lease].held)


def test_a_block_needs_no_parent_and_tells_of_it_all_the_same() -> None:
    bench = GroupsBench(host=(4, 4))
    bench.fill(SLIDING, "cd", "abcd")
    (row, _) = bench.core.listing(SLIDING, 0, 10).rows
    assert (row.key, row.parent) == (key("c"), key("b"))
    _ticket, outcome = bench.core.reserve(ALICE, FULL, HOST, 1, 0)
    grant = bench.apply(outcome).grants[0]
    assert grant.lease is not None
    results, outcome = bench.core.commit(ALICE, grant.lease, [CommitItem(grant.slots[0], key("c"), key("b"), 35)], 0)
    bench.apply(outcome)
    assert results == (BlockResult.PARENT_MISSING,)


def test_a_block_goes_alone() -> None:
    bench = GroupsBench(host=(4, 4))
    for group in (FULL, SLIDING):
        bench.fill(group, "abcd", "abcd")
        report, outcome = bench.core.drop(ALICE, group, [key("b")], 0)
        bench.apply(outcome)
        assert report.results == (BlockResult.OK,)
    assert (bench.has(FULL), bench.has(SLIDING)) == ("a", "acd")


def test_what_was_used_longest_ago_goes_first_whatever_stands_under_it() -> None:
    """In the full group the root outlives its child; in the sliding one it was simply used before it."""
    bench = GroupsBench(host=(2, 2))
    for group in (FULL, SLIDING):
        lease = bench.write(group, "ab", "ab")
        bench.apply(bench.core.release(ALICE, [lease], 0, [1]))
        bench.release(lease)
        bench.fill(group, "x", "x")
    assert (bench.has(FULL), bench.has(SLIDING)) == ("ax", "bx")


def test_a_demotion_to_disk_takes_no_ancestors_along() -> None:
    bench = GroupsBench(host=(3, 3), disk=(8, 8))
    for group in (FULL, SLIDING):
        bench.fill(group, "abc", "abc")
        _ticket, outcome = bench.core.move(ALICE, group, DISK, [key("c")], 0)
        bench.apply(outcome)
        bench.land()
    assert (bench.at(FULL, DISK), bench.at(SLIDING, DISK)) == ("abc", "c")


def test_a_lost_copy_takes_nothing_with_it() -> None:
    bench = GroupsBench(host=(3, 3), disk=(8, 8))
    for group in (FULL, SLIDING):
        bench.fill(group, "abc", "abc")
        _, outcome = bench.core.move(ALICE, group, DISK, [key(name) for name in "abc"], 0)
        bench.apply(outcome)
        bench.land()
        _, outcome = bench.core.move(ALICE, group, HOST, [key("b")], 0)
        bench.apply(outcome)
        bench.land(corrupt="b")
    assert (bench.has(FULL), bench.has(SLIDING)) == ("a", "ac")


# -- what a writer holds -----------------------------------------------------------------------------------------------


def test_a_writer_holds_what_the_newest_block_looks_back_on() -> None:
    bench = GroupsBench(host=(6, 6))
    lease = bench.write(SLIDING, "ab", "abcdef", slots=6)
    assert held(bench, lease) == "ab"
    bench.add(lease, "cd", "abcdef")
    assert held(bench, lease) == "bcd"
    bench.add(lease, "ef", "abcdef")
    assert held(bench, lease) == "def"
    assert bench.has(SLIDING) == "abcdef"
    assert bench.core.leases[lease].blank == {}


def test_what_a_writer_let_go_of_makes_room_for_others_at_once() -> None:
    bench = GroupsBench(host=(4, 4))
    bench.write(SLIDING, "abcd", "abcd")
    bench.write(SLIDING, "x", "x")
    assert bench.has(SLIDING) == "bcdx"


@pytest.mark.parametrize(
    ("window", "tokens_per_block", "kept"), [(4, 4, 1), (5, 4, 2), (8, 4, 2), (9, 4, 3), (1, 16, 1)]
)
def test_a_block_is_let_go_of_when_the_window_has_left_it_whole(window: int, tokens_per_block: int, kept: int) -> None:
    bench = GroupsBench((0, window), host=(6, 6), tokens_per_block=tokens_per_block)
    lease = bench.write(SLIDING, "abcdef", "abcdef")
    assert held(bench, lease) == "abcdef"[-kept:]
    shape = GroupShape(SLIDING, {}, {}, window, tokens_per_block)
    for blocks in range(20):
        first = max(0, blocks * tokens_per_block - window) // tokens_per_block
        assert shape.first_block(blocks) == first


def test_chains_of_one_lease_slide_each_for_itself() -> None:
    bench = GroupsBench((0, 2), host=(8, 8))
    lease = bench.write(SLIDING, "axbycz", "abc", slots=8)
    assert held(bench, lease) == "xbycz"


def test_blocks_that_exist_already_slide_the_window_too() -> None:
    bench = GroupsBench((0, 2), host=(8, 8))
    bench.fill(SLIDING, "cd", "abcd")
    lease = bench.write(SLIDING, "abcde", "abcde", slots=5)
    assert held(bench, lease) == "e"


def test_a_writer_of_a_full_group_holds_all_of_its_blocks() -> None:
    bench = GroupsBench(host=(6, 6))
    assert held(bench, bench.write(FULL, "abcdef", "abcdef")) == "abcdef"


# -- letting go of a part ----------------------------------------------------------------------------------------------


def test_a_release_may_let_go_of_the_first_blocks_only() -> None:
    bench = GroupsBench(host=(4, 4))
    lease = bench.write(FULL, "abc", "abc", slots=4)
    bench.apply(bench.core.release(ALICE, [lease], 0, [2]))
    assert (held(bench, lease), len(bench.core.leases[lease].blank)) == ("c", 1)
    bench.apply(bench.core.release(ALICE, [lease], 0, [1]))
    assert held(bench, lease) == ""
    bench.apply(bench.core.release(ALICE, [lease], 0, [0]))
    assert bench.core.leases == {}
    assert bench.tier(HOST).held == 0


def test_the_first_blocks_are_let_go_of_tail_first() -> None:
    bench = GroupsBench(host=(4, 4))
    lease = bench.write(SLIDING, "cba", "abc")
    bench.apply(bench.core.release(ALICE, [lease], 0, [3]))
    bench.release(lease)
    bench.fill(SLIDING, "xy", "xy")
    assert bench.has(SLIDING) == "bcxy"


def test_a_malformed_partial_release_changes_nothing() -> None:
    bench = GroupsBench(host=(4, 4))
    one, two = bench.write(FULL, "a", "a"), bench.write(FULL, "bc", "bc")
    for counts in ([1], [1, 3], [-1, 0], [1, 1, 1]):
        with pytest.raises(BadArgument, match="first_blocks"):
            bench.core.release(ALICE, [one, two], 0, counts)
    assert (held(bench, one), held(bench, two)) == ("a", "bc")
