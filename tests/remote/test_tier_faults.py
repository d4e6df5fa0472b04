"""Daemons over a store that refuses, is full, lies, is slow or silent: misses in time, and nothing else changes."""

import asyncio
import contextlib
import json
import os
import select
import time
import uuid
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from kvtier import DeadlineExceeded, KvtierError, Tier, connect
from tests.integration.blocks import SPEC, assert_bytes, chain, sizes
from tests.integration.scraping import LISTEN, text_of
from tests.integration.seeing import cache_stats
from tests.integration.test_cli import kvtier
from tests.integration.waiting import PATIENCE_S, eventually, halt
from tests.remote.between import between
from tests.remote.servers import BUCKET, KEYS, mooncake
from tests.remote.shared import SharedStore, problem_of, put, unwritten
from tests.remote.test_faults import answer, s3_error

SECRETS = ("a-wrong-key", "a-wrong-secret", *KEYS.values())
TIMEOUT_S = 0.5
"""After which the tier gives a call to its store up."""
MISSES = 20
ROOMY = sizes(host=32)


@pytest.fixture
async def proxy(seaweed_server):
    async with between(urlsplit(seaweed_server.env["AWS_ENDPOINT_URL"]).port) as proxy:
        yield proxy


@pytest.fixture
async def store(seaweed_server, monkeypatch):
    """Reached without the proxy, under a prefix that no other test has."""
    for variable, value in seaweed_server.env.items():
        monkeypatch.setenv(variable, value)
    store = SharedStore(f"s3://{BUCKET}/{uuid.uuid4().hex}", "c")
    yield store
    await store.close()


@pytest.fixture
def start(start_fresh, store, monkeypatch):
    """Starts a daemon that reaches the store through ``proxy``, or directly."""

    def start(proxy=None, env=None, slots=64, disk=0, **table):
        with monkeypatch.context() as patch:
            for variable, value in ({"AWS_ENDPOINT_URL": proxy.endpoint} if proxy else env or {}).items():
                patch.setenv(variable, value)
            flag = json.dumps({"url": store.url, "write": "through", "timeout_seconds": TIMEOUT_S, **table})
            return start_fresh("--remote", flag, *LISTEN, host=slots, disk=disk)

    return start


@asynccontextmanager
async def opened(daemon, budgets=ROOMY):
    """Calls wait for a daemon that has left a call without an answer, and is away until it is heard."""
    async with await connect(daemon.address, timeout=10, wait=PATIENCE_S) as client:
        yield client, await client.open_cache("c", SPEC, budgets=budgets)


async def store_elsewhere(start, store, *chains):
    """Blocks of another host."""
    async with opened(start()) as (_, cache):
        for keys in chains:
            await put(cache, keys)
            await store.has(keys)


async def misses_at_once(cache, name):
    """Gets of what nobody has take less than half as long as with a wait for the store each."""
    started = time.monotonic()
    for number in range(MISSES):
        await assert_missed(cache, chain(f"{name} {number}", 3))
    assert time.monotonic() - started < MISSES * TIMEOUT_S / 2


async def assert_missed(cache, keys):
    assert await cache.get(keys) == []


async def assert_serves(cache, name):
    """The tiers of the host do what they always do, and blocks in memory are read without a call."""
    keys = chain(name, 4)
    await put(cache, keys)
    async with cache.acquire(keys) as lease:
        assert len(lease.slots) == 4
    calls = cache.reads.calls
    assert_bytes(keys, await cache.get(keys))
    assert cache.reads.calls == calls


def children(daemon):
    """Processes that it started."""
    return [
        pid for task in Path(f"/proc/{daemon.pid}/task").iterdir() for pid in (task / "children").read_text().split()
    ]


def told(daemon):
    """All that a daemon tells anybody, and what it keeps."""
    for pid in (daemon.pid, *children(daemon)):
        yield Path(f"/proc/{pid}/cmdline").read_bytes().decode()
    yield daemon.log
    yield text_of(daemon)
    for command in (["status"], ["status", "-o", "json"], ["leases"]):
        yield kvtier(*command, "--address", daemon.address).stdout
    for path in daemon.state_dir.rglob("*"):
        if path.is_file():
            yield path.read_bytes().decode(errors="replace")


