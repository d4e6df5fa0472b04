"""A broken connection ends nothing; a process that is gone ends everything it held."""

from tests.unit.core.bench import BOB, DEVICE, HOST, Bench


def test_what_a_dead_session_gives_back_goes_to_who_waits() -> None:
    bench = Bench(device=2, host=1)
    bench.blank(DEVICE, 1)
    bench.put("a")
    waiting = bench.reserve(DEVICE, 1, BOB)
    assert not bench.answered(waiting)
    bench.end()
    assert waiting in bench.grants


def test_an_orphans_requests_are_withdrawn_without_an_answer() -> None:
    bench = Bench(device=2, host=2)
    bench.put("a", HOST)
    bench.put("x")
    bench.put("y")
    reserve = bench.reserve(DEVICE, 1)
    (acquire,) = bench.acquire("a")
    move = bench.move("a", DEVICE)
    bench.orphan()
    bench.land()
    assert not any(bench.answered(ticket) for ticket in (reserve, acquire, move))
    assert bench.tier(DEVICE).held == 0


def test_a_release_frees_the_tail_first() -> None:
    """The waiting one gets the slot that was released first, which is the tail's."""
    bench = Bench(device=3)
    lease = bench.store("abc")
    tail = bench.slot("c", DEVICE)
    bench.release(lease)
    assert bench.blank(DEVICE, 1).slots == (tail,)
