"""kvtier from a shell alone: a cache, a block in and out, beginnings of keys, output for eyes and for programs."""

import asyncio
import json
import os
import re
import subprocess
from hashlib import sha256

import pytest
import yaml

from kvtier import Tier
from tests.integration.blocks import SPEC, blocks, chain, put_chain, sizes
from tests.integration.terminal import terminal
from tests.integration.test_cli import DEADLINE_S, KVTIER, kvtier
from tests.integration.waiting import patient

LONG = "a-cache-with-a-name-that-no-terminal-of-eighty-columns-has-room-for-beside-the-rest"


def put(*arguments, data, status=0):
    command = [*KVTIER, "put", *arguments]
    done = subprocess.run(command, check=False, input=data, capture_output=True, timeout=DEADLINE_S)
    assert done.returncode == status, done.stderr
    return done


def get(*arguments):
    return subprocess.run([*KVTIER, "get", *arguments], check=True, capture_output=True, timeout=DEADLINE_S).stdout


@pytest.fixture
def plain(at, name):
    """A cache of 4 KiB blocks, as a shell makes one."""
    budgets = ("--block-bytes", "4KiB", "--device-bytes", "64KiB", "--host-bytes", "64KiB", "--disk-bytes", "128KiB")
    made = json.loads(kvtier("cache", "create", name, *budgets, *at, "-o", "json").stdout)
    assert [(each["tier"], each["slots"]) for each in made["groups"][0]["tiers"]] == [
        ("device", 16),
        ("host", 16),
        ("disk", 32),
    ]
    return name


def test_ping(daemon, at, short_dir):
    assert kvtier("ping", *at).stdout.startswith(f"{daemon.address} answers in ")
    assert json.loads(kvtier("ping", *at, "-o", "json").stdout)["took_ns"] > 0
    assert "no daemon answers" in kvtier("ping", "--address", str(short_dir), status=1).stderr
    imported = kvtier("ping", *at, env={**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}).stderr
    assert re.findall(r"\| +(click|numpy|rich|kvtier\.(?:arena|cache))$", imported, re.MULTILINE) == ["click"]


def test_a_block_goes_in_and_comes_out(at, plain, tmp_path):
    key = sha256(b"greeting").hexdigest()
    assert put(plain, "greeting", *at, data=b"hello").stdout.decode().startswith(f"{key}  ok")
    assert get(plain, "greeting", *at) == b"hello" + bytes(4091)
    assert get(plain, key[:8], *at) == get(plain, key, *at) == get(plain, "greeting", *at)
    (tmp_path / "file").write_bytes(b"x" * 4096)
    assert json.loads(put(plain, 64 * "a", str(tmp_path / "file"), *at, "-o", "json", data=b"").stdout)["bytes"] == 4096
    assert get(plain, 64 * "a", *at) == b"x" * 4096


def test_what_put_and_get_refuse(at, plain):
    put(plain, "greeting", *at, data=b"hello")
    assert b"exists" in put(plain, "greeting", *at, data=b"other", status=1).stdout
    assert get(plain, "greeting", *at)[:5] == b"hello"
    assert b"more than 4096 bytes" in put(plain, "big", *at, data=bytes(4097), status=1).stderr
    assert b"beginning of a key" in put(plain, "deadbeef", *at, data=b"", status=2).stderr
    assert "is not stored" in kvtier("get", plain, "big", *at, status=1).stderr
    assert "begins with deadbeef" in kvtier("get", plain, "deadbeef", *at, status=1).stderr
    assert "exists already" in kvtier("cache", "create", plain, *at, status=1).stderr


