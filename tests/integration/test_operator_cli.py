"""An operator steps in by hand: moves, leases, kicks, caches, against a real daemon."""

import json
import os

import pytest

from kvtier import LeaseLost, Tier
from tests.integration.blocks import SLOT_BYTES, SPEC, blocks, chain, put_chain, sizes
from tests.integration.conftest import own_cache
from tests.integration.test_cli import kvtier
from tests.integration.waiting import eventually

cache = own_cache(device=8, host=8, disk=16)


def answer(*arguments, status=0):
    return json.loads(kvtier(*arguments, "-o", "json", status=status).stdout)


async def where(cache, keys):
    return [place.residency for place in await cache.locate(keys)]


async def test_move_by_key_and_all(at, cache):
    keys = await put_chain(cache, cache.name, 3)
    done = answer("move", cache.name, "host", keys[2].hex(), *at)
    assert (done["verb"], done["blocks"], done["done"], done["not_done"]) == ("move", 1, 1, [])
    assert await where(cache, keys) == [1, 1, 2]

    assert answer("move", cache.name, "HOST", keys[1].hex(), keys[1].hex().upper(), *at)["blocks"] == 1
    assert await where(cache, keys) == [1, 2, 2]

    assert answer("move", cache.name, "disk", "--all", *at)["done"] == 3
    assert await where(cache, keys) == [4, 4, 4]
    said = kvtier("move", cache.name, "device", keys[0].hex(), *at).stdout
    assert "move 1 blocks: 1 ok" in said


async def test_what_could_not_be_moved_is_named(at, cache):
    keys = chain(cache.name, 2)
    await cache.put(keys[:1], blocks(keys[:1]))
    done = answer("move", cache.name, "host", keys[0].hex(), keys[1].hex(), *at, status=1)
    assert (done["done"], done["not_done"]) == (1, [{"key": keys[1].hex(), "result": "not_found"}])
    said = kvtier("move", cache.name, "host", keys[1].hex(), *at, status=1).stdout
    assert f"{keys[1].hex()}  not_found" in said


async def test_leases_say_who_holds_what(at, client, cache):
    keys = await put_chain(cache, cache.name, 2)
    async with cache.acquire(keys), cache.reserve(3, Tier.HOST):
        read, written = answer("leases", "--cache", cache.name, *at)
        assert (read["tier"], read["held_blocks"], read["blank_slots"]) == ("device", 2, 0)
        assert (written["tier"], written["held_blocks"], written["blank_slots"]) == ("host", 0, 3)
        assert read["session_id"] == client.session_id
        assert [lease["cache"] for lease in answer("leases", "--session", str(client.session_id), *at)] == 2 * [
            cache.name
        ]
        assert cache.name in kvtier("leases", *at).stdout
    assert answer("leases", "--cache", cache.name, *at) == []
    assert "no leases" in kvtier("leases", "--cache", cache.name, *at).stdout


async def test_a_hanging_client_is_kicked(at, client, cache):
    lease = await cache.reserve(4)
    session = str(client.session_id)
    dry = answer("kick", session, "--dry-run", *at)
    assert (dry["leases"], dry["slots"], dry["dry_run"]) == (1, 4, True)
    assert len(answer("leases", "--session", session, *at)) == 1
    assert "4 slots taken" in kvtier("kick", session, *at).stdout
    (left,) = answer("leases", "--session", session, *at)
    assert (left["blank_slots"], left["orphaned"]) == (4, True)
    with pytest.raises(LeaseLost, match="kicked"):
        await lease.commit(chain(cache.name, 4))
    await lease.release()
    await (await cache.reserve(8)).release()
    await eventually(client.stats, lambda stats: int(session) not in {one.session_id for one in stats.sessions})
    assert "no such session" in kvtier("kick", session, *at, status=1).stderr


