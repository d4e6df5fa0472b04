"""The ``lfuda`` policy: blocks used more often stay longer, and uses are remembered after a block has left."""

import pytest

from kvtierd.core.policy import Policy
from tests.unit.core.bench import DEVICE, HOST, Bench

LFUDA = Policy(eviction="lfuda")


def returned(device: int, host: int = 0) -> Bench:
    """``a`` has left, and come back."""
    bench = Bench(device=device, host=host, policy=LFUDA)
    fill(bench, "auvwxyz"[: 1 + device + host])
    assert "a" not in bench.stored()
    fill(bench, "a")
    return bench


def fill(bench: Bench, names: str) -> None:
    for name in names:
        bench.make_room(DEVICE, 1)
        bench.commit(list(bench.grants.values())[-1].only, [(name, None, 35)])
        bench.release(*bench.core.leases)


def test_a_block_that_came_back_outlives_newer_ones_for_as_many_uses_as_the_tier_has_slots() -> None:
    bench = returned(4)
    fill(bench, "bcdefg")
    assert "a" in bench.stored()
    fill(bench, "hijklm")
    assert "a" not in bench.stored()


@pytest.mark.parametrize(("uses", "newer"), [(1, "bcdefg"), (3, "bcdefghijklmn")])
def test_so_does_one_that_was_found_and_each_use_counts(uses: int, newer: str) -> None:
    bench = Bench(device=4, policy=LFUDA)
    bench.put("a")
    for _ in range(uses):
        bench.touch("a")
    fill(bench, newer)
    assert "a" in bench.stored()


def test_last_use_decides_where_that_finds_more() -> None:
    """Three blocks are asked for twice and never again, then the next three: the last three must not be in the way."""
    bench = Bench(device=4, policy=LFUDA)
    found = []
    for three in ("abc", "def", "ghi", "jkl", "mno", "pqr", "stu", "vwx", "yzA", "BCD", "EFG"):
        fill(bench, three)
        found.append(sum(name in bench.stored() for name in three))
        for name in three:
            if name in bench.stored():
                bench.touch(name)
            else:
                fill(bench, name)
    assert min(found[:4]) < 3 == min(found[-3:])


def test_priority_comes_first() -> None:
    bench = returned(4)
    for name in "bcd":
        bench.put(name, priority=36)
    bench.blank(DEVICE, 1)
    assert bench.stored() == "bcd"


def test_what_a_block_that_came_back_stands_on_is_kept_with_it() -> None:
    bench = Bench(device=4, policy=LFUDA)
    bench.put("ab")
    fill(bench, "uvx")
    assert bench.stored() == "auvx"
    bench.touch("a")
    bench.put("b", under="a")
    fill(bench, "cdef")
    assert {"a", "b"} <= set(bench.stored())


def test_it_is_the_lowest_tier_that_counts_uses() -> None:
    """The device goes on by last use: a block that came back goes down like any other, and stays below."""
    bench = returned(1, host=3)
    fill(bench, "bcde")
    assert bench.where("a") == {HOST}


def test_a_priority_that_changes_leaves_its_uses() -> None:
    bench = returned(4)
    bench.retain("a", 40)
    bench.retain("a", 35)
    fill(bench, "bcdefg")
    assert "a" in bench.stored()
