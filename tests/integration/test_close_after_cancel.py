"""A cache is closed behind calls that were given up: what they held goes back first."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from kvtier import Tier, connect
from tests.integration.blocks import SPEC


async def test_a_cache_closes_behind_a_reserve_that_was_given_up(start_daemon):
    """It was refused: what nobody had waited for any more was still leased when the daemon came to the close."""
    daemon = start_daemon(host=8)
    async with await connect(daemon.address) as client:
        cache = await client.open_cache("mine", SPEC)
        daemon.pause()
        reserving = asyncio.ensure_future(cache.reserve(2, Tier.HOST))
        await passes()
        reserving.cancel()
        await passes()
        closing = asyncio.ensure_future(cache.close())
        await passes()
        daemon.resume()
        with suppress(asyncio.CancelledError):
            await reserving
        await closing
        assert await client.leases() == []
        await (await client.open_cache("mine", SPEC)).close()


async def passes():
    """What has begun says to the daemon what it has to say: that takes turns of the loop, and no answer."""
    for _ in range(50):
        await asyncio.sleep(0)
