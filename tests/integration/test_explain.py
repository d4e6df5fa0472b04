"""``kvtier explain`` and ``client.explain``: where a block is, what holds it, and its past. A real daemon."""

import asyncio
import json
import os
from typing import Any

import pytest

from kvtier import Cause, EventType, InvalidArgument, NotFound, Tier
from kvtier.abi.words import TIERS
from kvtier.cli.explain import GONE, UNKNOWN
from kvtier.explanation import CopyState, why_gone
from tests.integration.actors import Actor
from tests.integration.blocks import blocks, chain, opened_cache, put_chain
from tests.integration.conftest import own_cache
from tests.integration.test_cli import kvtier
from tests.integration.waiting import PATIENCE_S, eventually

cache = own_cache(device=4, host=4, disk=8)


def told_by_cli(daemon, key, *more, status=0):
    said: dict[str, Any] = json.loads(
        kvtier("explain", key.hex(), "-o", "json", "--address", daemon.address, *more, status=status).stdout
    )
    return said


def shown(daemon, key, *more, status=0):
    return kvtier("explain", key.hex(), "--address", daemon.address, *more, status=status).stdout


def only(told):
    (block,) = told.blocks
    return block


def at(told, tier):
    return next(copy for copy in only(told).copies if copy.tier is tier)


def steps(told):
    assert told.past is not None
    return [(each.type, each.cause, each.residency) for each in told.past]


async def test_a_block_in_three_tiers(daemon, client, cache):
    keys = await put_chain(cache, cache.name, 3, priorities=50)
    await cache.move(keys[:2], Tier.DISK)
    async with cache.acquire(keys[:2], Tier.HOST):
        pass
    async with cache.acquire(keys[:2], Tier.DEVICE):
        await cache.set_retention([keys[1]], 80, 30.0)
        async with cache.acquire(keys[:2], Tier.HOST):
            told = await client.explain(keys[1])
    assert (told.state, told.keys, told.asked) == ("stored", (keys[1],), keys[1])
    block = only(told)
    assert (block.cache, block.group, block.parent, block.depth, block.children) == (cache.name, 0, keys[0], 1, 1)
    assert (block.priority, block.own_priority, block.duration_ms, block.deadline_ns) == (80, 80, 30_000, 0)
    assert [copy.tier for copy in block.copies] == [tier for tier in TIERS if block.residency & tier.bit]
    assert {lease.pid for lease in block.leases} == {os.getpid()}
    assert steps(told)[:2] == [
        (EventType.STORED, Cause.COMMIT, bytes([Tier.DEVICE.bit])),
        (EventType.UPDATED, Cause.EXPLICIT, bytes([Tier.DISK.bit])),
    ]
    assert told.past is not None and [len(event.keys) for event in told.past] == [1] * len(told.past)
    later = await client.explain(keys[1].hex())
    assert only(later).deadline_ns > later.time_ns
    assert at(later, Tier.DISK).state is CopyState.READY
    said = told_by_cli(daemon, keys[1])
    assert (said["state"], said["keys"], said["blocks"][0]["priority"]) == ("stored", [keys[1].hex()], 80)
    assert {"tier": "disk", "state": "ready"}.items() <= said["blocks"][0]["copies"][-1].items()
    assert said["past"][0]["type"] == "stored"


async def test_leases_and_pins_hold_it(daemon, client, cache):
    keys = await put_chain(cache, "held elsewhere", 1)
    await cache.pin(keys, Tier.DEVICE)
    with Actor(
        "hold", address=daemon.address, cache=cache.name, reserve={}, acquire={"DEVICE": ["held elsewhere", 1]}
    ) as actor:
        actor.says()
        told = await client.explain(keys[0], past=False)
        (lease,) = only(told).leases
        assert (lease.pid, lease.tier, lease.orphaned) == (actor.pid, Tier.DEVICE, False)
        assert at(told, Tier.DEVICE).pins == 1
        assert told.past is None
        page = shown(daemon, keys[0])
        assert f"pid {actor.pid}" in page
        assert "ready; pinned 1 times" in page
    await cache.unpin(keys, Tier.DEVICE)