async def test_refused_credentials_are_misses_and_in_no_text(start, store):
    keys = chain("elsewhere", 3)
    await store_elsewhere(start, store, keys)
    daemon = start(env=dict(zip(KEYS, SECRETS, strict=False)))
    async with opened(daemon) as (client, cache):
        async with client.watch() as watch:

            async def refused():
                for each in (keys, chain("nowhere", 3)):
                    await assert_missed(cache, each)
                return await problem_of(client)

            await eventually(refused, lambda problem: "403" in problem)
            await misses_at_once(cache, "missed")
            await assert_serves(cache, "here")
            stats, event = await client.stats(), await anext(aiter(watch))
        assert [problem for problem in stats.problems if "remote tier" in problem]
        texts = [*await asyncio.to_thread(lambda: list(told(daemon))), repr(stats), repr(event)]
        assert not [secret for secret in SECRETS if any(secret in text for text in texts)]


FULL = answer("507 Insufficient Storage")


async def test_a_full_store_still_gives_what_it_has(start, store, proxy):
    keys, more = chain("elsewhere", 3), chain("here", 3)
    await store_elsewhere(start, store, keys)
    proxy.lies = {b"PUT ": FULL}
    daemon = start(proxy)
    async with opened(daemon) as (client, cache):
        await put(cache, more)
        await eventually(lambda: problem_of(client), lambda problem: "507" in problem)
        (said,) = (problem for problem in (await client.stats()).problems if "remote tier" in problem)
        assert "takes no blocks" in said and "missed" not in said
        await healed(cache, keys)
        await assert_serves(cache, "more")
        assert await store.held(more) == []
        proxy.heal()
        await store.has(more)
        await eventually(lambda: problem_of(client), lambda problem: not problem)
        await eventually(lambda: "the remote tier is back in service" in daemon.log, bool)


GARBAGE = {
    "status 500": answer("500 Internal Server Error", b"oops"),
    "half an object": answer("200 OK", b"half", length=SPEC.block_bytes(0)),
    "another object": answer("200 OK", bytes(SPEC.block_bytes(0))),
}


@pytest.mark.parametrize("lie", GARBAGE.values(), ids=GARBAGE)
async def test_garbage_is_no_block(start, store, proxy, lie):
    keys = chain("elsewhere", 3)
    await store_elsewhere(start, store, keys)
    async with opened(start(proxy)) as (client, cache):
        proxy.lies = dict.fromkeys((b"GET ", b"HEAD ", b"PUT ", b"POST "), lie)  # POST deletes
        for _ in range(4):
            await assert_missed(cache, keys)
        await assert_serves(cache, "here")
        await misses_at_once(cache, "missed")
        proxy.heal()
        await healed(cache, keys)
        await eventually(lambda: problem_of(client), lambda problem: not problem)


async def test_blocks_that_move_on_while_they_wait_are_written(start, store, proxy):
    """To a disk, out of a host tier that holds a few of them."""
    chains, budgets = [chain(f"moving {number}", 6) for number in range(40)], sizes(host=12, disk=300)
    proxy.delay_s = 0.05
    async with opened(start(proxy, slots=12, disk=300), budgets) as (client, cache):
        for keys in chains:
            await put(cache, keys)
        await eventually(lambda: unwritten(client), lambda blocks: blocks == 0)
    for keys in chains:
        assert await store.held(keys) == keys


async def test_an_outage_is_made_up_for_after_a_restart(start, store, proxy):
    keys, budgets = chain("kept", 6), sizes(host=32, disk=32)
    daemon = start(proxy, slots=32, disk=32, timeout_seconds=10.0)
    proxy.lies = {b"PUT ": FULL}
    async with opened(daemon, budgets) as (client, cache):
        await put(cache, keys)
        await eventually(lambda: problem_of(client), bool)
        assert await unwritten(client) == 6
        assert "kvtier_remote_unwritten_blocks" in text_of(daemon)
        assert "unwritten 6" in kvtier("status", "--address", daemon.address).stdout
        await cache.move(keys, Tier.DISK)
    await eventually(lambda: "takes no blocks" in daemon.log, bool)
    daemon.crash()
    async with opened(daemon, budgets) as (client, cache):
        await store.has(keys)
        await eventually(lambda: unwritten(client), lambda blocks: blocks == 0)


