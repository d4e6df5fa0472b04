"""A watcher that does not keep up: it is told what it missed, and nobody else feels that it is there."""

import asyncio
import random
import signal
import time
from collections import Counter
from contextlib import AsyncExitStack
from itertools import count
from statistics import median
from typing import Any, Final

from kvtier import Cursor, Event, Gap, Tier, connect
from kvtier.v1 import blocks_pb2, events_pb2
from tests.integration.actors import Actor
from tests.integration.blocks import chain
from tests.integration.raw import attached
from tests.integration.seeing import edge_stats, memory
from tests.integration.seeing import last_event as last_event  # noqa: PLC0414  test_event_log takes it from here
from tests.integration.waiting import PATIENCE_S, eventually

RING_BYTES = 256 << 10
BLOCKS = 256
"""Of a put: its stored event is 17 kB, its removed one 8 kB."""
WARM, PUTS = 190, 390
"""Puts before the first look at the memory, in which the memory of departed blocks reaches its bound; and all puts."""
PRODUCED = (PUTS - WARM) * BLOCKS * (66 + 33)
"""Bytes of events, once the ring is full."""


assert PRODUCED > 16 * RING_BYTES


SMALL_RING = ("--event-ring-bytes", str(RING_BYTES))
NAME = "watched"


async def store(raw, cache, prompt, tier=Tier.HOST, blocks=BLOCKS):
    """One put, without bytes: every one evicts the blocks of an earlier one, in events as large as it can have."""
    await raw.store(cache, tier, chain(prompt, blocks))


async def follow(client, start, ids):
    """A watcher that keeps up, beside the test."""
    async with client.watch(since=start) as watch:
        async for item in watch:
            assert isinstance(item, Event), item
            ids.append(item.event_id)


async def test_a_watcher_that_does_not_read_gets_the_exact_gap_and_goes_on(start_daemon):
    daemon = start_daemon(*SMALL_RING, "--event-log-bytes", "0", host=2 * BLOCKS)
    async with await connect(daemon.address) as client, attached(daemon.address) as raw:
        cache = (await raw.open(NAME)).cache_id
        start = await last_event(client)
        request = events_pb2.WatchRequest(since=blocks_pb2.Cursor(epoch=start.epoch, id=start.id))
        slow = raw.stubs.events.Watch(request, metadata=raw.metadata)
        ids: list[int] = []
        neighbour = asyncio.create_task(follow(client, start, ids))
        before = 0
        for index in range(PUTS):
            if index == WARM:
                before = memory(daemon)
            await store(raw, cache, f"prompt {index}")
        end = await last_event(client)
        assert memory(daemon) - before < PRODUCED // 4, "what nobody reads piles up"
        await eventually(lambda: neighbour.done() or ids[-1:] == [end.id], bool)
        neighbour.cancel()
        assert ids == list(range(start.id + 1, end.id + 1)), "a neighbour missed something"

        covered, gaps = start.id, []
        async with asyncio.timeout(PATIENCE_S):
            while covered < end.id:
                batch: Any = await slow.read()
                assert batch.first_id == covered + 1
                assert [event.id for event in batch.events] == list(range(batch.first_id, batch.last_id + 1))
                covered = batch.last_id
                if batch.HasField("gap"):
                    gap = batch.gap
                    assert (gap.epoch, gap.first_id, gap.reason) == (start.epoch, covered + 1, "slow")
                    gaps.append((gap.first_id, gap.last_id))
                    covered = gap.last_id
        slow.cancel()
        assert gaps, "it never fell behind: this showed nothing"
        assert gaps[-1][1] < end.id, "and nothing came after the gap"