async def test_a_retention_that_ended_is_in_its_past(client, cache):
    keys = await put_chain(cache, cache.name, 1)
    await cache.set_retention(keys, 90, 0.05)
    told = await eventually(
        lambda: client.explain(keys[0]), lambda told: steps(told)[-1][:2] == (EventType.UPDATED, Cause.EXPIRED)
    )
    assert (only(told).priority, only(told).duration_ms) == (35, 0)
    assert [list(each.priorities) for each in told.past or ()] == [[35], [90], [35]]


async def test_dropped_by_call_and_with_its_ancestor(daemon, client, cache):
    keys = await put_chain(cache, cache.name, 2)
    await cache.drop(keys[:1])
    root, leaf = [await client.explain(key) for key in keys]
    assert [told.state for told in (root, leaf)] == ["gone", "gone"]
    assert [end.cause for end in root.endings()] == [Cause.EXPLICIT]
    assert [end.cause for end in leaf.endings()] == [Cause.ANCESTOR]
    assert told_by_cli(daemon, keys[1], status=GONE)["past"][-1]["cause"] == "ancestor"
    assert why_gone(Cause.ANCESTOR) in shown(daemon, keys[1], status=GONE)
    by_prefix = await client.explain(keys[1][:8], cache=cache.name)
    assert (by_prefix.keys, by_prefix.state) == ((keys[1],), "gone")
    assert "77" in why_gone(77), "a cause of a newer daemon"


async def test_nothing_is_known_of_it(daemon, client, cache):
    key = chain("never stored", 1)[0]
    told = await client.explain(key)
    assert (told.state, told.past, told.blocks) == ("unknown", (), ())
    assert "never stored" in shown(daemon, key[:8], status=UNKNOWN)


async def test_several_keys_begin_alike(daemon, client, cache):
    beginning = bytes.fromhex("0badf00d")
    twins = [beginning + bytes([number]) * 28 for number in (1, 2)]
    for key in twins:
        await cache.put([key], blocks([key]))
    told = await client.explain(beginning)
    assert (told.state, told.keys, told.past) == ("ambiguous", tuple(twins), None)
    assert all(key.hex() in shown(daemon, beginning, status=1) for key in twins)
    whole = await client.explain(beginning + b"\x02")
    assert (whole.state, whole.keys) == ("stored", (twins[1],))
    await cache.drop(twins)
    assert (await client.explain(beginning)).keys == tuple(twins), "by the log alone"


async def test_what_is_asked_wrongly_is_refused(daemon, client, cache):
    for wrong in (b"abc", "no hex at all"):
        with pytest.raises(InvalidArgument, match="key = "):
            await client.explain(wrong)
    with pytest.raises(NotFound):
        await client.explain(bytes(32), cache="there-is-none")
    said = kvtier("explain", "abcdef", "--address", daemon.address, status=2).stderr
    assert "8 to 64 hexadecimal digits" in said


async def test_a_page_for_people(daemon, client, cache):
    keys = await put_chain(cache, cache.name, 2, priorities=[35, 70])
    await cache.move(keys, Tier.HOST)
    await cache.move(keys, Tier.DISK)
    page = shown(daemon, keys[0])
    for part in ("70, its own is 35", "kept for ever", "a root; depth 0", "disk        slot", "host → disk"):
        assert part in page
    assert page.count("explicit") == 2


async def test_its_past_outlives_the_daemon(start_daemon):
    daemon = start_daemon(host=4, disk=8)
    async with opened_cache(daemon.address, "c", wait=PATIENCE_S) as (client, cache):
        stays, goes = chain("stays", 1), chain("goes", 1)
        for keys in (stays, goes):
            await cache.put(keys, blocks(keys))
        await cache.move(stays, Tier.DISK)
        await asyncio.to_thread(daemon.restart)
        kept, lost = await client.explain(stays[0]), await client.explain(goes[0])
    assert steps(kept) == [
        (EventType.STORED, Cause.COMMIT, bytes([Tier.HOST.bit])),
        (EventType.UPDATED, Cause.EXPLICIT, bytes([Tier.DISK.bit])),
        (EventType.CLEARED, Cause.SHUTDOWN, b""),
        (EventType.STORED, Cause.RECOVERED, bytes([Tier.DISK.bit])),
    ]
    assert (lost.state, [end.cause for end in lost.endings()]) == ("gone", [Cause.SHUTDOWN])
