"""A broken connection ends nothing; a process that is gone ends everything it held."""

from __future__ import annotations

from kvtierd.core.slots import SlotState
from tests.slot_rows import Ownership, owners
from tests.unit.core.bench import ALICE, BOB, DEVICE, HOST, Bench, ref


def test_an_orphans_blank_slots_stay_out_of_circulation() -> None:
    bench = Bench(device=2)
    bench.blank(DEVICE, 2)
    bench.orphan()
    assert bench.states(DEVICE) == {SlotState.ORPHANED: 2}
    assert bench.tier(DEVICE).held == 2
    assert bench.reserve(DEVICE, 1, BOB) in bench.refusals


def test_an_orphans_read_leases_hold_on() -> None:
    bench = Bench(device=1)
    bench.store("a")
    bench.orphan()
    assert bench.reserve(DEVICE, 1, BOB) in bench.refusals
    assert bench.where("a") == {DEVICE}


def test_who_comes_back_finds_leases_as_they_were() -> None:
    bench = Bench(device=2)
    grant = bench.blank(DEVICE, 2)
    bench.orphan()
    bench.reattach()
    assert bench.states(DEVICE) == {SlotState.BLANK: 2}
    bench.commit(grant, [("a", None, 35)])
    assert bench.where("a") == {DEVICE}


def test_who_is_gone_gives_everything_back() -> None:
    bench = Bench(device=3)
    bench.store("a")
    bench.blank(DEVICE, 2)
    bench.orphan()
    waiting = bench.reserve(DEVICE, 3, BOB)
    assert waiting in bench.refusals
    outcome = bench.apply(bench.core.end_session(ALICE, 0))
    assert set(owners(outcome)) == {Ownership(ref(DEVICE, slot), None) for slot in range(3)}
    assert bench.core.session_leases(ALICE) == 0
    assert bench.reserve(DEVICE, 3, BOB) in bench.grants


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


def test_sessions_are_counted_apart() -> None:
    bench = Bench(device=4)
    bench.store("ab")
    bench.blank(DEVICE, 1, BOB)
    assert bench.core.stats().held_by == {ALICE: 2, BOB: 1}
    bench.end()
    assert bench.core.stats().held_by == {BOB: 1}
