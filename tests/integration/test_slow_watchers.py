"""A watcher that does not keep up: it is told what it missed, and nobody else feels that it is there."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, Final

import pytest

from kvtier import Event, Tier, connect
from kvtier.v1 import blocks_pb2, events_pb2
from tests.integration.actors import Actor
from tests.integration.blocks import chain
from tests.integration.crowd import KINDS
from tests.integration.raw import attached
from tests.integration.seeing import edge_stats, last_event
from tests.integration.waiting import PATIENCE_S, eventually

RING_BYTES = 256 << 10
BLOCKS = 256
"""Of a put: its stored event is 17 kB, its removed one 8 kB."""
WARM, PUTS = 20, 220
PRODUCED = (PUTS - WARM) * BLOCKS * (66 + 33)
"""Bytes of events, once the ring is full."""


assert PRODUCED > 16 * RING_BYTES


SMALL_RING = ("--event-ring-bytes", str(RING_BYTES))
NAME = "watched"


async def store(raw, cache, prompt, tier=Tier.HOST):
    """One put, without bytes: every one evicts the blocks of an earlier one, in events as large as it can have."""
    keys = chain(prompt, BLOCKS)
    reserved = await raw.reserve(cache, tier, BLOCKS)
    await raw.commit(cache, reserved, keys)
    await raw.call(raw.stubs.blocks.Release, blocks_pb2.ReleaseRequest(cache_id=cache, lease_ids=[reserved.lease_id]))


def memory(daemon):
    """Resident bytes that are its own: anonymous, so without the arenas."""
    lines = Path(f"/proc/{daemon.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


class Follower:
    """A watcher that keeps up, beside the test."""

    def __init__(self, client, start):
        self.ids: list[int] = []
        self._client = client
        self._start = start

    async def __aenter__(self):
        self._task = asyncio.create_task(self._follow())
        return self

    async def __aexit__(self, *_):
        self._task.cancel()
        await asyncio.wait([self._task])

    async def up_to(self, end):
        """All ids that it has seen when it has seen the last."""

        async def seen():
            if self._task.done():
                self._task.result()
            return self.ids

        return await eventually(seen, lambda ids: ids[-1:] == [end.id])

    async def _follow(self):
        async with self._client.watch(since=self._start) as watch:
            async for item in watch:
                assert isinstance(item, Event), item
                self.ids.append(item.event_id)


async def test_a_watcher_that_does_not_read_gets_the_exact_gap_and_goes_on(start_daemon):
    daemon = start_daemon(*SMALL_RING, "--event-log-bytes", "0", host=2 * BLOCKS)
    async with await connect(daemon.address) as client, attached(daemon.address) as raw:
        cache = (await raw.open(NAME)).cache_id
        start = await last_event(client)
        request = events_pb2.WatchRequest(since=blocks_pb2.Cursor(epoch=start.epoch, id=start.id))
        slow = raw.stubs.events.Watch(request, metadata=raw.metadata)
        async with Follower(client, start) as other:
            before = 0
            for index in range(PUTS):
                if index == WARM:
                    before = memory(daemon)
                await store(raw, cache, f"prompt {index}")
            end = await last_event(client)
            assert memory(daemon) - before < PRODUCED // 4, "what nobody reads piles up"
            assert await other.up_to(end) == list(range(start.id + 1, end.id + 1)), "a neighbour missed something"

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


@pytest.mark.parametrize("log", [(), ("--event-log-bytes", "0")], ids=["log", "no-log"])
async def test_a_watcher_behind_what_a_log_spares_misses_nothing(start_daemon, log):
    daemon = start_daemon(*log, host=2 * BLOCKS)
    async with await connect(daemon.address) as client, attached(daemon.address) as raw:
        cache = (await raw.open(NAME)).cache_id
        start = await last_event(client)
        for index in range(PUTS):
            await store(raw, cache, f"prompt {index}")
        end = await last_event(client)
        async with Follower(client, start) as late:
            assert await late.up_to(end) == list(range(start.id + 1, end.id + 1))


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


WATCHED: Final = "visited"
PROCESSES, EACH = 4, 25
KILLED: Final = 2
"""Processes that are killed in the middle, each replaced by another."""
STORED: Final = 16
"""Of a put: about 2 kB of events with the moves and removals that follow from it."""
STAY_S: Final = 0.6
LONG_RING: Final = 2 << 20
ALONE_S, CROWDED_S = 0.5, 2.4
MORE_MEMORY: Final = 24 << 20
"""What the daemon may have taken for good: a watcher that left its buffers behind would take more, by hundreds."""


class Traffic:
    """Puts without bytes, one after the other: each makes room by moves from the device to the host and out of it."""

    def __init__(self, raw, cache):
        self.puts = 0
        self._raw = raw
        self._cache = cache
        self._stopping = False

    async def __aenter__(self):
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, kind, error, trace):
        self._stopping = True
        async with asyncio.timeout(PATIENCE_S):
            await self._task

    async def goes_on(self, seconds):
        """For so long, and at least by a few puts more."""
        some = self.puts + 3
        await asyncio.wait([self._task], timeout=seconds)
        assert not self._task.done(), self._task.result()
        await eventually(lambda: self.puts, lambda puts: puts >= some)

    async def _run(self):
        raw, cache = self._raw, self._cache
        for number in count():
            if self._stopping:
                return
            reserved = await raw.reserve(cache, Tier.DEVICE, STORED)
            await raw.commit(cache, reserved, chain(f"put {number}", STORED))
            release = blocks_pb2.ReleaseRequest(cache_id=cache, lease_ids=[reserved.lease_id])
            await raw.call(raw.stubs.blocks.Release, release)
            self.puts += 1


class Visitors:
    """The processes."""

    def __init__(self, daemon, stack):
        self._address = daemon.address
        self._stack = stack
        self._seeds = count()
        self._there: list[Actor] = []

    async def come(self, processes):
        """Returns when all of them have begun."""
        fresh = [
            Actor("come_and_go", address=self._address, cache=WATCHED, seed=seed, watchers=EACH, stay_s=STAY_S)
            for seed, _ in zip(self._seeds, range(processes), strict=False)
        ]
        for actor in fresh:
            self._stack.enter_context(actor)
            await asyncio.to_thread(actor.says)
        self._there += fresh

    def kill_one(self):
        self._there.pop(0).kill()

    async def go(self):
        """Nothing happens any more: what all of them have seen."""
        seen: Counter[str] = Counter()
        for actor in self._there:
            actor.go_on()
        for actor in self._there:
            seen.update(await asyncio.to_thread(actor.says))
        return seen


async def test_a_hundred_watchers_come_and_go(start_daemon):
    flags = ("--event-ring-bytes", str(LONG_RING), "--max-sessions", "64")
    daemon = start_daemon(*flags, device=8 * STORED, host=64 * STORED)
    async with await connect(daemon.address) as client, attached(daemon.address) as raw:
        cache = (await raw.open(WATCHED)).cache_id
        before = await client.stats()
        with ExitStack() as stack:
            visitors = Visitors(daemon, stack)
            async with Traffic(raw, cache) as traffic:
                await traffic.goes_on(ALONE_S)
                quiet = memory(daemon)
                await visitors.come(PROCESSES)
                await eventually(client.stats, lambda stats: stats.watchers > PROCESSES * EACH // 2)
                await traffic.goes_on(CROWDED_S / 3)
                for _ in range(KILLED):
                    visitors.kill_one()
                    await visitors.come(1)
                    await traffic.goes_on(CROWDED_S / 3)
            seen = await visitors.go()
        async with Traffic(raw, cache) as traffic:
            await nobody_is_left(client, before)
            await traffic.goes_on(ALONE_S)
        assert memory(daemon) - quiet < MORE_MEMORY
        assert (seen["gaps"], seen["compacted"]) == (0, 0), "what is not in memory any more is in the log"
        assert min(seen[kind] for kind in (*KINDS, "compared", "events")) > 0, "nothing was shown of some of them"
        assert sum(seen[kind] for kind in KINDS) > 2 * PROCESSES * EACH, "they came, and did not go"


async def nobody_is_left(client, before):
    """No watcher, and no session that was not there before."""
    after = await eventually(client.stats, lambda stats: stats.watchers == 0 and len(stats.sessions) <= 2)
    assert after.watcher_stats == ()
    assert {one.session_id for one in after.sessions} == {one.session_id for one in before.sessions}
