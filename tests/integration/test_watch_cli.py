"""``kvtier watch`` as scripts, pipes and terminals meet it: how it ends, what it says of breaks, what it draws."""

import asyncio
import fcntl
import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from kvtier import CacheOptions, Tier, connect, event_hashes
from tests.integration.blocks import SPEC, blocks, opened_cache, put_chain, sizes
from tests.integration.conftest import own_cache
from tests.integration.seeing import last_event
from tests.integration.terminal import terminal
from tests.integration.test_cli import DEADLINE_S, KVTIER, kvtier
from tests.integration.waiting import PATIENCE_S

cache = own_cache(device=4, host=8, disk=16)


def lines(text):
    return [json.loads(line) for line in text.splitlines()]


async def stored(cache, name, count=2):
    return await put_chain(cache, f"{cache.name} {name}", count)


@contextmanager
def watching(daemon, *arguments, before=(), **options):
    """In the background; stopped for good at the end. ``before``: what runs it."""
    command = [*before, *KVTIER, "watch", "--address", daemon.address, *arguments]
    with subprocess.Popen(
        command, **({"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options)
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _line(process):
    assert process.stdout is not None
    return process.stdout.readline()


async def next_line(process):
    async with asyncio.timeout(DEADLINE_S):
        found = json.loads(await asyncio.to_thread(_line, process))
    assert isinstance(found, dict)
    return found


async def ended(process):
    async with asyncio.timeout(DEADLINE_S):
        return await asyncio.to_thread(process.wait)


async def test_keys_cut_events_down_to_their_blocks(daemon, client, cache):
    start = await last_event(client)
    keys = await stored(cache, "cut", 4)
    watch = [
        "watch",
        "--address",
        daemon.address,
        "--since",
        str(start),
        "--no-follow",
        "-o",
        "json",
        "--type",
        "stored",
    ]
    prefixes = ["--key", keys[1].hex(), "--key", keys[3].hex()[:10], "--group", "0"]
    found = lines(kvtier(*watch, *prefixes).stdout)
    assert [block["block_hash"] for each in found for block in each["blocks"]] == [keys[1].hex(), keys[3].hex()]
    assert kvtier(*watch, "--key", "00" * 32).stdout == "", "and it ends all the same"
    await client.open_cache(f"{cache.name}-2", SPEC, budgets=sizes(host=2))
    await client.remove_cache(cache.name, force=True)
    told = lines(kvtier(*watch[:-2], "--key", keys[1].hex()).stdout)
    assert {each["cache"] for each in told} == {cache.name}, "another cache began, and that is not told"
    assert {each["type"] for each in told} >= {"stored", "cleared"}


async def test_who_may_watch_and_nothing_else_may_end_it_with_what_exists(start_daemon):
    rule = '{"anonymous": true, "caches": ["shared"], "verbs": ["watch"]}'
    daemon = start_daemon("--listen-tcp", "127.0.0.1:0", "--tcp-insecure", "--allow", rule, host=8)
    async with await connect(daemon.address) as client:
        for name in ("shared", "secret"):
            await stored(await client.open_cache(name, SPEC, budgets=sizes(host=4)), "one")
    for more in ([], ["--cache", "shared"]):
        command = ["watch", "--address", daemon.tcp_address, "--insecure", "--oldest", "-o", "json", "--no-follow"]
        found = lines(kvtier(*command, *more).stdout)
        assert {each["cache"] for each in found} == {"shared"}, more


async def test_a_snapshot_alone(daemon, cache):
    keys = await stored(cache, "there")
    command = ["watch", "--address", daemon.address, "--snapshot", "--no-follow", "-o", "json", "--cache", cache.name]
    start, *slices, end = lines(kvtier(*command).stdout)
    assert [start["type"], end["type"]] == ["snapshot_start", "snapshot_end"]
    assert {block["block_hash"] for each in slices for block in each["blocks"]} == {key.hex() for key in keys}


READ_TWO = "import json, sys\nfor _ in range(2): print(json.loads(sys.stdin.readline())['type'], flush=True)\n"


async def test_a_program_at_the_other_end_reads_each_event_as_it_happens(daemon, cache):
    """And when it has what it wants, the watch ends by itself, with status 0."""
    command = [*KVTIER, "watch", "--address", daemon.address, "-o", "json", "--type", "stored", "--oldest"]
    script = 'set -o pipefail; "$@" | ' + f"{shlex.quote(sys.executable)} -c {shlex.quote(READ_TWO)}"
    both = asyncio.create_task(
        asyncio.to_thread(
            subprocess.run,
            ["bash", "-c", script, "watch", *command],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
    )
    for name in ("one", "two"):
        await stored(cache, name, 1)
    done = await both
    assert (done.stdout, done.stderr, done.returncode) == ("stored\nstored\n", "", 0)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_signals_end_it_with_a_status_of_their_own(daemon, cache, number, status):
    with watching(daemon, "-o", "json", "--oldest", "--cache", cache.name) as process:
        await stored(cache, "one")
        await next_line(process)
        process.send_signal(number)
        assert await ended(process) == status
        assert process.stderr is not None
        assert process.stderr.read() == ""


async def test_a_background_job_does_not_heed_the_ctrl_c_of_others(daemon, cache):
    heedless = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]
    with watching(
        daemon, "-o", "json", "--oldest", "--type", "stored", "--cache", cache.name, before=heedless
    ) as process:
        await stored(cache, "one", 1)
        await next_line(process)
        process.send_signal(signal.SIGINT)
        await stored(cache, "two", 1)
        assert (await next_line(process))["type"] == "stored"
        process.terminate()
        assert await ended(process) == 143


async def test_a_signal_ends_it_even_where_nobody_reads(daemon, cache):
    """The pipe is full, and the write into it waits: for ever, if it were only asked between two lines."""
    for index in range(20):
        await stored(cache, f"{index}", 4)
    inside, outside = os.pipe()
    try:
        fcntl.fcntl(outside, fcntl.F_SETPIPE_SZ, 4096)
        with watching(daemon, "-o", "json", "--oldest", stdout=outside) as process:
            await asyncio.to_thread(_wait_until_full, outside)
            process.terminate()
            assert await ended(process) == 143
    finally:
        os.close(inside)
        os.close(outside)


def _wait_until_full(outside):
    until = time.monotonic() + PATIENCE_S
    while select.select([], [outside], [], 0)[1]:
        assert time.monotonic() < until, "nothing fills the pipe"
        time.sleep(0.02)


async def test_it_goes_without_standard_input_and_says_what_it_needs_of_output(daemon, cache, tmp_path):
    await stored(cache, "one")
    command = [*KVTIER, "watch", "--address", daemon.address, "--oldest", "--limit", "1"]

    def shell(redirection):
        return subprocess.run(
            ["sh", "-c", f'"$@" {redirection}', "sh", *command],
            check=False,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            cwd=tmp_path,
            start_new_session=True,
        )

    for redirection, status, says in (
        ("<&-", 0, ""),
        ("> file", 0, ""),
        (">&-", 1, "standard output is closed"),
        ("> /dev/full", 1, "No space left"),
    ):
        done = shell(redirection)
        assert (done.returncode, says in done.stderr, "Traceback" in done.stderr) == (status, True, False), redirection
    assert (tmp_path / "file").read_text().count("\n") == 1


def test_no_daemon_at_the_start_has_a_status_of_its_own(short_dir):
    assert "no daemon answers" in kvtier("watch", "--address", str(short_dir), status=3).stderr


@pytest.mark.parametrize("unclean", [False, True], ids=["restarted", "killed"])
async def test_a_restart_is_reported_and_survived(start_daemon, unclean):
    daemon = start_daemon(host=8, disk=32)
    async with opened_cache(daemon.address, "c", wait=PATIENCE_S) as (client, cache):
        await stored(cache, "before")
        with watching(daemon, "-o", "json", "--oldest") as process, watching(daemon, "--oldest") as people:
            while (await next_line(process))["type"] != "stored":
                pass
            said = await asyncio.to_thread(_line, people)
            (daemon.kill if unclean else daemon.stop)()
            assert (found := await next_line_but_events(process))["type"] == "disconnected", found
            await asyncio.to_thread(daemon.start)
            back = await next_line_but_events(process)
            stats = await client.stats()
            assert back == {"type": "reconnected", "epoch": stats.epoch, "boot": 2, "restarted": True}
            if unclean:
                gap = await next_line_but_events(process)
                assert (gap["type"], gap["epoch"], gap["reason"]) == ("gap", stats.epoch - 1, "unclean-stop")
            keys = await stored(await client.open_cache("c", SPEC), "after", 1)
            while (found := await next_line(process))["type"] != "stored" or keys[0].hex() not in json.dumps(found):
                pass
            async with asyncio.timeout(DEADLINE_S):
                while keys[0].hex()[:8] not in (line := await asyncio.to_thread(_line, people)):
                    said += line
            people.send_signal(signal.SIGINT)
            said += (await asyncio.to_thread(people.communicate, timeout=DEADLINE_S))[0]
    assert re.search(r"^away +the daemon does not answer", said, re.MULTILINE)
    assert f"back       restarted, epoch {stats.epoch}, boot 2" in said
    assert ("were lost: unclean-stop" in said) is unclean


async def next_line_but_events(process):
    while "event_id" in (found := await next_line(process)):
        pass
    return found


async def test_a_terminal_shows_coloured_lines_of_its_width(start_daemon):
    daemon = start_daemon(host=8)
    with terminal("watch", "--address", daemon.address, "--oldest") as screen:
        async with await connect(daemon.address) as client:
            await stored(await client.open_cache("c", SPEC), "one")
        await asyncio.to_thread(screen.until, r"\x1b\[32m stored .*→ host .* c +commit")
        screen.resize(40)
        await asyncio.to_thread(daemon.kill)
        await asyncio.to_thread(screen.until, r"away +the daemon does not answer")
        await asyncio.to_thread(daemon.start)
        await asyncio.to_thread(screen.until, r"back +restarted, epoch 2, boot 2\x1b")
        await asyncio.to_thread(screen.until, r"gap +unlogged events [^\x1b\n]*…")
        screen.type(b"\x03")  # Ctrl-C
        assert await asyncio.to_thread(screen.ended) == 130
        assert "Traceback" not in screen.drawn


NAME = "llama"
STEP = SPEC.tokens_per_block
IDS = list(range(1000, 1000 + 3 * STEP))
NAMED = CacheOptions(event_hash="v1_block_key", keep_tokens=True)


def hashes():
    packed = event_hashes("v1_block_key", IDS, STEP)
    return [int.from_bytes(packed[start : start + 8], "big") for start in range(0, len(packed), 8)]


RANK = ("--attention-dp-rank", "5")


def watched(daemon, *arguments):
    return lines(kvtier("watch", "--address", daemon.address, "-o", "trtllm", *arguments).stdout)


async def opened(client):
    cache = await client.open_cache(NAME, SPEC, budgets=sizes(device=8, host=8, disk=8), options=NAMED)
    return cache, cache.prompt(IDS)


async def test_a_life_in_their_words(start_daemon):
    daemon = start_daemon(device=8, host=8, disk=8)
    async with await connect(daemon.address) as client:
        cache, prompt = await opened(client)
        await cache.put(prompt.keys, blocks([prompt.keys[:32]] * 3), prompt=prompt)
        await cache.move(prompt.keys, Tier.HOST)
        await cache.drop(prompt.keys[:32])
        count = (await client.stats()).last_event_id
        events = await asyncio.to_thread(watched, daemon, "--cache", NAME, "--oldest", "--limit", str(count), *RANK)
    envelope = {"window_size": 2**31 - 1, "attention_dp_rank": 5, "hash_algo": "v1_block_key", "layer_group_id": 0}
    assert [{name: each[name] for name in envelope} for each in events] == [envelope] * len(events)
    assert [each["event_id"] for each in events] == list(range(len(events)))
    created, stored, *rest = [each["data"] for each in events]
    assert created == {"type": "created", "num_blocks_per_cache_level": [8, 8, 8]}
    assert [block["block_hash"] for block in stored["blocks"]] == hashes()
    assert [token["token_id"] for block in stored["blocks"] for token in block["tokens"]] == IDS
    moves = [each for each in rest if each["type"] == "updated"]
    down = {"type": "event_diff", "new_value": 1, "old_value": 0}
    assert {each["block_hash"] for each in moves} == set(hashes())
    assert all((each["cache_level"], each["priority"]) == (down, None) for each in moves)
    removed = [each for each in rest if each["type"] == "removed"]
    assert [number for each in removed for number in each["block_hashes"]] == hashes()[::-1]
    assert len(moves) + len(removed) == len(rest)


def test_one_cache_is_asked_for(daemon):
    said = kvtier("watch", "--address", daemon.address, "-o", "trtllm", status=2)
    assert "needs one --cache" in said.stderr
    said = kvtier("watch", "--address", daemon.address, "--attention-dp-rank", "1", status=2)
    assert "needs -o trtllm" in said.stderr
