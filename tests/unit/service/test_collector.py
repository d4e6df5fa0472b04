"""The garbage collector under a daemon with many blocks."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from kvtier import connect
from kvtier.v1 import admin_pb2, blocks_pb2
from kvtierd.mover.errors import Refused
from kvtierd.mover.leisure import Leisure
from kvtierd.service.collector import SLICE, Collector
from kvtierd.service.errors import CallRefused
from kvtierd.service.watch import Watcher
from tests.unit.service.rig import HOST, attached, config, eventually, running

LIVING = 60_000


class Knot:
    """Refers to itself, so only the collector can find that nobody else does."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    before = gc.get_threshold(), len(gc.callbacks)
    yield
    assert (gc.get_threshold(), len(gc.callbacks)) == before


def run(collector: Collector, test: Callable[[Leisure], Coroutine[Any, Any, None]]) -> None:
    """While the collector works, on a loop that has leisure."""
    leisure = Leisure()

    async def collecting() -> None:
        collector.pause()
        collector.start(leisure)
        try:
            await test(leisure)
        finally:
            collector.stop()

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(leisure)) as runner:
        runner.run(asyncio.wait_for(collecting(), 60))


async def at_leisure(leisure: Leisure) -> None:
    """Once all has been done that waits for that now."""
    done = asyncio.Event()
    leisure.defer(done.set)
    await done.wait()


def test_what_lives_long_is_looked_at_once_and_a_little_at_a_time() -> None:
    looked_at: list[int] = []

    def count(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            looked_at.append(sum(len(gc.get_objects(generation=old)) for old in range(3)))

    async def test(leisure: Leisure) -> None:
        living: list[list[int]] = []
        gc.callbacks.append(count)
        try:
            while len(living) < LIVING:
                living.extend([len(living)] for _ in range(SLICE // 2))
                await asyncio.sleep(0)
                await at_leisure(leisure)
        finally:
            gc.callbacks.remove(count)
        assert gc.get_freeze_count() >= LIVING - 2 * SLICE
        assert sum(looked_at) <= 1.5 * LIVING
        assert max(looked_at) <= 3 * SLICE

    before = [[number] for number in range(4 * LIVING)]
    run(Collector(), test)
    assert gc.get_freeze_count() == 0
    assert len(before) == 4 * LIVING


def test_garbage_goes_when_the_loop_has_leisure() -> None:
    async def test(leisure: Leisure) -> None:
        knots = [Knot() for _ in range(2 * SLICE)]
        gone = weakref.ref(knots[0])
        knots.clear()
        assert gone() is not None
        await asyncio.sleep(0)
        await at_leisure(leisure)
        assert gone() is None

    run(Collector(), test)


def collections() -> int:
    """Those that the collector has made: by itself the interpreter collects the youngest generation."""
    return sum(generation["collections"] for generation in gc.get_stats()[1:])


def test_cycles_that_were_frozen_go_in_the_end() -> None:
    collector = Collector(frozen_calls_max=5)

    async def test(leisure: Leisure) -> None:
        knot = Knot()
        gone = weakref.ref(knot)
        kept: list[list[int]] = []

        async def call() -> None:
            """Is under way while new objects are collected, and what survives is frozen."""
            before = collections()
            while collections() == before:
                kept.extend([number] for number in range(SLICE))
                await asyncio.sleep(0)
                await at_leisure(leisure)

        await asyncio.create_task(call())
        del knot
        for _ in range(10):
            assert gone() is not None or collector.full_collections
            await asyncio.create_task(call())
        assert collector.full_collections
        assert gone() is None

    run(collector, test)


def test_where_the_loop_has_no_leisure_the_interpreter_collects_as_elsewhere() -> None:
    collector = Collector()
    before = gc.get_threshold()
    collector.pause()
    assert not gc.isenabled()
    collector.start(None)
    assert gc.isenabled()
    assert gc.get_threshold() == before
    collector.stop()


def test_stopping_twice_is_nothing() -> None:
    collector = Collector()
    collector.stop()

    async def test(leisure: Leisure) -> None:
        collector.stop()
        await at_leisure(leisure)

    run(collector, test)
    gc.collect()
    assert gc.get_freeze_count() == 0


async def test_a_refused_call_leaves_nothing_for_the_collector(short_dir: Path) -> None:
    """What waits until it is refused is under way when what is new is frozen, so it would stay for hours."""
    async with running(config(short_dir, device=0, host=4)) as daemon, attached(daemon) as client:
        cache = await client.open()
        held = await client.reserve(cache, 4, HOST)
        wanted = blocks_pb2.ReserveRequest(cache_id=cache, tier=HOST, count=1, timeout_ns=1)
        gc.collect()
        gc.disable()
        try:
            for number in range(1, 4):
                wanted.seq = 1000 + number
                await client.refusal(client.blocks.Reserve, wanted)
                await client.refusal(client.blocks.Release, blocks_pb2.ReleaseRequest(cache_id=cache, lease_ids=[99]))
            assert len(held.slots) == 4
            await client.call(client.admin.Stats, admin_pb2.StatsRequest())
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            left = [one for one in gc.garbage if isinstance(one, grpc.aio.AbortError | CallRefused | Refused)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        assert left == []


async def test_a_watch_that_has_ended_leaves_nothing_for_the_collector(short_dir: Path) -> None:
    """All that live for long are under way when what is new is frozen."""
    settings = config(short_dir, device=0, host=4)
    async with running(settings) as daemon, await connect(settings.runtime_dir) as client:
        gc.collect()
        gc.disable()
        try:
            without, lines = len(daemon._attach._connections), 0
            async with client.watch(oldest=True, heartbeats=True, heartbeat_s=0.05) as watch:
                await anext(watch)
                lines = len(daemon._attach._connections) - without
            await eventually(lambda: len(daemon._attach._connections) == without)
            await asyncio.sleep(0)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            left = [one for one in gc.garbage if isinstance(one, Watcher)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        assert (lines, left) == (1, [])
