"""What one session may hold of a cache, and what it is told of more."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from kvtier import BlockResult, Tier, TierFull, connect
from tests.integration.blocks import SPEC, blocks, chain


async def refused(cache, count, tier=Tier.HOST):
    with pytest.raises(TierFull) as refusal:
        async with cache.reserve(count, tier=tier):
            raise AssertionError("granted")
    return refusal.value


async def other(cache, client):
    return await client.open_cache(cache.name, SPEC)


async def test_one_session_holds_so_many_slots_blank_and_no_more(start_daemon):
    daemon = start_daemon("--max-reserved-fraction", "0.5", device=8, host=8)
    async with await connect(daemon.address) as first, await connect(daemon.address) as second:
        cache = await first.open_cache("shared", SPEC)
        async with cache.reserve(3, tier=Tier.HOST) as lease:
            error = await refused(cache, 2)
            assert (error.reason, error.tier, error.wanted, error.free) == ("OVER_CAP", Tier.HOST, 2, 1)
            assert [(holder.session_id, holder.slots) for holder in error.holders] == [(first.session_id, 3)]
            assert "max_reserved_fraction" in str(error)
            async with cache.reserve(1, tier=Tier.HOST):
                assert (await refused(cache, 1)).free == 0
            # Each tier has its own, and so has each session.
            async with cache.reserve(4, tier=Tier.DEVICE), (await other(cache, second)).reserve(4, tier=Tier.HOST):
                pass
            # What is committed is not blank any more.
            keys = chain("committed", 3)
            assert await lease.commit(keys) == [BlockResult.OK] * 3
            async with cache.reserve(4, tier=Tier.HOST):
                pass


async def test_calls_at_the_same_time_count_together(start_daemon):
    daemon = start_daemon("--max-reserved-fraction", "0.5", host=8)
    async with await connect(daemon.address) as client:
        cache = await client.open_cache("shared", SPEC)
        async with AsyncExitStack() as stack:
            asked = [stack.enter_async_context(cache.reserve(3, tier=Tier.HOST)) for _ in range(4)]
            answers = await asyncio.gather(*asked, return_exceptions=True)
            refusals = [answer for answer in answers if isinstance(answer, TierFull)]
            assert [refusal.reason for refusal in refusals] == ["OVER_CAP"] * 3


async def test_streams_count_like_any_other_reservation_and_lease(start_daemon):
    daemon = start_daemon("--max-reserved-fraction", "0.5", host=8)
    async with await connect(daemon.address) as client:
        cache = await client.open_cache("shared", SPEC)
        keys = chain("streamed", 4)
        async with cache.reserve(1, tier=Tier.HOST):
            with pytest.raises(TierFull, match="max_reserved_fraction") as over:
                await cache.stream_put(keys, blocks(keys), tier=Tier.HOST)
            assert (over.value.reason, over.value.free) == ("OVER_CAP", 3)
        assert await cache.stream_put(keys, blocks(keys), tier=Tier.HOST) == [BlockResult.OK] * 4
