"""Slots leased ahead: at once or not at all, and nobody else is refused because of them."""

from __future__ import annotations

import pytest

from kvtierd.core.ahead import AHEAD_NS
from kvtierd.core.errors import StillHeld, TierOffline
from kvtierd.core.ids import LeaseId, TicketId
from kvtierd.core.manager import BlockResult
from kvtierd.core.outcome import Grant, RefusalReason
from kvtierd.core.slots import SlotState
from tests.unit.core.bench import ALICE, BOB, DEVICE, DISK, GROUP, HOST, Bench

AHEAD_MS = AHEAD_NS // 1_000_000


def names(count: int, first: int = 0x100) -> str:
    return "".join(chr(first + number) for number in range(count))


def lease_of(grant: Grant | None) -> LeaseId:
    assert grant is not None and grant.lease is not None
    return grant.lease


def test_they_are_blank_slots_of_the_session_like_any_others() -> None:
    bench = Bench(device=16)
    ahead = bench.ahead(DEVICE, 2)
    assert ahead is not None and len(ahead.slots) == 2
    assert bench.states(DEVICE) == {SlotState.BLANK: 2, SlotState.FREE: 14}
    assert bench.commit(ahead, [("a", None, 35), ("b", "a", 35)]) == [BlockResult.OK] * 2
    bench.release(lease_of(ahead))
    assert bench.stored() == "ab"


def test_a_tier_has_few_of_them_for_all_sessions_together() -> None:
    bench = Bench(device=16)
    assert bench.ahead(DEVICE, 3) is None
    bench.release(lease_of(bench.ahead(DEVICE, 1)))
    assert bench.ahead(DEVICE, 1) is not None
    assert bench.ahead(DEVICE, 1, BOB) is not None
    assert bench.ahead(DEVICE, 1, BOB) is None


@pytest.mark.parametrize("slots", [1, 4, 7])
def test_a_small_tier_has_none(slots: int) -> None:
    assert Bench(device=slots).ahead(DEVICE, 1) is None


def test_there_are_none_where_half_of_the_tier_is_held() -> None:
    bench = Bench(device=16)
    lease = bench.store(names(8))
    assert bench.ahead(DEVICE, 1) is None
    bench.release(lease)
    assert bench.ahead(DEVICE, 1) is not None


def test_there_are_none_while_somebody_waits() -> None:
    bench = Bench(device=16, host=16)
    bench.put(names(16))
    waiting = bench.reserve(DEVICE, 1, BOB)
    assert not bench.answered(waiting)
    assert bench.ahead(DEVICE, 1) is None
    bench.land()
    assert bench.answered(waiting)


def test_what_would_have_to_wait_is_not_granted_and_leaves_nothing_behind() -> None:
    bench = Bench(device=16, host=16)
    bench.put(names(16))
    assert bench.ahead(DEVICE, 1) is None
    bench.land()
    assert bench.tier(DEVICE).held == 0
    assert bench.ahead(DEVICE, 1) is not None  # the room was made meanwhile


def asked_in_vain(bench: Bench, count: int) -> None:
    """As the daemon does it: what is not granted at once is withdrawn before anything else is done."""
    ticket, outcome = bench.core.reserve_ahead(ALICE, GROUP, DEVICE, count, bench.now)
    assert ticket is not None and not outcome.grants
    bench.apply(bench.core.cancel(ticket, bench.now))


def test_the_room_for_them_is_made_though_nobody_waits_for_it() -> None:
    bench = Bench(device=16, host=16, disk=32)
    bench.put(names(16))
    bench.put(names(16, 0x200), HOST)
    asked_in_vain(bench, 2)
    bench.land()
    assert bench.states(DEVICE)[SlotState.FREE] == 2
    assert bench.tier(DEVICE).held == 0
    assert bench.ahead(DEVICE, 2) is not None


def test_whoever_reserves_first_takes_that_room_and_no_more_is_made() -> None:
    bench = Bench(device=16, host=16)
    bench.put(names(16))
    asked_in_vain(bench, 2)
    waiting = bench.reserve(DEVICE, 1, BOB)
    bench.land()
    assert bench.answered(waiting)
    assert bench.states(DEVICE)[SlotState.FREE] == 1  # on its way when he came


