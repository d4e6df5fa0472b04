"""A cache gets other sizes while clients in other processes read and write."""

import asyncio
import json
import subprocess
import sys

import numpy as np
import pytest

from kvtier import CallerError, Event, EventType, InvalidArgument, LeaseLost, NotFound, Tier, TierFull, connect
from kvtier.wire import split_keys
from tests.integration.blocks import SLOT_BYTES, assert_bytes, blocks, chain, opened_cache, put_chain, sizes
from tests.integration.conftest import own_daemon
from tests.integration.seeing import last_event, tier_stats
from tests.integration.supervised import SupervisedDaemon
from tests.integration.test_cli import kvtier
from tests.integration.waiting import PATIENCE_S, heard, patient

SLOTS = {"host": 16, "disk": 32}
daemon = own_daemon(host=64, disk=128)


def worker(address, name):
    """Reads and writes in a process of its own until it is told to stop, and prints how often. Any error ends it."""

    async def work():
        loop, counts = asyncio.get_running_loop(), [0, 0]
        stopping = loop.run_in_executor(None, sys.stdin.readline)
        async with opened_cache(address, "c", budgets=sizes(**SLOTS)) as (_, cache):
            print("ready", flush=True)
            while not stopping.done():
                keys = await put_chain(cache, f"{name} {counts[0] % 7}", 5, tier=Tier.HOST)
                found = await cache.get(keys)
                assert_bytes(keys[: len(found)], found)
                counts[0] += 1
                counts[1] += len(found)
        print(json.dumps(counts), flush=True)

    asyncio.run(work())


