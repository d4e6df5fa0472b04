"""What watchers are told: every change once, in order, with what is so after it."""

from itertools import pairwise

from kvtierd.core.events import Cause, EventType
from kvtierd.core.policy import Policy
from tests.slot_rows import changes
from tests.unit.core.bench import ALICE, DEVICE, DISK, GROUP, HOST, Bench, key

A_MOVE = Policy().blocks_a_move
AN_EVENT = Policy().blocks_an_event


def names(count: int) -> list[str]:
    return [f"block {number}" for number in range(count)]


def test_an_update_carries_the_residency_after_it_and_what_the_move_cost() -> None:
    bench = Bench(device=1, host=1)
    bench.put("a", priority=40)
    bench.now = 77
    bench.make_room(DEVICE, 1)
    event = bench.events[-1]
    assert (event.type, event.cause, event.time_ns) == (EventType.UPDATED, Cause.CAPACITY, 77)
    assert (event.moved_from, event.moved_to, event.moved_bytes) == (DEVICE, HOST, 4096)
    assert (event.queue_ns, event.copy_ns) == (5, 7)
    (change,) = changes(event.blocks)
    assert (change.key, change.parent, change.residency, change.priority) == (key("a"), None, HOST.bit, 40)


def test_changes_alike_in_one_call_are_one_event_up_to_a_limit() -> None:
    count = AN_EVENT + 44
    bench = Bench(disk=count, recovered=[(name, None, 35) for name in names(count)])
    stored = [event for event in bench.events if event.type is EventType.STORED]
    assert [len(event.blocks) for event in stored] == [AN_EVENT, 44]


def test_copies_alike_are_one_move_up_to_a_limit() -> None:
    count = A_MOVE + 8
    bench = Bench(host=count, disk=count, recovered=[(name, None, 35) for name in names(count)])
    _, outcome = bench.core.move(ALICE, GROUP, HOST, [key(name) for name in names(count)], 0)
    bench.apply(outcome)
    assert [len(move.items) for move in bench.moves] == [A_MOVE, 8]
    told = len(bench.events)
    bench.land()
    assert [(event.moved_bytes, len(event.blocks)) for event in bench.events[told:]] == [
        (A_MOVE * 4096, A_MOVE),
        (8 * 4096, 8),
    ]


def test_a_subtree_goes_without_a_word_on_priorities_that_nobody_could_see() -> None:
    bench = Bench(device=5)
    bench.put("r", priority=5)
    for priority, (parent, name) in enumerate(pairwise("rabcd"), start=10):
        bench.put(name, under=parent, priority=priority)
    assert bench.priority("r") == 13
    told = len(bench.events)
    bench.drop("a")
    assert list(bench.said(told)) == [
        (EventType.REMOVED, Cause.ANCESTOR, "dcb"),
        (EventType.REMOVED, Cause.EXPLICIT, "a"),
        (EventType.UPDATED, Cause.EXPLICIT, "r"),
    ]
    assert bench.priority("r") == 5


def test_what_was_copied_along_and_then_leaves_for_room_says_so() -> None:
    bench = Bench(device=2, disk=4)
    bench.put("ab")
    told = len(bench.events)
    bench.reserve(DEVICE, 2)
    assert {(name, cause) for name, _, _, cause in bench.in_flight()} == {
        ("a", Cause.WRITE_THROUGH),
        ("b", Cause.CAPACITY),
    }
    bench.land()
    assert {(cause, name) for _, cause, names in bench.said(told) for name in names} == {
        (Cause.CAPACITY, "a"),
        (Cause.CAPACITY, "b"),
    }
    assert [bench.where(name) for name in "ab"] == [{DISK}, {DISK}]
