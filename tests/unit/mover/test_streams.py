"""Copies between memory tiers: every byte arrives, no other changes, neighbours go in one piece."""

from hypothesis import given
from hypothesis import strategies as st

from kvtierd.core.events import EventSequencer
from kvtierd.core.ids import GroupId, SlotId, Tier
from kvtierd.mover.runtime import Faults, Piece
from kvtierd.mover.work import Run, copy, runs
from tests.unit.mover.rig import fill, holds, key, make_runtime, move

SLOTS = st.integers(0, 40)


def run(src: int, dst: int, count: int, group: int = 0) -> Run:
    return Run(GroupId(group), SlotId(src), SlotId(dst), count)


def copies(*pairs: tuple[int, int], group: int = 0) -> list[tuple[GroupId, SlotId, SlotId]]:
    return [(GroupId(group), SlotId(src), SlotId(dst)) for src, dst in pairs]


def test_adjacent_on_both_sides_is_one_run_in_whatever_order_it_was_planned() -> None:
    assert list(runs(copies((5, 11), (3, 9), (4, 10)))) == [run(3, 9, 3)]


def test_adjacent_on_one_side_only_is_not() -> None:
    assert list(runs(copies((3, 9), (4, 11)))) == [run(3, 9, 1), run(4, 11, 1)]
    assert list(runs(copies((3, 9), (5, 10)))) == [run(3, 9, 1), run(5, 10, 1)]


def test_a_run_ends_with_its_group() -> None:
    assert list(runs(copies((3, 9)) + copies((4, 10), group=1))) == [run(3, 9, 1), run(4, 10, 1, group=1)]


@given(st.dictionaries(SLOTS, SLOTS).filter(lambda pairs: len(set(pairs.values())) == len(pairs)))
def test_runs_are_the_copies_and_no_two_could_be_joined(pairs: dict[int, int]) -> None:
    found = list(runs(copies(*pairs.items())))
    assert [(r.src + i, r.dst + i) for r in found for i in range(r.count)] == sorted(pairs.items())
    ends = {(r.src + r.count, r.dst + r.count) for r in found}
    assert not ends & {(r.src, r.dst) for r in found}


def test_both_pools_of_every_block_arrive_and_other_slots_keep_their_bytes() -> None:
    runtime = make_runtime({Tier.DEVICE: 8, Tier.HOST: 8}, EventSequencer())
    for slot in range(8):
        fill(runtime, Tier.DEVICE, slot, key(slot))
        fill(runtime, Tier.HOST, slot, key(100 + slot))
    pairs = {1: 4, 2: 5, 3: 6, 7: 0}

    # two moves in one batch: their neighbours are joined, their bytes are not mixed up
    moves = [
        move(1, Tier.DEVICE, Tier.HOST, [(1, 1, 4), (2, 2, 5)]),
        move(2, Tier.DEVICE, Tier.HOST, [(3, 3, 6), (7, 7, 0)]),
    ]
    assert copy([Piece(runtime, each, 0, each.items, 0) for each in moves]) == Faults()

    came_from = {dst: src for src, dst in pairs.items()}
    for slot in range(8):
        assert holds(runtime, Tier.HOST, slot, key(came_from.get(slot, 100 + slot)))
        assert holds(runtime, Tier.DEVICE, slot, key(slot))
