"""Copies between memory tiers: every byte arrives; the mailbox: nothing is lost, and a burst wakes the loop once."""

import asyncio
import threading

from kvtierd.core.events import EventSequencer
from kvtierd.core.ids import Tier
from kvtierd.mover.runtime import CopyPiece, Faults
from kvtierd.mover.work import Mailbox, copy
from tests.unit.mover.rig import fill, holds, key, make_runtime, move


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
    assert copy([CopyPiece(runtime, each, 0, each.items, 0) for each in moves]) == Faults()

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
