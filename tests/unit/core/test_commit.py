"""Reserved slots become blocks, immutable from then on; what conflicts is answered block by block."""

from __future__ import annotations

import pytest

from kvtierd.core.errors import BadArgument, ForeignLease, UnknownLease
from kvtierd.core.events import Cause, EventType
from kvtierd.core.ids import SlotId
from kvtierd.core.slots import SlotState
from kvtierd.core.transfers import BlockResult, CommitItem
from tests.slot_rows import begun, filled
from tests.unit.core.bench import ALICE, BOB, DEVICE, Bench, key

OK, EXISTS, MISSING = BlockResult.OK, BlockResult.EXISTS, BlockResult.PARENT_MISSING


def test_a_chain_in_one_call() -> None:
    bench = Bench(device=2)
    assert bench.commit(bench.blank(DEVICE, 2), [("a", None, 35), ("b", "a", 35)]) == [OK, OK]
    assert list(bench.said(1)) == [(EventType.STORED, Cause.COMMIT, "ab")]


def test_a_chain_the_wrong_way_round_lacks_its_parent() -> None:
    bench = Bench(device=2)
    assert bench.commit(bench.blank(DEVICE, 2), [("b", "a", 35), ("a", None, 35)]) == [MISSING, OK]
    assert bench.stored() == "a"


def test_a_block_whose_parent_is_missing_leaves_its_slot_blank_and_can_be_committed_later() -> None:
    bench = Bench(device=2)
    grant = bench.blank(DEVICE, 1)
    assert bench.commit(grant, [("b", "a", 35)]) == [MISSING]
    assert bench.states(DEVICE) == {SlotState.BLANK: 1, SlotState.FREE: 1}
    bench.put("a")
    assert bench.commit(grant, [("b", "a", 35)]) == [OK]


def test_an_existing_key_keeps_the_old_block_and_gives_the_slot_back() -> None:
    bench = Bench(device=2)
    bench.put("a", priority=60)
    old = bench.slot("a", DEVICE)
    told = len(bench.events)
    assert bench.commit(bench.blank(DEVICE, 1), [("a", None, 10)]) == [EXISTS]
    assert (bench.slot("a", DEVICE), bench.priority("a")) == (old, 60)
    assert bench.states(DEVICE) == {SlotState.READY: 1, SlotState.FREE: 1}
    assert len(bench.events) == told


def test_an_existing_key_is_used_by_the_commit() -> None:
    bench = Bench(device=3)
    bench.put("a")
    bench.put("b")
    bench.commit(bench.blank(DEVICE, 1), [("a", None, 35)])
    bench.blank(DEVICE, 2)
    assert bench.stored() == "a"


def test_another_parent_is_a_conflict() -> None:
    bench = Bench(device=3)
    bench.put("ab")
    assert bench.commit(bench.blank(DEVICE, 1), [("b", None, 35)]) == [BlockResult.PARENT_CONFLICT]
    assert bench.states(DEVICE) == {SlotState.READY: 2, SlotState.BLANK: 1}


def test_a_committed_block_stays_held_until_the_release() -> None:
    bench = Bench(device=1)
    lease = bench.store("a")
    assert bench.reserve(DEVICE, 1, BOB) in bench.refusals
    bench.release(lease)
    assert bench.reserve(DEVICE, 1, BOB) in bench.grants


def test_a_committed_slot_shows_its_generation_even_and_a_freed_one_odd() -> None:
    bench = Bench(device=1)
    grant = bench.blank(DEVICE, 1)
    assert grant.lease is not None
    item = CommitItem(grant.slots[0], key("a"), None, 35)
    _, outcome = bench.core.commit(ALICE, grant.lease, [item], 0)
    assert [ref.slot for ref in filled(outcome)] == [grant.slots[0]]
    bench.apply(outcome)
    bench.release(grant.lease)
    _, outcome = bench.core.drop(ALICE, outcome.events[0].group, [key("a")], 0)
    assert [ref.slot for ref in begun(outcome)] == [grant.slots[0]]


@pytest.mark.parametrize(
    ("item", "field"),
    [
        (CommitItem(SlotId(1), key("x"), None, 35), "slots"),
        (CommitItem(SlotId(99), key("x"), None, 35), "slots"),
    ],
)
def test_a_slot_that_is_not_blank_refuses_the_whole_call(item: CommitItem, field: str) -> None:
    """Slots 2 and 0 are blank here; the first item is sound, and not committed either."""
    bench = Bench(device=3)
    bench.put("p")
    assert bench.slot("p", DEVICE) == 0
    bench.blank(DEVICE, 1, BOB)
    bench.drop("p")
    grant = bench.blank(DEVICE, 2)
    assert grant.lease is not None
    assert set(grant.slots) == {0, 2}
    items = [CommitItem(SlotId(2), key("a"), None, 35), item]
    with pytest.raises(BadArgument) as error:
        bench.core.commit(ALICE, grant.lease, items, 0)
    assert error.value.field == field
    assert bench.stored() == ""


def test_leases_are_their_sessions_own() -> None:
    bench = Bench(device=2)
    grant = bench.blank(DEVICE, 1)
    assert grant.lease is not None
    with pytest.raises(ForeignLease):
        bench.commit(grant, [("a", None, 35)], BOB)
    with pytest.raises(ForeignLease):
        bench.release(grant.lease, session=BOB)
    bench.release(grant.lease)
    with pytest.raises(UnknownLease):
        bench.commit(grant, [("a", None, 35)])
    with pytest.raises(UnknownLease):
        bench.release(grant.lease)


def test_a_release_of_several_leases_is_all_or_nothing() -> None:
    bench = Bench(device=2)
    mine, foreign = bench.store("a"), bench.store("b", session=BOB)
    with pytest.raises(ForeignLease):
        bench.release(mine, foreign)
    with pytest.raises(BadArgument):
        bench.release(mine, mine)
    assert bench.tier(DEVICE).held == 2
