"""What is said of one block: where its copies are, and what holds them."""

import hashlib
import tracemalloc

from kvtierd.core.block import Phase
from kvtierd.core.events import CAPACITY
from kvtierd.core.explain import BlockNow, CopyNow
from kvtierd.core.ids import Key, SessionId, Tier
from kvtierd.core.index import Departures
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


def test_departures_are_remembered_in_bounded_memory() -> None:
    tracemalloc.start()
    departures, keys = Departures(1 << 20), [Key(hashlib.sha256(b"%d" % n).digest()) for n in range(100_000)]
    before = tracemalloc.get_traced_memory()[0]
    for now, each in enumerate(keys, 1 << 60):
        departures.add(each, CAPACITY, SessionId(1 << 40))
        departures.stamp(now)
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    known = [departure for key in keys if (departure := departures.get(key)) is not None]
    assert known[-1] == ((1 << 60) + 99_999, CAPACITY, 1 << 40)
    assert 1 << 15 <= len(known) <= 1 << 16
    assert taken <= 150 * len(known)
