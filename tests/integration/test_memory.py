"""The daemon's own memory follows what it has, not what it had."""

from __future__ import annotations

import pytest

from kvtier import Tier
from tests.integration.blocks import chain
from tests.integration.raw import attached
from tests.integration.seeing import memory
from tests.integration.waiting import patient

A_CALL = 1024
"""Blocks."""
ROUNDS, WARM = 20, 5
GROWTH = 2 << 20


@pytest.mark.parametrize("calls", [4, pytest.param(20, marks=pytest.mark.long)])
async def test_the_memory_of_removed_caches_comes_back(start_fresh, calls):
    daemon = start_fresh("--event-ring-bytes", str(256 << 10), host=calls * A_CALL)
    used = []
    async with await patient(daemon.address) as client, attached(daemon.address) as raw:
        for turn in range(ROUNDS):
            cache = (await raw.open("removed")).cache_id
            for part in range(calls):
                await raw.store(cache, Tier.HOST, chain(f"{turn}/{part}", A_CALL))
            assert (await client.remove_cache("removed", force=True)).blocks == calls * A_CALL
            used.append(memory(daemon))
    print("MB after each round:", *(f"{each / 1e6:.1f}" for each in used))
    assert used[-1] - used[WARM - 1] < GROWTH
