"""How a cache behaves is chosen once: told to everybody, stored with it, and not changed by a later open."""

from __future__ import annotations

import asyncio

import pytest

from kvtier import CacheOptions, InvalidArgument, WritePolicy, connect
from tests.integration.blocks import SPEC
from tests.integration.daemon import StartDaemon


@pytest.mark.parametrize("eviction", ["lru", "2q"])
async def test_options_are_told_and_outlive_the_daemon(start_daemon: StartDaemon, eviction: str) -> None:
    options = CacheOptions(write_policy=WritePolicy.BACK, eviction=eviction)
    daemon = start_daemon(host=4, disk=8)
    async with await connect(daemon.address) as client:
        cache = await client.open_cache("c", SPEC, options=options)
        assert cache.info.options == options
        await asyncio.to_thread(daemon.stop)
        await asyncio.to_thread(daemon.start)
        (listed,) = await client.caches()
        assert listed.options == options
        assert (await client.open_cache("c", SPEC, options=options)).info.options == options
        assert (await client.open_cache("c", SPEC)).info.options == options


async def test_options_that_there_are_not_are_refused_and_make_no_cache(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(host=4)
    async with await connect(daemon.address) as client:
        with pytest.raises(InvalidArgument) as refused:
            await client.open_cache("c", SPEC, options=CacheOptions(eviction="random"))
        assert (refused.value.field, refused.value.value) == ("options.eviction", "random")
        assert await client.caches() == []
