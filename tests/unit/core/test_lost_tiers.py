"""A tier fails: what stood only there goes with all that needs it, and nobody is given what is not there."""

from __future__ import annotations

import pytest

from kvtierd.core.errors import TierOffline
from kvtierd.core.events import Cause, EventType
from kvtierd.core.outcome import RefusalReason
from kvtierd.core.policy import Policy
from kvtierd.core.slots import SlotState
from tests.slot_rows import begun, contents
from tests.unit.core.bench import BOB, DEVICE, DISK, HOST, Bench

A_CALL = 8
POLICY = Policy(blocks_a_call=A_CALL)


def test_blocks_only_there_go_with_their_descendants_children_first() -> None:
    bench = Bench(device=2, host=2)
    bench.put("a", HOST)
    bench.put("bc", DEVICE, under="a")
    told = len(bench.events)
    bench.lose(HOST)
    assert list(bench.said(told)) == [
        (EventType.REMOVED, Cause.ANCESTOR, "cb"),
        (EventType.REMOVED, Cause.IO_ERROR, "a"),
    ]


def test_blocks_elsewhere_too_only_lose_a_residency() -> None:
    bench = Bench(device=1, disk=2, recovered=[("a", None, 35), ("b", "a", 35)])
    bench.acquire("a")
    bench.land()
    told = len(bench.events)
    bench.lose(DISK)
    assert list(bench.said(told)) == [
        (EventType.REMOVED, Cause.IO_ERROR, "b"),
        (EventType.UPDATED, Cause.IO_ERROR, "a"),
    ]
    assert bench.where("a") == {DEVICE}


def test_a_leased_block_becomes_unreachable_at_once_and_free_at_release() -> None:
    bench = Bench(device=2, host=1)
    lease = bench.store("a")
    bench.lose(DEVICE)
    assert bench.stored() == ""
    assert bench.states(DEVICE) == {SlotState.READY: 1, SlotState.QUARANTINED: 1}
    bench.release(lease)
    assert bench.states(DEVICE) == {SlotState.QUARANTINED: 2}


def test_who_holds_or_copies_lost_bytes_finds_out_at_once() -> None:
    bench = Bench(device=2, host=2)
    bench.store("a")
    bench.put("b")
    bench.reserve(DEVICE, 1)
    assert [(move.src, move.dst) for move in bench.moves] == [(DEVICE, HOST)], "b is being copied"
    _, outcome = bench.core.lose_tier(DEVICE, Cause.LOST, bench.now)
    assert {ref.slot for ref in begun(outcome)} == {0, 1}
    assert {content.key for content in contents(outcome)} == {None}
    assert {(event.type, event.cause) for event in outcome.events} == {(EventType.REMOVED, Cause.LOST)}
    bench.apply(outcome)
    bench.land()
    assert bench.stored() == "", "what was copied after its source was lost is nothing"


def test_who_holds_or_copies_what_was_removed_before_finds_out_at_once() -> None:
    bench = Bench(device=3, host=3)
    bench.put("a", HOST)
    held = bench.blank(DEVICE, 1)
    bench.commit(held, [("b", "a", 35)])
    bench.lose(HOST)
    bench.restore(HOST)
    bench.put("c")
    bench.reserve(DEVICE, 2)
    assert [(move.src, move.dst) for move in bench.moves] == [(DEVICE, HOST)], "c is being copied"
    bench.apply(bench.core.reset(BOB, bench.now, force=True)[1])
    assert bench.stored() == ""
    _, outcome = bench.core.lose_tier(DEVICE, Cause.LOST, bench.now)
    told = {ref.slot for ref in begun(outcome)}
    assert told >= {0, 1}, "what b is held in and what c is read from"
    assert 2 not in told, "the third slot was free"


def test_nothing_is_given_out_there() -> None:
    bench = Bench(device=1, host=2)
    grant = bench.blank(DEVICE, 1)
    bench.lose(DEVICE)
    for call in (
        lambda: bench.reserve(DEVICE, 1),
        lambda: bench.acquire("a"),
        lambda: bench.move("a", DEVICE),
        lambda: bench.commit(grant, [("a", None, 35)]),
    ):
        with pytest.raises(TierOffline):
            call()


def test_who_waits_for_room_there_is_refused() -> None:
    bench = Bench(device=1, host=1)
    bench.put("a")
    reserve = bench.reserve(DEVICE, 1)
    move = bench.move("a", DEVICE)
    bench.lose(DEVICE)
    assert bench.refusals[reserve].reason is RefusalReason.TIER_OFFLINE
    assert bench.refusals[move].reason is RefusalReason.TIER_OFFLINE


