"""An edge that keeps failing is left out for a while: eviction falls back to dropping, then it is tried again."""

from kvtierd.core.policy import Policy
from tests.unit.core.bench import DEVICE, HOST, SECOND, Bench

POLICY = Policy(degrade_after=2, degraded_ns=5 * SECOND)


def degraded() -> Bench:
    """Two demotions from device to host have failed; a reserve that waited for them has dropped its victim."""
    bench = Bench(device=1, host=2, policy=POLICY)
    bench.put("a")
    ticket = bench.reserve(DEVICE, 1)
    bench.land_one(failed="a")
    assert not bench.answered(ticket)
    bench.land_one(failed="a")
    assert ticket in bench.grants
    assert bench.stored() == ""
    bench.end()
    return bench


def test_after_failures_in_a_row_victims_are_dropped() -> None:
    bench = degraded()
    bench.put("b")
    assert bench.reserve(DEVICE, 1) in bench.grants
    assert bench.stored() == ""


def test_after_the_cool_down_victims_go_down_again() -> None:
    bench = degraded()
    bench.put("b")
    bench.now = 5 * SECOND
    bench.make_room(DEVICE, 1)
    assert bench.where("b") == {HOST}


def test_a_success_starts_the_count_anew() -> None:
    bench = Bench(device=1, host=3, policy=POLICY)
    for name in "ab":
        bench.put(name)
        bench.reserve(DEVICE, 1)
        bench.land_one(failed=name)
        bench.land()
        assert bench.where(name) == {HOST}
        bench.end()


def test_an_acquire_over_a_degraded_edge_is_shortened_at_once() -> None:
    bench = Bench(device=2, host=2, policy=POLICY)
    bench.put("a")
    bench.put("b", HOST, under="a")
    for _ in range(2):
        bench.acquire("ab")
        bench.land(failed="b")
        bench.end()
    (ticket,) = bench.acquire("ab")
    assert len(bench.grants[ticket].only.slots) == 1
    assert bench.in_flight() == []


def test_what_only_a_degraded_edge_leads_from_is_a_miss() -> None:
    bench = Bench(device=2, host=2, policy=POLICY)
    bench.put("b", HOST)
    for _ in range(2):
        bench.acquire("b")
        bench.land(failed="b")
    before = bench.core.stats()
    (ticket,) = bench.acquire("b")
    assert (bench.grants[ticket].only.lease, bench.grants[ticket].matched) == (None, 0)
    after = bench.core.stats()
    asked = (after.queried - before.queried, after.found - before.found)
    assert (asked, after.hits) == ((1, 0), before.hits)


def test_it_shows_in_the_stats() -> None:
    bench = degraded()
    edge = bench.core.stats().edges[DEVICE, HOST]
    assert (edge.failures, edge.blocks, edge.degraded_until) == (2, 0, 5 * SECOND)
