"""How a cache behaves is chosen once: told to everybody, stored with it, and not changed by a later open."""

from __future__ import annotations

import asyncio

import pytest

from kvtier import CacheOptions, CacheSpec, InvalidArgument, WritePolicy, connect
from tests.integration.blocks import SPEC, chain


@pytest.mark.parametrize("eviction", ["lru", "2q"])
async def test_options_are_told_and_outlive_the_daemon(start_daemon, eviction):
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


async def test_options_of_a_cache_in_memory_alone_outlive_its_daemon(start_daemon):
    """Whoever opens it first, who need not have chosen them."""
    options = CacheOptions(write_policy=WritePolicy.THROUGH, eviction="2q", event_hash="v2_sha256", keep_tokens=True)
    defaults = CacheOptions(write_policy=WritePolicy.BACK, eviction="lru")
    other = CacheSpec.single("other", "uint8", tokens_per_block=16, layers=1, kv_heads=1, head_size=64)
    daemon = start_daemon(device=2, host=4)
    async with await connect(daemon.address) as chooser, await connect(daemon.address) as client:
        mine = await chooser.open_cache("c", SPEC, options=options)
        await asyncio.to_thread(daemon.stop)
        await asyncio.to_thread(daemon.start)
        theirs = await client.open_cache("c", SPEC)
        assert theirs.info.options == options
        assert (await mine.match(chain("any", 1))).blocks == 0, "its own options are refused"
        # They went with the cache when it was removed, and were never those of another specification.
        await chooser.remove_cache("c", force=True)
        assert (await client.open_cache("c", SPEC)).info.options == defaults
        await chooser.remove_cache("c", force=True)
        await chooser.open_cache("c", SPEC, options=options)
        await asyncio.to_thread(daemon.stop)
        await asyncio.to_thread(daemon.start)
        assert (await client.open_cache("c", other)).info.options == defaults


async def test_options_that_there_are_not_are_refused_and_make_no_cache(start_daemon):
    daemon = start_daemon(host=4)
    async with await connect(daemon.address) as client:
        with pytest.raises(InvalidArgument) as refused:
            await client.open_cache("c", SPEC, options=CacheOptions(eviction="random"))
        assert (refused.value.field, refused.value.value) == ("options.eviction", "random")
        assert await client.caches() == []
