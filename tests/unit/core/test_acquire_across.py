"""One prefix over all groups, READY and held: as long as every group can serve it, and nothing anywhere besides."""

from collections.abc import Callable

import pytest

from kvtierd.core.ids import GroupId, TicketId
from kvtierd.core.outcome import RefusalReason
from kvtierd.core.policy import Policy
from tests.unit.core.bench import BOB, DEVICE, HOST, key
from tests.unit.core.groups_bench import FULL, SLIDING, GroupsBench

CHAIN = "abcdef"


def stored(*, device: tuple[int, int], sliding: str = CHAIN) -> GroupsBench:
    """All of the chain in the full group, on the host; of the sliding one, which needs three, what is said."""
    bench = GroupsBench(device=device, host=(8, 8))
    bench.fill(FULL, CHAIN, CHAIN)
    bench.fill(SLIDING, sliding, CHAIN)
    return bench


def test_every_group_fetches_what_it_needs() -> None:
    bench = stored(device=(6, 3))
    (ticket,) = bench.across(CHAIN)
    bench.land()
    assert bench.granted(ticket, CHAIN) == [CHAIN, "def"]
    assert (bench.at(FULL, DEVICE), bench.at(SLIDING, DEVICE)) == (CHAIN, "def")


def test_nothing_stored_is_an_empty_grant_or_too_short_as_the_caller_said() -> None:
    bench = stored(device=(6, 6), sliding="xyz")
    (ticket,) = bench.across(CHAIN)
    assert bench.granted(ticket, CHAIN) == ["", ""]
    (ticket,) = bench.across(CHAIN, min_blocks=1)
    refusal = bench.refusals[ticket]
    assert (refusal.reason, refusal.matched, refusal.wanted) == (RefusalReason.TOO_SHORT, 0, 1)


@pytest.mark.parametrize(
    ("device", "sliding", "granted"),
    [
        pytest.param((4, 3), CHAIN, ["abcd", "bcd"], id="the full group is short of room: the window moves too"),
        pytest.param((6, 2), CHAIN, ["ab", "ab"], id="no room for a window: the prefix ends before it fills"),
        pytest.param((4, 3), "adef", ["a", "a"], id="the window of three or four is not stored"),
    ],
)
def test_it_is_shortened_to_a_prefix_that_every_group_can_serve(
    device: tuple[int, int], sliding: str, granted: list[str]
) -> None:
    bench = stored(device=device, sliding=sliding)
    (ticket,) = bench.across(CHAIN)
    bench.land()
    assert bench.granted(ticket, CHAIN) == granted


def test_an_answer_is_never_under_its_minimum_and_then_nothing_is_held() -> None:
    bench = stored(device=(4, 3))
    (ticket,) = bench.across(CHAIN, min_blocks=5)
    refusal = bench.refusals[ticket]
    assert (refusal.reason, refusal.matched, refusal.wanted) == (RefusalReason.TIER_FULL, 6, 5)
    assert bench.moves == []


def test_leases_of_others_shorten_it_where_they_are() -> None:
    bench = stored(device=(6, 4))
    ticket, outcome = bench.core.reserve(BOB, SLIDING, DEVICE, 2, 0)
    bench.apply(outcome)
    (ticket,) = bench.across(CHAIN)
    bench.land()
    assert bench.granted(ticket, CHAIN) == ["ab", "ab"]


def test_slots_are_taken_in_all_groups_in_one_step() -> None:
    """The sliding group has to make room first; until it has, the full one copies nothing."""
    bench = stored(device=(6, 3))
    bench.fill(SLIDING, "xyz", "xyz", DEVICE)
    (ticket,) = bench.across(CHAIN)
    assert {(move.group, move.src, move.dst) for move in bench.moves} == {(SLIDING, DEVICE, HOST)}
    bench.land_one()
    while any(move.src is DEVICE for move in bench.moves):
        bench.land_one()
    assert {(move.group, move.dst) for move in bench.moves} == {(FULL, DEVICE), (SLIDING, DEVICE)}
    bench.land()
    assert bench.granted(ticket, CHAIN) == [CHAIN, "def"]


def test_who_came_later_waits_behind_it_in_every_group() -> None:
    bench = stored(device=(6, 3))
    bench.fill(SLIDING, "xyz", "xyz", DEVICE)
    (ticket,) = bench.across(CHAIN)
    later, outcome = bench.core.reserve(BOB, FULL, DEVICE, 1, 0)
    bench.apply(outcome)
    assert not bench.answered(later)
    bench.land()
    assert bench.granted(ticket, CHAIN) == [CHAIN, "def"]
    assert bench.answered(later)


