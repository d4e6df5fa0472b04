"""Which blocks a remote store is offered."""

import pytest

from kvtierd.core.ids import REMOTE
from kvtierd.core.policy import Policy, RemotePolicy, RemoteWrites
from tests.unit.core.bench import GROUP, HOST, Bench, key, keys


def test_what_is_not_worth_it_is_not_looked_at_and_offered_once_it_is() -> None:
    writes = RemoteWrites(RemotePolicy.EVICT, min_priority=50, ahead=1.0)
    bench = Bench(host=4, policy=Policy(remote=writes))
    bench.put("abcd", HOST)
    state = bench.core.windows[GROUP].state
    assert not list(state.candidates(HOST).unsettled), "else one call would have to go through all of them"
    assert not bench.core.remote.offers(GROUP, 4)
    bench.retain("b", 50)
    assert [offer.key for offer in bench.core.remote.offers(GROUP, 4)] == [key("a"), key("b")]


@pytest.mark.parametrize("policy", RemotePolicy)
def test_what_only_a_device_has_is_offered_when_it_comes_down(policy: RemotePolicy) -> None:
    bench = Bench(device=2, host=2, policy=Policy(remote=RemoteWrites(policy, ahead=1.0)))
    bench.put("a")
    bench.touch("a")
    assert not bench.core.remote.offers(GROUP, 4)
    bench.move("a", HOST)
    bench.land()
    assert [offer.key for offer in bench.core.remote.offers(GROUP, 4)] == [key("a")]


def offered(bench: Bench, count: int = 1) -> list[bytes]:
    return [offer.key for offer in bench.core.remote.offers(GROUP, count)]


def test_what_a_restart_found_is_offered_after_what_is_new() -> None:
    found = [("a", None, 35), ("b", "a", 35), ("low", None, 10), ("c", "b", 35)]
    writes = RemoteWrites(RemotePolicy.THROUGH, min_priority=20)
    bench = Bench(host=4, disk=8, policy=Policy(remote=writes), recovered=found)
    bench.put("x", HOST)
    assert bench.core.remote.unwritten() == {"waiting": 1, "recovered": 3, "on a device alone": 0}
    assert [offered(bench) for _ in range(5)] == [[each] for each in keys("xabc")] + [[]]


def test_blocks_that_leave_before_they_were_offered_are_counted() -> None:
    bench = Bench(host=4, policy=Policy(remote=RemoteWrites(RemotePolicy.THROUGH)), recovered=[])
    bench.put("a", HOST)
    bench.put("b", HOST)
    assert offered(bench) == [key("a")]
    bench.drop("a")
    bench.drop("b")
    assert (bench.core.remote.left, bench.core.remote.unwritten().total()) == (1, 0)


@pytest.mark.parametrize("policy", [RemotePolicy.THROUGH, RemotePolicy.EVICT])
def test_a_block_in_use_is_offered_again_once_a_store_may_have_lost_it(policy: RemotePolicy) -> None:
    bench = Bench(host=4, disk=4, policy=Policy(remote=RemoteWrites(policy, ahead=0.1)))
    bench.core.remote.begin_day(100)
    for each in "ab":
        bench.put(each, HOST)
        bench.core.remote.travelled(GROUP, [key(each)], REMOTE, HOST, 0, 0)
    for day, told in ((100, []), (101, []), (102, [key("a")]), (103, [])):
        bench.core.remote.begin_day(day)
        bench.touch("a", HOST)
        offers = bench.core.remote.offers(GROUP, 4)
        assert [offer.key for offer in offers] == told
        assert all(offer.recovered for offer in offers)


def test_a_block_that_was_put_back_may_still_be_in_the_store() -> None:
    bench = Bench(host=4, disk=4, policy=Policy(remote=RemoteWrites(RemotePolicy.THROUGH)), recovered=[("a", None, 35)])
    bench.put("b", HOST)
    for _ in range(2):
        offers = bench.core.remote.offers(GROUP, 4)
        assert {offer.key: offer.recovered for offer in offers} == {key("a"): True, key("b"): False}
        bench.core.remote.put_back(GROUP, [offer.key for offer in offers])


def test_a_reset_names_the_roots_that_it_leaves() -> None:
    bench = Bench(host=8)
    for chain in ("abc", "de"):
        bench.put(chain, HOST)
    bench.pin("b", HOST)
    report, outcome = bench.core.reset(0, force=True)
    bench.apply(outcome)
    assert (report.dropped, report.kept, report.roots) == (3, 2, ((GROUP, key("a")),))
