"""Blocks that clients read without a call: what the core makes of being told."""

import pytest

from kvtierd.core import holds
from kvtierd.core.ids import Tier
from kvtierd.core.policy import Policy, WriteMode
from tests.unit.core.bench import DEVICE, DISK, GROUP, HOST, Bench, keys


def test_reads_are_counted_like_those_of_an_acquire() -> None:
    bench = Bench(device=2, host=2)
    bench.put("ab")
    bench.move("b", HOST)
    bench.land()
    bench.tell_read("b")
    stats = bench.core.stats()
    assert (stats.hits[DEVICE], stats.hits[HOST], stats.queried) == (1, 1, 0)


def test_a_read_is_a_second_use_for_a_cache_that_writes_down_what_is_used_twice() -> None:
    bench = Bench(device=2, disk=4, policy=Policy(write_policy=WriteMode.SELECTIVE))
    bench.put("ab")
    assert not bench.moves
    bench.tell_read("b")
    bench.land()
    assert bench.where("a") == bench.where("b") == {DEVICE, DISK}


def test_a_read_counts_as_a_use_on_disk() -> None:
    bench = Bench(device=2, disk=4, policy=Policy(write_policy=WriteMode.THROUGH))
    bench.put("ab")
    bench.land()
    bench.core.take_disk_uses()
    bench.tell_read("b")
    assert bench.core.take_disk_uses() == {GROUP: keys("ba")}


def test_what_a_call_counts_is_bounded_from_the_last_key_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holds, "TOUCHED_A_CALL", 2)
    bench = Bench(device=4)
    for chain in ("a", "x", "y", "z"):
        bench.put(chain)
    bench.tell_read("axy")
    assert sum(bench.core.stats().hits[tier] for tier in (Tier.DEVICE,)) == 2
    bench.blank(DEVICE, 1)
    assert bench.stored() == "axy"
