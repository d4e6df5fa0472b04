"""From threads to the loop: nothing is lost, and a burst wakes the loop once."""

import asyncio
import threading

from kvtierd.mover.work import Mailbox


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