async def test_a_key_s_beginning_names_it_unless_there_are_two(at, client, name):
    cache = await client.open_cache(name, SPEC, budgets=sizes(device=4, host=4, disk=4))
    (lonely,) = chain(name, 1)
    twins = [bytes.fromhex("0bad0bad") + bytes(27) + bytes([last]) for last in (1, 2)]
    for key in (lonely, *twins):
        await cache.put([key], blocks([key]))

    async def said(*arguments, status=0):
        return await asyncio.to_thread(kvtier, *arguments, *at, status=status)

    assert "1 ok" in (await said("move", name, "host", lonely.hex()[:8])).stdout
    assert [place.residency for place in await cache.locate([lonely])] == [Tier.HOST.bit]
    assert "1 dropped" in (await said("drop", name, lonely.hex()[:8])).stdout
    for verb in (("move", name, "host", "0bad0bad"), ("drop", name, "0bad0bad"), ("get", name, "0bad0bad")):
        refused = (await said(*verb, status=1)).stderr
        assert all(key.hex() in refused for key in twins)
    assert len([block async for block in cache.blocks()]) == 2
    listed = (await said("blocks", "ls", name)).stdout.splitlines()
    assert sorted(line.split() for line in listed) == [[key.hex(), "device"] for key in twins]
    rows = json.loads((await said("blocks", "ls", name, "-o", "json")).stdout)
    assert sorted((row["key"], *row["tiers"]) for row in rows) == [(key.hex(), "device") for key in twins]


def test_the_connection_is_named_before_the_verb_or_after_it(daemon, at, short_dir):
    for command in (["status"], ["cache", "ls"]):
        before = kvtier(*at, *command, "-o", "json").stdout
        assert json.loads(before) is not None
    # What stands after the verb wins; what is typed wins over the environment.
    assert kvtier("--address", str(short_dir), "ping", *at).stdout.startswith(daemon.address)
    elsewhere = {**os.environ, "KVTIER_ADDRESS": str(short_dir)}
    assert kvtier(*at, "ping", env=elsewhere).stdout.startswith(daemon.address)
    assert "runtime directory" in kvtier("--insecure", *at, "ping", status=2).stderr


async def test_yaml_says_what_json_says(at, client, name):
    cache = await client.open_cache(name, SPEC, budgets=sizes(device=4))
    keys = await put_chain(cache, name, 2)
    async with cache.acquire(keys):
        for command in (
            ["cache", "ls"],
            ["leases", "--cache", name],
            ["blocks", "ls", name],
            ["explain", keys[0].hex()],
        ):
            as_json = json.loads((await asyncio.to_thread(kvtier, *command, *at, "-o", "json")).stdout)
            as_yaml = yaml.safe_load((await asyncio.to_thread(kvtier, *command, *at, "-o", "yaml")).stdout)
            assert _timeless(as_yaml) == _timeless(as_json) != []
    watch = ("watch", *at, "--oldest", "--no-follow", "--cache", name)
    events = kvtier(*watch, "-o", "yaml").stdout
    assert list(yaml.safe_load_all(events)) == [
        json.loads(line) for line in kvtier(*watch, "-o", "json").stdout.splitlines()
    ]


def _timeless(value):
    """Without what goes on between two commands."""
    if isinstance(value, dict):
        return {
            key: _timeless(each) for key, each in value.items() if key not in ("age_ns", "time_ns", "as_of", "idle_s")
        }
    return [_timeless(each) for each in value] if isinstance(value, list) else value


async def test_eighty_columns_hold_every_table_and_a_pipe_cuts_nothing(start_fresh):
    daemon = start_fresh(device=8, host=8, disk=16)
    async with await patient(daemon.address) as client:
        cache = await client.open_cache(LONG, SPEC, budgets=sizes(device=8, host=8, disk=16))
        keys = await put_chain(cache, "eighty", 3)
        async with cache.acquire(keys):
            for command in (["status"], ["cache", "ls"], ["leases"], ["top", "--once"]):
                arguments = (*command, "--address", daemon.address)
                piped = (await asyncio.to_thread(kvtier, *arguments)).stdout
                assert LONG in piped
                assert "…" not in piped
                with terminal(*arguments, columns=80) as screen:
                    assert await asyncio.to_thread(screen.ended) == 0
                    shown = [_bare(line) for line in screen.drawn.splitlines()]
                assert max(map(len, shown)) <= 80
                assert "-rest" in "".join(line.split()[0] for line in shown if line.split()), (
                    "the name is folded, not cut"
                )


def _bare(line):
    return re.sub(r"\x1b\[[0-9;]*m", "", line)
