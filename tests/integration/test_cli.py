"""The commands as a person or a script runs them, against a real daemon."""

import asyncio
import json
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from click.shell_completion import BashComplete

from kvtier import Scope, Tier, chain_keys
from kvtier.cli import main
from kvtier.replay.private import PrivateDaemon
from tests.integration.blocks import put_chain
from tests.integration.conftest import own_cache
from tests.integration.waiting import eventually

KVTIER = [sys.executable, "-m", "kvtier.cli"]
DEADLINE_S = 180
"""Just below the limit of a test."""
cache = own_cache(device=4, host=8, disk=16)


def kvtier(*arguments, status=0, env=None):
    """Runs a command to its end, which must have this exit status and no traceback. Nobody is at its terminal."""
    done = subprocess.run(
        [*KVTIER, *arguments], check=False, capture_output=True, text=True, timeout=DEADLINE_S, env=env, input=""
    )
    assert done.returncode == status, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done


async def test_status(daemon, client, cache):
    await put_chain(cache, cache.name, 3)
    async with cache.reserve(2, Tier.HOST):
        shown = json.loads(kvtier("status", "-o", "json", "--address", daemon.address).stdout)
        assert (shown["pid"], shown["problems"]) == (daemon.pid, [])
        (one,) = [each for each in shown["caches"] if each["name"] == cache.name]
        assert (one["blocks"], one["stored"]) == (3, 3)
        tiers = {tier["tier"]: tier for tier in one["tiers"]}
        assert list(tiers) == ["device", "host", "disk"]
        assert (tiers["device"]["ready"], tiers["host"]["blank"], tiers["disk"]["free"]) == (3, 2, 16)
        held = {session["session_id"]: session["held_slots"] for session in shown["sessions"]}
        assert held[client.session_id] == 2
        text = kvtier("status", "--address", daemon.address).stdout
        for each in (cache.name, "device: stand-in", "healthy"):
            assert each in text
        (log,) = [line for line in text.splitlines() if line.startswith("event log: ")]
        assert re.fullmatch(r"event log: .+, events \d+ to \d+, oldest (\d{1,3} s|\d+:\d\d:\d\d) ago", log)
        assert ["tier", "filled", "of", "given", "out", "slots"] in [line.split()[:6] for line in text.splitlines()]
        assert " \n" not in text, "cells are padded at the end of a line"


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["watch", "--since", "999999999"], 1, "since.id"),
        (["watch", "--cache", "no/such"], 1, "filter.caches[0]"),
        (["status", "--nonsense"], 2, "nonsense"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_what_makes_no_sense_is_said_so(daemon, arguments, status, says):
    assert says in kvtier(*arguments, "--address", daemon.address, status=status).stderr


def conversations(path, count, turns):
    """A trace of conversations that take turns: each request repeats what was said before and adds two blocks."""
    rows, ids = [], iter(range(1, 10_000))
    said: list[list[int]] = [[0] for _ in range(count)]
    for turn in range(turns):
        for prompt in said:
            prompt += [next(ids), next(ids)]
            rows.append(
                {"timestamp": turn, "input_length": 512 * len(prompt), "output_length": 1, "hash_ids": list(prompt)}
            )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


async def test_replay_of_more_than_fits(tmp_path):
    """Tiers far too small: nothing is wrong, lost or misplaced."""
    trace = conversations(tmp_path / "trace.jsonl", count=8, turns=5)
    async with PrivateDaemon({Tier.DEVICE: 14 * 4096, Tier.HOST: 16 * 4096, Tier.DISK: 200 * 4096}) as daemon:
        at = ("--address", daemon.address)
        replay = ("replay", str(trace), *at, "--block-bytes", "4096", "-o", "json")
        done = await asyncio.to_thread(kvtier, *replay)
        assert done.stderr == ""
        assert json.loads(kvtier("cache", "ls", *at, "-o", "json").stdout) == []
        kept = (await asyncio.to_thread(kvtier, *replay, "--requests", "1", "--keep")).stderr.split()[1]
        assert [each["name"] for each in json.loads(kvtier("cache", "ls", *at, "-o", "json").stdout)] == [kept]
    report = json.loads(done.stdout)
    assert (report["requests"], report["block_refs"]) == (40, 8 * (3 + 5 + 7 + 9 + 11))
    assert (report["verify_failures"], report["event_gaps"], report["residency_mismatches"]) == (0, 0, 0)
    assert sum(report["hits"].values()) + report["misses"] == report["block_refs"]
    assert report["hits"]["disk"] > 0


async def test_an_interrupted_replay_removes_its_cache(tmp_path, daemon, client):
    before = {info.name for info in await client.caches()}

    async def names():
        return {info.name for info in await client.caches() if info.blocks} - before

    trace = conversations(tmp_path / "trace.jsonl", count=8, turns=400)
    at = ("--address", daemon.address, "--block-bytes", "256")
    with subprocess.Popen([*KVTIER, "replay", str(trace), *at], stderr=subprocess.PIPE) as replaying:  # noqa: ASYNC220
        (own,) = await eventually(names, bool)
        replaying.send_signal(signal.SIGINT)
        _, said = replaying.communicate()
    assert (replaying.returncode, said) == (130, b"")
    assert own.startswith("replay-")
    assert {info.name for info in await client.caches()} == before


async def test_pins_with_an_end(daemon, cache, client):
    keys = [key.hex() for key in await put_chain(cache, cache.name, 2)]
    at = ("--address", daemon.address)
    pin = ("pin", cache.name, *keys, *at, "--for")
    with subprocess.Popen([*KVTIER, *pin, "1h"], stdout=subprocess.PIPE, text=True) as pinning:  # noqa: ASYNC220
        assert pinning.stdout is not None
        assert pinning.stdout.readline().startswith(f"{cache.name}: 2 blocks stay in host for 3600 s")
        (lease,) = json.loads(kvtier("leases", *at, "--cache", cache.name, "-o", "json").stdout)
        assert (lease["pid"], lease["tier"], lease["held_blocks"]) == (pinning.pid, "host", 2)
        pinning.send_signal(signal.SIGINT)
    assert pinning.returncode == 130
    await eventually(lambda: client.leases(cache=cache.name), lambda left: not left)
    assert "stay in host for 0.1 s" in kvtier(*pin, "0.1s").stdout
    assert "is not stored" in kvtier("pin", cache.name, keys[0], "ab" * 32, *at, "--for", "1s", status=1).stderr
    assert "no time" in kvtier(*pin, "soon", status=2).stderr


async def test_locate_a_prompt_with_a_salt(tmp_path, daemon, cache):
    tokens, salt = list(range(2 * cache.info.spec.tokens_per_block)), tmp_path / "salt"
    salt.write_text("tenant-7\n")
    keys = chain_keys(tokens, cache.info.spec.tokens_per_block, Scope(salt="tenant-7"))
    await cache.put(keys, np.zeros((2, cache.block_bytes), np.uint8))
    locate = ("locate", ",".join(map(str, tokens)), "--cache", cache.name, "--address", daemon.address, "-o", "json")
    short = kvtier("locate", "1,2,3", *locate[2:], status=1)
    assert short.stderr == "Error: the prompt is shorter than a block of 16 tokens\n"
    assert json.loads(kvtier(*locate, status=1).stdout)["found"] == []
    (found,) = json.loads(kvtier(*locate, "--salt", str(salt)).stdout)["found"]
    assert found["blocks"] == 2


async def test_names_of_caches_are_completed(daemon, cache):
    def completed(*words, typed=""):
        found = BashComplete(main, {}, "kvtier", "_KVTIER_COMPLETE").get_completions(list(words), typed)
        return [each.value for each in found]

    at = ("--address", daemon.address)
    for words in (("drop", *at), ("cache", "rm", *at), ("watch", *at, "--cache"), (*at, "get")):
        assert await asyncio.to_thread(completed, *words, typed=cache.name[:-1]) == [cache.name]
        assert await asyncio.to_thread(completed, *words, typed="no such") == []
    began = time.monotonic()
    assert await asyncio.to_thread(completed, "drop", "--address", "/nonexistent") == []
    assert time.monotonic() - began < 1, "waited for a daemon that may come"
