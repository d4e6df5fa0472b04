"""A tier fails: what stood only there goes with all that needs it, and nobody is given what is not there."""

import pytest

from kvtierd.core.errors import TierOutOfService
from kvtierd.core.events import Cause, EventType
from kvtierd.core.ids import DEVICE, DISK, HOST
from kvtierd.core.outcome import RefusalReason
from kvtierd.core.policy import Policy
from kvtierd.core.slots import SlotState
from tests.unit.core.bench import BOB, Bench


def test_what_stands_on_a_lost_block_goes_with_it_children_first() -> None:
    bench = Bench(device=2, disk=2, recovered=[("a", None, 35)])
    bench.put("bc", DEVICE, under="a")
    told = len(bench.events)
    bench.lose()
    assert list(bench.said(told)) == [
        (EventType.UPDATED, Cause.IO_ERROR, "a"),
        (EventType.REMOVED, Cause.ANCESTOR, "cb"),
        (EventType.REMOVED, Cause.IO_ERROR, "a"),
    ]


def test_a_leased_block_becomes_unreachable_at_once_and_free_at_release() -> None:
    bench = Bench(device=2, disk=2, recovered=[("a", None, 35)])
    grant = bench.blank(DEVICE, 1)
    bench.commit(grant, [("b", "a", 35)])
    bench.lose()
    assert bench.stored() == ""
    assert bench.states(DEVICE) == {SlotState.READY: 1, SlotState.FREE: 1}
    assert grant.lease is not None
    bench.release(grant.lease)
    assert bench.states(DEVICE) == {SlotState.FREE: 2}


def test_who_waits_for_it_is_refused_and_nothing_is_moved_there() -> None:
    bench = Bench(device=2, disk=1)
    bench.put("ab")
    first, second = bench.move("a", DISK), bench.move("b", DISK)
    bench.lose()
    assert bench.refusals[first].reason is bench.refusals[second].reason is RefusalReason.TIER_OFFLINE
    assert bench.states(DISK) == {SlotState.RETIRING: 1}, "the copy still writes there"
    bench.land()
    assert bench.states(DISK) == {SlotState.QUARANTINED: 1}
    assert bench.where("a") == bench.where("b") == {DEVICE}
    with pytest.raises(TierOutOfService):
        bench.move("a", DISK)


def test_what_is_pinned_there_is_let_go_of() -> None:
    bench = Bench(device=1, disk=2, recovered=[("a", None, 35)])
    bench.pin("a", DISK)
    bench.lose()
    bench.lose()
    states = (window.state for window in bench.core.windows.values())
    assert sum(state.pins.slots(tier) for state in states for tier in state.tiers) == 0
    assert bench.states(DISK) == {SlotState.QUARANTINED: 2}


def test_restored_it_is_empty_and_in_use_but_for_slots_known_bad() -> None:
    bench = Bench(device=1, disk=2, recovered=[("a", None, 35)])
    bench.acquire("a")
    bench.land(corrupt="a")
    bench.lose()
    bench.restore_disk()
    assert bench.states(DISK) == {SlotState.QUARANTINED: 1, SlotState.FREE: 1}
    bench.put("b")
    bench.reserve(DEVICE, 1, BOB)
    bench.land()
    assert bench.where("b") == {DISK}


def test_it_is_lost_in_slices_and_nothing_is_given_out_there_in_between() -> None:
    names = [chr(0x100 + number) for number in range(17)]
    parents = [None, *names]
    recovered = [(name, parent, 35) for name, parent in zip(names, parents, strict=False)]
    bench = Bench(device=4, disk=len(names), policy=Policy(blocks_a_call=8), recovered=recovered)
    bench.apply(bench.core.lose_tier(DISK, bench.now))
    assert bench.core.behind
    assert len(bench.stored()) == 9, "the newest go first, so what is left is a prefix"
    with pytest.raises(TierOutOfService):
        bench.move(names[0], DISK)
    ticket = bench.move(names[0], DEVICE)
    assert not any(bench.grants[ticket].results) and not bench.moves, "nor is anything read there"
    steps = 1
    while bench.core.behind:
        bench.apply(bench.core.go_on(bench.now))
        steps += 1
    assert (bench.stored(), steps) == ("", 3)


def test_what_arrives_there_in_between_does_not_stay() -> None:
    newer = "".join(chr(0x100 + number) for number in range(8))
    bench = Bench(device=10, disk=10, policy=Policy(blocks_a_call=8))
    bench.put("a")
    bench.put(newer)
    bench.move("a", DISK)
    bench.apply(bench.core.lose_tier(DISK, bench.now))
    assert bench.core.behind, "the turn of the oldest is still to come"
    bench.land()
    assert bench.where("a") == {DEVICE}
    bench.rest()
    assert bench.where("a") == {DEVICE}
    assert bench.states(DISK) == {SlotState.QUARANTINED: 10}


def test_requests_for_a_lost_device_are_refused_and_a_writer_cannot_commit_there() -> None:
    bench = Bench(device=2, host=2)
    bench.put("a", HOST)
    written = bench.blank(DEVICE, 1)
    bench.move("a", DEVICE)
    waiting = bench.reserve(DEVICE, 1, BOB)
    bench.lose(DEVICE)
    assert bench.refusals[waiting].reason is RefusalReason.TIER_OFFLINE
    with pytest.raises(TierOutOfService):
        bench.commit(written, [("b", None, 35)])
    for ask in (lambda: bench.reserve(DEVICE, 1), lambda: bench.acquire("a")):
        with pytest.raises(TierOutOfService):
            ask()
    bench.land()
    assert bench.where("a") == {HOST}, "the copy came too late"
    assert bench.states(DEVICE) == {SlotState.BLANK: 1, SlotState.QUARANTINED: 1}
    assert written.lease is not None
    bench.release(written.lease)
    assert bench.states(DEVICE) == {SlotState.QUARANTINED: 2}
