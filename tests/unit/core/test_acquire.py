"""The longest stored prefix, READY in a tier and held: claimed before room is made, taken whole or shortened."""

from tests.unit.core.bench import DEVICE, GROUP, HOST, Bench, key


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


def test_looking_touches_nothing() -> None:
    bench = Bench(device=2)
    bench.put("a")
    bench.put("b")
    bench.core.match([GROUP], [key("a")])
    bench.core.locate(GROUP, [key("a")])
    bench.core.explain(GROUP, key("a"))
    bench.blank(DEVICE, 1)
    assert bench.stored() == "b"
