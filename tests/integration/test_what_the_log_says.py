"""What an operator reads: one line on what runs, and none on what is usual."""

import asyncio
import json
import os
from importlib.metadata import version

from kvtier.types import Tier
from tests.integration.blocks import SPEC, sizes
from tests.integration.daemon import DaemonProcess
from tests.integration.test_cli import kvtier
from tests.integration.waiting import patient


def test_a_start_says_what_runs(start_fresh):
    daemon = start_fresh("--eviction", "lfuda", host=8)
    (line,) = [line for line in daemon.log.splitlines() if "kvtierd starts" in line]
    assert f"version={version('kvtier')}" in line
    assert "'eviction': 'lfuda'" in line and f"'host_bytes': {sizes(host=8)[Tier.HOST]}" in line
    assert "wait_seconds" not in line, "a default"


def test_a_command_leaves_no_line(start_fresh):
    daemon = start_fresh(host=8)
    before = daemon.log
    kvtier("status", "--address", daemon.address)
    kvtier("cache", "ls", "--address", daemon.address)
    assert daemon.log == before


async def test_a_client_that_comes_back_after_a_restart_is_no_warning(start_fresh):
    daemon = start_fresh(host=8, disk=8)
    async with await patient(daemon.address) as client:
        await client.open_cache("c", SPEC, budgets=sizes(host=4, disk=4))
        daemon.forget_log()
        await asyncio.to_thread(daemon.restart)
        assert (await client.stats()).caches
    assert "UNKNOWN_SESSION" in daemon.log and "level=warning" not in daemon.log


def test_a_disk_tier_that_cannot_fit_now_is_warned_of(short_dir):
    status = os.statvfs(short_dir)
    free, whole = (blocks * status.f_frsize for blocks in (status.f_bavail, status.f_blocks))
    asked = (free + whole) // 2
    with DaemonProcess(short_dir, {Tier.DISK: asked}) as daemon:
        (line,) = [line for line in daemon.log.splitlines() if "larger than" in line]
        assert "level=warning" in line and f"disk_bytes={asked}" in line


def test_the_doctor_asks_the_daemon_at_the_address(start_fresh, tmp_path):
    daemon = start_fresh(disk=8)
    env = os.environ | {"KVTIER_ADDRESS": daemon.address}
    found = {each["check"]: each for each in json.loads(kvtier("doctor", "-o", "json", env=env).stdout)}
    says = f"that of the daemon; a daemon, pid {daemon.pid}, serves at {daemon.address}"
    assert (found["configuration"]["level"], found["configuration"]["found"]) == ("ok", says)
    assert str(daemon.disk_dir) in found["disk space"]["found"]
    # Options of kvtierd change the configuration of the daemon at the address, whose directories stay.
    said = json.loads(kvtier("doctor", "-o", "json", "--disk-bytes", "1MiB", env=env).stdout)
    found = {each["check"]: each["found"] for each in said}
    assert found["configuration"] == says.replace("daemon;", "daemon with these options;")
    assert found["disk space"].startswith(f"{daemon.disk_dir}: 1.0 MiB configured")
    assert "no tier is configured" in kvtier("doctor", env=env | {"KVTIER_ADDRESS": str(tmp_path)}, status=1).stdout
