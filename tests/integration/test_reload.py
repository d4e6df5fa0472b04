"""SIGHUP: what can change does, at once; what cannot is named; a broken file changes nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvtier import AsyncClient, RetryableError, connect
from tests.integration.blocks import SPEC
from tests.integration.daemon import DaemonProcess
from tests.integration.waiting import eventually


@pytest.fixture
def daemon(short_dir: Path) -> Iterator[DaemonProcess]:
    (short_dir / "kvtierd.toml").write_text('host_bytes = "1MiB"\n')
    process = DaemonProcess(short_dir, {}, ["--config", str(short_dir / "kvtierd.toml")])
    process.start()
    yield process
    process.stop()


def reload(daemon: DaemonProcess, text: str) -> None:
    (daemon.home / "kvtierd.toml").write_text(text)
    os.kill(daemon.pid, signal.SIGHUP)


@asynccontextmanager
async def seen(daemon: DaemonProcess) -> AsyncIterator[AsyncClient]:
    async with await connect(daemon.address) as client:
        yield client


async def problems(client: AsyncClient) -> tuple[str, ...]:
    return (await client.stats()).problems


async def test_live_keys_change_and_the_others_are_named_for_the_operator(daemon: DaemonProcess) -> None:
    async with seen(daemon) as client:
        reload(daemon, 'host_bytes = "2MiB"\nmax_sessions = 7\nlog_level = "debug"\n')
        said = await eventually(lambda: problems(client), bool)
        assert said == ("configuration: host_bytes has changed; that takes a restart",)
        assert 'event="configuration reloaded" changed=log_level,max_sessions refused=host_bytes' in daemon.log
        reload(daemon, 'host_bytes = "1MiB"\n')
        await eventually(lambda: problems(client), lambda said: not said)


async def test_a_broken_file_changes_nothing_and_says_where_it_is_broken(daemon: DaemonProcess) -> None:
    async with seen(daemon) as client:
        reload(daemon, 'host_bytes = "1MiB"\nmax_sessions = 7\nwait_seconds = "soon"\n')
        (said,) = await eventually(lambda: problems(client), bool)
        assert f"{daemon.home}/kvtierd.toml:3: wait_seconds = 'soon': must be seconds" in said
        assert "changed=" not in daemon.log
        await client.open_cache("still-serving", SPEC)


async def test_a_lower_cap_on_sessions_is_for_those_who_come(daemon: DaemonProcess) -> None:
    async with seen(daemon) as client, seen(daemon):
        reload(daemon, 'host_bytes = "1MiB"\nmax_sessions = 2\nevent_ring_events = 99\n')
        await eventually(lambda: problems(client), bool)  # event_ring_events, which tells that the reload is done
        with pytest.raises(RetryableError, match="at most 2 sessions"):
            await connect(daemon.address, timeout=5)