async def test_blocks_on_their_way_are_not_stored_after_a_reset(start, store, proxy):
    keys = chain("late", 6)
    await store_elsewhere(start, store, keys)
    async with opened(start(proxy, timeout_seconds=30.0)) as (client, cache):

        async def gets():
            return sum(each.calls for each in (await client.stats()).remote.operations if each.operation == "get")

        proxy.delay_s, before = 0.5, await gets()
        coming = asyncio.create_task(cache.get(keys))
        await eventually(gets, lambda calls: calls > before)
        await cache.reset(force=True)
        await coming
        await assert_missed(cache, keys)
        assert (await client.stats()).remote.blocks["forgotten meanwhile"] == 6


@pytest.mark.parametrize("verb", ["reset", "drop", "rm"])
async def test_a_store_that_is_away_is_told_later(start, store, proxy, verb):
    """Also after a restart. The daemon itself forgets at once."""
    keys, budgets = chain("later", 4), sizes(host=32, disk=32)
    daemon = start(proxy, slots=32, disk=32)
    async with opened(daemon, budgets) as (_, cache), opened(start()) as (_, other):
        await put(cache, keys)
        await store.has(keys)
        assert_bytes(keys, await other.get(keys))
        proxy.lies = {b"": FULL}
        command = {"reset": ["reset", "c"], "drop": ["drop", "c", keys[0].hex()], "rm": ["cache", "rm", "c", "--force"]}
        said = kvtier(*command[verb], "--yes", "--address", daemon.address).stdout
        assert "kept in the store, which does not answer" in said
        daemon.crash()
        proxy.heal()
        await eventually(lambda: other.match(keys), lambda found: not found.blocks)
        await assert_missed(other, keys)
    async with opened(daemon, budgets) as (_, cache):
        await assert_missed(cache, keys)


REFUSALS = {
    "archived": answer("403 Forbidden", s3_error("InvalidObjectState")),
    "conflict": answer("409 Conflict"),
    "range": answer("416 Range Not Satisfiable"),
    "failing": answer("500 Internal Server Error", b"oops"),
}


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS)
@pytest.mark.parametrize("place", [0, 3])
async def test_an_object_that_the_store_does_not_give_is_one_miss(start, store, proxy, refusal, place):
    """It answers that the object is there."""
    chains = [chain(f"elsewhere {number}", 4) for number in range(4)]
    await store_elsewhere(start, store, *chains)
    sick = chains[0]
    async with opened(start(proxy, timeout_seconds=10.0)) as (client, cache):
        proxy.lies = {f"GET /{store.path(sick[place])} ".encode(): refusal}
        for keys in chains:
            for each in (sick, keys):
                found = await cache.get(each)
                assert_bytes(each[: place if each is sick else 4], found)
        assert (await cache.match(sick, remote=True)).remote_blocks == place
        assert not await problem_of(client)


async def test_a_store_that_gives_nothing_is_left_alone_until_it_does(start, store, proxy):
    chains = [chain(f"elsewhere {number}", 4) for number in range(4)]
    await store_elsewhere(start, store, *chains)
    async with opened(start(proxy)) as (client, cache):
        proxy.lies = {b"GET ": REFUSALS["archived"]}
        for keys in chains[:2]:
            await assert_missed(cache, keys)
        assert "403 InvalidObjectState" in await problem_of(client)
        proxy.lies = {f"GET /{store.path(chains[0][0])} ".encode(): REFUSALS["archived"]}
        await eventually(lambda: problem_of(client), lambda problem: not problem)
        await healed(cache, chains[2])


async def test_a_delete_that_is_refused_stops_deletes_alone(start, store, proxy):
    keys = chain("elsewhere", 3)
    await store_elsewhere(start, store, keys)
    async with opened(start(proxy, timeout_seconds=10.0)) as (client, cache):
        proxy.lies = dict.fromkeys((b"DELETE ", b"POST "), REFUSALS["archived"])
        with pytest.raises(KvtierError, match="403"):
            await client.remote_gc(keep_bytes=0)
        assert not await problem_of(client)
        await healed(cache, keys)


