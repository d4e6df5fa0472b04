"""Peers that tell what cannot be: a miss, and a problem that is shown, for whoever follows them."""

import asyncio
import re
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvtier import connect
from tests.integration.blocks import SPEC, assert_bytes, blocks, chain, sizes
from tests.integration.daemon import DaemonProcess
from tests.integration.test_cli import kvtier
from tests.integration.waiting import eventually

KEYS = chain("lies", 4)
RULE = "[[allow]]\nanonymous = true\ncaches = ['*']\nverbs = ['read', 'watch']\n"


@asynccontextmanager
async def follower_of(start_daemon, home, lie):
    """A daemon that follows another one that lies, and clients of both, each with the cache."""
    (home / "rules.toml").write_text(RULE)
    flags = ["--config", str(home / "rules.toml"), "--listen-tcp", "127.0.0.1:0", "--tcp-insecure"]
    liar = DaemonProcess(home, sizes(host=16), flags)
    liar.program = ["tests.integration.lying_daemon", lie]
    liar.start()
    try:
        here = start_daemon("--peers", liar.tcp_address, "--tcp-insecure", host=16)
        async with await connect(here.address) as client, await connect(liar.address) as there:
            yield here, client, await client.open_cache("c", SPEC), liar, await there.open_cache("c", SPEC)
    finally:
        liar.stop()


async def peer(client):
    (found,) = (await client.stats()).peers
    return found


@pytest.mark.parametrize("lie", ["no groups", "no specification", "no time"])
async def test_a_block_of_a_peer_that_lies_is_a_miss(start_daemon, short_dir, lie):
    async with follower_of(start_daemon, short_dir, lie) as (here, client, cache, _, theirs):
        await theirs.put(KEYS, blocks(KEYS))
        await cache.put(KEYS[:1], blocks(KEYS[:1]))
        await eventually(lambda: peer(client), lambda found: found.blocks == 4)
        for _ in range(3):
            assert_bytes(KEYS[:1], await cache.get(KEYS))
            await asyncio.sleep(1)  # two looks at what peers have forgotten
        here.assert_healthy_log()


def rss_mib(pid):
    return int(re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[0]) >> 10


async def test_invented_blocks_end_a_mirror_at_the_capacity_that_was_told(start_daemon, short_dir):
    async with follower_of(start_daemon, short_dir, "blocks") as (here, client, cache, liar, _):
        before = rss_mib(here.pid)
        told = await eventually(lambda: peer(client), lambda found: found.problem)
        assert (told.state, told.blocks) == ("syncing", 0)
        assert told.problem == "given up: 1024 blocks of cache c, which has room for 32"
        assert told.problem in kvtier("status", "--address", here.address).stdout
        await eventually(lambda: here.log, lambda log: told.problem in log)
        await asyncio.sleep(2)
        assert liar.log.count("a snapshot begins") == 1, "it is not asked again and again"
        assert rss_mib(here.pid) - before < 32
        assert await cache.get(KEYS) == []
        here.assert_healthy_log()


@pytest.mark.parametrize("lie", ["no type", "half keys", "another cache", "another group", "many windows"])
async def test_what_makes_no_sense_is_told_and_the_peer_asked_again(start_daemon, short_dir, lie):
    async with follower_of(start_daemon, short_dir, lie) as (here, client, cache, liar, _):
        await eventually(lambda: peer(client), lambda found: found.problem and found.state != "exact")
        await eventually(lambda: liar.log.count("a snapshot begins"), lambda times: times > 1)
        assert await cache.get(KEYS) == []
        here.assert_healthy_log()
