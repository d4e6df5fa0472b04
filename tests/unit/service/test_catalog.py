"""What a daemon remembers of its caches, and what it makes of that under another configuration."""

import asyncio
import errno
import gc
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvtier.abi.spec import CacheSpec
from kvtier.v1 import admin_pb2, caches_pb2
from kvtier.wire import spec_to_wire
from kvtierd.config import Config
from kvtierd.core.ids import GroupId, Tier
from kvtierd.service.budgets import RememberedSlots
from kvtierd.service.daemon import Daemon
from kvtierd.state import StateDir
from kvtierd.tiers.arena import Arena
from kvtierd.tiers.base import DamagedDirectory, TierConfigError, TierIOError
from kvtierd.tiers.disk.recovery import Recovery
from kvtierd.tiers.disk.root import DiskRoot
from kvtierd.tiers.disk.store import DiskStore
from kvtierd.tiers.disk.superblock import write_superblock
from tests.integration.waiting import eventually
from tests.unit.service.rig import (
    DEVICE,
    DISK,
    HOST,
    SLOT_BYTES,
    SPEC,
    Client,
    attached,
    attached_to,
    chain,
    config,
    running,
)

PATIENCE_S = 20.0


async def slots(client: Client) -> dict[str, dict[int, int]]:
    """Slots by tier of each cache."""
    listed: Any = await client.call(client.caches.List, caches_pb2.ListCachesRequest())
    return {
        cache.name: {tier.tier: tier.slots for tier in cache.groups[0].tiers} for cache in listed.caches if cache.groups
    }


async def with_caches(directory: Path, **budgets: dict[int, int]) -> None:
    """A daemon's life in which these caches were opened, with budgets in slots."""
    async with running(config(directory, device=8, host=16, disk=64)) as daemon, attached(daemon) as client:
        for name, shares in budgets.items():
            await client.open(name, {tier: count * SLOT_BYTES for tier, count in shares.items()})


async def restored(directory: Path, **sizes: int) -> dict[str, dict[int, int]]:
    async with running(config(directory, **sizes)) as daemon, attached(daemon) as client:
        return await slots(client)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"device": 8, "host": 4, "disk": 64}, {DEVICE: 3, HOST: 4, DISK: 20}),
        ({"device": 0, "host": 16, "disk": 64}, {HOST: 5, DISK: 20}),
        ({"device": 0, "host": 0, "disk": 20}, {DISK: 20}),
    ],
)
async def test_memory_budgets_shrink_to_what_there_is(
    short_dir: Path, sizes: dict[str, int], expected: dict[int, int]
) -> None:
    await with_caches(short_dir, cache={DEVICE: 3, HOST: 5, DISK: 20})
    assert await restored(short_dir, **sizes) == {"cache": expected}


async def test_a_cache_that_died_in_the_making_is_announced_as_gone_once(short_dir: Path) -> None:
    """Its slots are remembered before its files are made."""
    await with_caches(short_dir)
    RememberedSlots(short_dir / "state" / "caches").put("half", {Tier.DEVICE: (3,), Tier.DISK: (20,)})
    assert [await last_event(short_dir) for _ in range(3)] == [1, 1, 1]


async def last_event(directory: Path) -> int:
    """The last event that a daemon's start has given out."""
    async with running(config(directory, device=8, disk=64)) as daemon, attached(daemon) as client:
        stats = await client.call(client.admin.Stats, admin_pb2.StatsRequest())
        return int(stats.last_event_id)


async def test_budgets_of_another_version_stop_the_start_and_cost_no_epoch(short_dir: Path) -> None:
    await with_caches(short_dir, cache={DEVICE: 3, DISK: 20})
    superblock = short_dir / "state" / "caches" / "SUPERBLOCK"
    whole = superblock.read_bytes()
    write_superblock(superblock.parent, "budgets", {"version": 9, "caches": {}})
    with pytest.raises(DamagedDirectory):
        await Daemon.start(config(short_dir, device=8, disk=64))
    superblock.write_bytes(whole)
    async with running(config(short_dir, device=8, disk=64)) as daemon, attached(daemon) as client:
        assert client.welcome.epoch == 1


async def test_caches_of_an_unknown_past_share_the_memory(short_dir: Path) -> None:
    root = DiskRoot.open(short_dir / "disk")
    other = CacheSpec.single("other", "uint8", tokens_per_block=16, layers=1, kv_heads=1, head_size=128)
    root.create("a", SPEC, {GroupId(0): 8})
    root.create("b", other, {GroupId(0): 8})
    root.close()
    settings = config(short_dir, device=9, disk=64, disk_dir=short_dir / "disk")
    async with running(settings) as daemon, attached(daemon) as client:
        found = await slots(client)
    assert found == {"a": {DEVICE: 4, HOST: 8, DISK: 8}, "b": {DEVICE: 5, HOST: 8, DISK: 8}}


