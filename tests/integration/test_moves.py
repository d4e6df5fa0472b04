"""A move by call that has begun and has to wait: for whoever repeats it, and without whoever goes away."""

from __future__ import annotations

import asyncio

from kvtier import Tier, connect
from kvtier.v1 import blocks_pb2, common_pb2
from tests.integration.blocks import SPEC, blocks, chain
from tests.integration.raw import attached
from tests.integration.seeing import cache_stats, edge_stats
from tests.integration.stuck import stuck_disk
from tests.integration.waiting import eventually

COUNT = 4
OK = bytes([common_pb2.BLOCK_RESULT_OK]) * COUNT


async def test_a_move_that_waits_is_one_move_for_all_who_ask_for_it_under_its_number(start_daemon):
    daemon = start_daemon(device=0, host=2 * COUNT, disk=2 * COUNT)
    keys = chain("moved", COUNT)
    async with await connect(daemon.address) as client, attached(daemon.address) as raw:
        cache = await client.open_cache("c", SPEC)
        await cache.put(keys, blocks(keys), tier=Tier.HOST)
        request = blocks_pb2.MoveRequest(
            cache_id=(await raw.open("c")).cache_id, to=common_pb2.TIER_DISK, keys=b"".join(keys), seq=1
        )
        with stuck_disk(daemon, "c") as disk:
            first, second, third = (asyncio.ensure_future(raw.call(raw.stubs.blocks.Move, request)) for _ in range(3))

            async def under_way():
                stats = await cache_stats(client, "c")
                return sum(tier.filling for tier in stats.tiers)

            assert await eventually(under_way, bool) == COUNT
            first.cancel()
            await asyncio.wait([first])
            assert await under_way() == COUNT
            disk.release()
            assert [(await each).results for each in (second, third)] == [OK, OK]
        edge = await edge_stats(client, "c", "host>disk")
        assert edge is not None
        assert edge.blocks == COUNT
        assert (await raw.call(raw.stubs.blocks.Move, request)).results == OK
