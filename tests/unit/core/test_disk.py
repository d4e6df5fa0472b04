"""The disk: prefix-closed by itself, slots free only after their deletion, bytes believed only if verified."""

import sys
from types import FrameType

from kvtierd.core.events import Cause, EventType
from kvtierd.core.policy import Policy
from kvtierd.core.slots import SlotState
from tests.unit.core.bench import ALICE, DEVICE, DISK, GROUP, HOST, Bench, key, keys

CHAIN = [("a", None, 35), ("b", "a", 35), ("c", "b", 35)]


def test_a_child_whose_ancestors_copy_failed_does_not_stay_on_disk() -> None:
    bench = Bench(device=3, disk=3, policy=Policy(degrade_after=100))
    bench.put("ab")
    ticket = bench.move("b", DISK)
    bench.land(failed="a")
    assert bench.grants[ticket].results == (False,)
    assert (bench.where("a"), bench.where("b")) == ({DEVICE}, {DEVICE})
    assert bench.states(DISK) == {SlotState.FREE: 3}


def test_a_slot_whose_deletion_failed_is_out_of_use_until_one_succeeds() -> None:
    """A disk that was full for a moment must not cost its slots for as long as the daemon runs."""
    bench = Bench(disk=2, device=1, recovered=[("x", None, 35)])
    bench.drop("x")
    for _ in range(2):
        bench.land(failed="x")
        assert bench.states(DISK) == {SlotState.QUARANTINED: 1, SlotState.FREE: 1}
        bench.pass_ms(4999)
        assert bench.in_flight() == [], "a disk that fails is left alone"
        bench.pass_ms(1)
        assert bench.in_flight() == [("x", DISK, None, Cause.CAPACITY)]
    bench.land()
    assert bench.states(DISK) == {SlotState.FREE: 2}
    bench.pass_ms(5000)
    assert bench.in_flight() == []


def test_a_slot_whose_deletion_failed_is_not_deleted_once_more_where_the_disk_came_back_empty() -> None:
    bench = Bench(disk=2, device=1, recovered=[("x", None, 35)])
    bench.drop("x")
    bench.land(failed="x")
    bench.lose()
    bench.restore_disk()
    bench.pass_ms(5000)
    assert bench.in_flight() == []
    assert bench.states(DISK) == {SlotState.FREE: 2}


def test_a_bad_slot_whose_deletion_failed_is_deleted_and_stays_out_of_use() -> None:
    bench = Bench(disk=2, device=1, recovered=[("x", None, 35)])
    bench.acquire("x")
    bench.land_one(corrupt="x")
    bench.land(failed="x")
    bench.pass_ms(5000)
    assert bench.in_flight() == [("x", DISK, None, Cause.CAPACITY)]
    bench.land()
    assert bench.states(DISK) == {SlotState.QUARANTINED: 1, SlotState.FREE: 1}


def test_what_is_moved_to_disk_finds_the_slots_that_the_move_before_it_freed_ahead() -> None:
    recovered = [(name, None, 35) for name in "abcdefgh"]
    bench = Bench(device=4, disk=8, policy=Policy(reserve_shift=2), recovered=recovered)
    for name in "vwxy":
        bench.put(name)
    bench.move("v", DISK)
    bench.land()
    assert bench.states(DISK) == {SlotState.READY: 6, SlotState.FREE: 2}
    bench.move("wx", DISK)
    assert [(name, to) for name, _, to, _ in bench.in_flight()[:2]] == [("w", DISK), ("x", DISK)], "at once"
    assert [to for _, _, to, _ in bench.in_flight()[2:]] == [None, None], "and behind that, room for the next"
    bench.land()
    assert bench.states(DISK) == {SlotState.READY: 6, SlotState.FREE: 2}


def test_a_disk_that_nothing_goes_to_gives_up_nothing() -> None:
    bench = Bench(device=1, disk=8, policy=Policy(reserve_shift=2), recovered=[(name, None, 35) for name in "abcdefgh"])
    bench.put("x")
    bench.pass_ms(1000)
    assert bench.stored() == "abcdefghx"


def test_a_corrupt_read_at_the_root_of_a_chain_of_any_length_costs_the_chain() -> None:
    chain = long_chain(2 * sys.getrecursionlimit())
    parents = [None, *chain[:-1]]
    recovered = [(name, parent, 35) for name, parent in zip(chain, parents, strict=True)]
    bench = Bench(device=1, disk=len(chain), recovered=recovered)
    bench.acquire(chain[0])
    told = len(bench.events)
    bench.land(corrupt=chain[0])
    bench.rest()
    bench.land()
    removed = "".join(names for kind, _, names in bench.said(told) if kind is EventType.REMOVED)
    assert removed == chain[::-1]
    assert bench.states(DISK) == {SlotState.QUARANTINED: 1, SlotState.FREE: len(chain) - 1}


def test_what_a_move_to_disk_costs_grows_with_the_chain_and_not_with_its_square() -> None:
    assert calls_of_a_move_to_disk(800) < 1.5 * 4 * calls_of_a_move_to_disk(200)


def calls_of_a_move_to_disk(blocks: int) -> int:
    """Python calls, and resumptions of generators, that the core makes to plan it."""
    chain = long_chain(blocks)
    bench = Bench(device=blocks, disk=blocks)
    bench.put(chain)
    wanted = keys(chain)
    calls = 0

    def count(_frame: FrameType, event: str, _arg: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        _, outcome = bench.core.move(ALICE, GROUP, DISK, wanted, bench.now)
    finally:
        sys.setprofile(None)
    assert sum(len(move.items) for move in outcome.moves) == blocks
    return calls


def long_chain(blocks: int) -> str:
    """One letter a block."""
    return "".join(map(chr, range(0x4E00, 0x4E00 + blocks)))


def test_a_corrupt_read_of_a_block_that_is_above_too_costs_only_what_the_disk_has_of_it() -> None:
    """A block read from disk for host arrives in the device meanwhile."""
    bench = Bench(device=1, host=1, disk=2, recovered=CHAIN[:2])
    bench.acquire("a")
    bench.acquire("a", tier=HOST)
    bench.land_one()
    told = len(bench.events)
    bench.land(corrupt="a")
    assert list(bench.said(told)) == [(EventType.REMOVED, Cause.ANCESTOR, "b"), (EventType.UPDATED, Cause.CORRUPT, "a")]
    assert bench.where("a") == {DEVICE}


def test_uses_of_disk_blocks_are_told_once_in_their_order() -> None:
    bench = Bench(device=3, disk=4, recovered=[*CHAIN[:2], ("x", None, 35), ("y", None, 35)])
    bench.acquire("ab")
    bench.acquire("x")
    bench.land()
    assert bench.core.take_disk_uses() == {GROUP: [key("b"), key("a"), key("x")]}
    assert bench.core.take_disk_uses() == {}
