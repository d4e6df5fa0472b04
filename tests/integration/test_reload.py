"""SIGHUP: rights and the log level change at once, other keys are named; a broken file changes nothing."""

from __future__ import annotations

import os
import signal
from contextlib import asynccontextmanager

import pytest

from kvtier import connect
from tests.integration.blocks import SPEC
from tests.integration.daemon import DaemonProcess
from tests.integration.waiting import eventually


@pytest.fixture
def daemon(short_dir):
    (short_dir / "kvtierd.toml").write_text('host_bytes = "1MiB"\n')
    process = DaemonProcess(short_dir, {}, ["--config", str(short_dir / "kvtierd.toml")])
    process.start()
    yield process
    process.stop()


def reload(daemon, text):
    (daemon.home / "kvtierd.toml").write_text(text)
    os.kill(daemon.pid, signal.SIGHUP)


@asynccontextmanager
async def seen(daemon):
    async with await connect(daemon.address) as client:
        yield client


async def problems(client):
    return (await client.stats()).problems


async def test_live_keys_change_and_the_others_are_named_for_the_operator(daemon):
    async with seen(daemon) as client:
        reload(daemon, 'host_bytes = "2MiB"\nlog_level = "debug"\n')
        said = await eventually(lambda: problems(client), bool)
        assert said == ("configuration: host_bytes has changed; that takes a restart",)
        assert "configuration reloaded changed=log_level refused=host_bytes" in daemon.log
        reload(daemon, 'host_bytes = "1MiB"\n')
        await eventually(lambda: problems(client), lambda said: not said)


async def test_a_broken_file_changes_nothing_and_says_where_it_is_broken(daemon):
    async with seen(daemon) as client:
        reload(daemon, 'host_bytes = "1MiB"\nlog_level = "debug"\nwait_seconds = "soon"\n')
        (said,) = await eventually(lambda: problems(client), bool)
        assert f"{daemon.home}/kvtierd.toml: wait_seconds = 'soon': must be a valid number" in said
        assert "changed=" not in daemon.log
        await client.open_cache("still-serving", SPEC)