async def test_a_start_that_failed_after_a_crash_leaves_the_crash_to_be_told(short_dir: Path) -> None:
    await with_caches(short_dir, cache={DISK: 20})
    state_dir = config(short_dir, device=8).state_dir
    crashed = StateDir.open(state_dir)
    crashed.begin()
    crashed.close(None)
    with pytest.raises(TierConfigError):
        await Daemon.start(config(short_dir, device=8, disk=10))
    following = StateDir.open(state_dir)
    assert following.identity.unclean
    following.close(None)


@asynccontextmanager
async def starting(
    settings: Config, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[asyncio.Task[Daemon], Any]]:
    """A daemon that answers already and reads a cache on disk for as long as it is not let; and what lets it."""
    reads, may_read = threading.Event(), threading.Event()
    read = DiskStore.recover

    def waiting(store: DiskStore) -> Recovery:
        reads.set()
        assert may_read.wait(PATIENCE_S)
        return read(store)

    monkeypatch.setattr(DiskStore, "recover", waiting)
    task = asyncio.create_task(Daemon.start(settings))
    try:
        await eventually(lambda: reads.is_set() or task.done(), bool)
        yield task, may_read
    finally:
        may_read.set()
        daemon = (await asyncio.gather(task, return_exceptions=True))[0]
        if isinstance(daemon, Daemon):
            assert await daemon.stop()


async def test_others_are_served_while_a_cache_is_read(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await with_caches(short_dir, big={DEVICE: 3, HOST: 5, DISK: 20})
    settings = config(short_dir, device=8, host=16, disk=64)
    async with starting(settings, monkeypatch) as (start, may_read), attached_to(str(settings.runtime_dir)) as client:
        stats = await client.call(client.admin.Stats, admin_pb2.StatsRequest())
        assert [problem for problem in stats.problems if "big is still being read" in problem]
        monkeypatch.undo()  # only what is on disk already is slow
        small = await client.open("small", {DEVICE: 5 * SLOT_BYTES, HOST: 11 * SLOT_BYTES})
        await client.put(small, chain(2))
        code, _ = await client.refusal(
            client.caches.Open,
            caches_pb2.OpenRequest(
                name="greedy", spec=spec_to_wire(SPEC), budgets=[caches_pb2.TierBudget(tier=HOST, bytes=SLOT_BYTES)]
            ),
        )
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED, "what is still being read has its budgets"
        opening = asyncio.create_task(client.open("big"))
        listing = asyncio.create_task(slots(client))
        await client.call(client.admin.Stats, admin_pb2.StatsRequest())
        assert not (opening.done() or listing.done() or start.done())
        may_read.set()
        await opening
        assert await listing == {"big": {DEVICE: 3, HOST: 5, DISK: 20}, "small": {DEVICE: 5, HOST: 11}}
        await start
        assert not (await client.call(client.admin.Stats, admin_pb2.StatsRequest())).problems


async def test_who_waits_for_a_cache_that_a_start_fails_to_read_is_told(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await with_caches(short_dir, big={DEVICE: 3, DISK: 20})
    settings = config(short_dir, device=8, host=16, disk=64)
    async with starting(settings, monkeypatch) as (start, may_read), attached_to(str(settings.runtime_dir)) as client:
        monkeypatch.setattr(Arena, "rebuild_index", lambda *_: 1 / 0)
        opening = asyncio.create_task(client.refusal(client.caches.Open, caches_pb2.OpenRequest(name="big")))
        may_read.set()
        with pytest.raises(ZeroDivisionError):
            await start
        code, _ = await opening
        assert code in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAVAILABLE)


@pytest.mark.parametrize(
    ("error", "level", "traced"),
    [(TierIOError(errno.ENOSPC, "no room"), "WARNING", False), (KeyError("no room"), "ERROR", True)],
    ids=["a full disk", "a bug"],
)
async def test_an_open_that_fails_when_its_caller_has_gone_is_told_to_the_log(
    error: Exception,
    level: str,
    traced: bool,
    short_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    begun, may_fail = threading.Event(), threading.Event()

    def full(*_: object) -> None:
        begun.set()
        assert may_fail.wait(PATIENCE_S)
        raise error

    async with running(config(short_dir, device=8, host=16, disk=64)) as daemon, attached(daemon) as client:
        with monkeypatch.context() as failing:
            failing.setattr(RememberedSlots, "put", full)
            opening = asyncio.create_task(
                daemon._catalog.open("gone", SPEC, {}, {}, create=True, last_open=lambda _: None)
            )
            await eventually(begun.is_set, bool)
            opening.cancel()
            await asyncio.wait([opening])
            may_fail.set()
            await eventually(lambda: "no room" in caplog.text, bool)
        gc.collect()
        told = [(record.levelname, bool(record.exc_info)) for record in caplog.records if "open-gone" in record.message]
        assert told == [(level, traced)]
        await client.open("gone")
