"""Who waits for whom: batches of other streams that touch the same slots, for as long as they are under way."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import pytest

from kvtier.abi.cuda.driver import Event, Stream
from kvtierd.core.ids import GroupId, SlotId, Tier
from kvtierd.mover.cuda.traffic import Hazards, Passage, Spot, spot

DOWN, UP = Stream(1), Stream(2)


def device(*slots: int) -> list[Spot]:
    return [spot(Tier.DEVICE, GroupId(0), SlotId(slot)) for slot in slots]


def passage(stream: Stream, event: int, reads: Iterable[Spot] = (), writes: Iterable[Spot] = ()) -> Passage:
    return Passage(stream, Event(event), frozenset(reads), frozenset(writes))


def test_places_differ_by_tier_group_and_slot() -> None:
    places = {
        spot(tier, GroupId(group), SlotId(slot))
        for tier in (Tier.DEVICE, Tier.HOST)
        for group in (0, 1, 63)
        for slot in (0, 1, 2**31 - 1)
    }
    assert len(places) == 2 * 3 * 3


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(passage(UP, 1, writes=device(4)), passage(DOWN, 2, reads=device(4)), id="read-after-write"),
        pytest.param(passage(DOWN, 1, reads=device(4)), passage(UP, 2, writes=device(3, 4)), id="write-after-read"),
        pytest.param(passage(DOWN, 1, writes=device(4, 5)), passage(UP, 2, writes=device(4)), id="write-after-write"),
    ],
)
def test_a_batch_waits_for_what_another_stream_does_to_its_slots(before: Passage, after: Passage) -> None:
    hazards = Hazards()
    assert hazards.enter(before) == []
    assert hazards.enter(after) == [before]


def test_readers_of_one_slot_do_not_wait_for_each_other() -> None:
    hazards = Hazards()
    hazards.enter(passage(DOWN, 1, reads=device(4)))
    assert hazards.enter(passage(UP, 2, reads=device(4))) == []


def test_other_slots_and_other_tiers_slots_of_the_same_number_are_nobodys_business() -> None:
    hazards = Hazards()
    hazards.enter(passage(DOWN, 1, reads=device(4), writes=[spot(Tier.HOST, GroupId(0), SlotId(5))]))
    assert hazards.enter(passage(UP, 2, writes=[*device(5), spot(Tier.DEVICE, GroupId(1), SlotId(4))])) == []


def test_a_stream_is_in_order_by_itself() -> None:
    hazards = Hazards()
    hazards.enter(passage(UP, 1, writes=device(4)))
    assert hazards.enter(passage(UP, 2, writes=device(4))) == []


def test_nobody_waits_for_a_batch_that_is_over() -> None:
    hazards, waited = Hazards(), list[Event]()
    first, second = passage(UP, 1, writes=device(1)), passage(UP, 2, writes=device(2))
    hazards.enter(first)
    hazards.enter(second)
    hazards.leave(first)
    clashing = hazards.enter(passage(DOWN, 3, reads=device(1, 2)))
    assert clashing == [second]

    second.recorded.set()
    hazards.leave(second)
    hazards.order(clashing, waited.append)  # it has ended since
    assert waited == []
    assert len(hazards) == 1


def test_an_event_is_waited_for_only_once_it_is_recorded() -> None:
    hazards, waited = Hazards(), list[Event]()
    first = passage(UP, 1, writes=device(1))
    hazards.enter(first)
    clashing = hazards.enter(passage(DOWN, 2, reads=device(1)))
    waiter = threading.Thread(target=hazards.order, args=(clashing, waited.append))
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive()
    assert waited == []

    first.recorded.set()
    waiter.join(30)
    assert waited == [Event(1)]
