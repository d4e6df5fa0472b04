"""What a service manager hears from a daemon over a real notify socket."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
import time
from itertools import count, islice, pairwise

import pytest

from kvtier import RetryableError, Tier, connect
from kvtier.v1 import session_pb2
from kvtier.wire import ReadCounts
from tests.integration.blocks import SPEC, assert_bytes, chain, opened_cache, put_chain, sizes
from tests.integration.daemon import DaemonProcess
from tests.integration.manager import NotifySocket
from tests.integration.raw import AttachSocket
from tests.integration.starting import refused
from tests.integration.stuck import stuck_disk
from tests.integration.test_cli import kvtier
from tests.integration.waiting import eventually

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
    async with opened_cache(daemon.address, "stuck") as (_, cache):
        keys = await put_chain(cache, "stuck", 4, tier=Tier.HOST)
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


NOT_NEEDED = ("torch", "cuda", "prometheus_client", "rich", "opentelemetry")
_TRAP = """
with open({mark!r}, "a") as mark:
    mark.write({name!r} + "\\n")
raise ImportError({name!r})
"""


@pytest.fixture
def trapped(tmp_path, monkeypatch):
    """Whoever imports one of these from now on leaves its name in this file, and fails."""
    mark = tmp_path / "imported"
    for name in NOT_NEEDED:
        (tmp_path / f"{name}.py").write_text(_TRAP.format(mark=str(mark), name=name))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return mark


async def test_a_daemon_serves_without_them(trapped, start_daemon):
    daemon = start_daemon(device=4, host=4, disk=8)
    async with opened_cache(daemon.address, "c") as (_, cache):
        keys = await put_chain(cache, "imports", 3)
        assert_bytes(keys, await cache.get(keys))
    assert not trapped.exists()


def test_the_trap_works(trapped):
    for name in NOT_NEEDED:
        assert subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True, check=False).returncode
    assert trapped.read_text().split() == list(NOT_NEEDED)


def descriptors(daemon):
    return {int(number) for number in os.listdir(f"/proc/{daemon.pid}/fd")}


def leave(daemon, free):
    """So many descriptors for all that it will ever open. Returns the limits of before."""
    taken = descriptors(daemon)
    first_refused = next(islice((number for number in count() if number not in taken), free, None))
    _, most = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    return resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (first_refused, most))


async def test_without_descriptors_sessions_go_on_and_others_are_told_to_come_again(start_daemon):
    daemon = start_daemon(host=4, disk=4)
    async with opened_cache(daemon.address, "mine") as (_, cache):
        keys = await put_chain(cache, "mine", 2)
        before = descriptors(daemon)
        limits = leave(daemon, free=1)  # for the connection, and none for the pidfd
        with AttachSocket(daemon.address) as sock:
            answer = sock.hello()
            assert isinstance(answer, session_pb2.AttachFailure)
            assert answer.reason == "TOO_MANY_SESSIONS"
            assert "file descriptor" in answer.message
        with pytest.raises(RetryableError, match="no file descriptor left for a session, its limit is"):
            await connect(daemon.address)
        assert_bytes(keys, await cache.get(keys))
        more = await put_chain(cache, "more", 2)
        await eventually(lambda: descriptors(daemon), lambda now: now <= before)
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, limits)
        async with await connect(daemon.address) as other:
            again = await other.open_cache("mine")
            assert_bytes(more, await again.get(more))
    daemon.kill()  # it has logged an error, rightly: a clean stop would find fault with that


@pytest.fixture
def foreign(short_dir):
    process = DaemonProcess(short_dir, sizes(device=4, host=8, disk=16))
    process.program = ["tests.integration.foreign_daemon"]
    with process:
        yield process


async def test_all_goes_by_calls_and_leases_there(foreign):
    async with opened_cache(foreign.address, "llama") as (_, cache):
        assert cache.mapped
        assert cache.lookups == "calls: the daemon keeps no key index on its kind of machine"
        keys = await put_chain(cache, "there", 12, tier=Tier.HOST)
        assert (await cache.match(keys)).blocks == 12
        assert await cache.prefix_length([*keys, *chain("not there", 2)]) == 12
        assert all(place.residency for place in await cache.locate(keys[-4:]))
        assert_bytes(keys, await cache.get(keys))
        assert_bytes(keys[:2], await cache.get(keys[:2], verify=True))
        async with cache.acquire(keys[:3], Tier.HOST) as lease:
            assert lease.blocks == 3
        assert cache.reads.calls > 0
        assert cache.reads == ReadCounts(calls=cache.reads.calls, hits=cache.reads.hits), "nothing in shared memory"
    assert "by calls" in kvtier("status", "--address", foreign.address).stdout
