"""What is said of one block: where its copies are, and what holds them."""

from kvtierd.core.block import Phase
from kvtierd.core.explain import BlockNow, CopyNow
from kvtierd.core.ids import Tier
from tests.unit.core.bench import DEVICE, GROUP, HOST, Bench, key


def explained(bench: Bench, name: str) -> BlockNow:
    found = bench.core.explain(GROUP, key(name))
    assert found is not None
    return found


def at(bench: Bench, name: str, tier: Tier = DEVICE) -> CopyNow:
    return next(copy for copy in explained(bench, name).copies if copy.tier is tier)


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
