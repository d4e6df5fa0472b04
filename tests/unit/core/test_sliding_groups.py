"""Blocks of a sliding window stand each for themselves, and their holders let go of what the window has left."""

import pytest

from kvtierd.core.ids import LeaseId, SlotId
from kvtierd.core.outcome import RefusalReason
from kvtierd.core.policy import GroupShape
from kvtierd.core.transfers import BlockResult
from tests.unit.core.bench import ALICE, DISK, HOST, key, name_of
from tests.unit.core.groups_bench import FULL, SLIDING, GroupsBench


def held(bench: GroupsBench, lease: LeaseId) -> str:
    return "".join(name_of(block.key) for block in bench.core.leases[lease].held)


def slots_of(bench: GroupsBench, lease: LeaseId, names: str) -> list[SlotId]:
    held = bench.core.leases[lease].held
    return [copy.slot for block, copy in held.items() if name_of(block.key) in names]


def test_a_block_goes_alone() -> None:
    bench = GroupsBench(host=(4, 4))
    for group in (FULL, SLIDING):
        bench.fill(group, "abcd", "abcd")
        drop, outcome = bench.core.drop(group, [key("b")], 0)
        bench.apply(outcome)
        assert drop.report is not None and drop.report.results == (BlockResult.OK,)
    assert (bench.has(FULL), bench.has(SLIDING)) == ("a", "acd")


def test_what_was_used_longest_ago_goes_first_whatever_stands_under_it() -> None:
    """In the full group the root outlives its child; in the sliding one it was simply used before it."""
    bench = GroupsBench(host=(2, 2))
    for group in (FULL, SLIDING):
        lease = bench.write(group, "ab", "ab")
        bench.apply(bench.core.release(ALICE, [lease], 0, slots_of(bench, lease, "a")))
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
        assert shape.attention.needs(blocks) == (0, first, blocks)


def test_the_first_blocks_are_let_go_of_tail_first() -> None:
    bench = GroupsBench(host=(4, 4))
    lease = bench.write(SLIDING, "cba", "abc")
    bench.apply(bench.core.release(ALICE, [lease], 0, slots_of(bench, lease, "abc")))
    bench.release(lease)
    bench.fill(SLIDING, "xy", "xy")
    assert bench.has(SLIDING) == "bcxy"


# -- what a reader holds -----------------------------------------------------------------------------------------------


def test_a_reader_of_one_group_holds_what_its_window_needs() -> None:
    """As over all groups, the first blocks may be gone; the others are neither fetched nor held."""
    bench = GroupsBench(device=(6, 3), host=(8, 8))
    bench.fill(SLIDING, "cdef", "abcdef")
    (ticket,) = bench.alone(SLIDING, "abcdefg", min_blocks=6)
    bench.land()
    assert bench.granted_alone(ticket, SLIDING, "abcdefg") == "def"
    grant = bench.grants[ticket]
    assert (grant.blocks, grant.matched, grant.only.found_in) == (6, 6, (HOST.bit,) * 3)
    stats = bench.core.stats()
    assert (stats.hits[HOST], stats.queried - stats.found, stats.held_by) == (3, 1, {ALICE: 3})


def test_a_reader_of_one_group_gets_a_shorter_prefix_where_room_is_short() -> None:
    bench = GroupsBench(device=(6, 2), host=(8, 8))
    bench.fill(SLIDING, "abcdef", "abcdef")
    (ticket,) = bench.alone(SLIDING, "abcdef")
    bench.land()
    assert bench.granted_alone(ticket, SLIDING, "abcdef") == "ab"
    assert bench.grants[ticket].matched == 6
    (ticket,) = bench.alone(SLIDING, "abcdef", min_blocks=3)
    assert bench.refusals[ticket].reason is RefusalReason.TIER_FULL


def test_a_window_with_a_hole_is_too_short_or_an_empty_grant() -> None:
    bench = GroupsBench(host=(8, 8))
    bench.fill(SLIDING, "bcef", "abcdef")
    assert bench.core.match([SLIDING], [key(name) for name in "abcdef"]).blocks == 0
    (ticket,) = bench.alone(SLIDING, "abcdef", tier=HOST)
    assert bench.granted_alone(ticket, SLIDING, "abcdef") == ""
    (ticket,) = bench.alone(SLIDING, "abcdef", tier=HOST, min_blocks=1)
    assert (bench.refusals[ticket].reason, bench.refusals[ticket].matched) == (RefusalReason.TOO_SHORT, 0)
