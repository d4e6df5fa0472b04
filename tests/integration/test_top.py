"""``kvtier top`` against real daemons: one screen as text, and the screen of a terminal."""

import asyncio
import json
import signal

import pytest

from kvtier import Tier
from tests.integration.blocks import blocks, chain, opened_cache
from tests.integration.terminal import terminal
from tests.integration.test_cli import kvtier


async def test_one_screen_in_plain_text(start_fresh, name):
    """Without a terminal it is one screen, as with --once."""
    daemon, keys = start_fresh(device=8, host=8, disk=16), chain(name, 3)
    async with opened_cache(daemon.address, name) as (client, cache):
        await cache.put(keys, blocks(keys))
        await cache.move(keys[2:], Tier.HOST)
        async with cache.acquire(keys[:2]), client.watch(oldest=True) as watch:
            await anext(watch)
            said = await asyncio.to_thread(kvtier, "top", "--address", daemon.address)
    assert said.stderr == ""
    assert "\x1b" not in said.stdout
    words = [[each for each in line.split() if "━" not in each] for line in said.stdout.splitlines()]
    rows = {line[0]: line for line in words if line}
    # filled, slots, held, free, clean
    assert rows["device"][1:] == ["25.0%", "8", "2", "6", "6"]
    assert rows["host"][1:] == ["12.5%", "8", "0", "7", "7"]
    assert "device>host" in rows
    assert "host>disk" not in rows
    assert rows[name][1:5] == ["3", "25.0%", "12.5%", "0.0%"]
    assert [name, "device", "2"] in [line[1:4] for line in words]
    for part in (f"pid {daemon.pid}", "caches 1", "watchers 1", "healthy"):
        assert part in said.stdout


async def test_a_look_as_json(daemon, client):
    shown = json.loads(kvtier("top", "-o", "json", "--address", daemon.address).stdout)
    assert shown["stats"]["pid"] == shown["before"]["pid"] == daemon.pid
    assert shown["stats"]["uptime_ns"] > shown["before"]["uptime_ns"]
    assert shown["leases"] == []


@pytest.mark.parametrize(("key", "status"), [(b"q", 0), (b"\x03", 0), (b"", 128 + signal.SIGTERM)])
async def test_a_terminal_is_painted_over_a_restart_and_given_back(start_daemon, key, status):
    daemon = start_daemon(host=8)
    with terminal("top", "--address", daemon.address) as screen:
        screen.until(r"\x1b\[\?1049h")
        screen.until("boot 1")
        screen.until("healthy")
        daemon.stop()
        await asyncio.to_thread(screen.until, "AWAY")
        await asyncio.to_thread(daemon.start)
        await asyncio.to_thread(screen.until, "boot 2")
        screen.type(key)
        if not key:
            screen.process.terminate()
        assert screen.ended() == status
        assert "\x1b[?1049l" in screen.drawn
        assert "Traceback" not in screen.drawn