def test_who_waits_for_copies_to_get_there_is_refused_at_once_and_they_count_for_nothing() -> None:
    bench = Bench(device=2, host=2)
    bench.put("a", HOST)
    bench.put("b", HOST)
    (acquire,) = bench.acquire("a")
    move = bench.move("b", DEVICE)
    assert len(bench.moves) == 2
    bench.lose(DEVICE)
    assert bench.refusals[acquire].reason is RefusalReason.TIER_OFFLINE
    assert bench.refusals[move].reason is RefusalReason.TIER_OFFLINE
    assert bench.states(DEVICE) == {SlotState.RETIRING: 2}, "the copies still write there"
    bench.land()
    assert bench.where("b") == {HOST}
    assert bench.where("a") == {HOST}
    assert bench.states(DEVICE) == {SlotState.QUARANTINED: 2}


def test_what_is_pinned_or_leased_there_is_let_go_of_like_anything_else() -> None:
    bench = Bench(device=3, host=1)
    lease = bench.store("a")
    bench.pin("a")
    blank = bench.blank(DEVICE, 1)
    bench.lose(DEVICE)
    bench.lose(DEVICE)
    assert bench.core.pinned_slots() == 0
    assert blank.lease is not None
    bench.release(lease, blank.lease)
    assert bench.states(DEVICE) == {SlotState.QUARANTINED: 3}
    assert bench.core.lease_records() == []


def test_a_demotion_out_of_it_is_too_late() -> None:
    bench = Bench(device=1, host=1)
    bench.put("a")
    bench.reserve(DEVICE, 1)
    bench.lose(DEVICE)
    bench.land()
    assert bench.stored() == ""
    assert bench.states(HOST) == {SlotState.FREE: 1}


def test_the_other_tiers_go_on_without_it() -> None:
    bench = Bench(device=1, host=1, disk=1)
    bench.lose(HOST)
    bench.put("a")
    bench.reserve(DEVICE, 1)
    bench.land()
    assert bench.where("a") == {DISK}


def test_restored_it_is_empty_and_in_use_but_for_slots_known_bad() -> None:
    bench = Bench(device=1, disk=2, recovered=[("a", None, 35)])
    bench.acquire("a")
    bench.land(corrupt="a")
    bench.lose(DISK)
    bench.restore(DISK)
    assert bench.states(DISK) == {SlotState.QUARANTINED: 1, SlotState.FREE: 1}
    bench.put("b")
    bench.reserve(DEVICE, 1, BOB)
    bench.land()
    assert bench.where("b") == {DISK}


def test_a_tier_is_lost_in_slices_and_nothing_is_given_out_there_in_between() -> None:
    recovered = [(number, number - 1 if number else None) for number in range(2 * A_CALL + 1)]
    names = [chr(0x100 + number) for number, _ in recovered]
    bench = Bench(
        device=4,
        disk=len(names),
        policy=POLICY,
        recovered=[(names[number], None if parent is None else names[parent], 35) for number, parent in recovered],
    )
    following, outcome = bench.core.lose_tier(DISK, Cause.IO_ERROR, bench.now)
    bench.apply(outcome)
    assert following is not None
    assert len(bench.stored()) == A_CALL + 1, "the newest go first, so what is left is a prefix"
    with pytest.raises(TierOffline):
        bench.move(names[0], DISK)
    ticket = bench.move(names[0], DEVICE)
    assert not any(bench.grants[ticket].results) and not bench.moves, "nor is anything read there"
    steps = 1
    while following is not None:
        following, outcome = bench.core.lose_tier(DISK, Cause.IO_ERROR, bench.now, following)
        bench.apply(outcome)
        steps += 1
    assert (bench.stored(), steps) == ("", 3)


def test_what_arrives_there_in_between_does_not_stay() -> None:
    newer = "".join(chr(0x100 + number) for number in range(A_CALL))
    bench = Bench(device=A_CALL + 1, host=1, policy=POLICY)
    bench.put("a", HOST)
    bench.put(newer)
    bench.move("a", DEVICE)
    following, outcome = bench.core.lose_tier(DEVICE, Cause.LOST, bench.now)
    bench.apply(outcome)
    assert following is not None and bench.stored() == "a", "the turn of the oldest is still to come"
    bench.land()
    assert bench.where("a") == {HOST}
    bench.apply(bench.core.lose_tier(DEVICE, Cause.LOST, bench.now, following)[1])
    assert bench.where("a") == {HOST}
    assert bench.states(DEVICE) == {SlotState.QUARANTINED: A_CALL + 1}
