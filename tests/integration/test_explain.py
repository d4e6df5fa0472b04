"""``kvtier explain`` and ``client.explain``: where a block is, why it stays or goes, why it is gone. A real daemon."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import pytest

from kvtier import AsyncClient, Cache, Cause, Client, EventType, InvalidArgument, NotFound, Tier, connect
from kvtier.cli.explain import GONE, UNKNOWN, page
from kvtier.explaining import BlockExplained, CopyExplained, CopyState, Departure, Explanation, Obstacle, Precision
from tests.integration.actors import Actor
from tests.integration.blocks import SPEC, blocks, chain, sizes
from tests.integration.daemon import DaemonProcess, StartDaemon
from tests.integration.load import CHAIN_BLOCKS, Load
from tests.integration.test_cli import kvtier
from tests.integration.waiting import eventually


@pytest.fixture
async def cache(client: AsyncClient, name: str) -> Cache:
    return await client.open_cache(name, SPEC, budgets=sizes(device=4, host=4, disk=8))


def told_by_cli(daemon: DaemonProcess, key: bytes, *more: str, status: int = 0) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(
        kvtier("explain", key.hex(), "--json", "--address", daemon.address, *more, status=status).stdout
    )
    return said


def only(told: Explanation) -> BlockExplained:
    (block,) = told.blocks
    return block


def at(told: Explanation, tier: Tier) -> CopyExplained:
    return next(copy for copy in only(told).copies if copy.tier is tier)


def steps(told: Explanation) -> list[tuple[EventType, Cause | int, int | None, int]]:
    assert told.past is not None
    return [(each.type, each.cause, each.before, each.residency) for each in told.past]


async def test_a_block_in_three_tiers(daemon: DaemonProcess, client: AsyncClient, cache: Cache) -> None:
    keys = chain(cache.name, 3)
    await cache.put(keys, blocks(keys), priorities=50)
    await cache.move(keys[:2], Tier.DISK)
    async with cache.acquire(keys[:2], Tier.HOST):
        pass
    async with cache.acquire(keys[:2], Tier.DEVICE):
        await cache.set_retention([keys[1]], 80, 30.0)
        async with cache.acquire(keys[:2], Tier.HOST):
            told = await client.explain(keys[1])
    assert (told.state, told.key, told.asked) == ("stored", keys[1], keys[1])
    block = only(told)
    assert (block.cache, block.group, block.parent, block.depth, block.children) == (cache.name, 0, keys[0], 1, 1)
    assert (block.priority, block.own_priority, block.duration_ms, block.deadline_ns) == (80, 80, 30_000, 0)
    assert [copy.tier for copy in block.copies] == [tier for tier in Tier if block.residency & tier.bit]
    assert {lease.pid for lease in block.leases} == {os.getpid()}
    assert Obstacle.LEASED in at(told, Tier.HOST).obstacles
    assert steps(told)[:2] == [
        (EventType.STORED, Cause.COMMIT, 0, Tier.DEVICE.bit),
        (EventType.UPDATED, Cause.EXPLICIT, Tier.DEVICE.bit, Tier.DISK.bit),
    ]
    assert told.past is not None and told.past[1].moved_bytes > 0
    later = await client.explain(keys[1].hex())
    assert only(later).deadline_ns > later.time_ns
    assert at(later, Tier.DISK).state is CopyState.READY
    said = told_by_cli(daemon, keys[1])
    assert (said["state"], said["blocks"][0]["priority"]) == ("stored", 80)
    assert said["past"][0]["residency"] == ["device"]


async def test_a_lease_of_another_process_holds_it(daemon: DaemonProcess, client: AsyncClient, cache: Cache) -> None:
    keys = chain("held elsewhere", 1)
    await cache.put(keys, blocks(keys))
    with Actor(
        "hold", address=daemon.address, cache=cache.name, reserve={}, acquire={"DEVICE": ["held elsewhere", 1]}
    ) as actor:
        actor.says()
        told = await client.explain(keys[0])
        (lease,) = only(told).leases
        assert (lease.pid, lease.tier, lease.orphaned) == (actor.pid, Tier.DEVICE, False)
        assert at(told, Tier.DEVICE).obstacles == (Obstacle.LEASED,)
        shown = kvtier("explain", keys[0].hex(), "--address", daemon.address).stdout
        assert f"pid {actor.pid}" in shown
        assert "stays: it is leased" in shown


async def test_a_pin_holds_it(client: AsyncClient, cache: Cache) -> None:
    keys = chain(cache.name, 2)
    await cache.put(keys, blocks(keys))
    await cache.pin([keys[1]], Tier.DEVICE)
    told = await client.explain(keys[1], past=False)
    assert (at(told, Tier.DEVICE).pins, at(told, Tier.DEVICE).obstacles) == (1, (Obstacle.PINNED,))
    assert only(told).leases == ()
    assert told.past is None
    await cache.unpin([keys[1]], Tier.DEVICE)


async def test_its_turn_is_said_and_comes(client: AsyncClient, cache: Cache) -> None:
    one, two = chain(f"{cache.name} one", 1), chain(f"{cache.name} two", 1)
    for keys in (one, two):
        await cache.put(keys, blocks(keys))
    first, second = [at(await client.explain(keys[0]), Tier.DEVICE) for keys in (one, two)]
    assert [(c.ahead, c.precision) for c in (first, second)] == [(0, Precision.EXACT), (1, Precision.EXACT)]
    assert (first.departure, first.free_slots, first.unheld_slots) == (Departure.DEMOTED, 2, 2)
    async with cache.reserve(3, Tier.DEVICE):
        told = await client.explain(one[0])
        assert only(told).residency == Tier.HOST.bit
        assert only(await client.explain(two[0])).residency == Tier.DEVICE.bit
    assert steps(told)[-1] == (EventType.UPDATED, Cause.CAPACITY, Tier.DEVICE.bit, Tier.HOST.bit)


async def test_a_retention_that_ended_is_in_its_past(client: AsyncClient, cache: Cache) -> None:
    keys = chain(cache.name, 1)
    await cache.put(keys, blocks(keys))
    await cache.set_retention(keys, 90, 0.05)
    told = await eventually(
        lambda: client.explain(keys[0]), lambda told: steps(told)[-1][:2] == (EventType.UPDATED, Cause.EXPIRED)
    )
    assert (only(told).priority, only(told).duration_ms) == (35, 0)
    assert [each.priority for each in told.past or ()] == [35, 90, 35]


async def test_dropped_by_call_and_with_its_ancestor(daemon: DaemonProcess, client: AsyncClient, cache: Cache) -> None:
    keys = chain(cache.name, 2)
    await cache.put(keys, blocks(keys))
    await cache.drop(keys[:1])
    root, leaf = [await client.explain(key) for key in keys]
    assert [told.state for told in (root, leaf)] == ["gone", "gone"]
    assert [end.cause for end in root.endings()] == [Cause.EXPLICIT]
    assert [end.cause for end in leaf.endings()] == [Cause.ANCESTOR]
    said = told_by_cli(daemon, keys[1], status=GONE)
    assert said["gone"] == [
        {"cache": cache.name, "group": 0, "cause": "ancestor", "why": said["gone"][0]["why"]},
    ]
    assert (
        "A block that it stands on was dropped"
        in kvtier("explain", keys[1].hex(), "--address", daemon.address, status=GONE).stdout
    )
    by_prefix = await client.explain(keys[1][:8], cache=cache.name)
    assert (by_prefix.key, by_prefix.state) == (keys[1], "gone")


async def test_dropped_for_room(client: AsyncClient, name: str) -> None:
    cache = await client.open_cache(name, SPEC, budgets=sizes(device=2))
    keys = chain(name, 1)
    await cache.put(keys, blocks(keys))
    assert at(await client.explain(keys[0]), Tier.DEVICE).departure is Departure.DROPPED
    async with cache.reserve(2, Tier.DEVICE):
        told = await client.explain(keys[0])
    assert [end.cause for end in told.endings()] == [Cause.CAPACITY]


async def test_gone_with_its_cache(client: AsyncClient, name: str) -> None:
    cache = await client.open_cache(name, SPEC, budgets=sizes(device=2))
    keys = chain(name, 1)
    await cache.put(keys, blocks(keys))
    await cache.close()
    await client.remove_cache(name)
    told = await client.explain(keys[0])
    assert [(end.type, end.cause) for end in told.endings()] == [(EventType.CLEARED, Cause.EXPLICIT)]


async def test_nothing_is_known_of_it(daemon: DaemonProcess, client: AsyncClient, cache: Cache) -> None:
    key = chain("never stored", 1)[0]
    told = await client.explain(key)
    assert (told.state, told.past, told.blocks) == ("unknown", (), ())
    assert told.oldest is not None and told.oldest.cursor.id >= 1
    shown = kvtier("explain", key.hex()[:16], "--address", daemon.address, status=UNKNOWN).stdout
    assert "never stored" in shown and str(told.oldest.cursor) in shown


async def test_several_keys_begin_alike(daemon: DaemonProcess, client: AsyncClient, cache: Cache) -> None:
    beginning = bytes.fromhex("0badf00d")
    twins = [beginning + bytes([number]) * 28 for number in (1, 2)]
    for key in twins:
        await cache.put([key], blocks([key]))
    told = await client.explain(beginning)
    assert (told.state, told.key, told.candidates, told.past) == ("ambiguous", None, tuple(twins), None)
    shown = kvtier("explain", beginning.hex(), "--address", daemon.address, status=1).stdout
    assert all(key.hex() in shown for key in twins)
    whole = await client.explain(beginning + b"\x02")
    assert (whole.state, whole.key) == ("stored", twins[1])
    await cache.drop(twins)
    assert (await client.explain(beginning)).candidates == tuple(twins), "by the log alone"


async def test_looking_is_no_use(client: AsyncClient, cache: Cache) -> None:
    one, two = chain(f"{cache.name} one", 1), chain(f"{cache.name} two", 1)
    for keys in (one, two):
        await cache.put(keys, blocks(keys))
    for _ in range(3):
        assert at(await client.explain(one[0]), Tier.DEVICE).ahead == 0
    stats = next(each for each in (await client.stats()).caches if each.name == cache.name)
    assert (stats.hits_device, stats.misses) == (0, 0)


async def test_what_is_asked_wrongly_is_refused(daemon: DaemonProcess, client: AsyncClient, cache: Cache) -> None:
    with pytest.raises(InvalidArgument, match="key = "):
        await client.explain(b"abc")
    with pytest.raises(InvalidArgument, match="key = "):
        await client.explain("no hex at all")
    with pytest.raises(NotFound):
        await client.explain(bytes(32), cache="there-is-none")
    assert "4 to 32 bytes" in kvtier("explain", "abcdef", "--address", daemon.address, status=2).stderr


async def test_the_page_and_its_limit(daemon: DaemonProcess, client: AsyncClient, cache: Cache) -> None:
    keys = chain(cache.name, 2)
    await cache.put(keys, blocks(keys), priorities=[35, 70])
    await cache.move(keys, Tier.HOST)
    await cache.move(keys, Tier.DISK)
    told = await client.explain(keys[0])
    lines = list(page(told))
    assert "  priority    70, its own is 35: a block under it has more" in lines
    assert any("stays until what needs it has gone" in line and "1 of 2 go before it" in line for line in lines)
    assert len([line for line in lines if "explicit" in line]) == 2
    assert len(told_by_cli(daemon, keys[0], "--limit", "1")["past"]) == 1
    assert "… 3 earlier events" in "\n".join(page(told, 1))


def test_the_synchronous_client_explains_alike(daemon: DaemonProcess, name: str) -> None:
    keys = chain(name, 1)
    with Client(daemon.address) as client:
        cache = client.open_cache(name, SPEC, budgets=sizes(host=2))
        cache.put(keys, blocks(keys), tier=Tier.HOST)
        told = client.explain(keys[0].hex(), cache=name)
        assert told.state == "stored"
        assert [each.cause for each in told.past or ()] == [Cause.COMMIT]


async def test_its_past_outlives_the_daemon(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(host=4, disk=8)
    async with await connect(daemon.address) as client:
        cache = await client.open_cache("c", SPEC)
        stays, goes = chain("stays", 1), chain("goes", 1)
        for keys in (stays, goes):
            await cache.put(keys, blocks(keys))
        await cache.move(stays, Tier.DISK)
        await asyncio.to_thread(daemon.stop)
        await asyncio.to_thread(daemon.start)
        kept, lost = await client.explain(stays[0]), await client.explain(goes[0])
    assert steps(kept) == [
        (EventType.STORED, Cause.COMMIT, 0, Tier.HOST.bit),
        (EventType.UPDATED, Cause.EXPLICIT, Tier.HOST.bit, Tier.DISK.bit),
        (EventType.CLEARED, Cause.SHUTDOWN, Tier.DISK.bit, 0),
        (EventType.STORED, Cause.RECOVERED, 0, Tier.DISK.bit),
    ]
    assert (lost.state, [end.cause for end in lost.endings()]) == ("gone", [Cause.SHUTDOWN])


async def test_while_everything_moves_answers_are_whole(daemon: DaemonProcess, client: AsyncClient, name: str) -> None:
    """Under the daemon's own checks, which a look at the order of eviction must not upset."""
    await client.open_cache(name, SPEC, budgets=sizes(device=24, host=32, disk=64))
    seen: set[str] = set()
    async with Load(daemon.address, name, chains=12, workers=3, seed=7) as load:
        for number in range(150):
            key = chain(f"{name}/{number % 12}", CHAIN_BLOCKS)[number % CHAIN_BLOCKS]
            told = await client.explain(key, cache=name, past=False)
            seen.add(told.state)
            for block in told.blocks:
                ready = {copy.tier for copy in block.copies if copy.state is not CopyState.FILLING}
                assert sum(tier.bit for tier in ready) == block.residency
                for copy in block.copies:
                    going = copy.departure is not Departure.NEVER
                    assert going or copy.obstacles, f"nothing keeps {copy} and it does not go"
                    assert copy.precision is Precision.UNKNOWN or copy.ahead < copy.unheld_slots
            load.check()
    assert "stored" in seen