def test_room_for_them_is_not_made_while_somebody_waits() -> None:
    bench = Bench(device=16, host=16)
    bench.put(names(16))
    waiting = bench.reserve(DEVICE, 1, BOB)
    assert not bench.answered(waiting)
    on_the_way = len(bench.moves)
    bench.apply(bench.core.tick(bench.now))
    assert len(bench.moves) == on_the_way == 1


def test_room_that_cannot_be_made_is_not_looked_for_again() -> None:
    bench = Bench(device=16)
    bench.put(names(16))
    ticket, _ = bench.core.reserve_ahead(ALICE, GROUP, DEVICE, 2, bench.now)
    assert ticket is not None
    acquired = bench.acquire(names(16), session=BOB)
    outcome = bench.core.cancel(ticket, bench.now)
    bench.apply(outcome)
    assert acquired[0] in bench.grants
    assert not bench.core.tick(bench.now).again
    assert bench.stored() == names(16)


def test_who_needs_the_whole_tier_waits_for_them() -> None:
    bench = Bench(device=16)
    ahead = bench.ahead(DEVICE, 2)
    waiting = bench.reserve(DEVICE, 16, BOB)
    assert not bench.answered(waiting)
    bench.release(lease_of(ahead))
    assert waiting in bench.grants


def test_who_needs_the_whole_tier_is_refused_once_they_are_used() -> None:
    bench = Bench(device=16)
    ahead = bench.ahead(DEVICE, 2)
    assert ahead is not None
    waiting = bench.reserve(DEVICE, 16, BOB)
    bench.commit(ahead, [("a", None, 35)])
    assert refused(bench, waiting) is RefusalReason.TIER_FULL


def test_nobody_waits_long_for_a_client_that_hangs() -> None:
    bench = Bench(device=16)
    bench.ahead(DEVICE, 2)
    waiting = bench.reserve(DEVICE, 16, BOB)
    bench.pass_ms(AHEAD_MS - 1)
    assert not bench.answered(waiting)
    bench.pass_ms(1)
    assert refused(bench, waiting) is RefusalReason.TIER_FULL
    assert [(holder.session, holder.slots) for holder in bench.refusals[waiting].holders] == [(ALICE, 2)]
    assert refused(bench, bench.reserve(DEVICE, 15, BOB)) is RefusalReason.TIER_FULL


def test_a_session_that_broke_off_is_not_waited_for() -> None:
    bench = Bench(device=16)
    ahead = bench.ahead(DEVICE, 2)
    waiting = bench.reserve(DEVICE, 16, BOB)
    bench.orphan()
    assert refused(bench, waiting) is RefusalReason.TIER_FULL
    bench.reattach()
    assert ahead is not None
    assert bench.commit(ahead, [("a", None, 35)]) == [BlockResult.OK]


def test_they_end_with_their_session() -> None:
    bench = Bench(device=16)
    bench.ahead(DEVICE, 2)
    waiting = bench.reserve(DEVICE, 16, BOB)
    bench.end()
    assert waiting in bench.grants


def test_an_acquire_waits_for_them_rather_than_being_shortened() -> None:
    bench = Bench(device=16, host=32)
    chain = names(16)
    for start in (0, 8):
        bench.put(chain[start : start + 8], HOST, under=chain[start - 1] if start else None)
    ahead = bench.ahead(DEVICE, 2)
    (waiting,) = bench.acquire(chain, session=BOB)
    bench.land()
    assert not bench.answered(waiting)
    bench.release(lease_of(ahead))
    bench.land()
    assert len(bench.grants[waiting].slots) == 16


def test_they_do_not_keep_a_cache_from_being_reset() -> None:
    bench = Bench(device=16)
    bench.put("ab")
    ahead = bench.ahead(DEVICE, 1)
    report, outcome = bench.core.reset(BOB, bench.now, force=False)
    bench.apply(outcome)
    assert (report.dropped, bench.stored()) == (2, "")
    assert ahead is not None
    bench.commit(ahead, [("c", None, 35)])
    with pytest.raises(StillHeld):
        bench.core.reset(BOB, bench.now, force=False)


def test_a_tier_out_of_service_has_none() -> None:
    bench = Bench(device=16, disk=16)
    bench.lose(DEVICE)
    with pytest.raises(TierOffline):
        bench.core.reserve_ahead(ALICE, GROUP, DEVICE, 1, bench.now)
    assert bench.states(DISK) == {SlotState.FREE: 16}


def refused(bench: Bench, ticket: TicketId) -> RefusalReason:
    return bench.refusals[ticket].reason