def started(daemon, name):
    command = f"from tests.integration.test_resize import worker; worker({daemon.address!r}, {name!r})"
    process = subprocess.Popen(
        [sys.executable, "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def shown(cache):
    return {tier: cache.slots(tier) for tier in cache.tiers}


@pytest.mark.parametrize(
    ("names", "steps"),
    [
        ("ab", ((32, 64), (18, 64), (16, 12), (64, 128), (16, 40), (20, 10))),
        ("a", ((4, 64), (16, 12), (4, 12), (64, 4))),  # a piece of a put has more blocks than the new tier has slots
    ],
)
async def test_clients_go_on_over_grows_and_shrinks(daemon, names, steps):
    workers = [await asyncio.to_thread(started, daemon, name) for name in names]
    async with await patient(daemon.address) as client:
        for host, disk in steps:
            report = await client.resize_cache("c", budgets=sizes(host=host, disk=disk))
            assert 0 < report.stalled_s <= report.took_s
            (info,) = await client.caches()
            assert [tier.slots for tier in info.groups[0].tiers] == [host, disk]
            cache = await client.open_cache("c")
            for name in names:
                before = chain(f"{name} 0", 5)
                found = await cache.get(before)
                assert_bytes(before[: len(found)], found)
            await cache.close()
    for process in workers:
        said, _ = await asyncio.to_thread(process.communicate, "stop\n", PATIENCE_S)
        rounds, found = json.loads(said)
        assert process.returncode == 0 and rounds > 1 and found > 1
    daemon.assert_healthy_log()


async def test_blocks_that_fit_stay_and_events_tell_of_the_others(daemon):
    hot, cold = chain("hot", 4), chain("cold", 8)
    async with opened_cache(daemon.address, "c", wait=PATIENCE_S, budgets=sizes(host=16, disk=8)) as (client, cache):
        await cache.put(cold, blocks(cold), tier=Tier.HOST)
        await cache.move(cold, Tier.DISK)
        await cache.put(hot, blocks(hot), tier=Tier.HOST)
        start = await last_event(client)
        report = await client.resize_cache("c", budgets=sizes(host=4, disk=3))
        assert all(residency & Tier.HOST.bit for residency in (await cache.match(hot)).residency)
        kept = (await cache.match(cold)).blocks
        assert 1 <= kept <= 3 and report.evicted == len(cold) - kept  # some disk slots may hold copies of hot blocks
        assert shown(cache) == {Tier.HOST: 4, Tier.DISK: 3}
        assert_bytes(hot, await cache.get(hot))
        found = await cache.get(cold)  # hot blocks make room for them, and may push the last of them out
        assert found
        assert_bytes(cold[: len(found)], found)
        seen = set(hot + cold)
        async for item in client.watch(since=start, types=[EventType.CLEARED, EventType.STORED]):
            assert isinstance(item, Event)
            seen = seen | set(split_keys(item.packed_keys)) if item.type is EventType.STORED else set()
            if seen == set(hot + cold[:kept]):
                break
        await client.resize_cache("c", budgets=sizes(host=40, disk=100))
        await heard(client)
        more = await put_chain(cache, "more", 36, tier=Tier.HOST)
        assert_bytes(more, await cache.get(more))
        await asyncio.to_thread(daemon.restart)
        await heard(client)
        await cache.match(cold)
        assert shown(cache) == {Tier.HOST: 40, Tier.DISK: 100}  # not what the client once asked for


async def test_a_lease_reads_its_bytes_over_a_resize_and_writes_nowhere(daemon):
    async with opened_cache(daemon.address, "c", wait=PATIENCE_S, budgets=sizes(**SLOTS)) as (client, cache):
        keys = await put_chain(cache, "held", 4, tier=Tier.HOST)
        read, written = await cache.acquire(keys, Tier.HOST), await cache.reserve(2, Tier.HOST)
        views, blank = [read.view(index) for index in range(4)], written.view(0)
        async with await patient(daemon.address) as other:
            await other.resize_cache("c", budgets=sizes(host=8))
        for part in blank:
            part[:] = 7
        assert_bytes(keys, [np.concatenate(parts) for parts in views])
        await heard(client)
        assert_bytes(keys, await cache.get(keys))
        with pytest.raises(LeaseLost):
            await written.commit(chain("late", 2))
        more = await put_chain(cache, "more", 8, tier=Tier.HOST)
        assert_bytes(more, await cache.get(more))
        await read.release()
        await written.release()
        assert (await tier_stats(client, "c", Tier.HOST)).held == 0


async def test_what_cannot_be_done_changes_nothing(daemon):
    async with opened_cache(daemon.address, "c", budgets=sizes(host=16)) as (client, cache):
        keys = await put_chain(cache, "kept", 16, tier=Tier.HOST)
        await cache.pin(keys[:4], Tier.HOST)
        for error, budgets, says in (
            (InvalidArgument, {Tier.HOST: SLOT_BYTES - 1}, "budgets[host]"),
            (InvalidArgument, {Tier.DEVICE: SLOT_BYTES}, "budgets[0].tier"),
            (TierFull, sizes(host=65), "host tier"),
            (CallerError, sizes(disk=4), "it has no disk tier"),
            (CallerError, sizes(host=3), "4 blocks are pinned"),
        ):
            with pytest.raises(error) as refused:
                await client.resize_cache("c", budgets=budgets)
            assert says in str(refused.value)
        with pytest.raises(NotFound):
            await client.resize_cache("d", budgets=sizes(host=8))
        assert shown(cache) == {Tier.HOST: 16}
        assert_bytes(keys, await cache.get(keys))


async def test_the_command_tells_the_stall(daemon):
    async with opened_cache(daemon.address, "c", budgets=sizes(**SLOTS)):
        at = ("--address", daemon.address)
        done = kvtier("cache", "resize", "c", "--host", str(8 * SLOT_BYTES), *at)
        assert done.stdout.startswith("c: resized in ") and " s; calls waited at most " in done.stdout
        assert "name a size" in kvtier("cache", "resize", "c", *at, status=2).stderr


@pytest.mark.parametrize("dies", ["save_surplus", "compact", "carry", "copy_slot"])
@pytest.mark.parametrize("after", [{"host": 8, "disk": 10}, {"host": 40, "disk": 100}])
async def test_a_daemon_killed_amid_a_resize_has_old_or_new_sizes(tmp_path, dies, after):
    daemon = SupervisedDaemon(tmp_path, sizes(host=64, disk=128))
    daemon.plain.program = ["tests.integration.faulty_daemon", "dies_in_a_resize"]
    daemon.plain.variables = {"KVTIER_DIES": dies, "KVTIER_DIED": str(tmp_path / "died")}
    daemon.start()
    low, high = chain("low", 16), chain("high", 6)
    try:
        async with opened_cache(daemon.address, "c", wait=PATIENCE_S, budgets=sizes(**SLOTS)) as (client, cache):
            await cache.put(low, blocks(low), tier=Tier.HOST)
            await cache.move(low, Tier.DISK)
            await cache.put(high, blocks(high), tier=Tier.HOST)
            for last in (False, True):
                if last:
                    await client.resize_cache("c", budgets=sizes(**after))
                else:
                    async with await connect(daemon.address) as operator:
                        first = asyncio.create_task(operator.resize_cache("c", budgets=sizes(**after)))
                        await asyncio.to_thread(daemon.await_ready)
                        first.cancel()
                        await asyncio.wait([first])
                    assert (tmp_path / "died").exists()
                (info,) = await client.caches()
                for tier in info.groups[0].tiers:
                    assert tier.slots in {
                        after[str(tier.tier)],
                        after[str(tier.tier)] if last else SLOTS[str(tier.tier)],
                    }
                for keys in (low, high):
                    found = await cache.get(keys)
                    assert_bytes(keys[: len(found)], found)
                more = await put_chain(cache, f"more {last}", 6, tier=Tier.HOST)
                assert_bytes(more, await cache.get(more))
    finally:
        daemon.close()
