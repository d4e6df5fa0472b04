"""A hundred watchers that come and go under real traffic, some of them killed: nobody misses anything, nothing stays.

The traffic goes on at all times. How much slower it does is for the processors that all of them share to say, so it is
not asked here: `kvtier bench events` measures what watchers cost the daemon.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import ExitStack
from itertools import count
from typing import Final

from kvtier import Tier, connect
from kvtier.v1 import blocks_pb2
from tests.integration.actors import Actor
from tests.integration.blocks import chain
from tests.integration.crowd import KINDS
from tests.integration.raw import attached
from tests.integration.test_slow_watcher import memory
from tests.integration.waiting import PATIENCE_S, eventually

NAME: Final = "visited"
PROCESSES, EACH = 4, 25
KILLED: Final = 2
"""Processes that are killed in the middle, each replaced by another."""
BLOCKS: Final = 16
"""Of a put: about 2 kB of events with the moves and removals that follow from it."""
STAY_S: Final = 0.6
RING_BYTES: Final = 2 << 20
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

        async def puts():
            return self.puts

        await eventually(puts, lambda done: done >= some)

    async def _run(self):
        raw, cache = self._raw, self._cache
        for number in count():
            if self._stopping:
                return
            reserved = await raw.reserve(cache, Tier.DEVICE, BLOCKS)
            await raw.commit(cache, reserved, chain(f"put {number}", BLOCKS))
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
            Actor("come_and_go", address=self._address, cache=NAME, seed=seed, watchers=EACH, stay_s=STAY_S)
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
    flags = ("--event-ring-bytes", str(RING_BYTES), "--max-sessions", "64")
    daemon = start_daemon(*flags, device=8 * BLOCKS, host=64 * BLOCKS)
    async with await connect(daemon.address) as client, attached(daemon.address) as raw:
        cache = (await raw.open(NAME)).cache_id
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
