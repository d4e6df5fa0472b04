"""The store's process: nothing that a store answers, and no file in it, reaches the daemon or its host."""

import asyncio
import json
import os
import stat
from pathlib import Path

import pytest

from kvtier import connect
from tests.integration.blocks import SPEC, assert_bytes, chain, opened_cache, sizes
from tests.integration.starting import kvtierd, message
from tests.integration.waiting import PATIENCE_S, eventually
from tests.remote.servers import KEYS
from tests.remote.shared import SharedStore, problem_of, put
from tests.remote.test_faults import HUGE, Liar, answer

ROOMY = sizes(host=32)


def remote(url: str, **table: object) -> tuple[str, str]:
    return "--remote", json.dumps({"url": url, "write": "through", **table})


async def store_one(daemon, keys):
    async with await connect(daemon.address) as client:
        await put(await client.open_cache("c", SPEC, budgets=ROOMY), keys)


async def test_an_answer_that_ends_the_stores_process_is_a_failed_call(start_fresh, monkeypatch):
    async def lie(reader, writer):
        nothing = (await reader.read(4)) == b"HEAD"
        await Liar(answer("404 Not Found") if nothing else answer("403 Forbidden", b"no", length=HUGE))(reader, writer)

    server = await asyncio.start_server(lie, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    env = {**KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ALLOW_HTTP": "true"}
    for variable, value in env.items():
        monkeypatch.setenv(variable, value)
    daemon = start_fresh(*remote("s3://blocks/x"), host=32)
    async with server, await connect(daemon.address) as client:
        cache = await client.open_cache("c", SPEC, budgets=ROOMY)
        keys = chain("some", 4)
        await put(cache, keys)
        await eventually(lambda: died(daemon), lambda times: times >= 2, within=PATIENCE_S)
        assert_bytes(keys, await cache.get(keys))
        assert await cache.get(chain("other", 2)) == []
        await eventually(lambda: problem_of(client), bool)
    assert daemon.running


async def died(daemon):
    return daemon.log.count("the process for a store died")


@pytest.mark.parametrize(
    ("table", "file_mode", "directory_mode"), [({}, 0o600, 0o700), ({"group_access": True}, 0o660, 0o770)]
)
async def test_objects_of_a_directory_are_private(start_fresh, tmp_path, table, file_mode, directory_mode):
    before = os.umask(0)
    try:
        daemon = start_fresh(*remote(tmp_path.as_uri(), **table), host=32)
    finally:
        os.umask(before)
    keys = chain("some", 4)
    await store_one(daemon, keys)
    store = SharedStore(tmp_path.as_uri(), "c")
    await store.has(keys)
    await store.close()
    for path in tmp_path.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (directory_mode if path.is_dir() else file_mode), path


async def test_a_link_in_a_directory_is_not_followed(start_fresh, tmp_path):
    outside, store = tmp_path / "outside", tmp_path / "store"
    outside.mkdir()
    store.mkdir()
    (store / "c").symlink_to(outside)
    daemon = start_fresh(*remote(store.as_uri()), host=32)
    async with opened_cache(daemon.address, "c", budgets=ROOMY) as (client, cache):
        keys = chain("some", 4)
        await put(cache, keys)
        await eventually(lambda: failures(client), bool)
        assert_bytes(keys, await cache.get(keys))
    assert not list(outside.iterdir())


async def failures(client):
    return sum(each.failures for each in (await client.stats()).remote.operations)


async def test_one_object_that_is_no_file_costs_its_own_block(start_fresh, tmp_path):
    keys, others = chain("some", 4), chain("others", 4)
    writer = start_fresh(*remote(tmp_path.as_uri()), host=32)
    await store_one(writer, keys)
    await store_one(writer, others)
    store = SharedStore(tmp_path.as_uri(), "c")
    await store.has(keys + others)
    objects = {key: Path(store.path(key)) for key in (keys[0], keys[1])}
    for key, make in zip(objects, (os.mkfifo, lambda path: path.symlink_to(path)), strict=True):
        objects[key].unlink()
        make(objects[key])
    await store.close()
    reader = start_fresh(*remote(tmp_path.as_uri(), timeout_seconds=2), host=32)
    async with opened_cache(reader.address, "c", budgets=ROOMY) as (client, cache):
        for _ in range(4):
            assert await cache.get(keys) == []
        assert_bytes(others, await cache.get(others))
        assert not await problem_of(client)


SECRETS = [
    "s3://AKIA:SECRET@bucket/p",
    "s3://bucket/p?secret_access_key=SECRET",
    "s3://AKIA:SEC/RET@bucket",
    "s3://AKIA:SEC RET@bucket",
    "s3:AKIA:SECRET@bucket",
    "http://user:SECRET@bucket/p",
    "file://relative?SECRET",
]


@pytest.mark.parametrize("url", [*SECRETS, "file://relative", "file:///nothing/there", "az://container"])
def test_a_check_says_what_a_start_says_and_no_secret(start_fresh, tmp_path, url):
    flags = ("--runtime-dir", tmp_path / "run", "--state-dir", tmp_path / "state", "--host-bytes", "1MiB", "--remote")
    ways = [kvtierd(*flags, url), kvtierd("--check-config", *flags, url)]
    for ended in ways:
        assert ended.returncode == 2, ended
        assert "SEC" not in ended.stderr
    said, checked = map(message, ways)
    assert said == checked
    assert "remote" in said


def test_a_secret_in_another_url_is_not_shown(tmp_path):
    ended = kvtierd("--check-config", "--host-bytes", "1MiB", "--traces", "http://user:SECRET@collector:4317")
    assert ended.returncode == 2
    assert "http://collector:4317" in message(ended)
    assert "SECRET" not in ended.stderr