async def test_cache_ls(at, cache, client):
    await put_chain(cache, cache.name, 3)
    (info,) = [each for each in answer("cache", "ls", *at) if each["name"] == cache.name]
    assert (info["model"], info["blocks"], info["sessions"]) == (SPEC.model, 3, 1)
    assert info["fingerprint"] == SPEC.fingerprint().hex()
    (group,) = info["groups"]
    assert group["block_bytes"] == SPEC.block_bytes(0)
    assert [(tier["tier"], tier["slots"]) for tier in group["tiers"]] == [("device", 8), ("host", 8), ("disk", 16)]
    assert group["tiers"][2]["bytes"] == 16 * SLOT_BYTES
    assert (info["idle_s"], info["last_user"]) == (0, f"uid {os.getuid()}")
    await cache.close()

    async def idle():
        return next(each for each in await client.caches() if each.name == cache.name)

    left = await eventually(idle, lambda told: told.idle_s > 0)
    assert (left.sessions, left.last_user) == (0, info["last_user"])
    row = next(line for line in kvtier("cache", "ls", *at).stdout.splitlines() if cache.name in line)
    assert "0:00:" in row and left.last_user in row


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["move", "nowhere", "host", "--all"], 1, "no such cache"),
        (["move", "nowhere", "host"], 2, "name the blocks"),
        (["move", "nowhere", "host", "--all", 64 * "0"], 2, "name the blocks"),
        (["move", "nowhere", "attic", "--all"], 2, "device"),
        (["move", "nowhere", "host", "abc"], 2, "64 hexadecimal digits"),
        (["drop", "nowhere"], 2, "KEY..."),
        (["leases", "--cache", "nowhere"], 1, "no such cache"),
        (["leases", "--session", "0"], 2, "session"),
        (["kick"], 2, "SESSION"),
        (["kick", "4000000000"], 1, "no such session"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_what_makes_no_sense_is_refused(at, arguments, status, says):
    assert says in kvtier(*arguments, *at, status=status).stderr


def test_the_doctor_finds_the_daemon_and_what_it_was_given(daemon):
    flags = ("--runtime-dir", daemon.address, "--disk-dir", str(daemon.disk_dir), "--host-bytes", "1MiB")
    found = {each["check"]: each for each in answer("doctor", *flags, "--disk-bytes", "64MiB")}
    assert f"pid {daemon.pid}" in found["configuration"]["found"]
    for check in ("configuration", "shared memory", "disk space", "O_DIRECT"):
        assert found[check]["level"] == "ok", found[check]
    assert "locked memory" in kvtier("doctor", *flags).stdout


async def test_drop_says_what_goes_before_it_goes(at, cache):
    keys = await put_chain(cache, cache.name, 4)
    dry = answer("drop", cache.name, keys[1].hex(), "--dry-run", *at)
    assert (dry["dry_run"], dry["done"], dry["dropped"]) == (True, 1, 3)
    assert (await cache.match(keys)).blocks == 4
    done = answer("drop", cache.name, keys[1].hex(), *at)
    assert (done["dry_run"], done["done"], done["dropped"]) == (False, 1, 3)
    assert (await cache.match(keys)).blocks == 1
    async with cache.acquire(keys[:1]):
        kept = answer("drop", cache.name, keys[0].hex(), keys[3].hex(), *at, status=1)
    assert [each["result"] for each in kept["not_done"]] == ["held", "not_found"]
    said = kvtier("drop", cache.name, keys[0].hex(), "--yes", *at).stdout
    assert "drop 1 blocks: 1 ok, 1 dropped" in said


async def test_what_is_pinned_stays_until_it_is_unpinned(at, cache):
    keys = await put_chain(cache, cache.name, 3)
    await cache.pin([keys[0], keys[2]], Tier.DEVICE)
    await cache.pin(keys[:1], Tier.DEVICE)
    assert answer("drop", cache.name, keys[1].hex(), "--dry-run", *at, status=1)["not_done"][0]["result"] == "held"
    assert answer("unpin", cache.name, "host", *at)["done"] == 0
    # Two rounds: the first block is pinned twice.
    assert answer("unpin", cache.name, "device", *at)["done"] == 3
    assert not [block async for block in cache.blocks() if block.pinned]
    assert answer("drop", cache.name, keys[0].hex(), *at)["dropped"] == 3


async def test_reset_forgets_all_or_what_it_can(at, cache):
    one, two = chain(f"{cache.name}-1", 2), chain(f"{cache.name}-2", 3)
    for keys in (one, two):
        await cache.put(keys, blocks(keys))
    async with cache.acquire(one):
        dry = answer("reset", cache.name, "--dry-run", *at)
        assert (dry["dropped"], dry["kept"], dry["dry_run"]) == (3, 2, True)
        assert "leased" in kvtier("reset", cache.name, *at, status=1).stderr
        assert (await cache.match(two)).blocks == 3
        done = answer("reset", cache.name, "--force", "--yes", *at)
        assert (done["dropped"], done["kept"]) == (3, 2)
    assert "2 blocks forgotten, 0 kept" in kvtier("reset", cache.name, *at).stdout
    assert not [block async for block in cache.blocks()]


async def test_a_cache_is_removed(daemon, at, client, name):
    cache = await client.open_cache(name, SPEC, budgets=sizes(device=8, disk=16))
    await put_chain(cache, name, 3)
    assert "open" in kvtier("cache", "rm", name, *at, status=1).stderr
    await cache.close()
    dry = answer("cache", "rm", name, "--dry-run", *at)
    assert (dry["blocks"], dry["freed"]["disk"], dry["dry_run"]) == (3, 16 * SLOT_BYTES, True)
    (info,) = [each for each in answer("cache", "ls", *at) if each["name"] == name]
    assert info["sessions"] == 0
    assert "3 blocks" in kvtier("cache", "rm", name, "--yes", *at).stdout
    assert name not in [each["name"] for each in answer("cache", "ls", *at)]
    assert "no such cache" in kvtier("cache", "rm", name, *at, status=1).stderr