async def healed(cache, keys):
    """Until blocks come from the store again, all right."""

    async def got():
        found = await cache.get(keys)
        assert_bytes(keys[: len(found)], found)
        return found

    await eventually(got, lambda found: len(found) == len(keys))


@pytest.mark.parametrize(("slowness", "timeout"), [("silent", 10.0), ("slow", 0.25)], ids=["patient", "hurried"])
async def test_a_slow_store_costs_a_few_calls_their_time(start, store, proxy, slowness, timeout):
    """Hurried: a caller gives up before the tier itself would."""
    keys = chain("elsewhere", 3)
    await store_elsewhere(start, store, keys)
    async with opened(start(proxy)) as (client, cache):
        await assert_missed(cache, chain("nowhere", 3))  # connections are open
        if slowness == "silent":
            proxy.passes.clear()
        else:
            proxy.delay_s = 30.0

        async def given_up():
            with contextlib.suppress(DeadlineExceeded):
                assert await cache.get(keys, timeout=timeout) == []
            return await problem_of(client)

        await eventually(given_up, bool)
        await misses_at_once(cache, "missed")
        await assert_serves(cache, "here")
        proxy.heal()
        await healed(cache, keys)
        await eventually(lambda: problem_of(client), lambda problem: not problem)


async def test_a_cache_goes_while_its_blocks_come_and_go(start, store, proxy):
    keys = chain("elsewhere", 3)
    await store_elsewhere(start, store, keys)
    daemon = start(proxy, timeout_seconds=30)
    async with opened(daemon) as (client, cache):
        proxy.passes.clear()
        getting = asyncio.create_task(cache.get(keys))
        await put(cache, chain("here", 4))
        await proxy.stuck()
        await client.remove_cache("c", force=True)
        proxy.heal()
        with contextlib.suppress(KvtierError):
            await getting
        again = await client.open_cache("c", SPEC, budgets=ROOMY)
        await assert_serves(again, "again")
        await assert_missed(again, keys)
    daemon.assert_healthy_log()


@pytest.mark.parametrize("end", ["clean", "killed"])
async def test_a_daemon_ends_in_the_middle_of_a_fetch(start, store, proxy, end):
    keys = chain("elsewhere", 24)
    await store_elsewhere(start, store, keys)
    daemon = start(proxy, timeout_seconds=120)
    async with opened(daemon) as (client, cache):
        own = chain("here", 4)
        await put(cache, own)
        proxy.passes.clear()
        getting = asyncio.create_task(cache.get(keys))
        await proxy.stuck()
        started = time.monotonic()
        if end == "clean":
            daemon.restart()
        else:
            daemon.crash()
        assert time.monotonic() - started < 60, "it waited for the store"
        proxy.heal()
        with contextlib.suppress(KvtierError):
            assert_bytes(keys, await getting)
    async with opened(daemon) as (client, cache):
        assert await client.leases() == []
        (tier,) = (await cache_stats(client, "c")).tiers
        assert (tier.held, tier.blank, tier.filling, tier.orphaned) == (0, 0, 0, 0)
        await healed(cache, keys)
        await assert_serves(cache, "here again")
    daemon.assert_healthy_log()


async def test_no_process_outlives_a_daemon_killed_while_mooncake_is_silent(start_fresh):
    with mooncake() as server:
        daemon = start_fresh("--remote", server.url, host=64)
        async with opened(daemon) as (client, cache):
            await assert_missed(cache, chain("nowhere", 3))
            running = await eventually(lambda: children(daemon), bool)
            helpers = [os.pidfd_open(int(pid)) for pid in running]
            halt(server.processes[0].pid)

            async def asked():
                return sum(each.calls for each in (await client.stats()).remote.operations)

            before = await asked()
            getting = asyncio.create_task(cache.get(chain("elsewhere", 3)))
            await eventually(asked, lambda calls: calls > before)
            daemon.kill()
            getting.cancel()
        for helper in helpers:
            with os.fdopen(helper):
                assert select.select([helper], [], [], PATIENCE_S)[0]
