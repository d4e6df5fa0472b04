"""What is said of one block: where its copies are, and what holds them."""

from __future__ import annotations

from kvtierd.core.block import Phase
from kvtierd.core.explain import BlockNow, CopyNow
from kvtierd.core.ids import Tier
from tests.unit.core.bench import ALICE, DEVICE, GROUP, HOST, SECOND, Bench, key


def explained(bench: Bench, name: str) -> BlockNow:
    found = bench.core.explain(GROUP, key(name))
    assert found is not None
    return found


def at(bench: Bench, name: str, tier: Tier = DEVICE) -> CopyNow:
    return next(copy for copy in explained(bench, name).copies if copy.tier is tier)


def test_where_it_is_and_what_holds_it() -> None:
    bench = Bench(device=4, host=4)
    bench.put("abc", priority=40)
    bench.put("d", under="b", priority=90, duration_ms=500)
    (ticket,) = bench.acquire("ab", tier=HOST)
    bench.land()
    bench.pin("b")
    b = explained(bench, "b")
    assert (b.parent, b.depth, b.children) == (key("a"), 1, 2)
    assert (b.priority, b.own_priority, b.duration_ms, b.deadline_ns) == (90, 40, 0, 0)
    assert [(copy.tier, copy.phase, copy.pins) for copy in b.copies] == [
        (DEVICE, Phase.READY, 1),
        (HOST, Phase.READY, 0),
    ]
    assert b.copies[1].slot == bench.slot("b", HOST)
    assert [(lease.id, lease.session, lease.tier) for lease in b.leases] == [(bench.lease(ticket), ALICE, HOST)]
    d = explained(bench, "d")
    assert (d.duration_ms, d.deadline_ns, d.leases) == (500, bench.now + SECOND // 2, ())


def test_a_copy_under_way_is_seen_at_both_ends() -> None:
    bench = Bench(device=1, host=1)
    bench.put("a", HOST)
    bench.move("a", DEVICE)
    assert at(bench, "a").phase is Phase.FILLING
    assert (at(bench, "a", HOST).phase, at(bench, "a", HOST).readers) == (Phase.READY, 1)


def test_a_victim_on_its_way_down_says_so() -> None:
    bench = Bench(device=1, host=1)
    bench.put("a")
    bench.reserve(DEVICE, 1)
    assert at(bench, "a").phase is Phase.LEAVING
