"""Down: what goes, when its source is free, and what a hit or a failure on the way changes."""

import pytest

from kvtierd.core.events import Cause, EventType
from kvtierd.core.policy import Policy
from kvtierd.core.slots import SlotState
from tests.unit.core.bench import BOB, DEVICE, DISK, HOST, Bench


@pytest.mark.parametrize(("priority", "found"), [(29, set()), (30, {HOST})])
def test_a_block_goes_down_from_the_threshold_on(priority: int, found: set[int]) -> None:
    bench = Bench(device=1, host=1)
    bench.put("a", priority=priority)
    bench.make_room(DEVICE, 1)
    assert bench.where("a") == found


def test_a_parent_goes_down_for_its_childs_sake() -> None:
    """Its own priority is under the threshold, its child's is not."""
    bench = Bench(device=1, host=2)
    bench.put("b", HOST, priority=0)
    bench.put("c", HOST, under="b", priority=50)
    bench.move("b", DEVICE)
    bench.land()
    bench.make_room(DEVICE, 1)
    assert bench.where("b") == {HOST}


def test_a_failed_demotion_leaves_the_source_as_it_was_and_says_nothing() -> None:
    bench = Bench(device=1, host=1, policy=Policy(degrade_after=100))
    bench.put("a")
    waiting = bench.reserve(DEVICE, 1)
    bench.cancel(waiting)
    told, slot = len(bench.events), bench.slot("a", DEVICE)
    bench.land(failed="a")
    assert bench.where("a") == {DEVICE}
    assert bench.slot("a", DEVICE) == slot
    assert len(bench.events) == told
    assert bench.states(HOST) == {SlotState.FREE: 1}


def test_a_failed_demotion_is_tried_again_while_somebody_waits() -> None:
    bench = Bench(device=1, host=1)
    bench.put("a")
    waiting = bench.reserve(DEVICE, 1)
    bench.land_one(failed="a")
    assert bench.in_flight() == [("a", DEVICE, HOST, Cause.CAPACITY)]
    bench.land()
    assert waiting in bench.grants


def test_a_block_that_goes_to_disk_for_its_child_leaves_rather_than_another() -> None:
    """Room for the parent is made in the host tier, by sending its child to disk, and an older request waits for it."""
    bench = Bench(device=4, host=2, disk=8, recovered=[("z", None, 35)])
    bench.put("p", HOST, priority=10)
    bench.store("y", under="p", priority=10)
    leases = bench.store("a"), bench.store("b", HOST, under="a"), bench.store("x")
    bench.move("z", DEVICE)
    bench.reserve(HOST, 1, BOB)
    bench.reserve(DEVICE, 1)
    bench.release(*leases)
    bench.land()
    assert (bench.where("a"), bench.where("x")) == ({DISK}, {DEVICE})


def parent_above(leased: bool = False) -> Bench:
    """The parent may not go down, its child is below: nothing but the subtree can make room."""
    bench = Bench(device=1, host=1)
    bench.put("a", HOST, priority=10)
    bench.move("a", DEVICE)
    bench.land()
    lease = bench.store("b", HOST, under="a", priority=10)
    if not leased:
        bench.release(lease)
    return bench


def test_if_only_parents_are_left_a_whole_subtree_goes_leaves_first() -> None:
    bench = parent_above()
    told = len(bench.events)
    assert bench.reserve(DEVICE, 1) in bench.grants
    assert list(bench.said(told)) == [(EventType.REMOVED, Cause.CAPACITY, key) for key in "ba"]


def test_a_subtree_that_goes_may_make_room_for_more_than_one() -> None:
    """Uses that are still on their way up have left the root behind its child."""
    bench = Bench(device=2, host=2, policy=Policy(blocks_a_call=1))
    bench.put("ab", HOST)
    bench.put("cd", under="b")
    bench.rest()
    bench.tell_read("abcd")
    bench.pass_ms(0)
    bench.pass_ms(0)
    bench.tell_read("abcd")
    assert bench.reserve(HOST, 2) in bench.grants
    assert bench.stored() == ""


@pytest.mark.parametrize("leased", [True, False], ids=["a leased descendant", "new blocks that follow it"])
def test_what_protects_the_subtree(leased: bool) -> None:
    bench = parent_above(leased)
    assert bench.reserve(DEVICE, 1, after=None if leased else "b") in bench.refusals
    assert bench.stored() == "ab"
