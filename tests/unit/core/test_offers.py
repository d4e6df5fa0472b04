"""Which blocks a store beyond the host is offered."""

from __future__ import annotations

import pytest

from kvtierd.core.policy import Policy, RemotePolicy, RemoteWrites
from tests.unit.core.bench import GROUP, HOST, Bench, key


def test_what_is_not_worth_it_is_not_looked_at_and_offered_once_it_is() -> None:
    writes = RemoteWrites(RemotePolicy.EVICT, min_priority=50, ahead=1.0)
    bench = Bench(host=4, policy=Policy(remote=writes))
    bench.put("abcd", HOST)
    state = bench.core.windows[GROUP].state
    assert not list(state.candidates(HOST).unsettled), "else one call would have to go through all of them"
    assert not bench.core.beyond.offers(GROUP, 4)
    bench.retain("b", 50)
    assert [offer.key for offer in bench.core.beyond.offers(GROUP, 4)] == [key("a"), key("b")]


@pytest.mark.parametrize("policy", RemotePolicy)
def test_what_only_a_device_has_is_offered_when_it_comes_down(policy: RemotePolicy) -> None:
    bench = Bench(device=2, host=2, policy=Policy(remote=RemoteWrites(policy, ahead=1.0)))
    bench.put("a")
    bench.touch("a")
    assert not bench.core.beyond.offers(GROUP, 4)
    bench.move("a", HOST)
    bench.land()
    assert [offer.key for offer in bench.core.beyond.offers(GROUP, 4)] == [key("a")]