async def test_watchers_that_do_not_read_delay_no_move(start_daemon):
    daemon = start_daemon(*SMALL_RING, device=BLOCKS, host=2 * BLOCKS)
    with Actor("stare", address=daemon.address) as stopped:
        async with await connect(daemon.address) as client, attached(daemon.address) as raw:
            cache = (await raw.open(NAME)).cache_id
            took: dict[bool, list[float]] = {False: [], True: []}
            for turn in range(8):
                with_watchers = turn % 2 == 1
                streams = [
                    raw.stubs.events.Watch(events_pb2.WatchRequest(oldest=True), metadata=raw.metadata)
                    for _ in range(6 if with_watchers else 0)
                ]
                if turn == 1:
                    stopped.says()
                    stopped.signal(signal.SIGSTOP)
                started = time.monotonic()
                for index in range(10):
                    await store(raw, cache, f"turn {turn} prompt {index}", Tier.DEVICE)
                took[with_watchers].append(time.monotonic() - started)
                for stream in streams:
                    stream.cancel()
            moved = await edge_stats(client, NAME, "device>host")
            assert moved is not None
            assert moved.blocks > 70 * BLOCKS
        assert median(took[True]) < 3 * median(took[False]), took


CLIENTS, EACH = 4, 25
STORED: Final = 16
"""Of a put: about 2 kB of events with the moves and removals that follow from it."""
LONG_RING: Final = 2 << 20
STAY_S: Final = 0.6
MORE_MEMORY: Final = 24 << 20
"""What the daemon may have taken for good: a watcher that left its buffers behind would take more, by hundreds."""


class Visitors:
    """Watchers that begin anywhere, stay for a moment and are followed by another. The client sees to it that what each
    is sent joins: a gap is a fault, since what is not in memory any more is in the log."""

    def __init__(self) -> None:
        self.visits: Counter[str] = Counter()
        self._rng = random.Random(1)

    async def one_after_the_other(self, client):
        while True:
            since = (await last_event(client)).id - self._rng.randint(0, 100)
            beginnings: dict[str, dict[str, Any]] = {
                "now": {},
                "oldest": {"oldest": True},
                "since": {"since": Cursor(client.epoch, since)},
                "snapshot": {"snapshot": True},
            }
            kind = self._rng.choice(list(beginnings))
            leaves = time.monotonic() + self._rng.uniform(0, STAY_S)
            async with client.watch(**beginnings[kind], heartbeats=True, heartbeat_s=0.05) as watch:
                async for item in watch:
                    assert not isinstance(item, Gap), item
                    if time.monotonic() > leaves:
                        break
            self.visits[kind] += 1


async def test_a_hundred_watchers_come_and_go(start_daemon):
    """Two of them with their processes, which are killed. Nobody misses anything, and nothing is left of them."""
    flags = ("--event-ring-bytes", str(LONG_RING), "--max-sessions", "64")
    daemon = start_daemon(*flags, device=8 * STORED, host=64 * STORED)
    prompts = count()
    async with await connect(daemon.address) as client, attached(daemon.address) as raw:
        cache = (await raw.open(NAME)).cache_id

        async def put():
            await store(raw, cache, f"prompt {next(prompts)}", Tier.DEVICE, STORED)

        while (await last_event(client)).id < 500:
            await put()
        before, quiet, visitors = await client.stats(), memory(daemon), Visitors()
        async with AsyncExitStack() as stack, asyncio.timeout(2 * PATIENCE_S):
            clients = [await stack.enter_async_context(await connect(daemon.address)) for _ in range(CLIENTS)]
            tasks = [asyncio.create_task(visitors.one_after_the_other(each)) for each in clients for _ in range(EACH)]
            for _ in range(2):
                with Actor("stare", address=daemon.address) as killed:
                    await asyncio.to_thread(killed.says)
                    await put()
            while visitors.visits.total() < 2 * CLIENTS * EACH or len(visitors.visits) < 4:
                await put()
                assert not [task.result() for task in tasks if task.done()]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        await put()
        after = await eventually(client.stats, lambda stats: len(stats.sessions) == len(before.sessions))
        assert (after.watchers, after.watcher_stats) == (0, ())
        assert memory(daemon) - quiet < MORE_MEMORY
