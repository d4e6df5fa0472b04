"""What a service manager hears from a daemon over a real notify socket."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from itertools import pairwise

import pytest

from kvtier import Tier, connect
from tests.integration.blocks import SPEC, blocks, chain, sizes
from tests.integration.daemon import DaemonProcess
from tests.integration.manager import NotifySocket
from tests.integration.starting import refused
from tests.integration.stuck import stuck_disk

WATCHDOG_S = 1.0


@pytest.fixture
def manager(short_dir):
    sock = NotifySocket(short_dir / "notify")
    yield sock
    sock.close()


@pytest.fixture
def daemon(short_dir, manager):
    (short_dir / "kvtierd.toml").write_text("")
    process = DaemonProcess(short_dir, sizes(host=8, disk=64), ["--config", str(short_dir / "kvtierd.toml")])
    process.variables |= {"NOTIFY_SOCKET": str(manager.path), "WATCHDOG_USEC": str(int(WATCHDOG_S * 1e6))}
    yield process
    if process.running:
        process.stop()


def test_a_life_is_told_from_start_to_stop(daemon, manager):
    daemon.start()
    first = manager.wait_for_field("STATUS")
    assert first.fields["STATUS"].startswith("starting")
    manager.wait_for_field("EXTEND_TIMEOUT_USEC")
    ready = manager.wait_for_field("READY")
    assert ready.fields["STATUS"] == f"serving at {daemon.address}"
    manager.wait_for_field("WATCHDOG")
    daemon.stop()
    stopping = manager.wait_for_field("STOPPING")
    assert stopping.fields["STATUS"].startswith("stopping")
    extended = manager.wait_for_field("EXTEND_TIMEOUT_USEC")
    assert int(extended.fields["EXTEND_TIMEOUT_USEC"]) > 30_000_000, "no less than shutdown_seconds"


def test_the_watchdog_is_fed_in_time_while_all_is_well(daemon, manager):
    daemon.start()
    at = [manager.wait_for_field("WATCHDOG").at for _ in range(7)]
    assert max(after - before for before, after in pairwise(at)) < WATCHDOG_S


def test_a_reload_begins_and_ends_with_a_word(daemon, manager):
    daemon.start()
    manager.wait_for_field("READY")
    before = time.monotonic_ns() // 1000
    (daemon.home / "kvtierd.toml").write_text('log_level = "debug"\nevent_ring_bytes = 5000\n')
    os.kill(daemon.pid, signal.SIGHUP)
    began = manager.wait_for_field("RELOADING")
    assert before <= int(began.fields["MONOTONIC_USEC"]) <= time.monotonic_ns() // 1000
    ended = manager.wait_for_field("READY")
    refused = "configuration: event_ring_bytes has changed; that takes a restart"
    assert ended.fields["STATUS"] == f"serving at {daemon.address}; {refused}"


async def test_a_stuck_lane_starves_the_watchdog(daemon, manager):
    """The loop goes on serving, so nothing else would ever tell the manager."""
    daemon.start()
    async with await connect(daemon.address) as client:
        cache = await client.open_cache("stuck", SPEC)
        keys = chain("stuck", 4)
        await cache.put(keys, blocks(keys), tier=Tier.HOST)
        with stuck_disk(daemon, "stuck") as disk:
            moving = asyncio.create_task(cache.move(keys, Tier.DISK))
            await asyncio.to_thread(starved, manager)
            assert (await cache.match(keys)).blocks == len(keys), "lookups go on"
            disk.release()
            await asyncio.to_thread(manager.wait_for_field, "WATCHDOG")
            await moving


def test_a_start_that_fails_says_why(daemon, manager):
    daemon.state_dir.mkdir()
    (daemon.state_dir / "photo.jpg").touch()
    assert "photo.jpg" in refused(daemon)
    failed = manager.wait_for(lambda message: message.fields.get("STATUS", "").startswith("failed: "))
    assert "photo.jpg" in failed.fields["STATUS"]
    assert not any("READY" in message.fields for message in manager.heard)


def starved(manager):
    """Waits until the manager would act: no feed for an interval. Fails if that does not come."""
    end = time.monotonic() + 20 * WATCHDOG_S
    fed = time.monotonic()
    while time.monotonic() - fed < WATCHDOG_S:
        assert time.monotonic() < end, "fed all the time"
        message = manager.hear(WATCHDOG_S / 10)
        if message is not None and "WATCHDOG" in message.fields:
            fed = message.at


async def test_arenas_are_stored_with_the_manager_and_forgotten_with_their_cache(daemon, manager):
    daemon.start()
    async with await connect(daemon.address) as client:
        await client.open_cache("kept", SPEC)

        def stored():
            messages = [message for message in manager.heard if message.fields.get("FDSTORE") == "1"]
            return {message.fields["FDNAME"]: len(message.fds) for message in messages}

        wanted = dict.fromkeys(["sessions", "arena/kept/control", "arena/kept/host", "arena/kept/about"], 1)
        await asyncio.to_thread(manager.wait_for, lambda _: stored() == wanted)
        for message in manager.heard:
            assert all(os.fstat(fd).st_mode & 0o777 == 0o400 for fd in message.fds)
        await client.remove_cache("kept", force=True)
        gone = await asyncio.to_thread(manager.wait_for_field, "FDSTOREREMOVE")
        assert gone.fields["FDNAME"].startswith("arena/kept/")
