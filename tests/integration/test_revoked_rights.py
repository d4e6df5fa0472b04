"""Rules that a reload takes away, from sessions and watches that live."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvtier import AsyncClient, Event, PermissionDenied, Tier, connect
from tests.integration.blocks import SPEC, blocks, chain, sizes
from tests.integration.daemon import DaemonProcess, StartDaemon
from tests.integration.seeing import tier_stats
from tests.integration.waiting import PATIENCE_S, eventually

ALL = """
[[allow]]
anonymous = true
caches = ["*"]
verbs = ["read", "write", "watch", "tokens"]
"""
ONE = """
[[allow]]
anonymous = true
caches = ["open"]
verbs = ["watch"]
"""


@pytest.fixture
def daemon(start_daemon: StartDaemon, tmp_path: Path) -> DaemonProcess:
    file = tmp_path / "kvtierd.toml"
    file.write_text(ALL)
    return start_daemon("--config", str(file), "--listen-tcp", "127.0.0.1:0", "--tcp-insecure", host=16)


async def revoke(daemon: DaemonProcess, file: Path) -> None:
    await asyncio.to_thread(file.write_text, ONE)
    os.kill(daemon.pid, signal.SIGHUP)

    async def log() -> str:
        return daemon.log

    await eventually(log, lambda text: "changed=allow" in text)


async def stored(client: AsyncClient, cache: str, name: str) -> list[bytes]:
    keys = chain(name, 2)
    await (await client.open_cache(cache, SPEC, budgets=sizes(host=4))).put(keys, blocks(keys), tier=Tier.HOST)
    return keys


async def test_a_watch_that_saw_everything_sees_what_it_still_may(daemon: DaemonProcess, tmp_path: Path) -> None:
    async with (
        await connect(daemon.address) as owner,
        await connect(daemon.tcp_address, insecure=True) as client,
        client.watch(oldest=True) as watch,
    ):
        before = await stored(owner, "other", "before")
        assert before[0] in await until_stored(watch, before[-1])
        await revoke(daemon, tmp_path / "kvtierd.toml")
        after = await stored(owner, "other", "after")
        shown = await stored(owner, "open", "shown")
        assert not set(after) & await until_stored(watch, shown[-1])


async def test_who_may_not_read_any_more_can_still_give_back(daemon: DaemonProcess, tmp_path: Path) -> None:
    async with await connect(daemon.address) as owner, await connect(daemon.tcp_address, insecure=True) as client:
        keys = await stored(owner, "other", "held")
        cache = await client.open_cache("other", SPEC, mapped=False)
        async with cache.acquire(keys, tier=Tier.HOST) as lease:
            assert lease.blocks == 2
            await revoke(daemon, tmp_path / "kvtierd.toml")
            with pytest.raises(PermissionDenied):
                await cache.match(keys)
            assert (await tier_stats(owner, "other", Tier.HOST)).held == 2
        await eventually(lambda: tier_stats(owner, "other", Tier.HOST), lambda stats: not stats.held)
        await cache.close()


async def until_stored(watch: AsyncIterator[object], key: bytes) -> set[bytes]:
    """Keys of all events up to that of ``key``."""
    seen: set[bytes] = set()
    async with asyncio.timeout(PATIENCE_S):
        async for item in watch:
            if isinstance(item, Event):
                seen.update(item.keys)
            if key in seen:
                return seen
    raise AssertionError("the watch has ended")
