"""What an operator sees of a remote store, and what goes from it at a command."""

import contextlib
import json
import os
import time

import pytest

from kvtier import CallerError, InvalidArgument, PermissionDenied, TierOffline
from tests.integration.blocks import SPEC, assert_bytes, chain, opened_cache, sizes
from tests.integration.scraping import LISTEN, scrape
from tests.integration.test_cli import kvtier
from tests.integration.test_operator_cli import answer
from tests.integration.waiting import PATIENCE_S, eventually, patient
from tests.remote.shared import put

DAY_S = 86_400
ROOMY = sizes(host=32, disk=64)


class Directory:
    """A store: a directory that the daemons share."""

    def __init__(self, path):
        path.mkdir()
        self.path = path
        self.url = f"file://{path}"

    def objects(self):
        return {path.name: path for path in self.path.rglob("*") if path.is_file() and "#" not in path.name}

    async def has(self, keys):
        """Waits until it has them all."""
        wanted = {key.hex() for key in keys}
        await eventually(self.objects, lambda found: wanted <= found.keys())


@contextlib.asynccontextmanager
async def opened(daemon):
    async with await patient(daemon.address) as client:
        yield client, await client.open_cache("c", SPEC, budgets=ROOMY)


@pytest.fixture
def store(tmp_path):
    return Directory(tmp_path / "store")


@pytest.fixture
def start(start_fresh, store):
    def start(*flags):
        return start_fresh("--remote", json.dumps({"url": store.url, "write": "through"}), *flags, host=64, disk=128)

    return start


@pytest.fixture
def daemon(start):
    return start()


def stored(*names):
    """A chain of one block each."""
    return [chain(name, 1)[0] for name in names]


async def fill(daemon, store, keys, name="c"):
    async with opened_cache(daemon.address, name, wait=PATIENCE_S, budgets=ROOMY) as (_, cache):
        for key in keys:
            await put(cache, [key])
        await store.has(keys)


def age(store, key, seconds):
    """As if the block had been written so long ago."""
    then = time.time() - seconds
    os.utime(store.objects()[key.hex()], (then, then))


def left(store, keys):
    return [key.hex() in store.objects() for key in keys]


async def test_old_blocks_go(start, daemon, store):
    old, young = stored("old", "older"), stored("young")
    await fill(daemon, store, [*old, *young])
    for key in old:
        age(store, key, 8 * DAY_S)
    nbytes = sum(store.objects()[key.hex()].stat().st_size for key in old)
    at = ("--address", daemon.address)
    told = answer("remote", "gc", "--older-than", "7d", "--dry-run", *at)
    assert (told["objects"], told["bytes"], told["kept_objects"], told["dry_run"]) == (2, nbytes, 1, True)
    assert left(store, [*old, *young]) == [True, True, True]
    said = kvtier("remote", "gc", "--older-than", "7d", "--yes", *at).stdout
    assert "2 blocks (" in said and "gone, 1 blocks (" in said
    assert left(store, [*old, *young]) == [False, False, True]
    async with opened(daemon) as (client, _), opened(start()) as (_, cache):
        assert_bytes(young, await cache.get(young))
        assert await cache.get(old[:1]) == []
        assert (await client.stats()).remote.blocks["deleted"] == 2


async def test_objects_that_are_no_blocks_stay(daemon, store):
    keys = stored("ours")
    await fill(daemon, store, keys)
    path = store.objects()[keys[0].hex()]
    foreign = [
        store.path / "notes",
        path.parent / "notes",
        path.parent.parent / "zz" / path.name,  # not where its key says
        store.path / "c" / "ab" / "0" / path.parent.name / path.name,  # no fingerprint
        path.parent.parent.parent / "one" / path.parent.name / path.name,  # no group
    ]
    for each in foreign:
        each.parent.mkdir(exist_ok=True, parents=True)
        each.write_bytes(b"mine")
    assert answer("remote", "gc", "--keep-bytes", "0", "--address", daemon.address)["objects"] == 1
    assert [each.read_bytes() for each in foreign] == [b"mine"] * len(foreign)
    assert not path.exists()


