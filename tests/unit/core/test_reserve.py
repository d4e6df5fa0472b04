"""Blank slots: all or nothing, in turn, and a refusal at once where waiting is of no use."""

from kvtierd.core.outcome import RefusalReason
from kvtierd.core.policy import Policy
from kvtierd.core.slots import SlotState
from tests.unit.core.bench import ALICE, BOB, DEVICE, HOST, Bench


def test_all_or_nothing() -> None:
    """One slot is free, and is not given away in part while the other is on its way."""
    bench = Bench(device=2, host=2)
    bench.put("a")
    waiting = bench.reserve(DEVICE, 2)
    assert not bench.answered(waiting)
    assert bench.states(DEVICE) == {SlotState.FREE: 1, SlotState.RETIRING: 1}
    bench.land()
    assert len(bench.grants[waiting].only.slots) == 2


def test_tiers_have_queues_of_their_own() -> None:
    bench = Bench(device=1, host=2)
    bench.put("a")
    waiting = bench.reserve(DEVICE, 1)
    assert bench.reserve(HOST, 1, BOB) in bench.grants
    assert not bench.answered(waiting)


def test_slots_leased_ahead_are_few_and_make_room_without_the_chain_they_follow() -> None:
    bench = Bench(device=4, policy=Policy(ahead_share=2))
    bench.put("ab")
    bench.put("cd")
    assert bench.lease_ahead(DEVICE, 3, after="b") is None, "more than half of the slots"
    assert bench.stored() == "abcd"
    assert bench.lease_ahead(DEVICE, 1, after="b") is not None
    assert bench.lease_ahead(DEVICE, 1, after="b", session=BOB) is not None
    assert bench.lease_ahead(DEVICE, 1, after="b") is None
    assert bench.stored() == "ab"


def test_a_request_waits_for_slots_leased_ahead_and_a_reset_does_not() -> None:
    bench = Bench(device=4, policy=Policy(ahead_share=2))
    lease = bench.lease_ahead(DEVICE, 2, after="a")
    assert lease is not None
    waiting = bench.reserve(DEVICE, 4, BOB)
    assert not bench.answered(waiting)
    assert bench.lease_ahead(DEVICE, 1, after="a") is None, "a request waits"
    bench.apply(bench.core.reset(bench.now, force=False)[1])
    bench.release(lease)
    assert waiting in bench.grants


def test_a_request_waits_for_no_slots_of_a_client_that_is_gone() -> None:
    bench = Bench(device=4, policy=Policy(ahead_share=2))
    bench.lease_ahead(DEVICE, 1, after="a")
    bench.orphan(ALICE)
    assert bench.reserve(DEVICE, 4, BOB) in bench.refusals


def test_after_a_lease_ahead_slots_are_freed_for_the_next() -> None:
    """Between the calls, so that no call waits for it."""
    bench = Bench(device=16, policy=Policy(ahead_share=4))
    bench.put("abcdefghijklmnop")
    lease = bench.lease_ahead(DEVICE, 2, after="b")
    assert (lease is not None, bench.states(DEVICE).get(SlotState.FREE, 0)) == (True, 0)
    assert bench.core.behind
    bench.rest()
    assert (bench.states(DEVICE)[SlotState.FREE], bench.core.behind) == (2, False)
    assert bench.stored() == "abcdefghijkl"


def test_what_becomes_impossible_while_it_waits_is_refused_then() -> None:
    bench = Bench(device=2, host=2)
    bench.put("a")
    bench.put("b")
    waiting = bench.reserve(DEVICE, 2)
    (hit,) = bench.acquire("a", session=BOB)
    bench.expire(hit)
    assert hit in bench.grants
    assert bench.refusals[waiting].reason is RefusalReason.TIER_FULL


def test_a_refused_reserve_evicts_nothing() -> None:
    bench = Bench(device=2)
    bench.store("a")
    bench.put("b")
    assert bench.reserve(DEVICE, 2) in bench.refusals
    assert bench.stored() == "ab"


def test_at_its_deadline_a_reserve_is_refused_and_the_next_in_line_served() -> None:
    bench = Bench(device=2, host=2)
    bench.put("a")
    first = bench.reserve(DEVICE, 2)
    second = bench.reserve(DEVICE, 1, BOB)
    bench.expire(first)
    assert bench.refusals[first].reason is RefusalReason.DEADLINE
    assert second in bench.grants


def test_a_cancelled_reserve_gets_no_answer_and_its_room_goes_to_the_next() -> None:
    bench = Bench(device=2, host=2)
    bench.put("a")
    first = bench.reserve(DEVICE, 2)
    second = bench.reserve(DEVICE, 1, BOB)
    bench.cancel(first)
    bench.land()
    assert not bench.answered(first)
    assert second in bench.grants


def test_to_expire_or_cancel_an_answered_ticket_does_nothing() -> None:
    bench = Bench(device=1)
    ticket = bench.reserve(DEVICE, 1)
    bench.expire(ticket)
    bench.cancel(ticket)
    assert ticket in bench.grants
    assert ticket not in bench.refusals
    assert bench.states(DEVICE) == {SlotState.BLANK: 1}
