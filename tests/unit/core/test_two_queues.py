"""The ``2q`` policy: blocks that came back after they had left are kept before those that only were used lately."""

from __future__ import annotations

from kvtierd.core.policy import Policy
from kvtierd.core.transfers import BlockResult, CommitItem
from tests.unit.core.bench import ALICE, DEVICE, HOST, Bench, key

TWO_QUEUES = Policy(eviction="2q")


def returned(device: int, host: int = 0) -> Bench:
    """``a`` has left, and come back."""
    bench = Bench(device=device, host=host, policy=TWO_QUEUES)
    fill(bench, "auvwxyz"[: 1 + device + host])
    assert "a" not in bench.stored()
    fill(bench, "a")
    return bench


def fill(bench: Bench, names: str) -> None:
    for name in names:
        bench.reserve(DEVICE, 1)
        bench.land()
        bench.commit(list(bench.grants.values())[-1], [(name, None, 35)])
        bench.release(*bench.core.leases)


def test_a_block_that_came_back_outlives_newer_ones() -> None:
    bench = returned(4)
    fill(bench, "bcdefghi")
    assert "a" in bench.stored()


def test_one_that_nobody_wants_any_more_goes_when_thrice_the_tier_has_left() -> None:
    bench = returned(4)
    fill(bench, "bcdefghijklm")
    assert "a" in bench.stored(), "twelve have left since"
    fill(bench, "no")
    assert "a" not in bench.stored()


def test_it_stays_where_that_has_saved_misses() -> None:
    """By last use alone it would have left before it was used again."""
    bench = returned(4)
    fill(bench, "bcdefghi")
    bench.touch("a")
    fill(bench, "jklmnopqrstuvwxyzABCDEF")
    assert "a" in bench.stored()


def test_it_does_not_where_that_has_caused_half_as_many() -> None:
    """A block after which fewer have left than are protected would still be here by last use alone."""
    bench = Bench(device=4, policy=TWO_QUEUES)
    fill(bench, "abuvwx")  # a and b have left
    fill(bench, "ab")  # and come back
    fill(bench, "cdefg")
    bench.touch("ab")
    assert bench.stored() == "abfg"
    fill(bench, "e")  # only f has left since
    fill(bench, "hijklmnopqrstuvwxyz")
    assert "a" not in bench.stored() and "b" not in bench.stored()


def test_used_again_is_not_come_back() -> None:
    """Else a scan that is read twice would be protected."""
    bench = Bench(device=4, policy=TWO_QUEUES)
    bench.put("a")
    bench.touch("a")
    fill(bench, "bcde")
    assert "a" not in bench.stored()


def test_priority_comes_first() -> None:
    bench = returned(4)
    for name in "bcd":
        bench.put(name, priority=36)
    bench.blank(DEVICE, 1)
    assert bench.stored() == "bcd"


def test_at_most_half_of_the_tier_is_protected_the_least_recently_used_gives_way() -> None:
    bench = Bench(device=4, policy=TWO_QUEUES)
    fill(bench, "abcdefg")  # a to c have left
    fill(bench, "abc")  # and come back: one too many
    fill(bench, "wxyz")
    assert bench.stored() == "bcyz"


def test_what_a_block_that_came_back_stands_on_is_kept_with_it() -> None:
    bench = Bench(device=4, policy=TWO_QUEUES)
    bench.put("ab")
    fill(bench, "uvx")
    assert bench.stored() == "auvx"
    bench.touch("a")
    bench.put("b", under="a")
    fill(bench, "cdefgh")
    assert bench.stored() == "abgh"


def test_it_is_the_lowest_tier_that_protects() -> None:
    """The device goes on by last use: a block that came back goes down like any other, and stays below."""
    bench = returned(1, host=3)
    fill(bench, "bcdefgh")
    assert bench.where("a") == {HOST}


def test_a_priority_that_changes_leaves_it_protected() -> None:
    bench = returned(4)
    bench.retain("a", 40)
    bench.retain("a", 35)
    fill(bench, "bcdefghi")
    assert "a" in bench.stored()


def test_a_commit_that_ends_its_lease_counts_all_that_came_back() -> None:
    """Its blocks are used, with what they stand on, before the blocks of the lease are let go of."""
    bench = Bench(device=3, host=1, policy=TWO_QUEUES)
    bench.put("p")
    bench.put("c", under="p")
    bench.drop("c")
    grant = bench.blank(DEVICE, 2)
    assert grant.lease is not None
    bench.commit(grant, [("x", None, 35)])
    again = [CommitItem(grant.slots[1], key("c"), key("p"), 35)]
    results, outcome = bench.core.commit(ALICE, grant.lease, again, bench.now, release=True)
    bench.apply(outcome)
    assert results == (BlockResult.OK,)
    assert (bench.stored(), bench.core.session_leases(ALICE)) == ("cpx", 0)