async def test_the_least_recently_used_go_beyond_a_size(start, store):
    keys = stored(*"abcde")
    await fill(start(), store, keys)
    for minutes, key in zip((50, 40, 30, 20, 10), keys, strict=True):
        age(store, key, 60 * minutes)
    nbytes = store.objects()[keys[0].hex()].stat().st_size
    other = start()
    async with opened(other) as (client, cache):
        assert_bytes(keys[:1], await cache.get(keys[:1]))  # the oldest is the last used
        report = await client.remote_gc(keep_bytes=3 * nbytes + 1)
    assert (report.objects, report.kept_objects, report.kept_bytes) == (2, 3, 3 * nbytes)
    assert left(store, keys) == [True, False, False, True, True]


async def test_only_blocks_of_the_caches_that_are_named_go(daemon, store):
    mine, others = stored("mine"), stored("others")
    await fill(daemon, store, mine, "c")
    await fill(daemon, store, others, "c2")
    said = answer("remote", "gc", "--cache", "c", "--keep-bytes", "0", "--address", daemon.address)
    assert (said["caches"], said["objects"], said["kept_objects"]) == (["c"], 1, 0)
    assert left(store, [*mine, *others]) == [False, True]


async def test_who_may_administer_a_cache_deletes_its_blocks_alone(start, store, tmp_path):
    rules = '[[allow]]\nanonymous = true\ncaches = ["c"]\nverbs = ["admin"]\n'
    (tmp_path / "kvtierd.toml").write_text(rules)
    listen = ("--listen-tcp", "127.0.0.1:0", "--tcp-insecure")
    daemon = start("--config", str(tmp_path / "kvtierd.toml"), *listen)
    mine, others = stored("mine"), stored("others")
    await fill(daemon, store, mine, "c")
    await fill(daemon, store, others, "d")
    async with await patient(daemon.tcp_address, insecure=True) as client:
        for caches, where in (([], "every cache"), (["d"], "cache d"), (["c", "d"], "cache d")):
            with pytest.raises(PermissionDenied, match=f"the right to admin on {where}"):
                await client.remote_gc(caches=caches, keep_bytes=0)
        assert left(store, [*mine, *others]) == [True, True]
        assert (await client.remote_gc(caches=["c"], keep_bytes=0)).objects == 1
    assert left(store, [*mine, *others]) == [False, True]


async def test_what_makes_no_sense_deletes_nothing(daemon, store, start_fresh):
    keys = stored("kept")
    await fill(daemon, store, keys)
    at = ("--address", daemon.address)
    assert "say what goes" in kvtier("remote", "gc", *at, status=2).stderr
    for option, value in (("--older-than", "0d"), ("--older-than", "week"), ("--keep-bytes", "all")):
        assert value in kvtier("remote", "gc", option, value, *at, status=2).stderr
    async with await patient(daemon.address) as client:
        for wrong in ({}, {"older_than": 0}, {"keep_bytes": -1}, {"keep_bytes": 0, "caches": ["a/b"]}):
            with pytest.raises(InvalidArgument):
                await client.remote_gc(**wrong)
    assert left(store, keys) == [True]
    without = start_fresh(host=4)
    assert "no [remote]" in kvtier("remote", "gc", "--keep-bytes", "0", "--address", without.address, status=1).stderr
    async with await patient(without.address) as client:
        with pytest.raises(CallerError) as refused:
            await client.remote_gc(keep_bytes=0)
        assert refused.value.reason == "NO_REMOTE"


