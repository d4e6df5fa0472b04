"""The longest stored prefix, READY in a tier and held: claimed before room is made, taken whole or shortened."""

from __future__ import annotations

from kvtierd.core.outcome import RefusalReason
from kvtierd.core.policy import Policy
from tests.unit.core.bench import DEVICE, DISK, GROUP, HOST, Bench, key


def test_a_shortened_acquire_holds_nothing_of_the_rest() -> None:
    bench = Bench(device=2, host=3)
    bench.put("abc", HOST)
    bench.acquire("abc")
    bench.land()
    assert bench.drop("c")[1] == 1


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
    assert (grant.blocks, grant.matched) == (1, 3)
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
    bench.lose()
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
    assert (stats.hits, stats.queried, stats.found) == ({DEVICE: 1, HOST: 1, DISK: 1}, 4, 3)


def test_looking_touches_nothing() -> None:
    bench = Bench(device=2)
    bench.put("a")
    bench.put("b")
    bench.core.match([GROUP], [key("a")])
    bench.core.locate(GROUP, [key("a")])
    bench.core.explain(GROUP, key("a"))
    bench.blank(DEVICE, 1)
    assert bench.stored() == "b"
