"""What an operator reads: one line on what runs, and none on what is usual."""

import asyncio
import os
import subprocess
from importlib.metadata import version

import pytest

from kvtier.types import Tier
from tests.integration.blocks import SPEC, sizes
from tests.integration.daemon import DaemonProcess
from tests.integration.test_cli import KVTIER, kvtier
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
    daemon = DaemonProcess(short_dir, {Tier.DISK: asked})
    daemon.start()
    try:
        (line,) = [line for line in daemon.log.splitlines() if "larger than" in line]
        assert "level=warning" in line and f"disk_bytes={asked}" in line
    finally:
        daemon.stop()


@pytest.mark.parametrize(("runs", "level", "status"), [(True, "warn", 0), (False, "fail", 1)])
def test_the_doctor_beside_a_daemon_whose_configuration_it_cannot_see(start_fresh, tmp_path, runs, level, status):
    address = start_fresh(host=8).address if runs else str(tmp_path)
    done = subprocess.run(
        [*KVTIER, "doctor", "-o", "json"],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"KVTIER_ADDRESS": address},
    )
    assert done.returncode == status, done.stderr
    assert f'"{level}"' in done.stdout and "no tier is configured" in done.stdout
