"""The longest stored prefix, READY in a tier and held: claimed before room is made, taken whole or shortened."""

from __future__ import annotations

from kvtierd.core.outcome import RefusalReason
from kvtierd.core.policy import Policy
from tests.unit.core.bench import BOB, DEVICE, DISK, GROUP, HOST, Bench, key


def test_the_longest_stored_prefix_is_granted() -> None:
    bench = Bench(device=3)
    bench.put("ab")
    grant = bench.grants[bench.acquire("abz")[0]]
    assert (grant.matched, grant.found_in) == (2, (DEVICE.bit, DEVICE.bit))
    assert grant.slots == (bench.slot("a", DEVICE), bench.slot("b", DEVICE))


def test_nothing_stored_is_an_empty_grant_or_too_short_as_the_caller_said() -> None:
    bench = Bench(device=1)
    grant = bench.grants[bench.acquire("ab")[0]]
    assert (grant.lease, grant.slots, grant.matched) == (None, (), 0)
    refusal = bench.refusals[bench.acquire("ab", min_blocks=1)[0]]
    assert (refusal.reason, refusal.matched) == (RefusalReason.TOO_SHORT, 0)


def test_two_chains_of_one_call_do_not_evict_each_others_hits() -> None:
    """Room for the first could be had by dropping the second: it is not."""
    bench = Bench(device=2, host=2)
    bench.put("x")
    bench.put("a", HOST)
    bench.put("b", HOST)
    first, second, third = bench.acquire("a", "b", "x")
    bench.land()
    assert bench.grants[third].slots == (bench.slot("x", DEVICE),)
    assert bench.where("x") >= {DEVICE}
    granted = [ticket for ticket in (first, second) if ticket in bench.grants]
    assert len(granted) == 1


def test_an_acquire_is_shortened_to_what_the_tier_can_hold() -> None:
    bench = Bench(device=2, host=3)
    bench.put("abc", HOST)
    (ticket,) = bench.acquire("abc")
    bench.land()
    grant = bench.grants[ticket]
    assert (len(grant.slots), grant.matched) == (2, 3)
    assert grant.found_in == (HOST.bit, HOST.bit)
    assert bench.where("c") == {HOST}


def test_an_acquire_is_never_shortened_under_its_minimum() -> None:
    bench = Bench(device=2, host=3)
    bench.put("abc", HOST)
    refusal = bench.refusals[bench.acquire("abc", min_blocks=3)[0]]
    assert (refusal.reason, refusal.matched) == (RefusalReason.TIER_FULL, 3)
    assert bench.in_flight() == []


def test_a_shortened_acquire_holds_nothing_of_the_rest() -> None:
    bench = Bench(device=2, host=3)
    bench.put("abc", HOST)
    bench.acquire("abc")
    bench.land()
    assert bench.drop("c")[1] == 1


def test_leases_of_others_count_as_there() -> None:
    bench = Bench(device=2)
    bench.store("ab", session=BOB)
    assert len(bench.grants[bench.acquire("ab")[0]].slots) == 2


def test_a_waiting_acquire_keeps_what_it_matched() -> None:
    bench = Bench(device=1, host=2)
    bench.put("a", HOST)
    bench.put("x")
    (ticket,) = bench.acquire("a")
    assert not bench.answered(ticket)
    assert bench.drop("a")[1] == 0
    assert not set(bench.stored()) - set("ax")
    bench.land()
    assert ticket in bench.grants


def test_destination_slots_are_taken_in_one_step_before_any_copy() -> None:
    bench = Bench(device=3, host=3)
    bench.put("abc", HOST)
    bench.acquire("abc")
    assert len(bench.moves) == 1
    assert [item.key for item in bench.moves[0].items] == [key("a"), key("b"), key("c")]


def test_at_its_deadline_an_acquire_gets_the_prefix_that_is_ready() -> None:
    bench = Bench(device=3, host=3)
    bench.put("a")
    bench.put("bc", HOST, under="a")
    (ticket,) = bench.acquire("abc")
    assert not bench.answered(ticket)
    bench.expire(ticket)
    grant = bench.grants[ticket]
    assert (len(grant.slots), grant.matched) == (1, 3)
    bench.land()
    assert bench.where("c") == {DEVICE}
    assert bench.tier(DEVICE).held == 1


def test_at_its_deadline_an_acquire_with_less_than_its_minimum_is_refused() -> None:
    bench = Bench(device=3, host=3)
    bench.put("a")
    bench.put("bc", HOST, under="a")
    (ticket,) = bench.acquire("abc", min_blocks=2)
    bench.expire(ticket)
    assert bench.refusals[ticket].reason is RefusalReason.DEADLINE
    assert bench.tier(DEVICE).held == 0


def test_a_cancelled_acquire_holds_nothing_while_its_copies_go_on() -> None:
    bench = Bench(device=2, host=2)
    bench.put("ab", HOST)
    (ticket,) = bench.acquire("ab")
    bench.cancel(ticket)
    bench.land()
    assert not bench.answered(ticket)
    assert (bench.where("a"), bench.tier(DEVICE).held) == ({DEVICE}, 0)


def test_an_acquire_whose_blocks_are_lost_while_it_waits_is_shortened() -> None:
    bench = Bench(device=2, host=1, disk=2, recovered=[("a", None, 35), ("b", "a", 35)])
    bench.put("h", HOST)
    bench.put("xy")
    (ticket,) = bench.acquire("ab")
    assert not bench.answered(ticket)
    bench.lose_disk()
    bench.land()
    assert bench.refusals[ticket].reason is RefusalReason.TOO_SHORT


def test_hits_count_where_the_block_was_found_nearest() -> None:
    bench = Bench(device=2, host=2, disk=2, recovered=[("d", None, 35)], policy=Policy())
    bench.put("a")
    bench.put("h", HOST)
    for chain in ("az", "h", "d"):
        bench.acquire(chain)
        bench.land()
        bench.end()
    stats = bench.core.stats()
    assert (stats.hits, stats.misses) == ({DEVICE: 1, HOST: 1, DISK: 1}, 1)


def test_match_and_locate_touch_nothing() -> None:
    bench = Bench(device=2)
    bench.put("a")
    bench.put("b")
    bench.core.match(GROUP, [key("a")])
    bench.core.locate(GROUP, [key("a")])
    bench.blank(DEVICE, 1)
    assert bench.stored() == "b"