def test_chains_of_one_call_do_not_evict_each_others_hits() -> None:
    bench = GroupsBench(device=(4, 2), host=(8, 8))
    for group in (FULL, SLIDING):
        bench.fill(group, "x", "x", DEVICE)
        bench.fill(group, "ab", "ab")
    first, second = bench.across("ab", "x")
    bench.land()
    assert bench.granted(second, "x") == ["x", "x"]
    assert bench.granted(first, "ab") == ["a", "a"]


def test_it_touches_only_what_the_window_covers() -> None:
    bench = GroupsBench((0, 2), host=(4, 4))
    for group in (FULL, SLIDING):
        bench.fill(group, "abcd", "abcd")
    (ticket,) = bench.across("abcd", tier=HOST)
    bench.release(*bench.grants[ticket].leases)
    for group in (FULL, SLIDING):
        bench.fill(group, "xy", "xy")
    assert (bench.has(FULL), bench.has(SLIDING)) == ("abxy", "cdxy")


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [FULL, SLIDING])
def test_a_failed_copy_shortens_it_and_the_other_group_fetches_what_that_needs(failing: GroupId) -> None:
    bench = stored(device=(6, 6))
    (ticket,) = bench.across(CHAIN)
    while bench.moves[0].group is not failing:
        bench.moves.append(bench.moves.pop(0))
    bench.land_one(failed="e")
    bench.land()
    assert bench.granted(ticket, CHAIN) == ["abcd", "bcd"]
    assert bench.tier(DEVICE).held == 7


def test_copies_that_keep_failing_end_in_a_refusal() -> None:
    bench = stored(device=(6, 6))
    (ticket,) = bench.across(CHAIN)
    for _ in range(20):
        bench.fail_all()
    assert bench.refusals[ticket].reason is RefusalReason.TOO_SHORT
    assert bench.tier(DEVICE).held == 0


def test_at_its_deadline_it_gets_the_prefix_that_is_ready_everywhere() -> None:
    bench = GroupsBench(device=(6, 6), host=(8, 8))
    for group in (FULL, SLIDING):
        bench.fill(group, "abc", CHAIN, DEVICE)
        bench.fill(group, "def", CHAIN)
    (ticket,) = bench.across(CHAIN)
    bench.expire(ticket)
    assert bench.granted(ticket, CHAIN) == ["abc", "abc"]
    assert bench.tier(DEVICE).held == 6
    bench.land()
    assert bench.tier(DEVICE).held == 6


def test_at_its_deadline_it_is_refused_where_no_prefix_is_ready_everywhere() -> None:
    """The full group has three of it, the sliding one the window of six only."""
    bench = GroupsBench(device=(6, 6), host=(8, 8))
    bench.fill(FULL, "abc", CHAIN, DEVICE)
    bench.fill(FULL, "def", CHAIN)
    bench.fill(SLIDING, "def", CHAIN, DEVICE)
    (ticket,) = bench.across(CHAIN)
    bench.expire(ticket)
    assert bench.refusals[ticket].reason is RefusalReason.DEADLINE
    assert bench.tier(DEVICE).held == 0
    bench.land()


@pytest.mark.parametrize("waiting", [True, False])
@pytest.mark.parametrize("leave", [GroupsBench.cancel, lambda bench, _: bench.end(), lambda bench, _: bench.orphan()])
def test_who_goes_away_leaves_nothing_held(waiting: bool, leave: Callable[[GroupsBench, TicketId], None]) -> None:
    bench = stored(device=(6, 3))
    if waiting:
        bench.fill(SLIDING, "xyz", "xyz", DEVICE)
    (ticket,) = bench.across(CHAIN)
    leave(bench, ticket)
    assert bench.tier(DEVICE).held == 0
    bench.land()
    assert not bench.answered(ticket)
    for group in (FULL, SLIDING):
        drop, outcome = bench.core.drop(group, [key("a")], 0)
        bench.apply(outcome)
        assert drop.report is not None and drop.report.dropped > 0


@pytest.mark.parametrize("expires", [False, True])
def test_nobody_gets_bytes_that_are_lost_while_what_needs_them_goes(expires: bool) -> None:
    bench = GroupsBench(device=(4, 4), host=(8, 8), policy=Policy(blocks_a_call=1))
    for group in (FULL, SLIDING):
        bench.fill(group, "a", "abcd", DEVICE)
        bench.fill(group, "bcd", "abcd")
    bench.rest()
    (ticket,) = bench.across("ab", min_blocks=1)
    slot = bench.core.locate(FULL, [key("a")])[0].slots[DEVICE]
    assert slot is not None
    bench.apply(bench.core.lose_bytes(FULL, key("a"), DEVICE, slot, bench.now))
    assert bench.core.behind
    if expires:
        bench.expire(ticket)
    else:
        bench.land()
    assert ticket in bench.refusals
