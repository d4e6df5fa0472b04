"""Up: what an acquire brings to a tier, and what becomes of where it came from."""

from tests.unit.core.bench import BOB, DEVICE, HOST, Bench


def test_promotion_from_host_keeps_a_leased_source() -> None:
    bench = Bench(device=1, host=1)
    bench.put("a", HOST)
    bench.acquire("a", tier=HOST, session=BOB)
    bench.acquire("a")
    bench.land()
    assert bench.where("a") == {DEVICE, HOST}


def test_two_who_want_the_same_block_share_one_copy() -> None:
    bench = Bench(device=1, host=1)
    bench.put("a", HOST)
    (first,) = bench.acquire("a")
    (second,) = bench.acquire("a", session=BOB)
    assert len(bench.in_flight()) == 1
    bench.land()
    assert bench.grants[first].only.slots == bench.grants[second].only.slots
    bench.release(bench.lease(first))
    assert bench.tier(DEVICE).held == 1


def test_room_above_may_take_room_below_that_the_promotion_frees() -> None:
    """Device and host are full of each other's wants: one block must go down before the other can come up."""
    bench = Bench(device=1, host=1, disk=1)
    bench.put("a", HOST)
    bench.put("b")
    (ticket,) = bench.acquire("a")
    bench.land()
    assert ticket in bench.grants
    assert bench.where("a") == {DEVICE}
    assert bench.stored() == "ab"


def test_a_failed_promotion_shortens_the_answer_and_leaves_the_source() -> None:
    bench = Bench(device=2, host=2)
    bench.put("ab", HOST)
    (ticket,) = bench.acquire("ab")
    bench.land(failed="b")
    assert len(bench.grants[ticket].only.slots) == 1
    assert bench.grants[ticket].matched == 2
    assert (bench.where("a"), bench.where("b")) == ({DEVICE}, {HOST})
