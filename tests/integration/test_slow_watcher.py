"""A watcher that does not keep up: it is told what it missed, and nobody else feels that it is there."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from kvtier import Cursor, Event, Tier, connect
from kvtier.v1 import blocks_pb2, events_pb2
from tests.integration.actors import Actor
from tests.integration.blocks import chain
from tests.integration.raw import attached
from tests.integration.seeing import edge_stats
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


async def last_event(client):
    stats = await client.stats()
    return Cursor(stats.epoch, stats.last_event_id)


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
