"""Copies between memory tiers: every byte arrives; the mailbox: nothing is lost, and a burst wakes the loop once."""

from __future__ import annotations

import asyncio
import threading

from hypothesis import given
from hypothesis import strategies as st

from kvtierd.core.events import EventSequencer
from kvtierd.core.ids import GroupId, SlotId, Tier
from kvtierd.mover.runtime import Faults, Piece
from kvtierd.mover.work import Mailbox, Run, copy, runs
from tests.unit.mover.rig import fill, holds, key, make_runtime, move

SLOTS = st.integers(0, 40)


def run(src: int, dst: int, count: int, group: int = 0) -> Run:
    return Run(GroupId(group), SlotId(src), SlotId(dst), count)


def copies(*pairs: tuple[int, int], group: int = 0) -> list[tuple[GroupId, SlotId, SlotId]]:
    return [(GroupId(group), SlotId(src), SlotId(dst)) for src, dst in pairs]


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


async def test_values_of_many_threads_all_arrive_in_their_threads_order() -> None:
    loop = asyncio.get_running_loop()
    taken: list[tuple[int, int]] = []
    complete = asyncio.Event()
    threads, each = 4, 2000

    def drain() -> None:
        taken.extend(mailbox.take(50, lambda value: 1))
        if len(taken) == threads * each:
            complete.set()

    mailbox: Mailbox[tuple[int, int]] = Mailbox(loop, drain)

    def post(thread: int) -> None:
        for i in range(each):
            mailbox.post([(thread, i)])

    workers = [threading.Thread(target=post, args=(n,)) for n in range(threads)]
    for worker in workers:
        worker.start()
    await asyncio.wait_for(complete.wait(), 30)
    for worker in workers:
        worker.join()
    for n in range(threads):
        assert [i for thread, i in taken if thread == n] == list(range(each))


async def test_a_burst_is_drained_in_one_turn_up_to_the_budget() -> None:
    turns: list[list[int]] = []
    mailbox: Mailbox[int] = Mailbox(
        asyncio.get_running_loop(), lambda: turns.append(mailbox.take(10, lambda value: value))
    )
    for value in (4, 4, 4, 4):
        mailbox.post([value])
    for _ in range(10):
        await asyncio.sleep(0)
    assert turns == [[4, 4, 4], [4]]


async def test_after_close_nothing_arrives_any_more() -> None:
    turns: list[list[int]] = []
    mailbox: Mailbox[int] = Mailbox(asyncio.get_running_loop(), lambda: turns.append(mailbox.take(10, int)))
    mailbox.post([1])
    mailbox.close()
    mailbox.post([2])
    for _ in range(3):
        await asyncio.sleep(0)
    assert turns in ([], [[]])