async def test_a_store_that_fails_is_named_everywhere(start, store):
    daemon = start(*LISTEN)
    keys = stored("lost")
    await fill(daemon, store, keys)
    store.path.rename(store.path.with_name("away"))
    store.path.write_bytes(b"")  # no directory any more
    at = ("--address", daemon.address)
    async with opened(daemon) as (client, cache):

        async def asked():
            await cache.get(stored(os.urandom(8).hex()))
            return (await client.stats()).remote.problem

        await eventually(asked, bool)
        with pytest.raises((CallerError, TierOffline)):
            await client.remote_gc(keep_bytes=0)
    assert f"remote {store.url}: failing; written 1" in kvtier("status", *at).stdout.replace("\n", "")
    seen = await scrape(daemon)
    assert (seen.value("kvtier_remote_up"), seen.value("kvtier_problems")) == (0, 1)
    assert seen.value("kvtier_remote_operations_total", outcome="failed") >= 1
    found = doctor(daemon, store, status=1)
    assert (found["level"], "out of service" in found["found"]) == ("fail", True)


async def test_the_store_has_a_line_in_status_and_top_and_its_numbers_in_metrics(start, store):
    keys = chain("seen", 4)
    async with opened(start()) as (_, cache):
        await put(cache, keys)
        await store.has(keys)
    daemon = start(*LISTEN)
    async with opened(daemon) as (client, cache):
        await cache.get(keys)
        remote = (await client.stats()).remote
    (get,) = (each for each in remote.operations if each.operation == "get")
    line = f"remote {store.url}: healthy; written 0, fetched 4, damaged 0, unwritten 0; get "
    for command in (("status",), ("top", "--once")):
        assert line in kvtier(*command, "--address", daemon.address).stdout.replace("\n", "")
    seen = await scrape(daemon)
    assert seen.value("kvtier_remote_up") == 1
    assert seen.value("kvtier_remote_operations_total", operation="get", outcome="ok") == get.calls
    assert seen.value("kvtier_remote_bytes_total", operation="get") == get.bytes > 0
    assert seen.value("kvtier_remote_seconds_total", operation="get") == pytest.approx(get.seconds)
    assert seen.value("kvtier_remote_blocks_total", outcome="fetched") == 4


async def test_explain_says_what_is_known_of_the_store(start, store):
    here, beyond, nowhere = stored("here", "beyond", "nowhere")
    daemon, at = start(), ("--cache", "c")
    await fill(start(), store, [beyond])
    async with opened(daemon) as (client, cache):
        assert [each.there for each in (await client.explain(here)).remote] == [None]
        await put(cache, [here])
        await store.has([here])
        assert (await cache.match([beyond], remote=True)).remote_blocks == 1
        assert (await cache.match([nowhere], remote=True)).remote_blocks == 0
        for key, there, state in ((here, True, "stored"), (beyond, True, "remote"), (nowhere, False, "unknown")):
            told = await client.explain(key, cache="c")
            assert ([each.there for each in told.remote], told.state) == ([there], state)
        said = answer("explain", here.hex(), *at, "--address", daemon.address)
        assert said["remote"] == [{"cache": "c", "group": 0, "there": True}]
        assert "remote      the remote store has it" in shown(daemon, here)
        assert "c, group 0: the remote store has it" in shown(daemon, beyond)
        assert "nothing is known of it" in shown(daemon, nowhere, status=4)
        located = {each.peer: each.blocks for each in (await client.holdings([beyond], cache="c")).found}
        assert located == {store.url: 1}
        assert store.url in kvtier("locate", here.hex(), "--address", daemon.address).stdout


def shown(daemon, key, status=0):
    return kvtier("explain", key.hex(), "--address", daemon.address, status=status).stdout


async def test_the_doctor_asks_whether_the_store_answers(daemon, store):
    found = doctor(daemon, store)
    assert (found["level"], found["advice"]) == (
        "warn",
        "look for a block that is not here, and run kvtier doctor again",
    )
    await fill(daemon, store, stored("asked"))
    found = doctor(daemon, store)
    assert (found["level"], found["found"]) == ("ok", f"{store.url} answers")


def doctor(daemon, store, status=0):
    """What it finds of the store. Nothing else fails here."""
    flags = ("--runtime-dir", daemon.address, "--host-bytes", "1MiB", "--remote", store.url)
    (found,) = (each for each in answer("doctor", *flags, status=status) if each["check"] == "remote store")
    return found
